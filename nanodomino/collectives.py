"""ZeRO's two collectives, each in the quickest way that a backend has.

    whole on each of n ranks   | part 0 | part 1 | ... | part n-1 |        rank i owns part i

    reduce_scatter     the owner gets the sum of everybody's part     each rank sends (n-1)/n of the whole
    all_gather         everybody gets each part from its owner        the same

One after the other they are an all-reduce: everybody gets the sum of the whole. NCCL, which joins GPUs, has both. gloo,
which joins CPUs, has both by name, but its reduce-scatter all-reduces a copy, which sends twice as much, and its
all-gather goes through buffers of its own. So on CPUs they are put together from what gloo does well:

    reduce_scatter     an all-to-all, in which every part goes straight to its owner, who adds up what has arrived.
                       It arrives in memory of its own, another gradient's worth until it is added up
    all_gather         a broadcast of each part by its owner: of 40 MB 2.8 times as fast between processes of a host.
                       (Of a few MB, as activations are, neither is; and over a slow wire gloo's own is faster)

Both work in place, and only start: the tensor must be left alone until wait() has come back.
"""

import torch
import torch.distributed as dist

# torch 2.13 gave both a new name and warns at the old one; older versions know the old one alone.
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(whole, group):
    """Start: this rank's part of `whole` becomes the sum of everybody's; the others are of no use afterwards.

    Returns (work, received). Where `received` [n, size/n] is not None, it holds all ranks' versions of this part after
    work.wait(), and the caller adds up: always in the same order, so to the same bits, whoever was late.
    """
    if whole.is_cuda:
        own = whole.chunk(group.size())[group.rank()]
        return native_reduce_scatter(own, whole, group=group, async_op=True), None
    received = torch.empty_like(whole)
    work = dist.all_to_all_single(received, whole, group=group, async_op=True)
    return work, received.view(group.size(), -1)


def all_gather(whole, group):
    """Start: each part of `whole` becomes that of its owner. Returns the work to wait for."""
    parts = whole.chunk(group.size())
    if whole.is_cuda:
        return native_all_gather(whole, parts[group.rank()], group=group, async_op=True)
    return Works([dist.broadcast(part, group=group, group_src=owner, async_op=True)
                  for owner, part in enumerate(parts)])


class Works:
    """Several collectives under way, as one."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()

    def get_future(self):
        """Done when all of them are; as torch's own Work has it, for whoever keeps a record."""
        return torch.futures.collect_all([work.get_future() for work in self.works])
