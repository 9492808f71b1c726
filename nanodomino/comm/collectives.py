"""A sum that is cut, and the cut made whole: the two collectives of ZeRO and of sequence parallelism.

    whole on each of n ranks   | part 0 | part 1 | ... | part n-1 |        rank i owns part i

    reduce_scatter     the owner gets the sum of everybody's part     each rank sends (n-1)/n of the whole
    all_gather         everybody gets each part from its owner        the same

One after the other they are an all-reduce: everybody gets the sum of the whole. NCCL, which joins GPUs, has both. gloo,
which joins CPUs, has both by name, but its reduce-scatter all-reduces a copy, which sends twice as much, and its
all-gather goes through buffers of its own. So on CPUs they are messages: every part goes straight to its owner, who
adds up what has arrived, or from its owner straight to everybody. What is to be added up arrives in memory of its own,
another whole until then.

**Receive first, then send.** Two ranks that exchange 2 MB over a wire of 500 Mbit/s in each direction need 35 ms, or 67
where each asks for its message after it has sent its own. gloo begins to send when the other side has said that it is
ready; that word goes by the same connection as everything else, and if this rank's message has set out, it waits behind
all of it. One direction follows the other then, on a wire that has both. (gloo's own all-to-all and broadcasts do that:
exchanges of 4 MB took 45 and 66 ms, these messages 35; between processes of a host 2.9 and 1.9 ms, these 1.8 and 1.5.)

Both work in place, and only start: the tensor must be left alone until wait() has come back.
"""

import threading

import torch
import torch.distributed as dist

# torch 2.13 gave both a new name and warns at the old one; older versions know the old one alone.
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TAGS = {"reduce_scatter": 0, "all_gather": 1}        # whoever counts messages can tell what they belong to


def reduce_scatter(whole, group):
    """Start: this rank's part of `whole` becomes the sum of everybody's; the others are of no use afterwards.

    Returns (work, received). Where `received` [n, size/n] is not None, it holds all ranks' versions of this part after
    work.wait(), and the caller adds up: always in the same order, so to the same bits, whoever was late.
    """
    parts, rank = whole.chunk(group.size()), group.rank()
    if whole.is_cuda:
        return native_reduce_scatter(parts[rank], whole, group=group, async_op=True), None
    received = torch.empty_like(whole).view(group.size(), -1)
    received[rank] = parts[rank]
    return exchange(parts, received, group, TAGS["reduce_scatter"]), received


def all_gather(whole, group):
    """Start: each part of `whole` becomes that of its owner. Returns the work to wait for."""
    parts = whole.chunk(group.size())
    own = parts[group.rank()]
    if whole.is_cuda:
        return native_all_gather(whole, own, group=group, async_op=True)
    return exchange([own] * len(parts), parts, group, TAGS["all_gather"])


def exchange(sends, receives, group, tag):
    """Start: one tensor to each other rank, and one from each; the next rank comes first, so that all have somebody
    else to talk to."""
    others = [(group.rank() + distance) % group.size() for distance in range(1, group.size())]
    return Messages([dist.irecv(receives[other], group=group, group_src=other, tag=tag) for other in others]
                    + [dist.isend(sends[other], group=group, group_dst=other, tag=tag) for other in others])


class Messages:
    """Several under way, as one work, which may be waited for again: one message may not."""

    def __init__(self, works):
        self.works, self.future = works, None

    def wait(self):
        if self.future:
            self.future.wait()
        else:
            self.finish()

    def finish(self):
        while self.works:
            self.works.pop(0).wait()

    def get_future(self):
        """Done when all of them are. Whoever keeps a record asks for it; messages have none, so a thread waits."""
        def thread():
            try:
                self.finish()
                future.set_result(None)
            except RuntimeError as error:                # for whoever waits
                future.set_exception(error)

        self.future = future = torch.futures.Future()
        threading.Thread(target=thread, daemon=True).start()
        return future
