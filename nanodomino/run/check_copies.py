"""Copies of a parameter must stay copies, bit for bit; and what tells when they do not.

A parameter lies on many ranks: what tensor parallelism does not cut (norms, the biases after a sum, positions) on all
of tp, everything on all of dp, a tied matrix on two stages. What keeps the copies alike:

    over dp        each part of a weight is updated by its owner, who sends it to all       alike by construction
                   (without ZeRO, each replica updates all of it with the same gradients)   (alike if the kernels are)
    two stages     both add the same two gradients, once the replicas have                  alike if a sum is
    over tp        every rank has the same gradient, as it has computed the same numbers    alike if the kernels are
                   (of a stream that is cut: all have the same sum of what each computed)   (alike if a sum is)

The last is a wish. A compiler that measures which of two kernels is quicker, on each rank for itself, may choose one
here and the other there, and their sums differ in the last bit: from then on the ranks train slightly different models,
which no loss shows. So it is asked to choose by rule, and at each save the copies are compared.
"""

from collections import defaultdict

import torch
import torch.distributed as dist

from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer

CHUNK = 1 << 20          # elements that are widened at once
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
SHOWN = 3                # parameters that are named


def make_compiler_deterministic():
    """Before anything is compiled. Older versions of torch have no such word; there the comparison alone is left."""
    # here and not above: as slow to import as the compiler itself
    from torch._inductor import config as inductor

    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True


@torch.no_grad()
def checksum(weight) -> torch.Tensor:
    """An int64 of all bits of a tensor and of their places, on its device: exact, so in whatever order it is summed."""
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for bits in weight.detach().reshape(-1).view(BITS[weight.element_size()]).split(CHUNK):
        places = torch.arange(1, 2 * len(bits), 2, device=weight.device)       # odd: times them no bit is lost
        total = 31 * total + (bits.to(torch.int64) * places).sum()             # beyond 64 bits it wraps around
    return total


def held(model: GPT, optimizer: ZeroOptimizer, mesh: Mesh):
    """(name, which shard of it over tp, which part over dp, the numbers) of all that this rank holds; who says the same
    of something should have the same numbers. Of 16-bit weights the fp32 masters too, of the own part: a weight rounds
    their drift away for a while."""
    for name, weight in model.named_parameters():
        shard, bucket = None if weight.shard_dim is None else mesh.tp_rank, optimizer.bucket_of[weight]
        yield name, shard, None, weight
        begin = bucket.offsets[weight] - bucket.own_offset
        own = bucket.master[max(begin, 0):max(begin + weight.numel(), 0)]
        if bucket.master is not bucket.own_weights and len(own):
            yield f"the master of {name}", shard, optimizer.partition, own


def drifted_copies(model: GPT, optimizer: ZeroOptimizer, mesh: Mesh) -> str:
    """Which parameters' copies are not the same on all ranks that have one, as a sentence; empty if all are. The same
    on every rank; all ranks call it together."""
    *keys, tensors = zip(*held(model, optimizer, mesh))
    sums = torch.stack([checksum(tensor) for tensor in tensors]).tolist()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (list(zip(*keys)), sums))
    copies = defaultdict(lambda: defaultdict(list))            # what should be the same -> checksum -> its ranks
    for rank, (keys, sums) in enumerate(everyone):
        for key, total in zip(keys, sums):
            copies[key][total].append(rank)
    found = {name: " and ".join(f"rank {', '.join(map(str, ranks))}" for ranks in by_sum.values())
             for (name, *_), by_sum in copies.items() if len(by_sum) > 1}
    if not found:
        return ""
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    named = "; ".join(f"{name} differs between {where}" for name, where in list(found.items())[:SHOWN])
    return (f"copies of parameters have drifted apart ({named}{more}), so the ranks train slightly different models; "
            "whoever goes on from this checkpoint has them alike again; try --deterministic-mode or --no-compile")
