"""A collective in four steps, so that other work can run while the collective is in flight:

    flight = prepare_all_reduce(tensor, group)     prepared: no byte has moved
    flight.launch()                                in flight: `tensor` must not be read or written
    flight.work.wait()                             done
    flight.result()                                returns the complete tensor

If nothing has to be sent, for example because the group has only one rank, `kind` is "" and only result() is called.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.collectives import all_gather, all_to_all, reduce_scatter


@dataclass
class Flight:
    """Holds a tensor and the collective that completes it.

    start() launches the collective and returns (work, received). `received` is None, except for a reduce-scatter on
    CPUs. Then it is a tensor [ranks, size], which holds each rank's addend after work.wait(), and result() sums the
    addends (see reduce_scatter in comm/collectives.py).
    """
    tensor: torch.Tensor
    kind: str = ""                                  # such as "all_reduce" or "all_to_all"; "": nothing to send
    sent: torch.Tensor | None = None                # the whole tensor; a trace records its bytes
    start: Callable | None = None
    work: dist.Work | None = None
    received: torch.Tensor | None = None
    group: str = "tp"                               # a name for the trace
    complete: Callable | None = None                # turns the received tensor into the result; None: it is the result

    def launch(self):
        self.work, self.received = self.start()

    def result(self):
        """Return the complete tensor. Call this only after work.wait()."""
        if self.received is not None:
            torch.sum(self.received, dim=0, out=self.tensor.view(-1))
            self.received = None
        return self.complete(self.tensor) if self.complete else self.tensor


def prepare_all_reduce(tensor, group, op=dist.ReduceOp.SUM, name="tp") -> Flight:
    """Prepare an in-place all-reduce. With only one rank in the group, nothing will be sent."""
    if group.size() == 1:
        return Flight(tensor)
    return Flight(tensor, "all_reduce", tensor, lambda: (dist.all_reduce(tensor, op, group=group, async_op=True), None),
                  group=name)


def prepare_all_gather(own, shape, group, name="tp") -> Flight:
    """Prepare an all-gather of every rank's `own`. The result has this shape; it holds rank 0's tensor first."""
    whole = own.new_empty(shape)
    return Flight(whole, "all_gather", whole, lambda: (all_gather(whole.view(-1), own.flatten(), group), None),
                  group=name)


def prepare_reduce_scatter(addend, shape, group, name="tp") -> Flight:
    """Prepare a reduce-scatter: rank i gets the i-th part of the sum of all addends, in this shape. It overwrites
    `addend`."""
    flat = addend.view(-1)
    own = flat.chunk(group.size())[group.rank()].view(shape)
    return Flight(own, "reduce_scatter", flat, lambda: reduce_scatter(flat, group), group=name)


def prepare_all_to_all(rows, input_splits: list[int], output_splits: list[int], group, name="ep") -> Flight:
    """Prepare an all-to-all of rows. input_splits, output_splits: the number of rows to and from each rank."""
    if len(input_splits) == 1:
        return Flight(rows)
    arrived = rows.new_empty(sum(output_splits), *rows.shape[1:])
    return Flight(arrived, "all_to_all", rows,
                  lambda: (all_to_all(arrived, rows, output_splits, input_splits, group), None), group=name)


def result_of(flights: list[Flight]):
    """Return the tensor of finished flights, each of which holds a chunk of its last dimension. Afterwards the list
    holds a single flight with the joined tensor, so that the chunks are freed."""
    if len(flights) > 1:
        flights[:] = [Flight(torch.cat([flight.result() for flight in flights], dim=-1))]
    return flights[0].result()
