"""An ideal wire: one process plays one rank, its matmuls are real, and its collectives cost no processor time.

Over the loopback the network's own work shares the cores with the matmuls, so no measurement shows how good the
*schedule* is. On the ideal wire a collective sends nothing. It is done when a wire of a given bandwidth would have
carried its bytes. The other ranks do not exist, so a sum lacks their addends and the losses mean nothing.

A rank has a wire in each direction, and a wire carries one message after another:

    carried = max(launched, when the wire is free) + bytes / bandwidth
    done    = carried + latency

The counts of an expert layer's rows, which are int64, do not wait for other messages, because packets of several
connections share a wire. A balanced router replaces the model's router. It gives every expert the same number of rows,
so this rank knows what the other ranks would send.

The clock counts the processor time of this thread, plus the time for which it had to wait for the wire. wait() does not
sleep: it moves the clock forward. So a measurement takes no longer than its matmuls, and other processes on the machine
hardly disturb it.

The slices take strict turns, so the order of launches and waits does not depend on the bandwidth. Hence the log of one
step is enough: replay() computes from it how long the step takes on any wire.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.runner import RandomTokens
from nanodomino import pipeline
from nanodomino.domino import Domino
from nanodomino.estimate.accounts import MATMULS
from nanodomino.errors import require
from nanodomino.mesh import make_mesh
from nanodomino.model import GPT
from nanodomino.options.router import Router
from nanodomino.schedules.simulation import timetable
from nanodomino.zero import ZeroOptimizer
from train import forward_step


class Wire:
    """The wire of this process, which all its process groups share, and the clock.

    bandwidth: bytes per second in each direction. latency: seconds
    clock: returns the seconds that this process has worked; by default its processor time, which needs one thread"""

    def __init__(self, bandwidth=float("inf"), latency=0.0, clock=time.thread_time):
        self.bandwidth, self.latency, self.clock = bandwidth, latency, clock
        self.free = {"out": 0.0, "in": 0.0}                 # when each direction will have carried all messages
        self.waited = 0.0                                   # seconds
        self.last_done = 0.0                                # when the last message will have arrived
        self.log = []                                       # of Event
        self.rows_per_expert = 0                            # that each rank sends, see balanced_choice()

    def now(self) -> float:
        return self.clock() + self.waited

    def carry(self, size: float, *directions) -> "Arrival":
        """Carry `size` bytes in each of these directions. Return a work that is done when they have arrived. Without a
        direction, the bytes travel, but do not delay other messages."""
        begin = max([self.now(), *(self.free[direction] for direction in directions)])
        for direction in directions:
            self.free[direction] = begin + size / self.bandwidth
        self.last_done = begin + size / self.bandwidth + self.latency
        arrival = Arrival(self, self.last_done)
        self.log.append(Event(self.clock(), arrival, size, directions))
        return arrival


class Arrival(dist._Work):
    """A work that is done at a moment of the wire's clock."""

    def __init__(self, wire: Wire, done: float):
        super().__init__()
        self.wire, self.done = wire, done

    def wait(self, timeout=None):
        self.wire.log.append(Event(self.wire.clock(), self))
        self.wire.waited += max(0.0, self.done - self.wire.now())
        return True


class Event(NamedTuple):
    """A launch or, with size None, a wait."""
    worked: float               # seconds that the process had worked by then
    arrival: Arrival
    size: float | None = None   # bytes
    directions: tuple = ()


@dataclass
class Log:
    """What a step did on the wire."""
    events: list                # in their order
    begin: float                # the clock at the start
    work: float                 # seconds that the process worked

    @property
    def sent(self) -> float:
        """The bytes that this rank has sent."""
        return sum(event.size for event in self.events if "out" in event.directions)

    def bound(self, ratio: float, latency=0.0) -> float:
        """Return step / max(work, wires) on a wire with wires / work = ratio. latency: in seconds."""
        return (self.work + self.replay(self.sent / (ratio * self.work), latency)) / (self.work * max(1, ratio))

    def replay(self, bandwidth: float, latency: float) -> float:
        """Return for how many seconds the process would wait for this wire."""
        worked, arrivals = self.begin, {}
        wire = Wire(bandwidth, latency, clock=lambda: worked)
        for event in self.events:
            worked = event.worked
            if event.size is None:
                arrivals[event.arrival].wait()
            else:
                arrivals[event.arrival] = wire.carry(event.size, *event.directions)
        return wire.waited


class IdealGroup(dist.ProcessGroup):
    """A process group on the ideal wire. Of its ranks, only this one exists."""
    wire: Wire                                # start_ideal_world() sets the wire of this process

    def allreduce(self, tensors, opts=None):
        """Take the time of a ring all-reduce, in which each rank sends 2 (n-1)/n of the tensor. Change nothing."""
        return self.wire.carry(2 * (self.size() - 1) / self.size() * tensors[0].nbytes, "out", "in")

    def barrier(self, opts=None):
        return self.wire.carry(0, "out", "in")

    def send(self, tensors, rank, tag):
        return self.wire.carry(tensors[0].nbytes, *["out"] * (tensors[0].dtype != torch.int64))

    def recv(self, tensors, rank, tag):
        # integers are the numbers of rows for this rank's experts
        tensors[0].fill_(self.wire.rows_per_expert if tensors[0].dtype == torch.int64 else 0)
        return self.wire.carry(tensors[0].nbytes, *["in"] * (tensors[0].dtype != torch.int64))


class MatmulClock(TorchDispatchMode):
    """A clock on which a matmul takes a nanosecond per multiplication, and everything else takes no time. So what is
    measured with it is the same on every machine."""

    def __init__(self):
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if name in MATMULS:
            self.multiplications += result.numel() * args[MATMULS[name]].size(-1)
        return result

    def __call__(self) -> float:
        return self.multiplications * 1e-9


def start_ideal_world(ranks: int, clock=time.thread_time) -> Wire:
    """Make this process rank 0 of `ranks` on an ideal wire, and return the wire."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    IdealGroup.wire = Wire(clock=clock)
    if not hasattr(dist.Backend, "IDEAL"):
        dist.Backend.register_backend("ideal", lambda store, rank, ranks, timeout: IdealGroup(rank, ranks),
                                      devices=["cpu"])
    dist.init_process_group("ideal", rank=0, world_size=ranks, store=FakeStore())
    return IdealGroup.wire


def log_of(wire: Wire, step) -> Log:
    """Run step() and return its log."""
    wire.log, wire.free, begin = [], dict.fromkeys(wire.free, 0.0), wire.clock()
    step()
    return Log(wire.log, begin, wire.clock() - begin)


# ---- steps of one rank

def pipeline_step(stage: Domino, batches, schedule="1f1b", chunks=1, only_forward=False) -> float:
    """Run a step on a single stage as train.py does, and return the mean loss."""
    table = timetable(schedule, 1, len(batches), chunks)
    totals = pipeline.run(table.forwards if only_forward else table, stage, stage.mesh, lambda i, chunk: batches[i],
                          forward_step, None, None, trace=stage.trace)
    return (totals.loss_sum / totals.tokens).item()


class IdealStage:
    """Runs steps of one rank on an ideal wire."""

    def __init__(self, config, **clock):
        self.wire = start_ideal_world(config.world_size, **clock)
        self.config = config
        self.mesh = make_mesh(1, config.dp, config.tp, torch.device("cpu"), **config.mesh_options)
        self.batches = [config.own_part(batch, self.mesh) for batch in RandomTokens(config).batches(config)]

    def model(self, config) -> GPT:
        model = GPT(config, self.mesh)
        for module in model.modules():
            if isinstance(module, Router):
                module.choose = partial(balanced_choice, module, self.wire)
        ZeroOptimizer(model, config, self.mesh)                # gives each parameter its main_grad
        return model

    def alternatives(self) -> dict:
        """Return {name: function that runs a step}."""
        config, model, compiler = self.config, self.model(self.config), self.config.compiler
        one_slice, domino, columns = (partial(pipeline_step, Domino(model, *cut, compiler), self.batches) for cut in (
            (1, 1), (config.slices, config.columns), (1, 2)))
        steps = {"forward": partial(domino, only_forward=True), "one slice": one_slice, "domino": domino,
                 "columns": columns, "paired": partial(domino, "paired")}
        if config.num_layers > 1:
            two = self.model(replace(config, schedule="interleaved", virtual_stages=2))
            chunked = partial(pipeline_step, Domino(two, config.slices, config.columns, compiler), self.batches)
            steps |= {name: partial(chunked, name, chunks=2) for name in ("interleaved", "zb-v")}
        return steps


def balanced_choice(router: Router, wire: Wire, logits):
    """Return what router.choose() returns, with the same number of tokens for each expert."""
    b, s, count = logits.shape
    rows, left = divmod(b * s * router.topk, count)
    require(not left, f"a slice's {b} x {s} tokens x moe-router-topk {router.topk} must be divisible by num-experts "
                      f"{count}, because the rows are balanced here; change one of them")
    wire.rows_per_expert = rows
    experts = torch.arange(b * s * router.topk).remainder(count)
    return experts.view(b, s, -1), torch.full((count,), rows), experts.argsort(stable=True)
