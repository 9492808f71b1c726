"""Searches for the fastest layouts that fit: `bench.py plan --search`.

The search varies tp, pp, the micro batch (dp follows from tp and pp) and, with experts, ep. For samples of at least
16,384 tokens it also varies cp and --cp-comm-type, such that each rank keeps at least 8,192 tokens of a sample. Then
come the schedule and its chunks, the ZeRO stage and recomputation, then slices, columns and sequence parallelism. A
flag that is given keeps its value.

A dry run of each of the 10^5 combinations would take hours. But layers are alike, whatever the stage that holds them.
So estimate/stages.py composes a combination from two short dry runs of a last stage, with two numbers of layers. They
depend neither on pp, dp and chunks nor on the schedule, except for whether it splits or pairs its backwards. So many
combinations share them. The search is best-first: a queue holds combinations, sorted by time.

    1. At first it holds every layout with every schedule, with a lower bound of its time: without communication.
       Replace the first of the queue by its choices of slices, columns and sequence parallelism.
    2. The first of the queue is complete. Run its own stages dry, and with 1F1B. If one fits, the faster is the result
       for this tp, pp, cp and micro batch.

More slices and columns are tried only while communication is exposed, and more recomputation only if less does not fit.
"""

import dataclasses
import heapq
import itertools
import math
import sys
from functools import lru_cache

import train
from benchmarks.runner import CONFIG_FLAGS, about, bytes_text, seconds_text, table
from nanodomino.errors import UserError, require
from nanodomino.estimate.formulas import Machine, mfu, parameter_count, state_bytes_per_parameter
from nanodomino.estimate.rank import RankRun, clock_of
from nanodomino.estimate.stages import Stage, fullest_rank_bytes, small_run, step_seconds
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name
from nanodomino.settings.rules import check_needs

RESULTS = 10
MICRO_BATCHES = range(1, 17)
LONG = 8192      # the fewest tokens of a sample that a rank keeps with context parallelism
HIDDEN = 0.01    # the share of exposed communication below which more slices and columns gain too little
MOST_CHUNKS = 4  # per stage, unless their number is given: more gain little, and take long to run dry
ROUNDS = 3       # of p microbatches, that are simulated; options' schedules may need one more than the others
LEAST_GAIN = 2e-4    # by how much a step must be shorter for one more chunk per stage
LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size")
# What tapes may keep on the GPU, from most to least.
RECOMPUTATION = [dict(recompute_granularity=name, checkpoint_in_cpu=offloads)
                 for name, offloads in (("none", False), ("selective", False), ("full", False), ("full", True))]
FURTHER = ("cp_comm_type", "expert_model_parallel_size", "schedule", "virtual_stages", "slices", "columns",
           "sequence_parallel", "zero_stage", *RECOMPUTATION[0])
WAYS_TO_HIDE = ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4))      # (slices, columns), in the order of the tries


# ---- a combination's costs

class SharedStage(Stage):
    """Estimates a stage from runs that many combinations share: the last of two stages, with the two depths of Stage.
    It has one chunk and one microbatch; a pair needs two, and with fp8 the first one leaves the converted weights. Two
    replicas stand for any number. Where only some layers have experts, a period of layers counts as one."""

    def small_runs(self, between, quick):
        config, last = self.config, self.config.placement.location(self.config.placement.last)
        # the first stage's embedding has as many parameters as the head
        self.heads = 1 if config.pp == 1 and config.tied else (self.stage == 0) + (self.stage == last[0])
        self.chunk_heads = [(self.stage, chunk) == last for chunk in range(len(self.layers))]
        self.replicas = 2 * config.ep
        self.ranks = range(0, config.world_size // config.pp, config.tp)          # with the same part of the weights
        free = range(1)                                        # ZeRO-1 reduces gradients only at the end of a step
        return [[on_replicas(self.small_run(schedule, depth), self.ranks if config.zero_stage == 2 else free, config.ep,
                             self.replicas / config.dp, config.zero_stage) for depth in self.depths]
                for schedule in dict.fromkeys((like(config.schedule), "1f1b"))]

    def small_run(self, schedule: str, depth: int) -> RankRun:
        config, replicas = self.config, self.replicas
        count = 2 if schedule == "paired" or config.fp8_format else 1
        small = dataclasses.replace(
            config, schedule=schedule, virtual_stages=1, pipeline_model_parallel_size=1, data_parallel_size=replicas,
            world_size=config.tp * config.cp * replicas, global_batch_size=count * config.micro_batch_size * replicas)
        return small_run(self.program, small, depth, 1, 2)

    def seconds(self, machine: Machine) -> tuple[dict, dict]:
        config, work = self.config, "element-wise work"        # of the update, which the replicas share
        after = self.linear(lambda run: clock_of(on_replicas(
            run, self.ranks, config.ep, 1.0, config.zero_stage), machine).after)
        share = self.replicas / config.dp if config.zero_stage else 1.0
        return super().seconds(machine)[0], after | {work: share * after[work]}


@lru_cache(maxsize=1024)
def on_replicas(run: RankRun, ranks: range, ep: int, share: float, zero_stage: int) -> RankRun:
    """Return the run as one of these replicas. share: the part of a sharded state that they leave to it."""
    shares = {"optimizer": share if zero_stage else 1.0, "gradients": share if zero_stage == 2 else 1.0}
    return dataclasses.replace(run, ranks_of=run.ranks_of | {"dp": ranks, "expert_dp": ranks[::ep]},
                               state={name: size * shares.get(name, 1.0) for name, size in run.state.items()})


def first_rounds(config: Config, rounds: int) -> Config:
    """Return the Config with at most this many rounds of p microbatches, and the rest."""
    whole, rest = divmod(config.microbatches, config.pp)
    count = min(whole, rounds) * config.pp + rest
    return dataclasses.replace(config, global_batch_size=count * config.micro_batch_size * config.dp)


def estimated_bytes(config: Config) -> float:
    """Estimate the bytes of the fullest GPU."""
    return fullest_rank_bytes(train, first_rounds(config, ROUNDS + 1), SharedStage)


def estimated_seconds(config: Config, machine: Machine) -> tuple[float, float]:
    """Estimate (seconds of a step, the share of communication within its actions that nothing hides). After ROUNDS
    rounds of p microbatches, each further round adds the same."""
    further = max(0, config.microbatches // config.pp - ROUNDS - 1)
    *fewer, parts = [step_seconds(train, first_rounds(config, rounds), machine, SharedStage)
                     for rounds in ([ROUNDS] * (further > 0) + [ROUNDS + 1])]
    total = sum(parts.values())
    exposed = sum(seconds for name, seconds in parts.items() if name.endswith("exposed") and name != "pp exposed")
    return total + further * sum(total - sum(one.values()) for one in fewer), exposed / total


def like(schedule: str) -> str:
    """Return the simplest schedule with the same kinds of actions: 1f1b, zb-h1 or paired."""
    row = SCHEDULES[schedule].actions(1, 2, 4, SCHEDULES[schedule].chunks[0])
    kinds = {half.kind for action in row for half in action.halves}
    return ("paired" if any(len(action.halves) > 1 for action in row)
            else "zb-h1" if "input_backward" in kinds else "1f1b")


# ---- the search

class Search:
    """Finds the fastest layouts of a model.

    config: the settings, not resolved; given: the names of those that were given, which keep their values
    usable: bytes of a GPU's memory"""

    def __init__(self, config: Config, gpus: int, given, machine: Machine, usable: float):
        self.config, self.gpus, self.given, self.machine, self.usable = config, gpus, given, machine, usable
        self.free = dataclasses.replace(machine, intra_host_rate=math.inf, inter_host_rate=math.inf, latency=0.0,
                                        host_copy_rate=math.inf)
        self.recomputation = [option for option in RECOMPUTATION if all(
            value in self.choices(name, [value]) for name, value in option.items())] or [{}]
        self.broken_rule = None                                # the message of the first layout that was not accepted
        self.simulated = 0                                     # combinations
        self.least = {}        # {Config with a micro batch of 1: the first place in `recomputation` that can fit}

    def run(self) -> list[tuple[float, float, Config]]:
        """Return up to RESULTS of (seconds of a step, bytes of the fullest GPU, Config), the fastest first."""
        order, found, queue = itertools.count(), {}, []        # order: of equal times, the first wins

        def push(choices):
            for seconds, config, complete in choices:
                heapq.heappush(queue, (float(f"{seconds:.9e}"), next(order), config, complete))

        push(self.layouts())
        while queue and len(found) < RESULTS:
            _, _, config, complete = heapq.heappop(queue)
            layout = tuple(getattr(config, name) for name in LAYOUT)
            if layout in found:
                continue
            if not complete:
                push(self.options(config))
            elif result := self.exact(config):
                found[layout] = result
        return sorted(found.values(), key=lambda one: one[0])

    def exact(self, config: Config) -> tuple[float, float, Config] | None:
        """Return (seconds, bytes, Config) of a dry run, or None if it does not fit. Estimates can err by more than a
        schedule gains, so the same layout with 1F1B runs dry too, and the faster one counts."""
        simplest = self.choices("schedule", ["1f1b"]) + self.choices("virtual_stages", [1])
        tries = {self.accepted(config, **dict(zip(("schedule", "virtual_stages"), simplest))): None, config: None}
        found = [(sum(step_seconds(train, one, self.machine).values()), needed, one) for one in tries
                 if one and (needed := fullest_rank_bytes(train, one)) <= self.usable]
        return min(found, key=lambda one: one[0], default=None)

    # ---- what is chosen, in this order. Each yields (seconds, Config, whether it is complete)

    def layouts(self):
        parameters = None
        for config in self.accepted_layouts(MICRO_BATCHES):
            parameters = parameters or parameter_count(config)
            if min(map(state_bytes_per_parameter, self.zero_stages(config))) * parameters <= (
                    self.usable * config.tp * config.pp * config.ep):
                yield from self.schedules(config)

    def schedules(self, config: Config):
        divisor = dataclasses.replace(config, sequence_parallel=config.tp > 1).seq_length_divisor
        parallel = config.tp > 1 and config.seq_length % divisor == 0     # it never adds work, only communication
        fixed = {name: self.choices(name, [value])[0] for name, value in (
            ("sequence_parallel", parallel), ("slices", 1), ("columns", 1))}
        for name, count in [(each, count) for each in self.choices("schedule", SCHEDULES)
                            for count in self.chunk_counts(each, config)]:
            before = len(self.recomputation)
            for other in self.zero_stages(dataclasses.replace(config, schedule=name, virtual_stages=count, **fixed)):
                key = dataclasses.replace(other, micro_batch_size=1)    # a larger one needs as much, at least
                place = self.least[key] = next((place for place in range(self.least.get(key, 0), before) if (
                    estimated_bytes(dataclasses.replace(other, **self.recomputation[place])) <= self.usable)), before)
                if place < before:                             # or the lower ZeRO stage is as good
                    before, other = place, dataclasses.replace(other, **self.recomputation[place])
                    yield estimated_seconds(other, self.free)[0], other, False

    def options(self, config: Config):
        too_much = []                                          # the seconds of those that do not fit
        overlaps = config.micro_batch_size > 1 and config.tp * config.cp * config.ep > 1
        ways = [way for way in WAYS_TO_HIDE if way[0] in self.choices("slices", (1, 2) if overlaps else (1,))
                and way[1] in self.choices("columns", (1, 2, 4) if config.tp > 1 else (1,))]
        ways = ways or [(config.slices, config.columns)]       # other numbers are given
        for parallel, (slices, columns) in itertools.product(
                self.choices("sequence_parallel", (True, False) if config.tp > 1 else (False,)), ways):
            if other := self.accepted(config, sequence_parallel=parallel, slices=slices, columns=columns):
                self.simulated += 1
                seconds, exposed = estimated_seconds(other, self.machine)
                seconds *= 1 + LEAST_GAIN * other.virtual_stages
                if estimated_bytes(other) <= self.usable:
                    yield seconds, other, True
                else:
                    too_much.append(seconds)
                if exposed < HIDDEN:
                    break
        now = {name: getattr(config, name) for name in self.recomputation[0]}
        more = self.recomputation[1 + self.recomputation.index(now):]
        if too_much and more:                                  # they take longer than now
            yield min(too_much), dataclasses.replace(config, **more[0]), False

    # ---- rules and memory

    def choices(self, name: str, values):
        """Return the values to try for a setting. If a flag has set it, that is the only one."""
        return [getattr(self.config, name)] if name in self.given else values

    def chunk_counts(self, schedule: str, config: Config) -> list[int]:
        """Return the numbers of chunks per stage to try: those that divide the layers evenly, or else the smallest."""
        counts = [count for count in SCHEDULES[schedule].chunks if config.pp * count <= config.num_layers
                  and (count <= MOST_CHUNKS or "virtual_stages" in self.given)]
        if config.pp == 1 and "schedule" not in self.given:
            counts = [count for count in counts if count == 1]
        even = [count for count in counts if config.num_layers % (config.pp * count) == 0]
        return [count for count in self.choices("virtual_stages", even or counts[:1])
                if count in SCHEDULES[schedule].chunks]

    def accepted(self, config: Config, **settings) -> Config | None:
        """Return the resolved Config with these settings, or None if it breaks a rule or a given flag has no effect."""
        try:
            other = dataclasses.replace(config, **settings).resolve(self.gpus)
            check_needs(other, self.given)
            return other.with_vocabulary(other.vocab_size)
        except UserError as error:
            self.broken_rule = self.broken_rule or str(error)
            return None

    def accepted_layouts(self, micro_batches):
        degrees = (self.choices(name, divisors(self.gpus)) for name in LAYOUT[:2])
        tokens = self.config.seq_length or self.config.preset["seq_length"]
        contexts = self.choices(LAYOUT[2], [1, *(size for size in divisors(self.gpus) if size > 1
                                                 and tokens // size >= LONG)])
        for values in itertools.product(*degrees, contexts, self.choices(LAYOUT[3], micro_batches)):
            if self.gpus % math.prod(values[:3]) and self.broken_rule:     # breaks a rule, too: most do for 10^6 GPUs
                continue
            for way in self.choices("cp_comm_type", ("all_gather", "a2a") if values[2] > 1 else ("all_gather",)):
                if config := self.accepted(self.config, **dict(zip(LAYOUT, values)), cp_comm_type=way,
                                           **self.recomputation[0]):
                    replicas = config.dp * config.cp
                    for ep in self.choices("expert_model_parallel_size",
                                           divisors(math.gcd(config.num_experts or 1, replicas))):
                        yield dataclasses.replace(config, expert_model_parallel_size=ep)

    def zero_stages(self, config: Config) -> list[Config]:
        return [dataclasses.replace(config, zero_stage=stage)
                for stage in self.choices("zero_stage", (1, 2) if config.dp * config.cp > 1 else (1,))]


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


# ---- the answer

def answer(flags, machine: Machine, usable: float):
    """Return (text, record) of the search. usable: bytes of a GPU's memory."""
    config = Config(**{name: getattr(flags, name) for name in CONFIG_FLAGS} | {"device": "cuda"})
    search = Search(config, flags.gpus, set(CONFIG_FLAGS) & set(flags.given), machine, usable)
    print(f"searching for layouts of {flags.model} on {flags.gpus} x {flags.gpu}; this may take minutes",
          file=sys.stderr, flush=True)
    rows, layouts = [], []
    for rank, (seconds, memory, found) in enumerate(search.run(), 1):
        used = mfu(found, seconds, machine.peak)
        rows.append([rank, found.tp, found.pp, found.cp, found.dp, found.micro_batch_size, seconds_text(seconds),
                     f"{used:.1%}", bytes_text(memory), flags_text(differences(found, FURTHER))])
        layouts.append({**about(found), "step_s": seconds, "mfu": used, "bytes": memory,
                        "command": command(found, flags.gpus_per_host)})
    if not rows:
        require(next(search.accepted_layouts((1,)), None) is not None,
                f"no layout for --gpus {search.gpus} obeys the rules together with the given flags; "
                f"the first that was tried breaks this one: {search.broken_rule}")
    text = "\n".join([
        f"the fastest layouts of {flags.model} ({parameter_count(found):,} parameters, {found.dtype}) on {flags.gpus} "
        f"x {flags.gpu} that fit into {bytes_text(usable)} per GPU:", "",
        table(["", "tp", "pp", "cp", "dp", "micro batch", "step", "MFU", "memory", "further flags"], rows), "",
        f"{search.simulated} combinations were simulated. `bench.py plan` with the flags of a row prints its memory, "
        "where its time goes, and the assumptions.", "", layouts[0]["command"]]) if rows else (
        f"nothing fits into the usable {bytes_text(usable)} per GPU, even with full recomputation; try more --gpus, a "
        "--gpu with more memory, or fewer of the given flags")
    return text, {"search": True, "model": flags.model, "gpu": flags.gpu, "gpus": flags.gpus,
                  "usable_bytes": usable, "simulated": search.simulated, "layouts": layouts}


def differences(config: Config, names) -> dict:
    """Return {name: value} of those settings in `names` that train.py would not choose for this layout."""
    plain = Config(model=config.model, global_batch_size=config.global_batch_size,
                   **{name: getattr(config, name) for name in LAYOUT}).resolve(config.world_size)
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(plain, name)}


def flags_text(changes: dict) -> str:
    return " ".join(flag_name(name) + ("" if value is True else f" {value}") for name, value in changes.items())


def command(config: Config, gpus_per_host: int) -> str:
    """Return the command that trains with this Config. On several hosts, each runs it with its own RANK."""
    names = [name for name in CONFIG_FLAGS if name not in (*LAYOUT, "model", "device", "global_batch_size")]
    layout = {name: getattr(config, name) for name in LAYOUT if name != "context_parallel_size" or config.cp > 1}
    chosen = {"model": config.model, **layout, "global_batch_size": config.global_batch_size}
    each = max(count for count in divisors(config.world_size) if count <= gpus_per_host)
    hosts = config.world_size // each
    several = f"--nnodes {hosts} --node_rank RANK --master_addr HOST --master_port 29500 " if hosts > 1 else ""
    return f"torchrun {several}--nproc_per_node {each} train.py {flags_text(chosen | differences(config, names))}"
