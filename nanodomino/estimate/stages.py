"""Estimates a step on all ranks, for models and clusters of any size, from a few small dry runs.

Layers are alike, and so are microbatches. So the first and the last stage of a pipeline of at most two stages run a few
microbatches with two depths, for example with one and with two layers in each chunk. All of it is linear in layers:

    value(L layers) = value(1) + (L - 1) (value(2) - value(1))

They give the seconds of each kind of action, the bytes that it leaves alive, and its peak. The schedule of all stages
and microbatches consists of the same kinds of actions:

    memory    the state plus the largest peak of an action, on top of what the actions before it have left alive
    time      the simulated schedule, plus what follows the last action: gradients in flight, update, all-gather

A stage between the first and the last has neither embedding nor head, so only what grows with the layers counts. All
other settings, such as data parallelism, precision and recomputation, are the real run's.
"""

import dataclasses
import math
from collections import Counter
from functools import lru_cache

from nanodomino.errors import require
from nanodomino.estimate.formulas import (bytes_outside_torch, memory_of_process, parameter_count,
                                          state_bytes_per_parameter)
from nanodomino.estimate.rank import RankRun, clock_of, dry_run, kinds_of
from nanodomino.schedules import simulation
from nanodomino.schedules.simulation import stage_layers
from nanodomino.settings.config import Config

SMALL = 32       # up to this many layers times microbatches, the whole model runs dry
MARGIN = 0.9     # a run may need this share of its estimate

run_of = lru_cache(maxsize=512)(dry_run)


@lru_cache(maxsize=512)
def small_run(program, config: Config, depth: int, stage: int, stages: int) -> RankRun:
    """Run one stage of a pipeline of only `stages` stages, with just enough microbatches to show each kind of action.
    depth: layers of the last chunk, in units of layer_period. The others have as many more as are behind the head."""
    chunks, behind = stages * config.virtual_stages, config.behind_head.layers
    layers = depth * config.layer_period + (config.first_last_layers_bf16 and chunks == 1)
    small = dataclasses.replace(
        config, num_layers=chunks * (layers + behind) - behind if chunks > 1 else layers,
        pipeline_model_parallel_size=stages, world_size=config.world_size // config.pp * stages,
        full_attention_layers=0,                               # the mask of a window takes memory, no mask takes none
        global_batch_size=min(config.microbatches, max(3, 2 * stages)) * config.micro_batch_size * config.dp)
    return run_of(program, small, stage * small.world_size // stages)


def message_bytes(config: Config) -> int:
    """Return the bytes that a stage sends to the next one: a rank's part of a microbatch's residual stream."""
    return math.prod(config.residual_shape) * config.params_dtype.itemsize


def add_up(row, kept: dict, peaks: dict) -> tuple[float, float]:
    """Return (peak bytes between a row's actions, peak bytes at any time). kept, peaks: as in RankRun."""
    alive = most = peak = 0.0
    for kinds in row:
        peak, alive = max(peak, alive + peaks[kinds]), alive + kept[kinds]
        most = max(most, alive)
    return most, peak


class Stage:
    """Estimates one stage. program, config: see dry_run(). quick: estimate a stage between the first and the last from
    both. Only its seconds are right then, because only what grows with the layers counts."""

    def __init__(self, program, config: Config, stage: int, quick=False):
        self.program, self.config, self.stage = program, config, stage
        self.all_actions = config.timetable.rows[stage]
        pairs = any(len(action.halves) > 1 for action in self.all_actions)    # with fewer layers other peaks win
        self.depths = (3, 4) if pairs else (2, 3) if config.zero_stage == 2 else (1, 2)
        self.row = tuple(map(kinds_of, self.all_actions))
        self.actions = dict(zip(self.row, self.all_actions))   # {kinds: an action of these kinds}
        place = config.placement
        self.layers = [len(stage_layers(config.num_layers, place.virtual_stage(stage, chunk), place.last + 1,
                                        config.behind_head.layers)) for chunk in range(place.chunks)]
        between = 0 < stage < config.pp - 1 and not place.folded
        borrowed = between and quick and config.num_layers * config.microbatches > SMALL
        # factors of what does not grow with the layers, in the stage's state and in each chunk's actions
        self.heads, self.chunk_heads = 1.0, [not borrowed] * len(self.layers)
        self.sides = self.small_runs(between, quick)

    def small_runs(self, between: bool, quick: bool) -> list[list[RankRun]]:
        """Return pairs of runs with two depths. The first pair that has an action says what the action needs."""
        config, stages = self.config, min(self.config.pp, 2)
        if config.num_layers * config.microbatches <= SMALL:   # one whole run is quicker than several small runs
            return [[run_of(self.program, config, self.stage * config.world_size // config.pp)] * 2]
        if between and not quick:
            return [[small_run(self.program, config, depth, 1, 3) for depth in self.depths]]
        # A schedule that splits backward may not split it on the first stage, so the last stage runs, too.
        order = range(stages) if self.stage == 0 or between else reversed(range(stages))
        return [[small_run(self.program, config, depth, one, stages) for depth in self.depths] for one in order]

    def linear(self, value, runs=None, chunk=None, heads=None):
        """Extrapolate value(run), a number or {name: number}, to the layers of this stage or of a chunk. heads: a
        factor of what does not grow with the layers, by default self.heads."""
        runs, heads = runs or self.sides[0], self.heads if heads is None else heads
        first, second, layers = (sum(counts) if chunk is None else counts[min(chunk, len(counts) - 1)]
                                 for counts in (*(run.layers for run in runs), self.layers))

        def line(one, two):
            if isinstance(one, dict):
                return {name: line(one.get(name, 0.0), two.get(name, 0.0)) for name in {**one, **two}}
            slope = (two - one) / (second - first) if second > first else 0.0
            return slope * layers + (one - slope * first) * heads
        return line(*map(value, runs))

    def of_action(self, action, value):
        """Return value(run, kinds) of an action, extrapolated to its layers."""
        chunk = action.halves[0].chunk
        for runs in self.sides:
            kinds = tuple((half.kind, min(half.chunk, len(runs[0].layers) - 1)) for half in action.halves)
            if all(kinds in run.kept for run in runs):
                return self.linear(lambda run, kinds=kinds: value(run, kinds), runs, chunk, self.chunk_heads[chunk])
        one, other = (self.of_action(half, value) for half in action.halves)         # no small run has this pair
        return {name: one[name] + other[name] for name in one} if isinstance(one, dict) else one + other

    def memory(self) -> dict[str, float]:
        """Return {name: bytes} of a rank at its peak: RankRun.state, activations, working, CUDA and NCCL, host."""
        config = self.config
        kept, peaks = ({kinds: self.of_action(action, lambda run, kinds, name=name: getattr(run, name)[kinds])
                        for kinds, action in self.actions.items()} for name in ("kept", "peaks"))
        most, peak = add_up(self.row, kept, peaks)
        # The small runs also know what the sums leave out, such as receives that are posted before the first action.
        most += self.linear(lambda run: run.activations - add_up(run.row, run.kept, run.peaks)[0])
        peak += self.linear(lambda run: run.first_peak - add_up(run.row[:-1], run.kept, run.peaks)[1])
        peak = max(peak, self.linear(lambda run: run.last_peak))
        # Up to p sends are in flight, each with its own buffer, but small runs have fewer stages.
        further = min(config.pp, config.microbatches) - len(self.sides[0][0].ranks_of["pp"])
        most, peak = (bytes_ + max(0, further) * message_bytes(config) for bytes_ in (most, peak))
        host = self.linear(lambda run: run.host / run.held) * simulation.peak_microbatches(self.all_actions)
        return {**self.linear(lambda run: run.state), "activations": most, "working": peak - most,
                "CUDA and NCCL": bytes_outside_torch(config, self.stage), "host": host}

    def seconds(self, machine) -> tuple[dict, dict]:
        """Return ({kinds of action: {part: seconds}}, {part: seconds after the last action})."""
        return ({kinds: self.of_action(action, lambda run, kinds: clock_of(run, machine).actions[kinds])
                 for kinds, action in self.actions.items()}, self.linear(lambda run: clock_of(run, machine).after))


def fullest_rank_bytes(program, config: Config, make_stage=Stage) -> float:
    """Return the peak bytes of the rank that needs the most. It is on the first stage, which holds the most
    microbatches, or on the last one, which holds the logits."""
    return max(sum(found.values()) - found["host"] for found in (
        make_stage(program, config, stage).memory() for stage in {0, config.pp - 1}))


def step_seconds(program, config: Config, machine, make_stage=Stage) -> dict[str, float]:
    """Return {part of a step: seconds}: the work and the exposed communication of the busiest stage, its idle time
    ("bubble"), the time that messages between stages add, and what follows the last action."""
    stages = [make_stage(program, config, stage, quick=True) for stage in range(config.pp)]
    costs = [stage.seconds(machine) for stage in stages]
    lengths = [{kinds: sum(parts.values()) for kinds, parts in actions.items()} for actions, _ in costs]
    message = machine.collective_seconds("send", message_bytes(config), (0, config.world_size // config.pp))
    rows = {delay: simulation.simulate(config.timetable, lambda stage, action: lengths[stage][kinds_of(action)], delay)
            for delay in {0.0, message}}
    free, real = rows[0.0], rows[message]
    busiest = max(range(config.pp), key=lambda stage: sum(end - start for _, start, end in free[stage]))
    parts = Counter()
    for kinds, count in Counter(stages[busiest].row).items():
        parts.update({name: count * seconds for name, seconds in costs[busiest][0][kinds].items()})
    after = max((after for _, after in costs), key=lambda after: sum(after.values()))
    return parts | {"bubble": simulation.step_time(free) - simulation.busy_time(free),
                    "pp exposed": simulation.step_time(real) - simulation.step_time(free),
                    **{f"{name}, at the end": seconds for name, seconds in after.items()}}


def least_bytes(config: Config) -> float:
    """Return a lower bound of the bytes of the fullest rank: a rank's mean model state plus one activation. Quick for
    a model of any size."""
    layers = config.layer_period
    one, two = (parameter_count(dataclasses.replace(config, num_layers=count)) for count in (layers, 2 * layers))
    parameters = one + (config.num_layers / layers - 1) * (two - one)
    return parameters * state_bytes_per_parameter(config) / (config.tp * config.pp * config.ep) + message_bytes(config)


def require_memory(program, config: Config, device, local_world_size: int) -> str:
    """Return in words how much memory the run needs. Raises UserError if it can't fit into the memory of a process.
    Call it before allocating anything, and before the ranks connect. program: see dry_run()."""
    memory, remedy = memory_of_process(device, local_world_size), "--num-layers or --hidden-size"
    needed, words = least_bytes(config), ""
    if needed <= memory:
        try:
            estimate = fullest_rank_bytes(program, dataclasses.replace(config, device=device.type))
            words = f"the fullest rank needs {estimate / 2**20:,.1f} MiB of memory"
            needed, remedy = MARGIN * estimate, "--micro-batch-size or --num-layers"
        except Exception as error:                             # a run must not fail because its estimate does
            words = f"no estimate of its memory ({error})"
    require(needed <= memory,
            f"the fullest of {config.world_size} processes would need at least {needed / 1e9:,.1f} GB of memory, and "
            f"each can have {memory / 1e9:,.1f} GB here; lower {remedy}, or give the model more processes (--tp, --pp)")
    return words
