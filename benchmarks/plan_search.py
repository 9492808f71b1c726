"""Searches for the fastest layouts that fit: `bench.py plan --search`.

    python bench.py plan --search --model llama3-8b --gpus 8 --gpu H100

The search varies tp, pp, the micro batch (dp follows from tp and pp) and, with experts, ep. For samples of at least
16,384 tokens it also varies cp and --cp-comm-type, such that each rank keeps at least 8,192 tokens of a sample. Then
come the schedule and its chunks, the ZeRO stage and recomputation, then slices, columns and sequence parallelism. A
flag that is given keeps its value.

A dry run of each of the 10^5 combinations would take hours. But layers are alike, whatever the stage that holds them.
So the costs of a combination follow from two short dry runs of a last stage, with one layer and with two:

    value(chunk) = value(layer) x its layers + value(head), if it is the last chunk

These runs depend neither on pp, dp and chunks nor on the schedule, except for whether it splits or pairs its backwards.
So many combinations share them. The search is best-first: a queue holds combinations, sorted by time.

    1. The first of the queue has chosen only some settings. Replace it by its choices of the next ones, each with a
       lower bound of its time: the FLOPs at the largest tile's rate, then the schedule without communication.
    2. The first of the queue is complete, and its time is that of its simulated schedule, with the costs above. Run it
       dry (estimate/stages.py), and with 1F1B. If one fits, the faster is the result for this tp, pp, cp and micro
       batch.

More slices and columns are tried only while communication is exposed, and more recomputation only if less does not fit.
"""

import dataclasses
import heapq
import itertools
import math
import sys

import train
from benchmarks.runner import CONFIG_FLAGS, about, bytes_text, progress, seconds_text, table
from nanodomino.errors import UserError, require
from nanodomino.estimate.formulas import (FP8_SPEEDUP, Machine, flops_per_token, mfu, parameter_count,
                                          state_bytes_per_parameter)
from nanodomino.estimate.rank import Clock, kinds_of
from nanodomino.estimate.stages import (add_up, extrapolate, fullest_rank_bytes, layers_of, message_seconds, small_run,
                                        step_seconds)
from nanodomino.schedules import simulation
from nanodomino.schedules.definitions import SCHEDULES, Backward
from nanodomino.schedules.simulation import timetable
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
WHOLE, PAIR = ("backward",), ("backward", "forward")
WAYS_TO_HIDE = ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (2, 4))      # (slices, columns), in the order of the tries


# ---- a combination's costs

class Costs:
    """Estimates a step from the costs of a layer and of the head. layers[stage][chunk]: the layers of each chunk."""

    def __init__(self, config: Config, machine: Machine):
        self.config, self.machine = config, machine
        self.last = config.placement.location(config.placement.last)
        self.layers = [layers_of(config, stage) for stage in range(config.pp)]
        self.runs, self.clocks = {}, {}        # {schedule: those of one layer and of two}
        self.parts, self.lengths = {}, {}      # {kinds of the halves: parts of a layer; seconds of it, of the head}
        self.add("1f1b")

    def add(self, schedule: str):
        """Learn the costs of the kinds of actions that this schedule has."""
        if schedule in self.runs:
            return
        self.runs[schedule] = self.small_runs(schedule)
        one, two = self.clocks[schedule] = [Clock(run, self.machine) for run in self.runs[schedule]]
        for kinds, parts in one.actions.items():
            layer, head = ({name: extrapolate(parts[name], two.actions[kinds][name], *self.depths, *count)
                            for name in one.parts} for count in ((1, 0), (0, 1)))
            key = tuple(kind for kind, _ in kinds)
            self.parts[key], self.lengths[key] = layer, (sum(layer.values()), sum(head.values()))

    def small_runs(self, schedule: str) -> list:
        """Run the last of two stages twice: with one layer, then with two. If only some layers have experts, count
        periods of layers instead. Replicas cost nothing there; end_seconds() and bytes() count them. A pair needs two
        microbatches, and with fp8 the first one leaves the converted weights."""
        config, replicas = self.config, self.config.ep
        count = 2 if schedule == "paired" or config.fp8_format else 1
        small = dataclasses.replace(
            config, schedule=schedule, virtual_stages=1, pipeline_model_parallel_size=1, data_parallel_size=replicas,
            zero_stage=1, world_size=config.tp * config.cp * replicas,
            global_batch_size=count * config.micro_batch_size * replicas)
        runs = [small_run(train, small, depth, 1, 2) for depth in (1, 2)]
        self.depths = [run.layers[0] for run in runs]
        return [dataclasses.replace(run, ranks_of=run.ranks_of | {"dp": (0,), "expert_dp": (0,)}) for run in runs]

    def linear(self, value, layers: float, heads=1.0, runs=None) -> float:
        """Return value(run) for this many layers and heads. runs: by default those of 1F1B."""
        return extrapolate(*map(value, runs or self.runs["1f1b"]), *self.depths, layers, heads)

    def action_seconds(self, stage: int, action) -> float:
        layer, head = self.lengths[tuple(half.kind for half in action.halves)]
        chunk = action.halves[0].chunk
        return self.layers[stage][chunk] * layer + ((stage, chunk) == self.last) * head

    def exposed(self) -> float:
        """Return the share of communication in a layer's forward and backward that nothing hides."""
        parts = [self.parts[kinds] for kinds in ([PAIR] if PAIR in self.parts else [("forward",), WHOLE])]
        return (sum(seconds for one in parts for name, seconds in one.items() if name.endswith("exposed"))
                / sum(sum(one.values()) for one in parts))

    def timetable(self, rounds: int):
        """Return the timetable of `rounds` x p microbatches, and of the rest."""
        config = self.config
        return timetable(config.schedule_with_settings, config.pp,
                         rounds * config.pp + config.microbatches % config.pp, config.virtual_stages)

    def seconds(self) -> float:
        """Estimate a step: the simulated schedule and what follows it. After ROUNDS rounds of p microbatches, each
        further round adds the same."""
        config, rounds = self.config, self.config.microbatches // self.config.pp
        self.add(like(config.schedule))
        message = message_seconds(config, self.machine)
        some = [simulation.step_time(simulation.simulate(self.timetable(count), self.action_seconds, message))
                for count in ([rounds] if rounds <= ROUNDS + 1 else [ROUNDS, ROUNDS + 1])]
        return some[-1] + (rounds - ROUNDS - 1) * (some[-1] - some[0]) + self.end_seconds()

    def end_seconds(self) -> float:
        """Estimate what the reduction of the gradients and the update of the weights add to the schedule."""
        config, layers = self.config, max(map(sum, self.layers))
        ranks = range(0, config.world_size // config.pp, config.tp)
        gathered, reduced = (self.machine.collective_seconds(
            kind, self.linear(lambda run, name=name: run.state[name], layers), ranks)
            for kind, name in (("all_gather", "parameters"), ("reduce_scatter", "gradients")))
        backward = layers * self.lengths[WHOLE][0]
        exposed = max(0.0, reduced - backward) + self.machine.overlap_slowdown * min(reduced, backward)
        update = self.linear(lambda clock: sum(clock.after.values()), layers, runs=self.clocks["1f1b"])
        return (gathered + update * (config.ep / config.dp if config.zero_stage else 1.0)
                + exposed * (config.microbatches if config.zero_stage == 2 else 1))

    def of_action(self, name: str, action, stage: int) -> float:
        """Return the bytes of RankRun.kept or RankRun.peaks for an action. An action that has not run is part of a
        split backward, which frees its bytes at its end."""
        kinds, chunk = tuple((half.kind, 0) for half in action.halves), action.halves[0].chunk
        runs = next((runs for runs in self.runs.values() if kinds in runs[0].kept), None)
        if runs:
            return self.linear(lambda run: getattr(run, name)[kinds], self.layers[stage][chunk],
                               (stage, chunk) == self.last, runs)
        return self.of_action(name, Backward(0, chunk), stage) if action.halves[0].kind == "weight_backward" else 0.0

    def bytes(self) -> float:
        """Estimate the bytes of the fullest GPU, which is on one of the ends."""
        config = self.config
        if like(config.schedule) == "paired":
            self.add("paired")
        rows = self.timetable(min(config.microbatches // config.pp, ROUNDS + 1)).rows
        sharded = config.ep / config.dp
        shares = {"parameters": 1.0, "gradients": sharded if config.zero_stage == 2 else 1.0,
                  "optimizer": sharded if config.zero_stage else 1.0}

        def stage_bytes(stage):
            heads = 1 if config.pp == 1 and config.tied else (stage == 0) + (stage == self.last[0])
            state = sum(share * self.linear(lambda run, name=name: run.state[name], sum(self.layers[stage]), heads)
                        for name, share in shares.items())
            if config.zero_stage == 2:                         # a layer's gradients are whole while they are reduced
                state += self.linear(lambda run: run.state["gradients"], 1, heads)
            row, actions = [*map(kinds_of, rows[stage])], rows[stage]
            kept, peaks = ({kinds: self.of_action(name, action, stage)
                            for kinds, action in dict(zip(row, actions)).items()} for name in ("kept", "peaks"))
            return state + add_up(row, kept, peaks)[1]

        return max(map(stage_bytes, {0, config.pp - 1}))


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
        self.counts = dict.fromkeys(("layouts", "schedules", "simulated", "dry runs"), 0)

    def run(self, results=RESULTS, progress=progress) -> list[tuple[float, float, Config]]:
        """Return up to `results` of (seconds of a step, bytes of the fullest GPU, Config), the fastest first.
        progress(results): a context manager that yields a progress bar with tqdm's methods"""
        queue, order, found = [], itertools.count(), {}        # order: of equal times, the first wins

        def add(entries):
            for seconds, config, choose_next in entries:
                heapq.heappush(queue, (float(f"{seconds:.9e}"), next(order), config, choose_next))

        with progress(results) as bar:
            add(self.layouts())
            while queue and len(found) < results:
                _, _, config, choose_next = heapq.heappop(queue)
                layout = tuple(getattr(config, name) for name in LAYOUT)
                if layout not in found and choose_next:
                    add(choose_next(config))
                elif layout not in found and (result := self.exact(config)):
                    found[layout] = result
                    bar.update(1)
                bar.set_description_str(", ".join(f"{count} {name}" for name, count in self.counts.items()))
        return sorted(found.values(), key=lambda one: one[0])

    def exact(self, config: Config) -> tuple[float, float, Config] | None:
        """Return (seconds, bytes, Config) of a dry run, or None if it does not fit. Estimates can err by more than a
        schedule gains, so the same layout with 1F1B runs dry too, and the faster one counts."""
        simplest = self.choices("schedule", ["1f1b"]) + self.choices("virtual_stages", [1])
        tries = {self.accepted(config, **dict(zip(("schedule", "virtual_stages"), simplest))): None, config: None}
        self.counts["dry runs"] += len(tries)
        found = [(sum(step_seconds(train, one, self.machine).values()), needed, one) for one in tries
                 if one and (needed := fullest_rank_bytes(train, one)) <= self.usable]
        return min(found, key=lambda one: one[0], default=None)

    # ---- what is chosen, in this order. Each yields (seconds, Config, the method that chooses next)

    def layouts(self):
        parameters = flops = None
        for config in self.accepted_layouts(MICRO_BATCHES):
            if parameters is None:                             # attention and look-ups may take less time
                looked_up = 0 if config.tied else config.vocab_size * config.hidden_size
                attention = 2 * config.num_attention_heads * config.kv_channels * config.seq_length
                parameters, flops = parameter_count(config), config.global_batch_size * config.seq_length * (
                    flops_per_token(config) - 6 * (looked_up + (config.num_layers + config.mtp_num_layers) * attention))
            if min(map(state_bytes_per_parameter, self.zero_stages(config))) * parameters <= (
                    self.usable * config.tp * config.pp * config.ep):
                self.counts["layouts"] += 1
                rate = self.machine.matmul_rate * (FP8_SPEEDUP if config.fp8_format else 1.0)
                yield flops / (rate * config.world_size), config, self.schedules

    def schedules(self, config: Config):
        divisor = dataclasses.replace(config, sequence_parallel=config.tp > 1).seq_length_divisor
        parallel = config.tp > 1 and config.seq_length % divisor == 0     # it never adds work, only communication
        fixed = {name: self.choices(name, [value])[0] for name, value in (
            ("sequence_parallel", parallel), ("slices", 1), ("columns", 1))}
        for name, count in [(each, count) for each in self.choices("schedule", SCHEDULES)
                            for count in self.chunk_counts(each, config)]:
            before = math.inf
            for other in self.zero_stages(dataclasses.replace(config, schedule=name, virtual_stages=count, **fixed)):
                place = next((place for place, option in enumerate(self.recomputation) if Costs(
                    dataclasses.replace(other, **option), self.free).bytes() <= self.usable), math.inf)
                if place < before:                             # or the lower ZeRO stage is as good
                    before, other = place, dataclasses.replace(other, **self.recomputation[place])
                    self.counts["schedules"] += 1
                    yield Costs(other, self.free).seconds(), other, self.options

    def options(self, config: Config):
        too_much = []                                          # the seconds of those that do not fit
        overlaps = config.micro_batch_size > 1 and config.tp * config.cp * config.ep > 1
        ways = [way for way in WAYS_TO_HIDE if way[0] in self.choices("slices", (1, 2) if overlaps else (1,))
                and way[1] in self.choices("columns", (1, 2, 4) if config.tp > 1 else (1,))]
        ways = ways or [(config.slices, config.columns)]       # other numbers are given
        for parallel, (slices, columns) in itertools.product(
                self.choices("sequence_parallel", (True, False) if config.tp > 1 else (False,)), ways):
            if other := self.accepted(config, sequence_parallel=parallel, slices=slices, columns=columns):
                self.counts["simulated"] += 1
                costs = Costs(other, self.machine)
                seconds = costs.seconds() * (1 + LEAST_GAIN * other.virtual_stages)
                if costs.bytes() <= self.usable:
                    yield seconds, other, None
                else:
                    too_much.append(seconds)
                if costs.exposed() < HIDDEN:
                    break
        now = {name: getattr(config, name) for name in self.recomputation[0]}
        more = self.recomputation[1 + self.recomputation.index(now):]
        if too_much and more:                                  # they take longer than now
            yield min(too_much), dataclasses.replace(config, **more[0]), self.options

    # ---- rules and memory

    def choices(self, name: str, values):
        """Return the values to try for a setting. If a flag has set it, that is the only one."""
        return [getattr(self.config, name)] if name in self.given else values

    def chunk_counts(self, schedule: str, config: Config) -> list[int]:
        """Return the numbers of chunks per stage to try with a schedule: those that divide the layers evenly or, if
        none does, the smallest."""
        counts = [count for count in SCHEDULES[schedule].chunks if config.pp * count <= config.num_layers
                  and (count <= MOST_CHUNKS or "virtual_stages" in self.given)]
        if config.pp == 1 and "schedule" not in self.given:
            counts = [count for count in counts if count == 1]
        even = [count for count in counts if config.num_layers % (config.pp * count) == 0]
        return [count for count in self.choices("virtual_stages", even or counts[:1])
                if count in SCHEDULES[schedule].chunks]

    def accepted(self, config: Config, **settings) -> Config | None:
        """Return the resolved Config with these settings. If it breaks a rule, or if a given flag has no effect, return
        None."""
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

# The columns of the table, and the parts of step_seconds() that each adds up.
SHARES = {"matmuls": ("matmuls",), "attention": ("attention",), "element-wise": ("element-wise work",),
          "tp": ("tp exposed", "cp exposed", "ep exposed", "ep counts exposed"), "host": ("host exposed",),
          "bubble": ("bubble",), "pp": ("pp exposed",)}


def answer(flags, machine: Machine, usable: float, peak: float, progress=progress):
    """Return (text, record) of the search. usable: bytes of a GPU's memory; peak: FLOP/s of a GPU; progress: as in
    Search.run()."""
    config = Config(**{name: getattr(flags, name) for name in CONFIG_FLAGS} | {"device": "cuda"})
    search = Search(config, flags.gpus, set(CONFIG_FLAGS) & set(flags.given), machine, usable)
    print(f"searching for layouts of {flags.model} on {flags.gpus} x {flags.gpu}; this may take two minutes",
          file=sys.stderr, flush=True)
    rows, layouts = [], []
    for rank, (seconds, memory, found) in enumerate(search.run(progress=progress), 1):
        parts, used = step_seconds(train, found, machine), mfu(found, seconds, peak)
        shares = {name: sum(parts.get(part, 0.0) for part in summed) / seconds for name, summed in SHARES.items()}
        shares["end"] = 1 - sum(shares.values())
        rows.append([rank, found.tp, found.pp, found.cp, found.dp, found.micro_batch_size, seconds_text(seconds),
                     f"{used:.1%}", bytes_text(memory), *(f"{abs(share):.1%}" for share in shares.values()),
                     flags_text(differences(found, FURTHER))])
        layouts.append({**about(found), "step_s": seconds, "mfu": used,
                        "bytes": memory, "parts_s": parts, "command": command(found, flags.gpus_per_host)})
    if not rows:
        require(next(search.accepted_layouts((1,)), None) is not None,
                f"no layout for --gpus {search.gpus} obeys the rules together with the given flags; "
                f"the first that was tried breaks this one: {search.broken_rule}")
    text = "\n".join([
        f"the fastest layouts of {flags.model} ({parameter_count(found):,} parameters, {found.dtype}) on {flags.gpus} "
        f"x {flags.gpu} that fit into {bytes_text(usable)} per GPU:", "",
        table(["", "tp", "pp", "cp", "dp", "micro batch", "step", "MFU", "memory", *SHARES, "end", "further flags"],
              rows), "",
        "The columns from matmuls to end are shares of the step. tp (with cp, ep), host and pp are communication "
        "that nothing hides; end is all that follows the last backward, such as the optimizer. "
        f"{search.counts['simulated']} combinations were simulated. `bench.py plan` with the flags "
        "of a row prints its memory and the assumptions.", "", layouts[0]["command"]]) if rows else (
        f"nothing fits into the usable {bytes_text(usable)} per GPU, even with full recomputation; try more --gpus, a "
        "--gpu with more memory, or fewer of the given flags")
    return text, {"search": True, "model": flags.model, "gpu": flags.gpu, "gpus": flags.gpus,
                  "usable_bytes": usable, "counts": search.counts, "layouts": layouts}


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
