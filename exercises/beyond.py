"""The second tier: six pieces that the whole system has beyond minimal.py. Each stands alone; README.md says where in
nanodomino/ the same idea serves a real model. The shapes are named as in minimal.py; /t means cut over t ranks.
"""
from collections import deque

import torch
import torch.distributed as dist

# ---- 11. Interleaved 1F1B (2104.04473, section 2.2) ----------------------------------------------
# A stage holds several short chunks of layers: of p stages, stage r has pieces r, p + r, 2 p + r ... of the model. The
# pipeline fills with short actions, so the bubble shrinks to 1/chunks. F1' is microbatch 1's forward in chunk 1.
#
#     stage 0 |F0  F1  F0' F1' F2      B0' B0' F3  B1' B1' F2' B0  B0  F3' B1  B1      B2' B2' ...
#     stage 1 |    F0  F1  F0' B0' B0' F1' B1' B1' F2  B0  B0  F3  B1  B1  F2' B2' B2' F3' B3' ...

def interleaved(stage, stages, microbatches, chunks):                                   # exercise 11
    """Return a stage's actions as (kind, microbatch, chunk), such as ("F", 1, 0). `stages` divides `microbatches`."""
    order = [(i, chunk) for first in range(0, microbatches, stages) for chunk in range(chunks)
             for i in range(first, first + stages)]
    forwards = [("F", i, chunk) for i, chunk in order]
    backwards = [("B", i, chunks - 1 - chunk) for i, chunk in order]
    num_warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))
    actions = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards):
        actions += [forward, backward]
    return actions + backwards[len(order) - num_warmup:]

# ---- 12. Sequence parallelism (2205.05198, section 4.2.2) ----------------------------------------
# Between two sublayers, all t ranks do the same work on the same b s rows of h numbers. Let each rank hold 1/t of the
# rows instead. The matmuls still need all of them: so f's forward all-gathers rows, and g's forward reduce-scatters the
# addends. Together they send what g's all-reduce sent, which is a reduce-scatter, then an all-gather.

class GatherRows(torch.autograd.Function):                                              # exercise 12
    """f: turns this rank's rows [b s/t, h] into the rows of all ranks of the group [b s, h]."""
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows, group=group)
        return torch.cat(parts)
    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.chunk(dist.get_world_size(ctx.group))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, list(parts), group=ctx.group)
        return own, None

class ScatterSum(torch.autograd.Function):                                              # exercise 12
    """g: turns addends of all rows [b s, h] into the sums of this rank's rows [b s/t, h]."""
    @staticmethod
    def forward(ctx, addends, group):
        ctx.group = group
        parts = addends.chunk(dist.get_world_size(group))
        sums = torch.empty_like(parts[0])
        dist.reduce_scatter(sums, list(parts), group=group)
        return sums
    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient, group=ctx.group)
        return torch.cat(parts), None

# ---- 13. ZeRO-2 (1910.02054, section 5.2) --------------------------------------------------------
# The parameters of a bucket share a flat gradient, bucket.grad [n]. ZeRO-1 keeps it for the whole step. ZeRO-2 keeps
# only this replica's part of the sum over replicas, bucket.own_grad [n/dp]. Each microbatch's backward allocates
# bucket.grad if it is None, adds to it, and reports each parameter once. Backward goes on while a reduce-scatter runs.

def report(bucket, in_flight, group):                                                   # exercise 13
    """Count a report; after the microbatch's last one, launch the reduce of bucket.grad and let go of bucket.grad.

    bucket.missing: reports still to come, at first bucket.parameters. in_flight: a deque of (bucket, sum, work), at
    most two, because each keeps a whole gradient in memory. finish() makes room.
    """
    bucket.missing -= 1
    if bucket.missing == 0:
        bucket.missing = bucket.parameters
        if len(in_flight) == 2:
            finish(in_flight)
        own = torch.empty_like(bucket.own_grad)
        parts = list(bucket.grad.chunk(dist.get_world_size(group)))
        in_flight.append((bucket, own, dist.reduce_scatter(own, parts, group=group, async_op=True)))
        bucket.grad = None

def finish(in_flight):                                                                  # exercise 13
    """Wait for the oldest reduce in flight, and count its sum in."""
    bucket, own, work = in_flight.popleft()
    work.wait()
    bucket.own_grad += own

# ---- 14. Pairs (combined 1F1B of Megatron-Core, DualPipe) ----------------------------------------
# A pair, BBF in the picture, is the backward of a microbatch and the forward of a later one: two generators that yield
# while an all-reduce is in flight. Another stage can use what a pair computes only after the pair has ended.
#
#     stage 0 |F0 F1 F2 F3 F4             B0 B0 F5 B1 B1    B2 B2 B3 B3    B4 B4 B5 B5
#     stage 1 |   F0 F1 F2       B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4 B5 B5
#     stage 2 |      F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5

def paired(stage, stages, microbatches):                                                # exercise 14
    """Return a stage's actions: ("F", i), ("B", i), and ("BF", i, j) for B of microbatch i with F of j."""
    num_warmup = min(2 * (stages - stage - 1) + 1, microbatches)
    return ([("F", i) for i in range(num_warmup)]
            + [("BF", i, num_warmup + i) for i in range(microbatches - num_warmup)]
            + [("B", i) for i in range(microbatches - num_warmup, microbatches)])

def run_pair(backward, forward, send):                                                  # exercise 14
    """Let two generators take turns, the backward first, until both have ended. Right after the backward's end, call
    send(): the previous stage waits for its gradient."""
    running = deque([backward, forward])
    while running:
        generator = running.popleft()
        if next(generator, "ended") != "ended":
            running.append(generator)
        elif generator is backward:
            send()

# ---- 15. The vocabulary-parallel embedding (1909.08053, section 3) -------------------------------
# Each rank of the group holds v/t rows of the embedding, in order. Autograd runs both directions.

class EmbedWords(torch.autograd.Function):                                              # exercise 15
    """Turns words [v/t, h] and tokens [b, s] into embeddings [b, s, h], the same on all ranks of the group. All ranks
    also have the same gradient of the embeddings."""
    @staticmethod
    def forward(ctx, words, tokens, group):
        row = tokens - dist.get_rank(group) * len(words)
        is_own = (0 <= row) & (row < len(words))
        row, ctx.rows = row.where(is_own, 0), len(words)
        ctx.save_for_backward(row, is_own)
        embeddings = words[row] * is_own.unsqueeze(-1)
        dist.all_reduce(embeddings, group=group)
        return embeddings
    @staticmethod
    def backward(ctx, gradient):
        row, is_own = ctx.saved_tensors
        grad_words = gradient.new_zeros(ctx.rows, gradient.size(-1))
        gradient = gradient * is_own.unsqueeze(-1)
        grad_words.index_add_(0, row.flatten(), gradient.flatten(0, 1))
        return grad_words, None, None

# ---- 16. A router's balance (2101.03961, section 2.2) --------------------------------------------
# A router sends each token to k of E experts. A sample's loss is E x sum over e of f_e P_e: f_e is the share of its s k
# choices that expert e received, P_e its mean probability over the s tokens. The loss is 1 if the choice is even. The
# loss of a step is the mean over all tokens, so a sample counts s times. No layout may change it: no microbatches, no
# replicas, no cut of the samples' tokens over c ranks.

def balance_loss(probabilities, experts, group, tokens):                                # exercise 16
    """Return this rank's addend of the step's loss, for probabilities [b, s/c, E] and chosen experts [b, s/c, k].

    group: the c ranks with the tokens of the same samples. tokens: the number of tokens in the global batch.
    """
    count, s = probabilities.size(-1), probabilities.size(1) * dist.get_world_size(group)
    chosen = torch.nn.functional.one_hot(experts, count).sum((1, 2)).to(probabilities.dtype)          # [b, E]
    dist.all_reduce(chosen, group=group)
    shares, means = chosen / (s * experts.size(-1)), probabilities.sum(1) / s
    return s * count * (shares * means).sum() / tokens
