"""Are stages idle for as long as the schedule predicts, and are the schedules as fast as torch's?

A step is forward and backward of m microbatches on p stages, without the optimizer. For every schedule and several m,
these implementations, called sides, run in turn with the same weights and tokens. Losses and gradients must agree:

    domino    nanodomino as it trains: pipeline.run with Domino's stages
    torch     torch.distributed.pipelining with stages of plain_model.py, for the schedules that torch also has

The columns of the table:

    speed       torch's time / domino's time
    of 1f1b's   this schedule's time / 1F1B's time
    idle        the share of the step's time in which a stage does not compute, averaged over the stages. It is measured
                in extra rounds, in which each stage records when it computes
    simulated   there are two such columns. Each predicts the column to its left by a simulation. The simulation takes
                the recorded duration of each kind of action (F, B, I, W, pair) on each stage; messages take no time
    even        the idle share if stages are equal and F, I and W take equally long: (p - 1)/(m + p - 1) for 1F1B and
                GPipe. (2104.04473, section 2.2, divides by the ideal time instead of the step's and gets (p - 1)/m)

torch has no class for zb-h1, but its ScheduleInterleavedZeroBubble with one chunk per stage is that schedule.

On CPUs each stage has one core. The core also handles the stage's network traffic, which makes actions longer. If there
are fewer cores than stages, a stage that waits leaves its core to another stage, and idle times mean little.

    python bench.py pipeline                                        two stages, m of 2, 4 and 8
    python bench.py pipeline --pp 4 --microbatches 4 8 16
"""

import inspect
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import nn

import train
from benchmarks.plain_model import Plain
from benchmarks.runner import (Figure, RandomTokens, about, add_config_flags, compare, config_here, describe, gathered,
                               join, ratio_text, ratios, require_same_work, table)
from nanodomino.comm.trace import Trace
from nanodomino.domino import Domino
from nanodomino.errors import counted, require
from nanodomino.mesh import Mesh
from nanodomino.pictures.merged_trace import actions, difference, spans_of, union
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import Placement, Timetable, simulate, stage_layers, step_time
from nanodomino.settings.config import Config
from nanodomino.zero import ZeroOptimizer


RECORDED_ROUNDS = 3          # at most; they measure the idle times
TORCH_CLASSES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B",
                 "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}
FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size",
         "pipeline_model_parallel_size", "dtype", "device")


def add_flags(parser):
    # With a small vocabulary the head is cheap, so the last stage takes about as long as the others.
    add_config_flags(parser, FLAGS, pipeline_model_parallel_size=2, num_layers=8, hidden_size=256,
                     num_attention_heads=8, seq_length=128, vocab_size=256, micro_batch_size=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8], metavar="M",
                        help="microbatches per step, measured one after the other (default 2 4 8)")


def processes(flags) -> int:
    stages, least = flags.pipeline_model_parallel_size, min(flags.microbatches)
    require(stages >= 2, f"--pp must be at least 2, but is {stages} (a single stage is never idle); try 2")
    require(least >= stages,
            f"--microbatches must be at least --pp {stages}, but is {least} (torch's Schedule1F1B refuses fewer "
            f"microbatches than stages); try --microbatches {stages} {2 * stages}")
    for m in flags.microbatches:
        rounds = m // stages
        require(m % rounds == 0, f"--microbatches {m} must be divisible by the {rounds} rounds in which torch's "
                f"interleaved schedules run them ({m} // --pp {stages}); try {rounds * stages}")
    configs_for(flags, least)
    return stages


def configs_for(flags, microbatches: int) -> dict[str, Config]:
    """Return {schedule: its Config}. Each schedule gets the smallest number of chunks per stage that it allows."""
    return {name: config_here(flags, flags.pipeline_model_parallel_size, tensor_model_parallel_size=1,
                            data_parallel_size=1, slices=1, schedule=name,
                            global_batch_size=flags.micro_batch_size * microbatches) for name in SCHEDULES}


def answer(flags, launch):
    by_count = [configs_for(flags, microbatches) for microbatches in flags.microbatches]
    config, mesh = join(by_count[0]["1f1b"], launch, one_core=True)
    trace = Trace(mesh.device, recording=False)
    parts = {placement: build(config, mesh, trace)
             for placement, config in {config.placement: config for config in by_count[0].values()}.items()}
    return report(config, [row for configs in by_count for row in measure(configs, parts, trace, flags.repeats)])


# ---- the sides

@dataclass
class Parts:
    """Holds this rank's stage twice, as Domino and as plain modules, with the same layers and weights.

    Sides and schedules that place the layers alike share one Parts.
    """
    placement: Placement
    mesh: Mesh
    domino: Domino
    optimizer: ZeroOptimizer         # holds Domino's gradients; never updates the weights
    plain: nn.ModuleList             # one Plain per chunk


def build(config: Config, mesh: Mesh, trace: Trace) -> Parts:
    """Build this rank's stage for the placement of config's schedule."""
    model, placement, plain = train.model_builder(config, mesh), config.placement, nn.ModuleList()
    for chunk in range(placement.chunks):
        place = placement.virtual_stage(mesh.pp_rank, chunk)
        layers = stage_layers(config.num_layers, place, placement.last + 1, config.mtp_num_layers)
        plain.append(Plain(config, layers, place == 0, place == placement.last).load(model.state_dict()))
    if len(plain) > 1 and plain[0].pre_process and plain[-1].post_process:     # tied, as in the model
        plain[-1].embedding.word_embeddings = plain[0].embedding.word_embeddings
    optimizer = ZeroOptimizer(model, config, mesh)
    return Parts(placement, mesh, Domino(model, config.slices, config.columns, trace=trace), optimizer,
                 plain.to(mesh.device, config.params_dtype))


class DominoSide:
    """Runs a schedule as train.py does. step() returns the sum of the losses if this stage has the head, otherwise 0.
    gradients() returns this stage's gradients after a step.
    """

    def __init__(self, config: Config, parts: Parts, tokens):
        self.config, self.parts, self.tokens = config, parts, tokens

    def step(self) -> float:
        self.parts.optimizer.zero_grad()
        totals = train.run_schedule(self.config.timetable, 0, self.parts.domino, self.tokens, self.config,
                                    self.parts.mesh)
        return totals.loss_sum.item()

    def gradients(self):
        return [bucket.main_grad for bucket in self.parts.optimizer.buckets]


class TorchSide:
    """Runs a schedule of torch.distributed.pipelining. The loss is a sum over tokens, as on the other sides, so torch
    must not divide the gradients by the number of microbatches (scale_grads=False).
    """

    def __init__(self, config: Config, parts: Parts, tokens):
        # Imports torch's compiler, which takes seconds: not needed for --help or a refusal.
        from torch.distributed import pipelining
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti

        self.config, self.parts, self.tokens = config, parts, tokens
        schedule_class = getattr(pipelining, TORCH_CLASSES[config.schedule])
        stages = [pipelining.PipelineStage(part, parts.placement.virtual_stage(parts.mesh.pp_rank, chunk),
                                           parts.placement.last + 1, parts.mesh.device)
                  for chunk, part in enumerate(parts.plain)]
        several_chunks = issubclass(schedule_class, PipelineScheduleMulti)
        self.schedule = schedule_class(stages if several_chunks else stages[0], config.microbatches, loss_sum,
                                       scale_grads=False)
        # Without this option torch concatenates all logits, which costs time; older versions lack the option.
        names = inspect.signature(self.schedule.step).parameters
        self.options = {"return_outputs": False} if "return_outputs" in names else {}

    def gradients(self):
        return [weight.grad for weight in self.parts.plain.parameters()]

    def step(self) -> float:
        tokens, plain, losses = self.tokens.tokens.to(self.tokens.device), self.parts.plain, []
        plain.zero_grad(set_to_none=True)
        self.schedule.step(*([tokens[:, :-1]] if plain[0].pre_process else []), losses=losses,
                           target=tokens[:, 1:] if plain[-1].post_process else None, **self.options)
        return sum(losses).item() if losses else 0.0


def loss_sum(logits, labels):
    """Return the sum of the losses of logits [b, s, v] and labels [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


# ---- measurements

def measure(configs: dict[str, Config], parts: dict, trace: Trace, repeats: int) -> list[dict]:
    """Compare all schedules for one number of microbatches. Return a dict for each schedule.

    configs: {schedule: Config}; parts: {placement: Parts}.
    """
    first = configs["1f1b"]
    device = parts[first.placement].mesh.device
    tokens = RandomTokens(first, device)
    domino = {name: DominoSide(config, parts[config.placement], tokens) for name, config in configs.items()}
    sides = {(name, "domino"): side for name, side in domino.items()}
    sides |= {(name, "torch"): TorchSide(config, parts[config.placement], tokens) for name, config in configs.items()
              if name in TORCH_CLASSES}
    loss = check_same_work(first, sides)
    times = compare({key: side.step for key, side in sides.items()}, repeats, device, about=f"m {first.microbatches}, ")
    steps, works = record(domino, trace, device, min(repeats, RECORDED_ROUNDS))
    found = {name: idle(config.timetable, steps[name], works[name]) for name, config in configs.items()}
    return [dict(microbatches=first.microbatches, schedule=name, loss=loss, time=times[name, "domino"],
                 speed=ratios(times[name, "torch"], times[name, "domino"]) if name in TORCH_CLASSES else None,
                 of_1f1b=ratios(times[name, "domino"], times["1f1b", "domino"]),
                 simulated_of_1f1b=found[name]["simulated_step_s"] / found["1f1b"]["simulated_step_s"], **found[name])
            for name in configs]


def check_same_work(config: Config, sides) -> float:
    """Run a step of each side and return the mean loss per token. Raises UserError if the losses of two sides differ.

    With the same placement a stage has the same layers on two sides. Then its gradient norms must agree, too.
    """
    losses, norms = {}, defaultdict(dict)
    for key, side in sides.items():
        loss = side.step() / (config.global_batch_size * config.seq_length)
        norm = sum(gradient.double().square().sum() for gradient in side.gradients()).sqrt().item()
        ranks = gathered((loss, norm))
        losses[" ".join(key)] = [sum(loss for loss, _ in ranks)]
        norms[side.parts.placement][" ".join(key)] = [norm for _, norm in ranks]
    require_same_work(config, "loss", losses)
    for alike in norms.values():
        require_same_work(config, "gradient norms", alike)
    return next(iter(losses.values()))[0]


def record(sides, trace: Trace, device, rounds: int):
    """Run extra rounds with recording on. Return two dicts with the keys of `sides`:

        the step's seconds in each round
        each stage's work_of() in each round
    """
    works = {key: [] for key in sides}

    def recorded(key):
        trace.recording = True
        sides[key].step()
        trace.recording = False
        works[key].append(work_of(trace.take()))

    times = compare({key: partial(recorded, key) for key in sides}, rounds, device, about="recorded ")
    return ({key: time.seconds for key, time in times.items()},
            {key: gathered(rounds_of_stage[1:]) for key, rounds_of_stage in works.items()})     # without the warm-up


def work_of(events) -> dict[tuple, list[float]]:
    """Return {(kind, chunk): seconds of each such action}, without the time in which the action waits."""
    found, waited = defaultdict(list), spans_of(events, "wait")
    for spans in actions(events):
        kind = "pair" if len({span.kind for span in spans}) > 1 else spans[0].kind
        work = difference(union((span.begin, span.end) for span in spans), waited)
        found[kind, spans[0].args.get("chunk", 0)].append(sum(end - begin for begin, end in work) / 1e9)
    return dict(found)


def idle(timetable: Timetable, steps, works) -> dict:
    """Return three shares of time for which the stages of a schedule idle: measured, simulated, and with equal stages.

    steps: the seconds of each recorded round; works: for each stage and round what work_of() returned.
    """
    busy = [[sum(map(sum, work.values())) for work in stage] for stage in works]
    shares = [[1 - seconds / step for seconds, step in zip(stage, steps)] for stage in busy]
    each = [statistics.median(stage) for stage in busy]
    lengths = [{key: statistics.median(statistics.mean(work[key]) for work in stage) for key in stage[0]}
               for stage in works]
    rows = simulate(timetable, lambda stage, action: lengths[stage][action.kind, action.halves[0].chunk])
    return dict(idle=Figure(tuple(statistics.mean(stages) for stages in zip(*shares)), most=1.0, size=1.0),
                even=idle_share(simulate(timetable)), imbalance=max(each) / statistics.mean(each),
                simulated=idle_share(rows), simulated_step_s=step_time(rows),
                seconds=[{f"{kind} {chunk}": seconds for (kind, chunk), seconds in stage.items()}
                         for stage in lengths])


def idle_share(rows) -> float:
    """Return the share of a simulated step in which a stage is idle, averaged over the stages.

    rows: the result of simulate().
    """
    return 1 - statistics.mean(sum(end - begin for _, begin, end in row) for row in rows) / step_time(rows)


# ---- the report

def report(config: Config, rows: list[dict]):
    """Return (text, record). rows: measure()'s dicts for all numbers of microbatches."""
    lines = [[row["microbatches"], row["schedule"], row["time"], ratio_text(row["speed"]) if row["speed"] else "",
              f"{row['of_1f1b']:.2f}", f"{row['simulated_of_1f1b']:.2f}", f"{row['idle']:.1%}",
              f"{row['simulated']:.1%}", f"{row['even']:.1%}"] for row in rows]
    compared = [row for row in rows if row["speed"]]
    least = {name: min((row["speed"] for row in compared if row["schedule"] == name), key=lambda speed: speed.median)
             for name in {row["schedule"]: None for row in compared}}
    farthest = max(rows, key=distance)
    text = "\n".join([
        f"{describe(config)}; forward and backward of m microbatches",
        table(["m", "schedule", "step: median [min .. max]", "speed", "of 1f1b's", "simulated", "idle", "simulated",
               "even"], lines),
        "lowest speed over all m, relative to torch's: "
        + "; ".join(f"{name} {speed:.2f}" for name, speed in least.items()),
        f"measured and simulated idle share differ by at most {100 * distance(farthest):.1f} percentage points "
        f"({farthest['schedule']}, {counted(farthest['microbatches'], 'microbatch')}); losses and gradients agree"])
    return text, {**{f"speed_{name}": speed.value for name, speed in least.items()},
                  "rows": [as_json(row) for row in rows], **about(config)}


def distance(row: dict) -> float:
    """Return the absolute difference between the measured and the simulated idle share."""
    return abs(row["idle"].median - row["simulated"])


def as_json(row: dict) -> dict:
    """Return a row for the JSON line, with each Figure replaced by its value and its spread."""
    return {"step_s": row["time"].median} | {
        key: entry for name, value in row.items() if name != "time"
        for key, entry in (value.record(name) if isinstance(value, Figure) else {name: value}).items()}
