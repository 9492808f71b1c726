"""Reduce-scatter and all-gather, in place and asynchronous: the two collectives of ZeRO and sequence parallelism.

    a tensor on each of n ranks   | part 0 | part 1 | ... | part n-1 |        rank i owns part i

    reduce_scatter     part i on rank i becomes the sum of all ranks' part i     each rank sends (n-1)/n of the tensor
    all_gather         part i on every rank becomes rank i's part i              the same

One after the other they are an all-reduce. NCCL has both. gloo has both by name, but its reduce-scatter all-reduces a
copy, which sends twice as much, and its all-gather copies through extra buffers. So on CPUs both are built from
point-to-point messages: each part goes straight to its owner, or from its owner to all others. A reduce-scatter then
needs a receive buffer as large as the tensor.

**Post the receives before the sends.** Two ranks that exchange 2 MB over a link with 500 Mbit/s in each direction need
35 ms, but 67 ms if each posts its receive after its send. gloo starts to send when the receiver has said that it is
ready. That short message uses the same connection. If the rank's own large send has started, the short message queues
behind all of it, and the two directions run one after the other. (gloo's all-to-all and broadcasts do that: exchanging
4 MB took 45 and 66 ms, and 35 ms here; between processes on one host 2.9 and 1.9 ms, and 1.8 and 1.5 ms here.)

Both functions only launch the operation. Leave the tensor alone until wait() has returned.
"""

import threading

import torch
import torch.distributed as dist

# torch 2.13 renamed both and warns about the old names; older versions have only those
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TAGS = {"reduce_scatter": 0, "all_gather": 1}        # so that benchmarks can count the messages of each


def reduce_scatter(whole, group):
    """Launch a reduce-scatter: this rank's part of `whole` becomes the sum; the other parts become garbage.

    Returns (work, received). If `received` [n, size/n] is not None, it holds all ranks' versions of this part after
    work.wait(), and the caller adds them up: always in the same order, so the sum has the same bits in every run.
    """
    parts, rank = whole.chunk(group.size()), group.rank()
    if whole.is_cuda:
        return native_reduce_scatter(parts[rank], whole, group=group, async_op=True), None
    received = torch.empty_like(whole).view(group.size(), -1)
    received[rank] = parts[rank]
    return exchange(parts, received, group, TAGS["reduce_scatter"]), received


def all_gather(whole, group):
    """Launch an all-gather: every part of `whole` becomes its owner's. Returns the work to wait for."""
    parts = whole.chunk(group.size())
    own = parts[group.rank()]
    if whole.is_cuda:
        return native_all_gather(whole, own, group=group, async_op=True)
    return exchange([own] * len(parts), parts, group, TAGS["all_gather"])


def exchange(sends, receives, group, tag):
    """Launch a send of sends[i] to each other rank i and a receive of receives[i] from it.

    Each rank starts with the next rank, then the one after, so that no rank is everyone's first partner.
    """
    ranks = [(group.rank() + distance) % group.size() for distance in range(1, group.size())]
    return Messages([dist.irecv(receives[rank], group=group, group_src=rank, tag=tag) for rank in ranks]
                    + [dist.isend(sends[rank], group=group, group_dst=rank, tag=tag) for rank in ranks])


class Messages:
    """Several messages in flight as one work. It may be waited for twice, which torch's message works may not."""

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
        """Return a future that is done when all messages are; traces use it. Messages have none, so a thread waits."""
        def thread():
            try:
                self.finish()
                future.set_result(None)
            except RuntimeError as error:                # raised where the future is waited for
                future.set_exception(error)

        self.future = future = torch.futures.Future()
        threading.Thread(target=thread, daemon=True).start()
        return future
