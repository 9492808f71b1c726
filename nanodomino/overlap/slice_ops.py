"""Provides the steps of a slice's generator: launch a collective, yield, wait for it, multiply.

A slice's generator yields to let the other slices compute:

    yield_if_in_flight(flights)    yields only if one of these flights sends something
    yield_if_sharded()             yields only if an option shards the residual stream (options/sequence_parallel.py)
    yield_then_wait(flights)       yields once, then waits

The *column split* (Domino, 2409.15241, section 3.3) works within one slice, so it also helps at batch size 1. It cuts a
matrix into `columns` chunks along the features that are communicated. While one chunk's collective is in flight, the
next chunk is computed. So a tensor in flight is a list of flights, one for each chunk of its last dimension.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.layers.gradients import add_weight_gradient, main_grad_of
from nanodomino.overlap.slices import Flight, prepare_all_reduce, result_of


class ReplicatedResidual:
    """Gathers and reduces for a residual stream of which every tensor-parallel rank holds all rows.

    gather and reduce are the operators f and g of parallel.py: gather comes before a pair of matmuls in forward, reduce
    after it; in backward it is the other way round. An option may replace this class to shard the rows.
    """
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


class SliceOps:
    """Runs the steps of any slice. all_reduce and the methods whose names start with yield are generators.

    Arguments slice (a domino.Slice) and site (a name such as "layers.3.mlp") only label what the trace records.
    """

    def __init__(self, stream: ReplicatedResidual, columns: int, trace, statistics_of, always_yields=True):
        """statistics_of: {site: tensor} to which sublayers add what they count; see GPT.
        always_yields: yield between two sublayers even if nothing is in flight, so that a pair's forward and backward
        take turns also without tensor parallelism. If False, a slice runs until it launches its next collective."""
        self.stream, self.columns, self.trace, self.always_yields = stream, columns, trace, always_yields
        self.statistics_of = statistics_of

    # ---- collectives

    def launch(self, slice, site, flight: Flight) -> Flight:
        """Launch a flight, if it sends anything. Its tensor must not be read or written until wait()."""
        if flight.kind:
            flight.launch()
            self.trace.watch(flight.kind, flight.work, group=flight.group, slice=slice.index, site=site,
                             bytes=flight.sent.nbytes)
        return flight

    def gather(self, slice, site, x) -> list[Flight]:
        """Launch the gather of x [b, s/t, h], in chunks of its features. If x is replicated, nothing is sent."""
        chunks = self.column_chunks(x, -1) if self.stream.shards > 1 else [x]
        return [self.launch(slice, site, self.stream.gather(chunk)) for chunk in chunks]

    def wait(self, slice, site, flights):
        """Wait for all flights of a tensor and return the tensor."""
        if any(flight.kind for flight in flights):
            with self.trace.span("wait", group=flights[0].group, slice=slice.index, site=site):
                for flight in flights:
                    flight.work.wait()
        return result_of(flights)

    def all_reduce(self, slice, site, tensor, op=dist.ReduceOp.SUM):
        """All-reduce a tensor in place."""
        flight = prepare_all_reduce(tensor, self.stream.group, op)
        yield from self.yield_then_wait(slice, site, [self.launch(slice, site, flight)])

    # ---- turns

    def yield_if_in_flight(self, flights):
        """Let other slices compute if any of the flights sends something."""
        if any(flight.kind for flight in flights):
            yield

    def yield_once(self, flights):
        """Let other slices compute, if always_yields is set or any of the flights sends something."""
        if self.always_yields:
            yield
        else:
            yield from self.yield_if_in_flight(flights)

    def yield_if_sharded(self):
        """Let other slices compute if the stream is sharded, although this slice has nothing in flight."""
        if self.stream.shards > 1:
            yield

    def yield_then_wait(self, slice, site, flights):
        """Let other slices compute, then wait for the flights and return their tensor."""
        yield from self.yield_once(flights)
        return self.wait(slice, site, flights)

    # ---- matmuls; a weight is a tensor, or an option's object that multiplies in another way (options/fp8.py)

    def column_chunks(self, tensor, dim):
        """Cut a tensor into `columns` chunks of features. dim: -1 for an activation, 0 for a weight [out, in]."""
        return [tensor] if self.columns == 1 else tensor.chunk(self.columns, dim)

    def linear(self, slice, site, flights, weight, bias=None):
        """Return x W^T + bias. `flights` carry x, and each chunk of x's features is multiplied when it has arrived. A
        single flight then carries x as convert_once() returns it, for the weight gradient."""
        total = None
        for flight, chunk in zip(flights, weight.chunk(len(flights), dim=1)):
            x = self.wait(slice, site, [flight])
            if len(flights) == 1:
                x = flight.tensor = self.convert_once(x, weight)
            with self.trace.span("matmul", slice=slice.index, site=site):
                total = multiply(x, chunk, bias, total)
        return total

    def linear_then_reduce(self, slice, site, x, weight) -> list[Flight]:
        """Compute this rank's addend of x W^T in chunks of W's rows. Launch each chunk's reduce; return the flights."""
        flights = []
        for chunk in self.column_chunks(weight, 0):
            with self.trace.span("matmul", slice=slice.index, site=site):
                addend = multiply(x, chunk)
            flights.append(self.launch(slice, site, self.stream.reduce(addend)))
        return flights

    def weight_gradients(self, slice, site, matmuls: list[tuple]):
        """Add grad_output^T x to the weight's main_grad for each (weight, grad_output, x); empty the list `matmuls`."""
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
