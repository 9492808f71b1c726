"""Reduce-scatter, all-gather and all-to-all, asynchronous: for ZeRO, sequence parallelism and experts.

    a tensor on each of n ranks   | part 0 | part 1 | ... | part n-1 |        rank i owns part i

    reduce_scatter     part i on rank i becomes the sum of all ranks' part i     each rank sends (n-1)/n of the tensor
    all_gather         part i on every rank becomes rank i's part i              each rank sends (n-1)/n of the tensor

A reduce-scatter followed by an all-gather is an all-reduce. NCCL has both. gloo's reduce-scatter all-reduces a copy,
which sends twice as much, and its all-gather copies through extra buffers. So on CPUs we build both from point-to-point
messages: each part goes straight to its owner, or from its owner to all others. The price is a receive buffer.

**Post the receives before the sends.** Two ranks that exchange 2 MB over a link with 500 Mbit/s in each direction need
35 ms, but 67 ms if each posts its receive after its send. gloo starts a send only after the receiver has sent back a
short "ready". If the receiver's own large send has already started, this "ready" queues behind it on the same
connection. So the two directions run one after the other, as in gloo's own all-to-all and broadcasts.

The functions only launch the operation. Do not read or change the tensor before wait() has returned.
"""

import threading

import torch
import torch.distributed as dist

from nanodomino.comm.device import on_gpu

# torch 2.13 renamed both functions and warns about the old names; older versions have only the old names
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TAGS = {"reduce_scatter": 0, "all_gather": 1, "all_to_all": 2}    # so that benchmarks can count each one's messages


def reduce_scatter(whole, group):
    """Launch a reduce-scatter of the flat tensor `whole`. Returns (work, received). On GPUs `received` is None, and
    after work.wait() this rank's part of `whole` is the sum. On CPUs `received` is a tensor [n, size/n]: after
    work.wait() its row i is rank i's addend of this part. The caller must add up the rows, in this order, so that the
    sum has the same bits in every run. Ignore the other parts of `whole`."""
    parts, rank = whole.chunk(group.size()), group.rank()
    if on_gpu(whole):
        return native_reduce_scatter(parts[rank], whole, group=group, async_op=True), None
    received = torch.empty_like(whole).view(group.size(), -1)
    received[rank] = parts[rank]
    return exchange(parts, received, group, TAGS["reduce_scatter"]), received


def all_gather(whole, own, group):
    """Launch an all-gather of the parts of `whole`. Return the work. own: this rank's part, in `whole` or elsewhere."""
    if on_gpu(whole):
        return native_all_gather(whole, own, group=group, async_op=True)
    parts, rank = whole.chunk(group.size()), group.rank()
    if not own.is_set_to(parts[rank]):
        parts[rank].copy_(own)
    return exchange([parts[rank]] * len(parts), parts, group, TAGS["all_gather"])


def all_to_all(received, sent, output_splits: list[int], input_splits: list[int], group):
    """Launch an all-to-all: rank i gets the i-th run of rows of `sent`, and its rows become the i-th run of `received`.
    output_splits, input_splits: the number of rows from and to each rank. Returns the work to wait for."""
    if on_gpu(sent):
        return dist.all_to_all_single(received, sent, output_splits, input_splits, group=group, async_op=True)
    sends, receives, rank = sent.split(input_splits), received.split(output_splits), group.rank()
    receives[rank].copy_(sends[rank])
    return exchange(sends, receives, group, TAGS["all_to_all"])


def exchange(sends, receives, group, tag):
    """Launch a send of sends[i] to each other rank i and a receive of receives[i] from it, unless they are empty. Each
    rank starts with the next rank, then the one after, so that no rank is everyone's first partner."""
    ranks = [(group.rank() + distance) % group.size() for distance in range(1, group.size())]
    return Messages([dist.irecv(receives[rank], group=group, group_src=rank, tag=tag) for rank in ranks
                     if receives[rank].numel()]
                    + [dist.isend(sends[rank], group=group, group_dst=rank, tag=tag) for rank in ranks
                       if sends[rank].numel()])


class Messages:
    """Several messages in flight, combined into one work, for which wait() may be called twice."""

    def __init__(self, works):
        self.works, self.future = works, None

    def wait(self):
        if self.future:
            return self.future.wait()
        while self.works:
            self.works.pop(0).wait()

    def get_future(self):
        """Return a future for Trace.watch(). torch's messages have none, so a thread waits for them."""
        def thread():
            try:
                for work in self.works:
                    work.wait()
                future.set_result(None)
            except RuntimeError as error:                # future.wait() will raise it
                future.set_exception(error)

        self.future = future = torch.futures.Future()
        threading.Thread(target=thread, daemon=True).start()
        return future
