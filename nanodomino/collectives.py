"""ZeRO's two collectives, each in the quickest way that a backend has.

    whole on each of n ranks   | part 0 | part 1 | ... | part n-1 |

    reduce_scatter     rank i gets the sum of everybody's part i      each rank sends (n-1)/n of the whole
    all_gather         everybody gets part i from its owner, rank i   the same

One after the other they are an all-reduce. NCCL has both. gloo has both by name, but its reduce-scatter all-reduces a
copy, which sends twice as much, and its all-gather goes through buffers of its own. So on CPUs they are put together
from what gloo does well:

    reduce_scatter     an all-to-all, in which every part goes straight to its owner, who adds up all that have
                       arrived: the same bits at every run, whoever was late
    all_gather         a broadcast of each part by its owner

Both work in place, and only start: the tensor must be left alone until wait() of what they return has come back. It may
be called once.
"""

import torch
import torch.distributed as dist

# torch 2.13 gave both a new name and warns at the old one; older versions know the old one alone.
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(whole, group):
    """Start: this rank's part of `whole` becomes the sum of everybody's. The other parts are of no use afterwards."""
    if whole.is_cuda:
        return native_reduce_scatter(whole.chunk(group.size())[group.rank()], whole, group=group, async_op=True)
    return SumOfParts(whole, group)


def all_gather(whole, group):
    """Start: each part of `whole` becomes that of its owner."""
    parts = whole.chunk(group.size())
    if whole.is_cuda:
        return native_all_gather(whole, parts[group.rank()], group=group, async_op=True)
    return Works([dist.broadcast(part, group=group, group_src=owner, async_op=True)
                  for owner, part in enumerate(parts)])


class SumOfParts:
    """The all-to-all of a reduce-scatter under way, and the sum that follows."""

    def __init__(self, whole, group):
        self.own, self.received = whole.chunk(group.size())[group.rank()], torch.empty_like(whole)
        self.work = dist.all_to_all_single(self.received, whole, group=group, async_op=True)

    def wait(self):
        self.work.wait()
        torch.sum(self.received.view(-1, len(self.own)), dim=0, out=self.own)

    def get_future(self):
        return self.work.get_future()


class Works:
    """Several collectives under way, as one."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()

    def get_future(self):
        """Of the last one, as torch's Work has it."""
        return self.works[-1].get_future()
