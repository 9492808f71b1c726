"""A slice: what it holds, the collectives that it has in flight, and the steps that it is made of.

A slice is some samples of a microbatch. Its forward and its backward are generators, made of these steps: launch a
collective, yield to let the other slices compute, wait for the collective, multiply.

**A collective in four steps**, so that other work can run while it is in flight:

    flight = prepare_all_reduce(tensor, group)     prepared: no byte has moved
    flight.launch()                                in flight: `tensor` must not be read or written
    flight.work.wait()                             done
    flight.result()                                returns the complete tensor

If nothing has to be sent, as in a group of one rank, `collective` is "" and only result() is called.

**The column split** (Domino, 2409.15241, section 3.3) works within one slice, so it also helps at batch size 1. It cuts
a matrix into `columns` parts along the features that are communicated. While the collective of one part is in flight,
the next part is computed. So a tensor in flight is a list of flights, one for each part of its last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.comm.collectives import all_gather, all_to_all, reduce_scatter
from nanodomino.layers.gradients import add_weight_gradient, main_grad_of

if TYPE_CHECKING:
    from nanodomino.data import Batch
    from nanodomino.layers.dropout_and_positions import MasksAndPositions
    from nanodomino.model import Chunk
    from nanodomino.overlap.compute import Branch, HeadTape, LinearPairTape, SavedResidualNorm


@dataclass
class Flight:
    """Holds a tensor and the collective that completes it."""
    tensor: torch.Tensor
    collective: str = ""                            # such as "all_reduce" or "all_to_all"; "": nothing to send
    sent: torch.Tensor | None = None                # the whole tensor; a trace records its bytes
    start: Callable | None = None                   # launches the collective and returns (work, received)
    work: dist.Work | None = None
    received: torch.Tensor | None = None            # all addends of a reduce-scatter on CPUs, which result() adds up
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
    """Prepare an in-place all-reduce."""
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
    """Prepare a reduce-scatter: rank i gets part i of the sum of all addends, in this shape. It overwrites `addend`."""
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
    """Return the tensor of finished flights, each of which holds a part of its last dimension. Replace the flights in
    the list by a single one with the joined tensor, so that the parts are freed."""
    if len(flights) > 1:
        flights[:] = [Flight(torch.cat([flight.result() for flight in flights], dim=-1))]
    return flights[0].result()


class ReplicatedResidual:
    """Gathers and reduces for a residual stream of which every tensor-parallel rank holds all rows. gather and reduce
    are the operators f and g of parallel.py. In forward, gather comes before a pair of matmuls and reduce after it. In
    backward it is the other way round. An option may replace this class to shard the rows."""
    shards = 1                           # the number of ranks that share the rows

    def __init__(self, group):
        self.group = group

    def gather(self, x) -> Flight:
        """Prepare what turns this rank's rows [b, s/shards, f] into all rows [b, s, f]: here nothing."""
        return Flight(x)

    def reduce(self, addend) -> Flight:
        """Prepare the sum of all ranks' addends [b, s, f], for this rank's rows. It overwrites `addend`."""
        return prepare_all_reduce(addend, self.group)

    def own_rows(self, whole):
        """Return this rank's rows of `whole` [b, s, ..]."""
        return whole


def in_flight(flights) -> bool:
    """Return whether any of the flights sends something."""
    return any(flight.collective for flight in flights)


class SliceOps:
    """Runs the steps of any slice. all_reduce and the methods whose names start with yield are generators. Arguments
    slice (a Slice) and site (a name such as "layers.3.mlp") only label what the trace records."""

    def __init__(self, stream: ReplicatedResidual, columns: int, trace, statistics_of, always_yields=True):
        """statistics_of: {site: tensor} to which sublayers add what they count; see GPT. always_yields: yield between
        two sublayers even if nothing is in flight, so that a pair's forward and backward take turns also without tensor
        parallelism. If False, a slice runs until it launches its next collective."""
        self.stream, self.columns, self.trace, self.always_yields = stream, columns, trace, always_yields
        self.statistics_of = statistics_of

    def launch(self, slice, site, flight: Flight) -> Flight:
        """Launch a flight, if it sends anything. Its tensor must not be read or written until wait()."""
        if flight.collective:
            flight.launch()
            self.trace.watch(flight.collective, flight.work, group=flight.group, slice=slice.index, site=site,
                             bytes=flight.sent.nbytes)
        return flight

    def gather(self, slice, site, x) -> list[Flight]:
        """Launch the gather of x [b, s/t, h], in parts of its features. If x is replicated, nothing is sent."""
        parts = self.column_parts(x, -1) if self.stream.shards > 1 else [x]
        return [self.launch(slice, site, self.stream.gather(part)) for part in parts]

    def wait(self, slice, site, flights):
        """Wait for all flights of a tensor and return the tensor."""
        if in_flight(flights):
            with self.trace.span("wait", group=flights[0].group, slice=slice.index, site=site):
                for flight in flights:
                    flight.work.wait()
        return result_of(flights)

    def all_reduce(self, slice, site, tensor, op=dist.ReduceOp.SUM):
        """All-reduce a tensor in place."""
        flight = prepare_all_reduce(tensor, self.stream.group, op)
        yield from self.yield_then_wait(slice, site, [self.launch(slice, site, flight)])

    def yield_if_in_flight(self, flights):
        """Let other slices compute if any of the flights sends something."""
        if in_flight(flights):
            yield

    def yield_once(self, flights):
        """Let other slices compute if always_yields is set or any of the flights sends something."""
        if self.always_yields or in_flight(flights):
            yield

    def yield_if_sharded(self):
        """Let other slices compute if an option shards the stream, although this slice has nothing in flight."""
        if self.stream.shards > 1:
            yield

    def yield_then_wait(self, slice, site, flights):
        """Let other slices compute, then wait for the flights and return their tensor."""
        yield from self.yield_once(flights)
        return self.wait(slice, site, flights)

    # ---- matmuls; a weight is a tensor, or an option's object that multiplies in another way (options/fp8.py)

    def column_parts(self, tensor, dim):
        """Cut a tensor's features into `columns` parts. dim: -1 for an activation, 0 for a weight [out, in]."""
        return [tensor] if self.columns == 1 else tensor.chunk(self.columns, dim)

    def linear(self, slice, site, flights, weight, bias=None):
        """Return x W^T + bias. `flights` carry x, and each part of x's features is multiplied when it has arrived. A
        single flight then carries x as convert_once() returns it, for the weight gradient."""
        total = None
        for flight, part in zip(flights, weight.chunk(len(flights), dim=1)):
            x = self.wait(slice, site, [flight])
            if len(flights) == 1:
                x = flight.tensor = self.convert_once(x, weight)
            with self.trace.span("matmul", slice=slice.index, site=site):
                total = multiply(x, part, bias, total)
        return total

    def linear_then_reduce(self, slice, site, x, weight) -> list[Flight]:
        """Compute this rank's addend of x W^T, and launch its sum over the ranks: part by part with --columns."""
        flights = []
        for part in self.column_parts(weight, 0):
            with self.trace.span("matmul", slice=slice.index, site=site):
                addend = multiply(x, part)
            flights.append(self.launch(slice, site, self.stream.reduce(addend)))
        return flights

    def weight_gradients(self, slice, site, matmuls: list[tuple]):
        """Add the weight gradient grad_output^T x of each (weight, grad_output, x) to main_grad, and empty the list."""
        with self.trace.span("weight_gradient", slice=slice.index, site=site):
            while matmuls:
                weight, grad_output, *inputs = matmuls.pop(0)
                if weight is not None:
                    add_gradient(weight, grad_output, *inputs)

    def convert_once(self, x, weight):
        """Return x in the form in which it is multiplied by the weight and kept for the weight gradient."""
        return x if isinstance(weight, torch.Tensor) else weight.convert_once(x)


def multiply(x, weight, bias=None, total=None):
    """Return x W^T + bias. If `total` is given, add x W^T to it instead, and return it."""
    if not isinstance(weight, torch.Tensor):
        return weight.multiply(x, bias, total)
    if total is None:
        return F.linear(x, weight, bias)
    total.flatten(0, 1).addmm_(x.flatten(0, 1), weight.t())
    return total


def add_gradient(weight, grad_output, *inputs):
    """Add grad_output^T x to the weight's main_grad; see add_weight_gradient()."""
    if isinstance(weight, torch.Tensor):
        add_weight_gradient(main_grad_of(weight), grad_output, *inputs)
    else:
        weight.add_gradient(grad_output, *inputs)


@dataclass
class TapeEntry:
    """Holds what forward keeps of one sublayer. Dropped tensors are None."""
    branch: Branch
    norm: SavedResidualNorm
    h: torch.Tensor | None               # the norm's output [b, s, h]; only this rank's rows if the stream is sharded
    branch_tape: LinearPairTape          # or what another branch keeps
    h_flights: list[Flight] | None = None    # set in backward: the flights that gather all rows of h


@dataclass(eq=False)
class Slice:
    """Holds the state of one slice (some samples of a microbatch) in one chunk of the stage."""
    index: int
    chunk: Chunk
    batch: Batch
    hidden: torch.Tensor | None                        # [b, s, h] from the previous chunk; None in the first
    masks_and_positions: MasksAndPositions
    training: bool
    tape: list[TapeEntry] = field(default_factory=list)
    head: HeadTape | None = None
    behind_head: object = None                         # the tape of what an option runs behind the head
    output: torch.Tensor | None = None                 # hidden states [b, s, h]; the last chunk: losses [b, s]
    deferred: list | None = None                       # (site, matmuls, modules) for weight_backward()
    loss_scale: float = 1.0                            # the scale of losses that options add by themselves


class GradientsReady:
    """Passes modules to on_gradients_ready once every slice has called this object with them, because then their
    gradients are complete. A slice that uses modules several times reports them as often."""

    def __init__(self, slices: int, on_gradients_ready):
        self.slices, self.on_gradients_ready, self.remaining = slices, on_gradients_ready, {}

    def __call__(self, *modules):
        self.remaining[modules] = (self.remaining.get(modules) or self.slices) - 1
        if self.on_gradients_ready and self.remaining[modules] == 0:
            self.on_gradients_ready(modules)
