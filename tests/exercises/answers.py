"""Answers to the exercises as a student may write them, and words of the sentence that each gets (None: it passes).

An answer is a patch (old, new) of minimal.py, or the body of the exercise's function.
"""

F = "dist.all_reduce(gradient := gradient.clone(), group=ctx.group)\n        return gradient, None"
G_BACKWARD = "        return total\n    @staticmethod\n    def backward(ctx, gradient):\n        return gradient, None"

RANK_GRID = [
    (("grid[i, :, k].tolist(), grid[i, j].tolist()", "grid[i, :, k].tolist(), grid[i, 0].tolist()"),
     "The row of tp ranks of rank 2 of tp 2"),
    (("grid[i, j].tolist()", "grid[i, j]"), "must hold ints"),
    (("return (i, j, k), grid[:, j, k]", "return i, j, k, grid[:, j, k]"), "must return four things"),
]

F_AND_G = [
    ((F, "gradient = gradient + 0\n        dist.all_reduce(gradient, group=ctx.group)\n        return gradient, None"),
     None),
    ((F, "dist.all_reduce(gradient, group=ctx.group)\n        return gradient, None"), "changes the gradient"),
    ((F, "return None, gradient"), "one gradient for each argument"),
    (("dist.all_reduce(total := addend.clone(), group=group)", "dist.all_reduce(addend, group=group); total = addend"),
     "changes its addend"),
    ((G_BACKWARD, G_BACKWARD.replace("return total", "pass")), "g's forward returns None"),
]

BY_STEPS = """
    first = model.grid.tp_rank * logits.size(-1)
    columns = first + torch.arange(logits.size(-1))
    logits = logits.masked_fill(columns >= model.vocab, -1e9)
    largest = logits.max(-1).values
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=model.grid.tp_group)
    yield
    e = torch.exp(logits - largest[..., None])
    total = e.sum(-1)
    yield from all_reduce(model, total)
    here = columns == labels[..., None]
    mine = ((logits - largest[..., None]) * here).sum(-1)
    yield from all_reduce(model, mine)
    return torch.log(total) - mine, e / total[..., None] - here.to(e.dtype)"""
STACKED = BY_STEPS.replace("    yield from all_reduce(model, total)\n", "").replace(
    "    yield from all_reduce(model, mine)\n", """    both = torch.stack([total, mine])
    yield from all_reduce(model, both)
    total, mine = both
""")
CROSS_ENTROPY = [
    (STACKED, None),
    (BY_STEPS, "but 3 all-reduces follow each other where two suffice"),
    (STACKED.replace("[total, mine]", "[total, mine, mine, mine]").replace("total, mine = both",
                                                                           "total, mine = both[:2]"),
     "each rank sends 5 numbers per token"),
    (BY_STEPS.replace("logits.max(-1).values", "logits.max(-1).values * 0"), "not finite"),
    (BY_STEPS.replace("    yield from all_reduce(model, total)\n", "    work = dist.all_reduce(total, "
     "group=model.grid.tp_group, async_op=True)\n").replace(
        "    return", "    total = total * 1; work.wait()\n    return"), "has NaN"),
    (BY_STEPS.replace("yield from all_reduce(model, mine)", "yield all_reduce(model, mine)"), "without running it"),
]

SUBLAYER = [
    (("F.linear(core(model, site, F.linear(h, w1, b1)), w2)", "core(model, site, h @ w1 + b1) @ w2"), "RuntimeError"),
    (("F.linear(core(model, site, F.linear(h, w1, b1)), w2)", "core(model, site, h @ w1.t() + b1) @ w2.t()"), None),
]

LISTS = """
    fs, bs, order = list(range(microbatches)), list(range(microbatches)), []
    for _ in range({AHEAD}):
        order.append(("F", fs.pop(0)))
    while bs:
        if fs:
            order.append(("F", fs.pop(0)))
        order.append(("B", bs.pop(0)))
    return order"""
ONE_F_ONE_B = [
    (LISTS.replace("{AHEAD}", "min(stages - stage - 1, microbatches)"), None),
    (LISTS.replace("{AHEAD}", "min(stages - stage - 1, microbatches)").replace("bs.pop(0)", "bs.pop()"),
     "is wrong: entry 4 is [('B', 5)]"),
    ("    stages += 1", "it is None instead of"),
    ("    while True:\n        stage += 1", "does not end"),
]

WAIT = "    for work in dist.batch_isend_irecv(messages) if messages else []:\n        work.wait()\n"
SEPARATE = '''
    grid, size, received = model.grid, model.sizes, None
    source = {"F": grid.previous, "B": grid.next}.get(following)
    target = {"F": grid.next, "B": grid.previous}.get(action)
    def send():
        if target is not None:
            dist.send(output, target)
    def receive():
        if source is None:
            return None
        received = torch.empty(size.micro_batch, size.seq_length, size.hidden)
        dist.recv(received, source)
        return received
    ORDER'''
EXCHANGE = [
    (SEPARATE.replace("ORDER", "send()\n    return receive()"),
     "all stages send first and receive later"),
    (SEPARATE.replace("ORDER", "received = receive()\n    send()\n    return received"),
     "all stages receive first"),
    (SEPARATE.replace("ORDER", """if grid.pp_rank % 2:
        received = receive()
        send()
        return received
    send()
    return receive()"""), None),
    ((WAIT, "    if messages: dist.batch_isend_irecv(messages)\n"), "returns too early"),
    ((WAIT, WAIT.replace(" if messages else []", "")), "empty list"),
    (("    if target is not None:\n", "    if action is not None:\n"), "but gets Tensor and NoneType"),
    (("    if target is not None:\n", "    if target:\n"), "0 is a rank, too"),
    (('{"F": grid.next, "B": grid.previous}.get(action)', 'grid.next if action else None'),
     "B to the previous one"),
    (("received = torch.empty(size.micro_batch, size.seq_length,", "received = torch.empty(size.micro_batch, 1,"),
     "receives into a tensor of [2, 1, 4]"),
]

LOOP = '''    waiting = deque(generators)
    while waiting:
        generator = waiting.popleft()
        if next(generator, "ended") != "ended":
            waiting.append(generator)'''
INTERLEAVE = [
    ("    alive = generators\n    while alive:\n        alive = [one for one in alive if next(one, 0) != 0]", None),
    ("    alive = set(generators)\n    while alive:\n        alive = {one for one in alive if next(one, 0) != 0}",
     "A set, for example"),
    ("    while True:\n        for generator in generators:\n            next(generator)", "raises StopIteration"),
    ("    for generator in generators:\n        next(generator)\n        yield", "is a generator itself"),
    ((LOOP, LOOP.replace("waiting.popleft()", "first_of(waiting)") + "\n\nfrom collections import deque as queue\n\n"
      "def first_of(waiting):\n    return queue.popleft(waiting)"), None),     # a function and an import of one's own
]

BACKWARD_BODY = '''
    w1, b1, w2, b2 = matrices(model, site)
    x, h, c, a = slice.tape.pop()
    a.backward(gradient @ w2)
    b1.grad += c.grad.sum((0, 1))
    b2.grad += gradient.sum((0, 1))
    grad_h = c.grad @ w1
    LAUNCH
    h.backward(grad_h)
    return gradient + x.grad'''
WORK = "work = dist.all_reduce(grad_h, group=model.grid.tp_group, async_op=True)"
WEIGHTS = ("w2.grad += torch.einsum('bsh,bsm->hm', gradient, a.detach())\n"
           "    w1.grad += torch.einsum('bsn,bsh->nh', c.grad, h.detach())")


def launch(text):
    return BACKWARD_BODY.replace("LAUNCH", text)


BACKWARD = [
    (launch(f"{WORK}\n    {WEIGHTS}\n    yield\n    work.wait()"), None),
    (launch(f"{WEIGHTS}\n    yield from all_reduce(model, grad_h)"), "with one slice only 0%"),
    (launch(f"{WORK}\n    {WEIGHTS}\n    work.wait()\n    yield"), "yield between the launch and wait()"),
    (launch(f"{WORK}\n    {WEIGHTS}\n    yield").replace("return", "work.wait()\n    return"), "NaN"),
    (launch(f"{WORK}\n    {WEIGHTS}\n    yield\n    work.wait()").replace("b2.grad += gradient.sum((0, 1))",
                                                                      "b2.grad = gradient.sum((0, 1))"),
     "change .grad in place"),
    (launch(f"{WORK}\n    grad_h += 0\n    {WEIGHTS}\n    yield\n    grad_h[0] = 1\n    work.wait()"),
     "writes to a tensor"),
]

OPTIMIZER = [
    (("weight, moment, square = model.flat.chunk(grid.dp)[grid.dp_rank]",
      "weight, moment, square = model.flat.chunk(grid.dp)[0]"), "is wrong on rank"),
]

NORM_BODY = '''
    own = model.counts.view(model.grid.dp, -1)[model.grid.dp_rank].bool()
    squares = (gradient[own] ** 2).sum()
    loss = loss if model.grid.tp_rank == 0 else loss * 0
    dist.all_reduce(squares)
    dist.all_reduce(loss)
    return float(loss), float(squares) ** 0.5'''
NORM = [
    (NORM_BODY, None),
    (NORM_BODY.replace("    dist.all_reduce(squares)\n", "    if model.grid.tp_rank == 0:\n"
                                                         "        dist.all_reduce(squares)\n"), "call"),
]

AHEAD = "min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))"
INTERLEAVED = [
    ((AHEAD, "min(stages * (chunks + 1) - 2 * stage - 2, len(order))"), None),
    ((AHEAD, AHEAD.replace(" - 1) +", ") +")), "microbatches and 2 chunks is wrong: entry"),
]
F_SUM = "dist.reduce_scatter(own, list(parts), group=ctx.group)\n        return own, None"
ROWS = [
    ((F_SUM, "dist.all_reduce(total := gradient.clone(), group=ctx.group)\n        "
             "return total.chunk(len(parts))[dist.get_rank(ctx.group)], None"), None),
    ((F_SUM, "dist.all_reduce(total := gradient.clone(), group=ctx.group)\n        return total, None"),
     "returned an invalid gradient"),
    (("dist.all_gather(parts, rows, group=group)", "dist.all_gather(parts, rows)"), "one for each rank of the group"),
    (("        return torch.cat(parts)\n", "        return rows\n"), "f must turn 3 rows into 6"),
]
REPORTS = [
    (("bucket.missing -= 1\n    if bucket.missing == 0:\n        bucket.missing = bucket.parameters",
      "bucket.missing = (bucket.missing - 1) % bucket.parameters\n    if not bucket.missing:"), None),
    (("    work.wait()\n", ""), "never calls wait()"),
]
PAIR = [
    (("2 * (stages - stage - 1) + 1", "2 * stages - 2 * stage - 1"), None),
    (("2 * (stages - stage - 1) + 1", "stages - stage"), "of stage 0 of 3 with 6 microbatches is wrong"),
]
INDEX = "grad_words.index_add_(0, row.flatten(), gradient.flatten(0, 1))"
EMBEDDING = [
    ((INDEX, "grad_words.index_put_((row,), gradient, accumulate=True)"), None),
    (("return grad_words, None, None", "return grad_words, None"), "incorrect number of gradients"),
]
BALANCE = [
    ("""
    b, s, count = probabilities.shape
    chosen = torch.zeros(b, count).scatter_add_(1, experts.flatten(1), torch.ones(b, experts[0].numel()))
    c = dist.get_world_size(group)
    dist.all_reduce(chosen, group=group)
    return (count * chosen / (c * s * experts.size(-1)) * probabilities.sum(1)).sum() / tokens""", None),
    (("* means).sum() / tokens", "* means).sum().item() / tokens"), "must return a scalar tensor"),
]

ANSWERS = {1: RANK_GRID, 2: F_AND_G, 3: CROSS_ENTROPY, 4: SUBLAYER, 5: ONE_F_ONE_B, 6: EXCHANGE, 7: INTERLEAVE,
           8: BACKWARD, 9: OPTIMIZER, 10: NORM, 11: INTERLEAVED, 12: ROWS, 13: REPORTS, 14: PAIR, 15: EMBEDDING,
           16: BALANCE}
