"""Answers to the exercises as a student may write them, and words of the sentence that each gets (None: it passes).

An answer is a patch (old, new) of minimal.py, or the body of the exercise's function.
"""

F = "dist.all_reduce(gradient := gradient.clone(), group=ctx.group)\n        return gradient, None"
G_BACKWARD = "        return total\n    @staticmethod\n    def backward(ctx, gradient):\n        return gradient, None"

RANK_GRID = [
    (("grid[i, j].tolist()", "grid[i, j]"), "must hold ints"),
    (("return (i, j, k), grid[:, j, k]", "return i, j, k, grid[:, j, k]"), "must return four things"),
]

F_AND_G = [
    ((F, "gradient = gradient + 0\n        dist.all_reduce(gradient, group=ctx.group)\n        return gradient, None"),
     None),
    ((F, "dist.all_reduce(gradient, group=ctx.group)\n        return gradient, None"), "changes the gradient"),
    ((F, "return None, gradient"), "gradient different than None"),
    (("dist.all_reduce(total := addend.clone(), group=group)", "dist.all_reduce(addend, group=group); total = addend"),
     "changes its addend"),
    ((G_BACKWARD, G_BACKWARD.replace("return total", "pass")), "g's forward returns None"),
]

SUMS = "    yield from all_reduce(model, sums)\n"
STACK = "torch.stack([exps.sum(-1), at_label.squeeze(-1)])"
CROSS_ENTROPY = [
    (("exps.div_(sums[0].unsqueeze(-1))", "(logits - maximum[..., None] - sums[0, ..., None].log()).exp()"), None),
    ((SUMS, "    for one in sums:\n        yield from all_reduce(model, one)\n"),
     "but 3 all-reduces follow each other where two suffice"),
    ((STACK, f"{STACK}.repeat(2, 1, 1)"), "each rank sends 5 numbers per token"),
    ((SUMS, "    work = dist.all_reduce(sums, group=model.grid.tp_group, async_op=True)\n    yield\n"
      "    sums = sums * 1; work.wait()\n"), "has NaN"),
    ((SUMS, SUMS.replace("yield from", "yield")), "without running it"),
]

SUBLAYER = [
    (("F.linear(core(model, site, F.linear(h, w1, b1)), w2)", "core(model, site, h @ w1 + b1) @ w2"), "RuntimeError"),
    (("F.linear(core(model, site, F.linear(h, w1, b1)), w2)", "core(model, site, h @ w1.t() + b1) @ w2.t()"), None),
]

LISTS = """
    ahead, bs = min(stages - stage - 1, microbatches), [("B", i) for i in range(microbatches)]
    fs = [("F", i) for _, i in bs]
    pairs = [action for pair in zip(fs[ahead:], bs) for action in pair]
    return fs[:ahead] + pairs + bs[microbatches - ahead:]"""
ONE_F_ONE_B = [
    (LISTS, None),
    (LISTS.replace("bs)", "bs[::-1])"), "is wrong: entry 4 is [('B', 5)]"),
    ("    stages += 1", "it is None instead of"),
    ("    while True:\n        stage += 1", "does not end"),
]

WAIT = "    for work in dist.batch_isend_irecv(messages) if messages else []:\n        work.wait()\n"
SEND = "    if target is not None: dist.send(output, target)\n"
RECEIVE = "    if source is not None: dist.recv(received, source)\n"
EXCHANGE = [
    ((WAIT, SEND + RECEIVE), "all stages send first and receive later"),
    ((WAIT, RECEIVE + SEND), "all stages receive first"),
    ((WAIT, f"    if grid.pp_rank % 2:\n    {RECEIVE}{SEND}    if grid.pp_rank % 2 == 0:\n    {RECEIVE}"), None),
    ((WAIT, "    if messages: dist.batch_isend_irecv(messages)\n"), "never calls wait()"),
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
    ("    exit()", "SystemExit"),
    ("    raise KeyboardInterrupt", "KeyboardInterrupt"),
    ((LOOP, LOOP.replace("waiting.popleft()", "first_of(waiting)") + "\n\nfrom collections import deque as queue\n\n"
      "def first_of(waiting):\n    return queue.popleft(waiting)"), None),     # a function and an import of one's own
]

REDUCE = "yield from all_reduce(model, grad_h, deferred=[(w2, gradient, a), (w1, c.grad, h)])"
RETURN = "    return gradient + x"
WORK = "work = dist.all_reduce(grad_h, group=model.grid.tp_group, async_op=True)"
WEIGHTS = ("w2.grad += torch.einsum('bsh,bsm->hm', gradient, a.detach())\n"
           "    w1.grad += torch.einsum('bsn,bsh->nh', c.grad, h.detach())")
BACKWARD = [
    ((REDUCE, f"{WORK}\n    {WEIGHTS}\n    yield\n    work.wait()"), None),
    ((REDUCE, f"{WEIGHTS}\n    yield from all_reduce(model, grad_h)"), "with one slice only 0%"),
    ((REDUCE, f"{WORK}\n    {WEIGHTS}\n    work.wait()\n    yield"), "yield between the launch and wait()"),
    ((REDUCE, f"{WORK}\n    {WEIGHTS}\n    yield", RETURN, f"    work.wait()\n{RETURN}"), "NaN"),
    (("b2.grad += gradient.sum((0, 1))", "b2.grad = gradient.sum((0, 1))"), "change .grad in place"),
    ((REDUCE, f"{WORK}\n    {WEIGHTS}\n    yield\n    grad_h[0] = 1\n    work.wait()"), "writes to a tensor"),
]

OPTIMIZER = [
    (("weight, moment, square = model.flat.chunk(grid.dp)[grid.dp_rank]",
      "weight, moment, square = model.flat.chunk(grid.dp)[0]"), "is wrong on rank"),
]

SUMS_OF_NORM = "    dist.all_reduce(sums)\n    return"
NORM = [
    ((SUMS_OF_NORM, "    for one in sums: dist.all_reduce(one)\n    return"), None),
    ((SUMS_OF_NORM, "    if model.grid.tp_rank == 0: dist.all_reduce(sums)\n    return"), "call"),
]

AHEAD = "min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))"
INTERLEAVED = [
    ((AHEAD, "min(stages * (chunks + 1) - 2 * stage - 2, len(order))"), None),
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
]
INDEX = "grad_words.index_add_(0, row.flatten(), gradient.flatten(0, 1))"
EMBEDDING = [
    ((INDEX, "grad_words.index_put_((row,), gradient, accumulate=True)"), None),
    (("return grad_words, None, None", "return grad_words, None"), "incorrect number of gradients"),
]
BALANCE = [
    (("torch.nn.functional.one_hot(experts, count).sum((1, 2)).to(probabilities.dtype)",
      "sum(experts.flatten(1)[:, i, None] == torch.arange(count) for i in range(experts[0].numel())) + 0.0"), None),
    (("* means).sum() / tokens", "* means).sum().item() / tokens"), "must return a scalar tensor"),
]

ANSWERS = {1: RANK_GRID, 2: F_AND_G, 3: CROSS_ENTROPY, 4: SUBLAYER, 5: ONE_F_ONE_B, 6: EXCHANGE, 7: INTERLEAVE,
           8: BACKWARD, 9: OPTIMIZER, 10: NORM, 11: INTERLEAVED, 12: ROWS, 13: REPORTS, 14: PAIR, 15: EMBEDDING,
           16: BALANCE}
