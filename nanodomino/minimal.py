"""The whole idea in one file: train a GPT-2 on tp x pp x dp processes and hide most messages.

    python data/prepare.py                               once: makes the text that all runs read
    torchrun --nproc_per_node 8 -m nanodomino.minimal    tp 2 x pp 2 x dp 2; or add --tp 1 --pp 8
    python -m nanodomino.minimal                         one process; same losses but for rounding

*Tensor parallelism* (tp) cuts the large matrices, *pipeline parallelism* (pp) cuts the layers into
stages, *data parallelism* (dp) cuts the batch over replicas of the model. A process that waits for
a message computes nothing. Tp sends the most, so this file hides tp's messages: it computes while
they are in flight. train.py computes the same losses. `# exercise N`: see exercises/README.md.
Shapes: b samples, s tokens, h hidden size, v vocabulary; /t means cut over the t = tp ranks.
"""
import hashlib
import json
import math
import time
from argparse import ArgumentParser
from collections import deque, namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

# global_batch: samples per step, of all replicas; micro_batch: samples per pass through a stage
Sizes = namedtuple("Sizes", "layers hidden heads seq_length global_batch micro_batch lr seed",
                   defaults=(8, 96, 8, 128, 16, 4, 4e-3, 1234))         # attention heads; peak lr

# ---- 1. The grid of ranks ------------------------------------------------------------------------
#              replica 0 replica 1  torchrun numbers its processes; a process is called a rank.
#     stage 0   [0  1]    [2  3]    0 and 1 have halves of a matrix (tp), 0 and 2 the same weights
#     stage 1   [4  5]    [6  7]    but different samples (dp). 4 has the layers after 0's (pp).

def rank_grid(rank, tp, pp, dp):                                                        # exercise 1
    """Return this rank's (pp_rank, dp_rank, tp_rank) and the ranks of its row along each axis."""
    grid = torch.arange(pp * dp * tp).view(pp, dp, tp)
    i, j, k = (grid == rank).nonzero()[0].tolist()
    return (i, j, k), grid[:, j, k].tolist(), grid[i, :, k].tolist(), grid[i, j].tolist()

def make_grid(tp, pp, dp, device):
    """Create this rank's groups. In a collective, all ranks of a group make the same call: after an
    all-reduce, each has the sum of their tensors. A sum over the wrong group raises no error."""
    (i, j, k), stages, replicas, shards = rank_grid(dist.get_rank(), tp, pp, dp)
    ends = {stages[0], stages[-1]}  # both have the word embedding: GPT-2 makes logits with it
    tp_group, dp_group, *tied = (dist.new_group(sorted(row), use_local_synchronization=True)
                                 for row in (shards, replicas, ends) if dist.get_rank() in row)
    return SimpleNamespace(
        tp=tp, pp=pp, dp=dp, pp_rank=i, dp_rank=j, tp_rank=k, device=device,
        previous=[None, *stages][i], next=[*stages, None][i + 1], is_first=i == 0,
        is_last=i == pp - 1, tp_group=tp_group, dp_group=dp_group, tied_group=(*tied, None)[0])

# ---- 2. The parameters ---------------------------------------------------------------------------
# A rank's weights are views of one flat tensor, its gradients of another. So one collective sums
# all gradients, and section 7 can cut them anywhere. A site is a sublayer's name: layers.0.mlp.

WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
MATRICES = {"attention": ("qkv", 3, "dense", 1), "mlp": ("dense_h_to_4h", 4, "dense_4h_to_h", 4)}

def declare(sizes, grid, sites, vocab):
    """Return {name: (shape of the whole tensor, the dimension cut over tp or None)}."""
    h, vector, declared = sizes.hidden, ((sizes.hidden,), None), {}
    if grid.is_first or grid.is_last:
        declared[WORDS] = (-(-vocab // 128) * 128, h), 0          # rounded up so that tp divides it
    if grid.is_first:
        declared[POSITIONS] = (sizes.seq_length, h), None
    for site in sites:
        w1, out, w2, inner = MATRICES[site.split(".")[-1]]    # W1 [out h, h], W2 [h, inner h]
        declared |= {f"{site}.norm.weight": vector, f"{site}.norm.bias": vector,
                     f"{site}.{w1}.weight": ((out * h, h), 0), f"{site}.{w1}.bias": ((out * h,), 0),
                     f"{site}.{w2}.weight": ((h, inner * h), 1), f"{site}.{w2}.bias": vector}
    if grid.is_last:
        declared |= {"final_norm.weight": vector, "final_norm.bias": vector}
    return declared

def draw(sizes, name, shape, cut):
    """Draw a whole tensor, seeded by its name: it is the same for all sizes of tp, pp and dp."""
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("norm.weight")))              # biases are 0
    std = 0.06 if cut != 1 else 0.06 / (2 * sizes.layers) ** 0.5  # cut 1: W2, whose outputs add up
    digest = hashlib.blake2b(f"{sizes.seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)

def make_model(sizes, grid, vocab, slices, verbose=False):
    """Create this rank's part of the model: some of the layers, and a shard of each matrix."""
    layers = np.array_split(np.arange(sizes.layers), grid.pp)[grid.pp_rank]      # may be uneven
    sites = [f"layers.{layer}.{kind}" for layer in layers for kind in MATRICES]
    declared, shards, weights, start = declare(sizes, grid, sites, vocab), {}, {}, 0
    for name, (shape, cut) in declared.items():
        whole = draw(sizes, name, shape, cut)          # shards drawn from one seed would be equal
        shards[name] = whole if cut is None else whole.chunk(grid.tp, cut)[grid.tp_rank]
    size = -(-sum(map(torch.numel, shards.values())) // grid.dp) * grid.dp  # so that dp divides it
    flat, grad, decays, counts = (torch.zeros(size, device=grid.device) for _ in range(4))
    for name, shard in shards.items():
        place, start = slice(start, start + shard.numel()), start + shard.numel()
        weights[name] = flat[place].copy_(shard.flatten()).view(shard.shape).requires_grad_()
        weights[name].grad = grad[place].view(shard.shape)     # autograd adds to .grad in place
        decays[place] = shard.dim() > 1                              # weight decay is for matrices
        is_copy = declared[name][1] is None and grid.tp_rank > 0
        counts[place] = not (is_copy or (name == WORDS and not grid.is_first))   # see global_sums
    return SimpleNamespace(sizes=sizes, grid=grid, vocab=vocab, slices=slices, sites=sites,
                           weights=weights, flat=flat, grad=grad, decays=decays, counts=counts,
                           orders={}, verbose=verbose, moments=flat.new_zeros(2, size // grid.dp))

# ---- 3. The model, cut by hand (Megatron-LM, arXiv 1909.08053) -----------------------------------
# Attention and MLP are alike: a norm (its output is the tensor h), then two matrices with a core
# between. Cut W1 by rows, W2 by columns. Then rank i computes its own heads or MLP features:

#     h --f--> c = h W1[i]^T + b1[i] --core--> a --> a W2[i]^T, one addend of y --g--> y + b2

#     f   forward: nothing, every rank has h     backward: all-reduce, every rank has one addend
#     g   forward: all-reduce of the addends     backward: nothing, since d sum / d addend = 1
#         (a sum would multiply the gradient that enters each sublayer by t, and raise no error)

class CopyToRanks(torch.autograd.Function):                                             # exercise 2
    """f: returns the tensor h [b, s, h]; backward sums the gradient over the tp ranks."""
    @staticmethod
    def forward(ctx, h, group):
        ctx.group = group
        return h.view_as(h)
    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.clone(), group=ctx.group)
        return gradient, None

class SumOverRanks(torch.autograd.Function):                                            # exercise 2
    """g: sums addends [b, s, h] over the tp ranks; backward returns the gradient as it is."""
    @staticmethod
    def forward(ctx, addend, group):
        dist.all_reduce(total := addend.clone(), group=group)
        return total
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

def matrices(model, site):
    """Return W1 [n/t, h], b1 [n/t], W2 [h, m/t], b2 [h]. Attention: n, m = 3h, h; MLP: 4h, 4h."""
    w1, _, w2, _ = MATRICES[site.split(".")[-1]]
    return [model.weights[f"{site}.{w}.{part}"] for w in (w1, w2) for part in ("weight", "bias")]

def norm(model, name, x):
    weight, bias = model.weights[f"{name}.weight"], model.weights[f"{name}.bias"]
    return F.layer_norm(x, x.shape[-1:], weight, bias)

def core(model, site, c):
    """Turn c [b, s, n/t] into a [b, s, m/t]: gelu, or the attention of this rank's heads."""
    if site.endswith("mlp"):
        return F.gelu(c, approximate="tanh")
    # W1 holds q, k, v of head 0, then of head 1 ... With all q first, rank 0 would lack its v.
    qkv = c.unflatten(2, (model.sizes.heads // model.grid.tp, 3, -1)).permute(3, 0, 2, 1, 4)
    return F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)

def plain_sublayer(model, site, x):                                                     # exercise 4
    """Return x + sublayer(x) [b, s, h], the definition. It waits for g; autograd runs backward."""
    w1, b1, w2, b2 = matrices(model, site)
    h = CopyToRanks.apply(norm(model, f"{site}.norm", x), model.grid.tp_group)
    addend = F.linear(core(model, site, F.linear(h, w1, b1)), w2)
    return x + SumOverRanks.apply(addend, model.grid.tp_group) + b2   # in g, b2 would count t times

def own_rows(model, ids):
    """Return each id's row in this rank's part of WORDS, and whether it is there; both [b, s]."""
    row = ids - model.grid.tp_rank * len(model.weights[WORDS])
    is_own = (0 <= row) & (row < len(model.weights[WORDS]))
    return row.where(is_own, 0), is_own

# Three numbers per token travel, not v logits: maximum, sum of exp, and the label's logit. Until
# section 4 explains generators, read `x = yield from f()` as x = f(): x is what f returns.
def cross_entropy(model, logits, labels):                                               # exercise 3
    """Turn logits [b, s, v/t] and labels [b, s] into (losses [b, s], gradient of the logits)."""
    logits[..., max(model.vocab - model.grid.tp_rank * logits.size(-1), 0):] = -1e9     # padding
    maximum = logits.amax(-1)      # subtract it, so exp stays finite; all ranks subtract the same
    yield from all_reduce(model, maximum, dist.ReduceOp.MAX)
    exps = (logits - maximum.unsqueeze(-1)).exp()
    row, is_own = (tensor.unsqueeze(-1) for tensor in own_rows(model, labels))
    at_label = (logits.gather(-1, row) - maximum.unsqueeze(-1)).where(is_own, 0)
    sums = torch.stack([exps.sum(-1), at_label.squeeze(-1)])                            # [2, b, s]
    yield from all_reduce(model, sums)
    softmax = exps.div_(sums[0].unsqueeze(-1))
    return sums[0].log() - sums[1], softmax.scatter_add_(-1, row, -is_own.to(softmax.dtype))

# ---- 4. Slices that take turns (Domino, 2409.15241) ----------------------------------------------
# g makes each sublayer wait. But samples do not depend on each other. So cut a microbatch (the
# samples of a pass) into slices a and b, and compute b while the all-reduce of a is in flight:

#     one slice     compute   [  A   ]        [  M   ]        [  A   ]        [  M   ]
#                   in flight         ~~~~~~~~        ~~~~~~~~        ~~~~~~~~        ~~~~~~~~
#     two slices    compute   [Aa][Ab][Ma][Mb][Aa][Ab][Ma][Mb]                  Aa: a's attention
#                   in flight     ~Aa~~Ab~~Ma~~Mb~~Aa~~Ab~~Ma~~Mb~              Ma: a's MLP

# A slice runs in a generator: all_reduce() launches and yields, `yield from` passes the yield on,
# and interleave() resumes the next slice. A collective has no name: the n-th call on one rank meets
# the n-th on the others. If ranks took turns in different orders, slice a would be added to b.

def interleave(generators):                                                             # exercise 7
    """Resume each generator in turn until all have ended."""
    waiting = deque(generators)
    while waiting:
        generator = waiting.popleft()
        if next(generator, "ended") != "ended":
            waiting.append(generator)

def all_reduce(model, tensor, op=dist.ReduceOp.SUM, deferred=()):
    """All-reduce in place over the tp ranks; meanwhile add the deferred gradients and yield."""
    note(model, "<-> all-reduce", tensor)
    work = dist.all_reduce(tensor, op, group=model.grid.tp_group, async_op=True)
    for weight, gradient, x in deferred:               # gradient^T x, summed over all b x s tokens
        weight.grad.addmm_(gradient.flatten(0, 1).t(), x.detach().flatten(0, 1))
    yield
    work.wait()

def record(function, x):
    """Return (x as a leaf, function(x)). Autograd is off in run_pipeline, but records this call."""
    with torch.enable_grad():
        return (x := x.detach().requires_grad_()), function(x)

def forward_sublayer(model, slice, site, x):
    """Compute plain_sublayer(); yield while g is in flight; keep on a tape what backward needs."""
    w1, b1, w2, b2 = matrices(model, site)
    x, h = record(lambda x: norm(model, f"{site}.norm", x), x)
    c, a = record(lambda c: core(model, site, c), F.linear(h, w1, b1))
    slice.tape.append((x, h, c, a))                  # two small graphs: x -norm-> h, c -core-> a
    y = F.linear(a, w2)
    yield from all_reduce(model, y)
    return x + y + b2

def forward_slice(model, slice):
    """Turn the slice's tokens, or its x [b, s, h] from the previous stage, into its output."""
    x, words = slice.x, model.weights.get(WORDS)
    if model.grid.is_first:
        row, is_own = own_rows(model, slice.tokens)
        x = F.embedding(row, words) * is_own.unsqueeze(-1)           # words of other ranks: zeros
        yield from all_reduce(model, x)
        x = x + model.weights[POSITIONS]
    for site in model.sites:
        if model.slices:                                     # --slices 0: the definition instead
            x = yield from forward_sublayer(model, slice, site, x)
        else:
            slice.tape.append(record(lambda x, site=site: plain_sublayer(model, site, x), x))
            x = slice.tape[-1][1]
    slice.output = x
    if model.grid.is_last:
        slice.tape.append(record(lambda x: norm(model, "final_norm", x), x))
        logits = F.linear(slice.tape[-1][1], words)                                   # [b, s, v/t]
        slice.output, slice.gradient = yield from cross_entropy(model, logits, slice.labels)

# ---- 5. Backward along a tape --------------------------------------------------------------------
# Autograd's backward cannot pause: in f's backward, one slice would wait for its all-reduce while
# the other could compute. So backward is a generator, too. With the tensors of section 3:
#     grad_a = grad_y W2, grad_c = the core's backward, grad_h = grad_c W1 -> launch f's all-reduce
#     meanwhile: the gradients of W1 and W2, for which no other rank waits; then the other slices

def backward_sublayer(model, slice, site, gradient):                                    # exercise 8
    """Turn the gradient of x + y + b2 [b, s, h] into the gradient of x."""
    w1, b1, w2, b2 = matrices(model, site)
    x, h, c, a = slice.tape.pop()
    a.backward(gradient @ w2)             # g: each addend has y's gradient; -> c.grad
    b1.grad += c.grad.sum((0, 1))
    b2.grad += gradient.sum((0, 1))
    grad_h = c.grad @ w1                                     # this rank's addend; see f
    yield from all_reduce(model, grad_h, deferred=[(w2, gradient, a), (w1, c.grad, h)])
    h.backward(grad_h)                                       # -> the norm's .grad, and x.grad
    return gradient + x.grad

def backward_slice(model, slice, gradient):
    """Turn the output's gradient into slice.gradient, the gradient of x; add to every .grad."""
    words = model.weights.get(WORDS)
    if model.grid.is_last:
        x, h = slice.tape.pop()
        grad_h = slice.gradient @ words                                    # from cross_entropy()
        yield from all_reduce(model, grad_h, deferred=[(words, slice.gradient, h)])
        h.backward(grad_h)
        gradient = x.grad
    for site in reversed(model.sites):
        if model.slices:
            gradient = yield from backward_sublayer(model, slice, site, gradient)
        else:
            x, output = slice.tape.pop()
            output.backward(gradient)
            gradient = x.grad
    if model.grid.is_first:
        row, is_own = own_rows(model, slice.tokens)
        words.grad.index_add_(0, row.flatten(), (gradient * is_own.unsqueeze(-1)).flatten(0, 1))
        model.weights[POSITIONS].grad += gradient.sum(0)
    slice.gradient = gradient

# ---- 6. The pipeline (1F1B: 2104.04473, section 2.2) ---------------------------------------------
# The batch passes in microbatches, so that all stages have work. After a warm-up, 1F1B alternates F
# (forward) and B (backward, twice as long). So stage r of p keeps at most p - r tapes, not all.

#     stage 0 |F0 F1 F2             B0 B0 F3 B1 B1    B2 B2    B3 B3
#     stage 1 |   F0 F1       B0 B0 F2 B1 B1 F3 B2 B2    B3 B3
#     stage 2 |      F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

def one_f_one_b(stage, stages, microbatches):                                           # exercise 5
    """Return a stage's actions; (0, 2, 2) gives [("F", 0), ("F", 1), ("B", 0), ("B", 1)]."""
    num_warmup = min(stages - stage - 1, microbatches)
    actions = [("F", i) for i in range(num_warmup)]
    for i in range(microbatches - num_warmup):
        actions += [("F", num_warmup + i), ("B", i)]
    return actions + [("B", i) for i in range(microbatches - num_warmup, microbatches)]

# F receives from the previous stage and sends to the next one, B the other way. Send and receive go
# in one batch: a send waits for its receive, so two neighbours that both sent first would hang.
def exchange(model, action, output, following):                                         # exercise 6
    """Send an action's output; return what the following action receives, or None."""
    grid, size, messages, received = model.grid, model.sizes, [], None
    source = {"F": grid.previous, "B": grid.next}.get(following)
    target = {"F": grid.next, "B": grid.previous}.get(action)
    if source is not None:
        received = torch.empty(size.micro_batch, size.seq_length, size.hidden, device=grid.device)
        messages.append(dist.P2POp(dist.irecv, received, source))
    if target is not None:
        note(model, f"--> rank {target}", output)
        messages.append(dist.P2POp(dist.isend, output, target))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return received

@torch.no_grad()
def run_pipeline(model, text, step):
    """Add this replica's gradients to .grad; return its summed loss, 0 before the last stage."""
    size, grid, tapes, loss = model.sizes, model.grid, {}, model.flat.new_zeros(())
    actions = one_f_one_b(grid.pp_rank, grid.pp, size.global_batch // (grid.dp * size.micro_batch))
    count = min(max(model.slices, 1), size.micro_batch)                                  # slices
    received = exchange(model, None, None, actions[0][0])
    for (action, i), (following, _) in zip(actions, [*actions[1:], (None, None)]):
        model.action = f"{action}{i}"
        parts = [None] * count if received is None else received.tensor_split(count)
        if action == "F":
            tokens, labels = (ids.tensor_split(count) for ids in read_batch(text, model, step, i))
            tapes[i] = [SimpleNamespace(x=x, tokens=tokens, labels=labels, tape=[])
                        for x, tokens, labels in zip(parts, tokens, labels)]
            interleave([forward_slice(model, slice) for slice in tapes[i]])
            output = torch.cat([slice.output for slice in tapes[i]])
            loss += output.sum() if grid.is_last else 0.0         # the last stage outputs losses
        else:
            interleave([backward_slice(model, slice, part) for slice, part in zip(tapes[i], parts)])
            output = torch.cat([slice.gradient for slice in tapes.pop(i)])
        received = exchange(model, action, output, following)
    return loss

# ---- 7. The sharded optimizer (ZeRO-1: 1910.02054) -----------------------------------------------
# The dp replicas have the same weights. To keep a weight's two moments (AdamW) on only one of them,
# replica j updates part j of the flat tensor: it receives part j of the summed gradients (reduce-
# scatter) and sends its new weights to all (all-gather). The two send as much as one all-reduce.

@torch.no_grad()
def optimizer_step(model, step, lr, loss, clip=1.0, beta1=0.9, beta2=0.95, decay=0.1):  # exercise 9
    """Sum the gradients, clip, update, gather the weights; return (mean loss, gradient norm)."""
    grid, tokens = model.grid, model.sizes.global_batch * model.sizes.seq_length
    if grid.pp > 1 and grid.tied_group:                        # one matrix, used at both ends
        dist.all_reduce(model.weights[WORDS].grad, group=grid.tied_group)
    weight, moment, square = model.flat.chunk(grid.dp)[grid.dp_rank], *model.moments
    gradient, model.action = torch.empty_like(weight), "  "
    note(model, "<-> reduce-scatter", model.grad)
    dist.reduce_scatter(gradient, list(model.grad.chunk(grid.dp)), group=grid.dp_group)
    gradient /= tokens                                         # tokens of all replicas; divide once
    loss, grad_norm = global_sums(model, loss / tokens, gradient)
    gradient *= min(1.0, clip / (grad_norm + 1e-6))

    weight *= 1.0 - lr * decay * model.decays.chunk(grid.dp)[grid.dp_rank]             # AdamW
    moment.lerp_(gradient, 1.0 - beta1)
    square.lerp_(gradient.square(), 1.0 - beta2)
    deviation = (square / (1.0 - beta2 ** step)).sqrt_().add_(1e-8)
    weight.addcdiv_(moment, deviation, value=-lr / (1.0 - beta1 ** step))
    note(model, "<-> all-gather", model.flat)
    dist.all_gather(list(model.flat.chunk(grid.dp)), weight.clone(), group=grid.dp_group)
    model.grad.zero_()
    return loss, grad_norm

# All tp ranks have the loss, b2, positions and layer norms; two stages have the words. `counts`
# is 1 on only one copy. If ranks clipped by different gradient norms, copies would drift apart.
def global_sums(model, loss, gradient):                                                # exercise 10
    """Return the global loss and gradient norm, the same on all ranks. Copies count once."""
    own = model.counts.chunk(model.grid.dp)[model.grid.dp_rank]
    sums = torch.stack([loss * (model.grid.tp_rank == 0), (gradient.square() * own).sum()]).double()
    dist.all_reduce(sums)
    return sums[0].item(), sums[1].sqrt().item()

# ---- 8. Training ---------------------------------------------------------------------------------

def read_batch(text, model, step, microbatch):
    """Return tokens and labels of a microbatch, both [b, s]. A label is the next token."""
    sizes, grid, s, rows = model.sizes, model.grid, model.sizes.seq_length, []
    samples = torch.arange(sizes.global_batch).view(grid.dp, -1, sizes.micro_batch)
    for sample in samples[grid.dp_rank, microbatch].tolist():  # all layouts read the same samples
        epoch, i = divmod(step * sizes.global_batch + sample, (len(text) - 1) // s)
        if epoch not in model.orders:                        # shuffle once, not for each sample
            random = np.random.Generator(np.random.PCG64([sizes.seed, epoch]))
            model.orders = {epoch: random.permutation((len(text) - 1) // s)}
        start = model.orders[epoch][i] * s                                   # sample i of the epoch
        rows.append(torch.from_numpy(text[start:start + s + 1].astype(np.int64)))
    rows = torch.stack(rows).to(grid.device)
    return rows[:, :-1], rows[:, 1:]

def learning_rate(step, steps, peak):
    """Rise linearly for the first 5 % of steps, then fall along a cosine to a tenth of the peak."""
    warmup_iters = int(0.05 * steps)
    cosine = math.cos(math.pi * (step - warmup_iters) / max(steps - warmup_iters, 1))
    return peak * (step / warmup_iters if step <= warmup_iters else 0.55 + 0.45 * cosine)

def note(model, what, tensor):
    """Print this rank's sends, all_reduce() calls, reduce-scatters and all-gathers."""
    if model.verbose:
        rank, now = dist.get_rank(), time.perf_counter() % 1000   # one clock for a machine's ranks
        print(f"{now:9.4f} s {' ' * 8 * rank} rank {rank} {model.action} {what} "
              f"{tensor.nbytes / 1e3:.0f} kB\n", end="", flush=True)

def train(sizes, grid, slices, steps, folder, verbose=False, report=print):
    """Train on a folder from data/prepare.py; return the model and each step's (loss, norm)."""
    if not (path := folder / "meta.json").exists():                 # rank 0 says so; the others end
        raise SystemExit(0 if dist.get_rank() else f"No {path}: first run python data/prepare.py")
    meta = json.loads(path.read_text())
    text = np.memmap(folder / "train.bin", meta["dtype"], mode="r")
    model, history = make_model(sizes, grid, meta["vocab_size"], slices, verbose), []
    for step in range(1, steps + 1):
        loss = run_pipeline(model, text, step - 1)
        history.append(optimizer_step(model, step, learning_rate(step, steps, sizes.lr), loss))
        if dist.get_rank() == 0 and (step % 10 == 0 or step in (1, steps)):
            report("step {:4d}   loss {:.4f}   gradient norm {:.3f}".format(step, *history[-1]))
    return model, history

def main():
    alone = () if dist.is_torchelastic_launched() else (None, None, 1, 0, dist.HashStore())
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.device_count() else "gloo", *alone)
    world, parser = dist.get_world_size(), ArgumentParser(description=__doc__.splitlines()[0])
    for flag, default, text in (("--tp", 2 - world % 2, "tensor-parallel ranks"),
            ("--pp", None, "stages"), ("--dp", None, "replicas"), ("--steps", 200, "updates"),
            ("--slices", 2, "slices of a microbatch; 0: the definition, run by autograd")):
        parser.add_argument(flag, type=int, default=default, help=text)
    parser.add_argument("--data", type=Path, default="data/python-stdlib", help="prepared text")
    parser.add_argument("--verbose", action="store_true", help=note.__doc__)
    args, device = parser.parse_args(), torch.device("cpu")
    if torch.cuda.device_count() >= world:                                   # else all on the CPU
        torch.cuda.set_device(device := torch.device("cuda", dist.get_rank()))
    tp, pp = args.tp, args.pp or 1 + (world % (2 * args.tp or 1) == 0)
    dp = args.dp or max(world // (tp * pp or 1), 1)
    sizes = Sizes(micro_batch=min(4, Sizes().global_batch // dp))
    if (min(tp, pp, dp, args.steps, args.slices + 1) < 1 or tp * pp * dp != world
            or sizes.heads % tp or sizes.global_batch % dp):
        raise SystemExit(0 if dist.get_rank() else f"tp {tp} x pp {pp} x dp {dp} must be {world} "
            f"processes; tp must divide {sizes.heads} heads, and dp {sizes.global_batch} samples; "
            f"steps must be at least 1, and slices at least 0")
    train(sizes, make_grid(tp, pp, dp, device), args.slices, args.steps, args.data, args.verbose)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
