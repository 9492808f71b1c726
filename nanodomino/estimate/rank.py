"""Runs a training step of one rank without data, memory or other ranks: train.py's own code, on the meta device.

    process groups    torch's "fake" backend, in which every collective is done at once
    device            meta tensors that stand for a CPU or a GPU (comm/device.py)
    data              samples of one document each
    options           what depends on data takes its most even form, for example all experts are chosen equally often

So no formula here can differ from the program, and a new option needs no code here. A process can be in only one world.
So a dry run must come before the run's own process group, or after it.

A Clock turns the events of a dry run into seconds, on a machine that is given by a few rates (formulas.py):

    operation    moves the clock
    launch       occupies a wire as soon as it is free: a collective its group's, a copy the one to or from the host.
                 While a collective is in flight, it takes a share of the GPU from compute
    wait         moves the clock to the end of the collective. The time that passes is exposed

Messages between stages take no time here: schedules/simulation.py knows when they arrive.
"""

import itertools
import statistics
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from unittest import mock

import torch
import torch.distributed as dist

from nanodomino.comm.device import StandIn, kind_of, standing_for
from nanodomino.data import Batch
from nanodomino.domino import Domino
from nanodomino.estimate.accounts import Accounts, ActionEnd, Launch, Operation, Streams, attention_kernel, storage
from nanodomino.estimate.formulas import Machine
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.schedules import simulation
from nanodomino.settings.config import Config
from nanodomino.zero import ZeroOptimizer

META = torch.device("meta")


@dataclass(frozen=True, eq=False)
class RankRun:
    """Says what a rank does in a training step. kinds: the kinds of an action; see kinds_of()."""
    state: dict[str, int]        # bytes of parameters, gradients and optimizer
    activations: int             # peak bytes between two actions, besides the state: what the tapes keep
    peak: int                    # peak bytes
    host: int                    # peak bytes in pinned memory of the host
    traffic: dict                # {(group, kind): (calls, bytes)}
    events: list                 # what a Clock plays
    ranks_of: dict[str, tuple]   # {group: its ranks}
    layers: tuple[int, ...]      # layers in each chunk
    held: int                    # the largest number of microbatches that the stage holds
    row: tuple[tuple, ...]       # the kinds of each action, in order
    kept: dict[tuple, float]     # {kinds: bytes that an action leaves alive, minus those that it frees}
    peaks: dict[tuple, float]    # {kinds: peak bytes of an action, besides what was alive before it}
    first_peak: int              # peak bytes of all actions but the last, besides the state
    last_peak: int               # peak bytes of the last action and what follows, besides the state


def kinds_of(action) -> tuple:
    """Return the kind and the chunk of each half of an action, for example (("backward", 0), ("forward", 0))."""
    return tuple((half.kind, half.chunk) for half in action.halves)


class NoTokens:
    """Stands in for a TokenDataset."""

    def __init__(self, config: Config):
        self.seq_length, self.prepare = config.seq_length, partial(config.prepare_batch, end_of_text=-1)

    def batch(self, first_sample, microbatch, dp_rank, dp, micro_batch_size, global_batch_size, shuffle=True) -> Batch:
        device = "cpu" if kind_of(META) == "cuda" else "meta"  # a GPU's run counts documents in the host's memory
        rows = torch.zeros(micro_batch_size, self.seq_length + 1, dtype=torch.int64, device=device)
        return Batch.from_rows(rows, [*range(micro_batch_size)], None, META, self.prepare)


@contextmanager
def world_of(rank: int, size: int):
    """Join a world in which the other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore          # registers the backend "fake"
    hook = sys.excepthook                                      # torch puts the rank in front of each line of an error
    dist.init_process_group("cpu:fake,meta:fake", rank=rank, world_size=size, store=FakeStore())
    dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)       # or destroying it would warn
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def groups_of(mesh: Mesh) -> dict:
    """Return {name: process group} of a rank, as Accounts needs it."""
    return {"world": dist.group.WORLD, **mesh.groups}


def dry_run(program, config: Config, rank=0) -> RankRun:
    """Run a step of one rank. program: has model_builder and train_step, like the module train.py. config: resolved,
    and with its vocabulary; config.device, "cpu" or "cuda", is the device that meta tensors stand for."""
    compiles = config.fuses and (config.device == "cuda" if config.compile is None else config.compile)
    with world_of(rank, config.world_size):
        mesh = make_mesh(config.pp, config.dp, config.tp, META, **config.mesh_options)
        accounts = Accounts(groups_of(mesh), host_counts=config.device == "cpu")
        with standing_for(StandIn(config.device, Streams(accounts))), accounts, \
                mock.patch("torch.nn.functional.scaled_dot_product_attention", attention_kernel), \
                mock.patch("torch.optim.adam._device_dtype_check_for_fused"):  # it refuses meta tensors
            model = program.model_builder(config, mesh)
            optimizer = ZeroOptimizer(model, config, mesh)
            domino = Domino(model, config.slices, config.columns, accounts.fuse if compiles else None)
            optimizer.update(0.0, 1.0, 1.0)                    # creates the moments
            return measured_step(program, domino, optimizer, NoTokens(config), config, accounts)


def measured_step(program, domino, optimizer, dataset, config: Config, accounts: Accounts) -> RankRun:
    """Train one step, dry or real. `accounts` must be active, and the optimizer must have its moments."""
    mesh, tensors = domino.mesh, state_tensors(domino.model, optimizer)
    state = {name: sum(tensor.untyped_storage().nbytes() for tensor in held) for name, held in tensors.items()}
    for tensor in itertools.chain(*tensors.values()):
        accounts.allocate(tensor)
    base = accounts.now                                        # the state, and what was alive before this step
    actions = config.timetable.rows[mesh.pp_rank]
    # alive, peaks: without the buffers of messages. The first step creates them one by one; later steps find them all
    alive, peaks, buffers, row = [0], [], [0], tuple(map(kinds_of, actions))

    def on_action(done, count):
        buffers.append(sum(accounts.message_bytes.values()))
        peaks.append(accounts.peak - base - buffers[-2])
        alive.append(accounts.now - base - buffers[-1])
        accounts.peak = accounts.now
        accounts.events.append(ActionEnd(row[done - 1]))

    accounts.restart()
    program.train_step(1, domino, optimizer, dataset, config, mesh, on_action=on_action)
    last_peak, kept, extra = max(peaks[-1], accounts.peak - base - buffers[-1]), defaultdict(list), defaultdict(list)
    for kinds, before, peak, after in zip(row, alive, peaks, alive[1:]):
        kept[kinds].append(after - before)
        extra[kinds].append(peak - before)
    return RankRun(
        state, activations=max(alive) + buffers[-1], host=accounts.host_peak,
        peak=sum(state.values()) + max(*peaks, last_peak) + buffers[-1],
        traffic={key: (round(calls), round(bytes_)) for key, (calls, bytes_) in accounts.traffic.items()},
        events=accounts.events, layers=tuple(len(chunk.layers) for chunk in domino.model.chunks),
        ranks_of={name: tuple(dist.get_process_group_ranks(group)) for name, group in groups_of(mesh).items() if group},
        held=simulation.peak_microbatches(actions), row=row,
        # the first action of a kind may also leave what all later ones use, so of two numbers `kept` takes the lower
        kept={kinds: statistics.median_low(found) for kinds, found in kept.items()},
        peaks={kinds: statistics.median(found) for kinds, found in extra.items()},
        first_peak=max(peaks[:-1], default=0) + buffers[-1], last_peak=last_peak + buffers[-1])


def state_tensors(model, optimizer) -> dict:
    """Return {"parameters", "gradients", "optimizer": tensors}, with one tensor of each storage."""
    known, buckets = set(), optimizer.buckets

    def new(tensors):
        found = {storage(tensor): tensor for tensor in tensors if storage(tensor) not in known}
        known.update(found)
        return found.values()

    return {"parameters": new([*model.parameters(), *(bucket.weights for bucket in buckets)]),
            "gradients": new([bucket.own_grad for bucket in buckets]), "optimizer": new(optimizer.state_tensors())}


PARTS = {"matmul": "matmuls", **dict.fromkeys(("attention", "attention backward"), "attention"),
         "memory": "element-wise work"}


class Clock:
    """Plays the events of a RankRun. actions: {kinds of action: {part: median seconds}}; after: {part: seconds} of what
    follows the last action. The parts add up to the time that passes."""

    def __init__(self, run, machine: Machine):
        self.machine, self.ranks_of = machine, run.ranks_of
        self.now, self.in_flight_until, self.after = 0.0, 0.0, Counter()
        self.wires, self.ends, passed = defaultdict(float), {}, []
        for event in run.events:
            if type(event) is Operation:
                self.compute(PARTS[event.kind], machine.operation_seconds(event))
            elif type(event) is Launch:
                self.launch(event)
            elif type(event) is ActionEnd:
                passed.append((event.kinds, self.after))
                self.after = Counter()
            elif event.number in self.ends:
                group, end = self.ends.pop(event.number)
                self.after[f"{group} exposed"] += max(0.0, end - self.now)
                self.now = max(self.now, end)
        self.parts = sorted({name for _, parts in passed for name in parts} | set(self.after))
        self.actions = {kinds: Counter({name: statistics.median(parts[name] for same, parts in passed if same == kinds)
                                        for name in self.parts}) for kinds in {kinds for kinds, _ in passed}}

    def compute(self, part: str, seconds: float):
        """Move the clock by an operation, which is slower while a collective is in flight."""
        share = 1.0 - self.machine.overlap_slowdown
        slow = min(seconds, max(0.0, self.in_flight_until - self.now) * share)
        passed = slow / share + seconds - slow
        self.after[part] += passed
        self.now += passed

    def launch(self, event: Launch):
        wire, seconds = event.group, 0.0
        if event.group == "host":
            wire, seconds = event.kind, event.bytes / self.machine.host_copy_rate
        elif event.group != "pp":                              # the simulated schedule knows when messages arrive
            seconds = self.machine.collective_seconds(event.kind, event.bytes, self.ranks_of[event.group])
        end = self.wires[wire] = max(self.now, self.wires[wire]) + seconds
        self.ends[event.number] = event.group, end
        if seconds and event.group != "host":
            self.in_flight_until = max(self.in_flight_until, end)


clock_of = lru_cache(maxsize=256)(Clock)
