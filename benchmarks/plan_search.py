"""Searches for the fastest layouts that fit: `bench.py plan --search`.

    python bench.py plan --search --model llama3-8b --gpus 8 --gpu H100

The search varies tp, pp, the micro batch (dp follows from tp and pp) and, with experts, ep. For samples of at least
16,384 tokens it also varies cp and --cp-comm-type, such that each rank keeps at least 8,192 tokens of a sample. Then
come the schedule and its chunks, then slices, columns, sequence parallelism and the ZeRO stage, then recomputation.
With a single stage, only one chunk is tried. A flag that is given keeps its value. For 1,024 GPUs there are some 10^5
combinations, and simulating one can take seconds. So the search is best-first:

    1. An incomplete combination has chosen only some of its settings. Compute a lower bound for it: no way to complete
       it takes less time.
    2. Keep all combinations in a queue, sorted by time, and take the first. If it is incomplete, replace it by its
       choices of the next settings, and compute a bound for each.
    3. If it is complete, Config's rules must accept it and it must fit. Then simulate it, and put it back into the
       queue with the simulated time.
    4. If the first in the queue has been simulated, it is a result: everything else takes at least as long.

A result is the fastest combination with its tp, pp, cp and micro batch, so all results differ in these four. Trying
every combination would give the same results.
"""

import dataclasses
import heapq
import itertools
import math
import sys
from collections import Counter
from functools import cache

from benchmarks.common import CONFIG_FLAGS, bytes_text, layout_of, seconds_text, table
from benchmarks.plan_changes import RECOMPUTATION, context_sizes, flags_text, fullest_gpu_bytes, with_chunks
from nanodomino.analysis import expected_memory, sizes, step_time
from nanodomino.analysis.expected_traffic import Traffic
from nanodomino.analysis.sizes import parameter_count
from nanodomino.analysis.step_time import Machine
from nanodomino.config.config import Config
from nanodomino.config.presets import PRESETS
from nanodomino.config.rules import check_needs
from nanodomino.errors import UserError, require
from nanodomino.model import stage_layers
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement_and_messages import timetable

RESULTS = 10
MICRO_BATCHES = range(1, 17)
CHOICES = {"slices": (1, 2), "columns": (1, 2, 4), "sequence_parallel": (False, True), "zero_stage": (1, 0, 2)}
LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "micro_batch_size")
GRADIENTS = ("backward", "input_backward")       # the actions that compute input gradients
FURTHER = ("cp_comm_type", "expert_model_parallel_size", "schedule", "virtual_stages", *CHOICES, *RECOMPUTATION[0])


class Search:
    """Finds the fastest layouts of a model.

    config: the settings, not resolved; given: the names of those that must keep their value
    usable: bytes of a GPU's memory
    """

    def __init__(self, config: Config, gpus: int, given, machine: Machine, usable: float):
        self.config, self.gpus, self.given, self.machine, self.usable = config, gpus, given, machine, usable
        self.recomputation = [option for option in RECOMPUTATION if all(
            value in self.choices(name, [value]) for name, value in option.items())] or [{}]
        self.broken_rule = None                                # the message of the first layout that was not accepted
        self.counts = dict.fromkeys(("layouts", "schedules", "options", "simulated"), 0)

    def run(self, results=RESULTS) -> list[tuple[float, Config]]:
        """Return up to `results` pairs (seconds of a step, Config), the fastest first."""
        queue, order, found = [], itertools.count(), {}        # order: of equal times, the first wins

        def add(entries):
            for seconds, config, choose_next in entries:
                heapq.heappush(queue, (float(f"{seconds:.9e}"), next(order), config, choose_next))

        add(self.layouts())
        while queue and len(found) < results:
            seconds, _, config, choose_next = heapq.heappop(queue)
            layout = tuple(getattr(config, name) for name in LAYOUT)
            if layout not in found and choose_next:
                add(choose_next(config))
            elif layout not in found:
                found[layout] = sum(step_time.step_seconds(config, self.machine).values()), config
        return list(found.values())

    # ---- what is chosen, in this order. Each yields (seconds, Config, the method that chooses next). The seconds are a
    # lower bound, except where nothing is left to choose

    def layouts(self):
        for config in self.accepted_layouts(MICRO_BATCHES):
            if min(map(expected_memory.average_state_bytes, self.zero_stages(config))) <= self.usable:
                self.counts["layouts"] += 1
                yield max(config.microbatches * step_time.stage_flops(config, mesh)[0]
                          for mesh in ends(config)) / self.machine.matmul_rate, config, self.schedules

    def schedules(self, config: Config):
        free = dataclasses.replace(self.machine, intra_host_rate=math.inf, inter_host_rate=math.inf, latency=0.0)
        parallel = self.choices("sequence_parallel", [config.tp > 1])[0]      # it never adds work, only communication
        for name in self.choices("schedule", SCHEDULES):
            for count in self.chunk_counts(name, config):
                other = dataclasses.replace(config, schedule=name, virtual_stages=count, sequence_parallel=parallel)
                if self.may_fit(other):
                    self.counts["schedules"] += 1
                    yield lower_bound(other, free), other, self.options

    def options(self, config: Config):
        names = [name for name in CHOICES if name != "zero_stage"]
        values = [self.choices(name, CHOICES[name] if config.tp > 1 or name == "slices" and config.ep * config.cp > 1
                               else CHOICES[name][:1]) for name in names]
        for chosen in itertools.product(*values):
            self.counts["options"] += 1
            other = dataclasses.replace(config, **dict(zip(names, chosen)), **self.recomputation[0])
            least = busy_bound(other, self.machine)
            yield from ((least + end_of_step(one, self.machine), one, self.recomputations)
                        for one in self.zero_stages(other))

    def recomputations(self, config: Config):
        """Choose the least recomputation that fits, since more of it never takes less time."""
        if self.fits(config):
            self.counts["simulated"] += 1
            yield sum(step_time.step_seconds(config, self.machine).values()), config, None
        elif more := self.recomputation[1 + self.recomputation.index(recomputation_of(config)):]:
            config = dataclasses.replace(config, **more[0])
            yield lower_bound(config, self.machine), config, self.recomputations

    # ---- rules and memory

    def choices(self, name: str, values):
        """Return the values to try for a setting: only its own value if it must keep that."""
        return [getattr(self.config, name)] if name in self.given else values

    def chunk_counts(self, schedule: str, config: Config) -> list[int]:
        """Return the numbers of chunks per stage to try with a schedule."""
        counts = [settings["virtual_stages"] for settings in with_chunks(schedule, config)]
        if config.pp == 1 and "schedule" not in self.given:
            counts = [count for count in counts if count == 1]
        return [count for count in self.choices("virtual_stages", counts) if count in SCHEDULES[schedule].chunks]

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
        tokens = self.config.seq_length or PRESETS[self.config.model]["seq_length"]
        contexts = self.choices(LAYOUT[2], context_sizes(tokens, self.gpus))
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
        stages = self.choices("zero_stage", CHOICES["zero_stage"] if config.dp * config.cp > 1
                              else CHOICES["zero_stage"][:1])
        return [dataclasses.replace(config, zero_stage=stage) for stage in stages]

    def fits(self, config: Config) -> bool:
        """Return whether the rules accept the Config and it fits. Columns change no term of the memory, so all choices
        of them share a result."""
        return (self.accepted(config) is not None
                and memory_needed(dataclasses.replace(config, columns=1), self.usable) <= self.usable)

    def may_fit(self, config: Config) -> bool:
        """Return False if no choice of the other settings fits, because model state and the leanest tapes do not."""
        leanest = dataclasses.replace(config, recompute_granularity="full", checkpoint_in_cpu=True, slices=1,
                                      sequence_parallel=config.tp > 1)
        return all(min(sum(expected_memory.state_bytes(other, mesh).values()) for other in self.zero_stages(config))
                   + expected_memory.peak_tape_bytes(leanest, mesh) <= self.usable for mesh in ends(config))

    def leanest(self) -> tuple[float, Config | None]:
        """Return (bytes of the fullest GPU, Config) of the choice that needs least: with full recomputation from the
        host's memory, sequence parallelism and the best tp, pp, cp and ZeRO stage, for a micro batch of 1."""
        def lean(config):
            settings = {"sequence_parallel": config.tp > 1, **self.recomputation[-1]}
            return self.accepted(config, **{name: value for name, value in settings.items() if name not in self.given})

        configs = (lean(other) for config in self.accepted_layouts((1,)) for other in self.zero_stages(config))
        return min(((memory_needed(config), config) for config in configs if config),
                   default=(math.inf, None), key=lambda pair: pair[0])


def recomputation_of(config: Config) -> dict:
    return {name: getattr(config, name) for name in RECOMPUTATION[0]}


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def ends(config: Config) -> list:
    """Return the meshes of the first and the last stage. One of them has the head."""
    return [sizes.mesh_at(config, stage) for stage in sorted({0, config.pp - 1})]


memory_needed = cache(fullest_gpu_bytes)


def lower_bound(config: Config, machine: Machine) -> float:
    """Return seconds that no step of this Config can beat."""
    return busy_bound(config, machine) + end_of_step(config, machine)


def end_of_step(config: Config, machine: Machine) -> float:
    """Return the seconds of the final communication, such as the all-gather of the weights, and of the optimizer, on
    the first or the last stage."""
    return (max(step_time.data_parallel_seconds(config, machine, mesh)[1] for mesh in ends(config))
            + max(step_time.optimizer_memory_traffic(config, mesh) for mesh in ends(config)) / machine.memory_rate)


def busy_bound(config: Config, machine: Machine) -> float:
    """Return the seconds that the first or the last stage works, with the waits that come before and after its work.

    A stage cannot start before a microbatch has passed all earlier chunks. After the stage's last input gradient, the
    gradient passes the same chunks in reverse, while the stage can still compute weight gradients.
    """
    placement, mesh = config.placement, sizes.mesh_at(config)
    message = step_time.communication_seconds(config, machine, mesh,
                                              [Traffic("pp", "send", 1, sizes.residual_bytes(config))])

    @cache
    def costs(stage):
        return step_time.action_costs(config, machine, sizes.mesh_at(config, stage))

    @cache
    def seconds(stage, *halves):
        return step_time.action_seconds(config, *(costs(stage)[kind, chunk] for chunk, kind in halves))

    alike = {}

    def of_equal_chunk(stage, chunk):
        """Return the first (stage, chunk) with as many layers, with and without experts, and equally fast groups: its
        costs are the same."""
        number = placement.virtual_stage(stage, chunk)
        layers = stage_layers(config.num_layers, number, placement.last + 1, config.mtp_num_layers)
        key = (len(layers), sum(map(config.has_experts, layers)), number == 0,
               *(step_time.ranks_and_hosts(sizes.mesh_at(config, stage), group, machine.ranks_per_host)
                 for group in ("tp", "cp", "ep")))
        return alike.setdefault(key, (stage, chunk))

    def earlier_chunks(stage, chunk, kind):
        places = list(map(placement.location, range(placement.virtual_stage(stage, chunk) + 1)))
        equal = itertools.starmap(of_equal_chunk, places[:-1])
        return (sum(seconds(at, (number, kind)) for at, number in equal)
                + message * sum(one[0] != other[0] for one, other in zip(places, places[1:])))

    def work(actions):
        return sum(count * seconds(stage, *keys) for keys, count in actions.items())

    bounds = []
    for stage in {0, config.pp - 1}:
        first, last, until_last, rest = row_counts(config.schedule, config.pp, config.microbatches,
                                                   config.virtual_stages, stage)
        bounds.append(earlier_chunks(stage, *first) + work(until_last) + max(earlier_chunks(stage, *last), work(rest)))
    return max(bounds)


@cache
def row_counts(schedule: str, stages: int, microbatches: int, chunks: int, stage: int):
    """Return (the stage's first forward, its last input gradient, {action: count} up to that one, {action: count}
    after it). An action is a tuple with (chunk, kind) of each half, the first two results are one such pair."""
    row = [tuple((half.chunk, half.kind) for half in action.halves)
           for action in timetable(schedule, stages, microbatches, chunks).rows[stage]]
    last = max(number for number, halves in enumerate(row) if any(kind in GRADIENTS for _, kind in halves))
    gradient = next(half for half in row[last] if half[1] in GRADIENTS)
    return row[0][0], gradient, Counter(row[:last + 1]), Counter(row[last + 1:])


# ---- the answer

# The columns of the table, and the parts of step_time.step_seconds() that each adds up.
SHARES = {"matmuls": ("products",), "element-wise": ("element-wise",), "recompute": ("again", "host copies"),
          "tp": ("tp wires",), "bubble": ("bubble",), "pp": ("pp wires",), "dp": ("dp wires",),
          "optimizer": ("optimizer",)}


def answer(flags, machine: Machine, usable: float, peak: float):
    """Return (text, record) of the search. usable: bytes of a GPU's memory; peak: FLOP/s of a GPU."""
    config = Config(**{name: getattr(flags, name) for name in CONFIG_FLAGS} | {"device": "cuda"})
    search = Search(config, flags.gpus, set(CONFIG_FLAGS) & set(flags.given), machine, usable)
    rows, layouts = [], []
    if flags.gpus > 1 << 14:
        print(f"searching the layouts of {flags.gpus:,} GPUs, which can take minutes", file=sys.stderr)
    for rank, (seconds, found) in enumerate(search.run(), 1):
        parts, memory, used = (step_time.step_seconds(found, machine), fullest_gpu_bytes(found),
                               step_time.mfu(found, seconds, peak))
        shares = {name: sum(parts.get(part, 0.0) for part in summed) / seconds for name, summed in SHARES.items()}
        rows.append([rank, found.tp, found.pp, found.cp, found.dp, found.micro_batch_size, seconds_text(seconds),
                     f"{used:.1%}", bytes_text(memory), *(f"{abs(share):.1%}" for share in shares.values()),
                     flags_text(differences(found, FURTHER))])
        layouts.append({**layout_of(found), "micro_batch_size": found.micro_batch_size, "step_s": seconds, "mfu": used,
                        "bytes": memory, "parts_s": parts, "command": command(found, flags.gpus_per_host)})
    text = nothing_fits(search) if not rows else "\n".join([
        f"the fastest layouts of {flags.model} ({parameter_count(found):,} parameters, {found.dtype}) on {flags.gpus} "
        f"x {flags.gpu} that fit into {bytes_text(usable)} per GPU:", "",
        table(["", "tp", "pp", "cp", "dp", "micro batch", "step", "MFU", "memory", *SHARES, "further flags"], rows), "",
        "The columns from matmuls to optimizer are shares of the step. tp (with cp, ep), pp and dp are communication "
        f"that nothing hides. {search.counts['simulated']} combinations were simulated. `bench.py plan` with the flags "
        "of a row prints its memory, its communication and the assumptions.", "", layouts[0]["command"]])
    return text, {"question": "plan", "search": True, "model": flags.model, "gpu": flags.gpu, "gpus": flags.gpus,
                  "usable_bytes": usable, "counts": search.counts, "layouts": layouts}


def differences(config: Config, names) -> dict:
    """Return {name: value} of those settings in `names` that train.py would not choose for this layout."""
    plain = Config(model=config.model, global_batch_size=config.global_batch_size,
                   **{name: getattr(config, name) for name in LAYOUT}).resolve(config.world_size)
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(plain, name)}


def layout_flags(config: Config) -> dict:
    """Return {name: value} of the settings in LAYOUT that a command needs."""
    return {name: getattr(config, name) for name in LAYOUT if name != "context_parallel_size" or config.cp > 1}


def command(config: Config, gpus_per_host: int) -> str:
    """Return the command that trains with this Config. On several hosts, each runs it with its own RANK."""
    names = [name for name in CONFIG_FLAGS if name not in (*LAYOUT, "model", "device", "global_batch_size")]
    chosen = {"model": config.model, **layout_flags(config), "global_batch_size": config.global_batch_size}
    each = max(count for count in divisors(config.world_size) if count <= gpus_per_host)
    hosts = config.world_size // each
    several = f"--nnodes {hosts} --node_rank RANK --master_addr HOST --master_port 29500 " if hosts > 1 else ""
    return f"torchrun {several}--nproc_per_node {each} train.py {flags_text(chosen | differences(config, names))}"


def nothing_fits(search: Search) -> str:
    """Return the sentence that names the least memory found and what would help."""
    needed, config = search.leanest()
    require(config is not None, f"no layout for --gpus {search.gpus} obeys the rules together with the given flags; "
            f"the first that was tried breaks this one: {search.broken_rule}")
    layout = {name: value for name, value in layout_flags(config).items() if name != "micro_batch_size"}
    more = next((gpus for gpus in (search.gpus * factor for factor in (2, 4, 8, 16, 32))
                 if Search(search.config, gpus, search.given, search.machine, search.usable).leanest()[0]
                 <= search.usable), None)
    return (f"nothing fits into the usable {bytes_text(search.usable)} per GPU: the least memory found is "
            f"{bytes_text(needed)}, with {flags_text(layout | differences(config, FURTHER))}; try "
            + (f"--gpus {more}" if more else "a --gpu with more memory"))
