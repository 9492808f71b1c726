"""Checks, at each checkpoint, that all copies of a parameter are still bitwise equal.

Every parameter has a copy on each replica (dp); an expert has copies only on the replicas that hold it (expert_dp). A
parameter that is not sharded (norms, row-parallel biases, positions) has a copy on each tensor-parallel rank too (tp).
A tied embedding has one on the first and one on the last stage. The copies stay equal because

    over dp        with ZeRO, one owner updates each part and all-gathers it      equal by construction
                   without, each replica applies the same gradients               equal if kernels are deterministic
    two stages     both add the same two gradients                                equal if addition is deterministic
    over tp        each rank computes the same gradient from the same numbers     equal if kernels are deterministic
                   (with sequence parallelism, the ranks sum the same parts)      (equal if addition is deterministic)

torch.compile can break the equality over tp: it may benchmark kernels on each rank separately, and two ranks may choose
kernels whose sums differ in the last bit. From then on the ranks train slightly different models, which no loss shows.
So the compiler is asked to choose kernels deterministically (kernels.py), and the copies are compared.
"""

from collections import defaultdict

import torch
import torch.distributed as dist

from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer

CHUNK = 1 << 20          # elements converted to int64 at once
INTEGER_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}       # keys: bytes per element
MAX_NAMED = 3            # parameters named in the message


@torch.no_grad()
def checksum(weight) -> torch.Tensor:
    """Return an exact checksum of a tensor's bits and their order, as an int64 scalar on its device."""
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for bits in weight.detach().reshape(-1).view(INTEGER_TYPES[weight.element_size()]).split(CHUNK):
        factors = torch.arange(1, 2 * len(bits), 2, device=weight.device)      # odd: then no bit is lost modulo 2^64
        total = 31 * total + (bits.to(torch.int64) * factors).sum()
    return total


def local_copies(model: GPT, optimizer: ZeroOptimizer, mesh: Mesh):
    """Yield (name, shard, partition, tensor) for each tensor of this rank that may have a copy on another rank.

    Tensors on two ranks are copies if name, shard and partition are equal. shard: this rank's index on each axis over
    which the parameter is cut. partition: this rank's ZeRO partition for master weights, else None. Master weights are
    included if the weights have 16 bits, because rounding can hide their drift for a while.
    """
    for name, weight in model.named_parameters():
        shard = tuple(mesh.axis(axis)[1] for axis in weight.spec.kind.shards)
        bucket = optimizer.bucket_of[weight]
        yield name, shard, None, weight
        start = bucket.offsets[weight] - bucket.own_offset
        master = bucket.master[max(start, 0):max(start + weight.numel(), 0)]
        if bucket.master is not bucket.own_weights and len(master):
            yield f"the master of {name}", shard, bucket.partition, master


def drift_warning(model: GPT, optimizer: ZeroOptimizer, mesh: Mesh) -> str:
    """Return a warning that names the parameters whose copies differ, and their ranks; "" if all copies are equal.

    All ranks must call this together, and get the same text.
    """
    *keys, tensors = zip(*local_copies(model, optimizer, mesh))
    checksums = torch.stack([checksum(tensor) for tensor in tensors]).tolist()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (list(zip(*keys)), checksums))
    ranks_by_value = defaultdict(lambda: defaultdict(list))    # {(name, shard, partition): {checksum: ranks}}
    for rank, (keys, checksums) in enumerate(gathered):
        for key, value in zip(keys, checksums):
            ranks_by_value[key][value].append(rank)
    drifted = {name: " and ".join(f"rank {', '.join(map(str, ranks))}" for ranks in by_value.values())
               for (name, *_), by_value in ranks_by_value.items() if len(by_value) > 1}
    if not drifted:
        return ""
    more = f", and {len(drifted) - MAX_NAMED} more" if len(drifted) > MAX_NAMED else ""
    named = "; ".join(f"{name} differs between {ranks}" for name, ranks in list(drifted.items())[:MAX_NAMED])
    return (f"copies of parameters have drifted apart ({named}{more}), so the ranks train slightly different models; "
            "a run resumed from this checkpoint has equal copies again; try --deterministic-mode or --no-compile")
