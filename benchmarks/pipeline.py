"""Is a stage idle as long as its schedule predicts, and is a schedule as fast as torch's?

A step is forward and backward of m microbatches over p stages, without an optimizer. For every schedule and several m
these sides run in turn, with the same weights and tokens; losses and gradients must agree:

    domino    nanodomino as it trains: pipeline.run with Domino's stages
    runner    pipeline.run with stages of plain torch.nn and autograd (plain.py), which can neither split a backward nor
              pair it with a forward
    torch     the same schedule of torch.distributed.pipelining, if it has one, with the same plain stages

So runner and torch differ only in schedule and messages, domino and runner only in the stages.

    speed       torch's time / this side's time
    of 1f1b's   the time of a step / 1F1B's on the same side
    idle        the share of the step in which a stage runs no action, averaged over the stages; from extra rounds that
                are recorded
    simulated   the previous two columns, simulated with the recorded duration of each kind of action (F, B, I, W, pair)
                on each stage, and with messages that take no time
    even        the idle share with equal stages and F = B = W: (p - 1)/(m + p - 1) for 1F1B and GPipe, which is
                (p - 1)/m of the ideal time (2104.04473, section 2.2)

torch orders its actions itself, so they are not simulated. Its ScheduleInterleavedZeroBubble runs with one chunk per
stage, which makes it zb-h1.

On CPUs each stage has one core, which also handles its network traffic: this shows as longer actions. With fewer cores
than stages, a waiting stage leaves its core to others, and idle times mean little.

    python bench.py pipeline                                        two stages, m of 2, 4 and 8
    python bench.py pipeline --pp 4 --microbatches 4 8 16
"""

import inspect
import os
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

import train
from benchmarks.common import (SAME, Figure, RandomTokens, add_config_flags, bind_to_one_core, compare, config_of,
                               gathered, ratio_text, ratios, shape_of, table)
from benchmarks.plain import Plain
from nanodomino import pipeline
from nanodomino.comm.trace import Trace
from nanodomino.comm.world import find_device, start_world
from nanodomino.config.config import Config
from nanodomino.domino import Domino
from nanodomino.errors import require
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.model import stage_layers
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement_and_messages import Placement, Timetable
from nanodomino.schedules.simulation import simulate, step_time
from nanodomino.timeline.merged_trace import actions, difference, spans_of, union
from nanodomino.zero import ZeroOptimizer

RECORDED_ROUNDS = 3          # at most, for the idle times
TORCHS = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B",
          "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}
FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size",
         "pipeline_model_parallel_size", "dtype", "device")


def add_flags(parser):
    # a small vocabulary, so that the last stage with its head takes about as long as the others
    add_config_flags(parser, FLAGS, pipeline_model_parallel_size=2, num_layers=8, hidden_size=256,
                     num_attention_heads=8, seq_length=128, vocab_size=256, micro_batch_size=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8], metavar="M",
                        help="microbatches per step, measured one after the other (default 2 4 8)")


def processes(flags) -> int:
    stages, least = flags.pipeline_model_parallel_size, min(flags.microbatches)
    require(stages >= 2, f"--pp must be at least 2, but is {stages}: a single stage has no bubble")
    require(least >= stages,
            f"--microbatches must be at least --pp {stages}, since torch's Schedule1F1B refuses fewer, but is "
            f"{least}; try --microbatches {stages} {2 * stages}")
    for m in flags.microbatches:
        rounds = m // stages
        require(m % rounds == 0, f"--microbatches {m} must be divisible by the {rounds} rounds of torch's "
                f"interleaved schedules; try {rounds * stages}")
    configs_for(flags, least)
    return stages


def configs_for(flags, microbatches: int) -> dict[str, Config]:
    """Return a Config for each schedule, with the smallest number of chunks."""
    return {name: config_of(flags, flags.pipeline_model_parallel_size, tensor_model_parallel_size=1,
                            data_parallel_size=1, slices=1, schedule=name,
                            global_batch_size=flags.micro_batch_size * microbatches) for name in SCHEDULES}


def answer(flags, launch):
    by_count = [configs_for(flags, microbatches) for microbatches in flags.microbatches]
    config = by_count[0]["1f1b"]
    device = find_device(config, launch)
    bind_to_one_core(device)
    start_world(launch, device)
    mesh = make_mesh(config.pp, 1, 1, device)
    trace = Trace(device, recording=False)
    parts = {placement: build(config, mesh, trace)
             for placement, config in {config.placement: config for config in by_count[0].values()}.items()}
    rows = [row for configs in by_count for row in measure(configs, parts, trace, flags.repeats)]
    return report(config, device, flags.repeats, rows)


# ---- the sides

@dataclass
class Parts:
    """What the sides share on this stage, for one placement of the layers."""
    placement: Placement
    mesh: Mesh
    trace: Trace
    domino: Domino
    optimizer: ZeroOptimizer         # holds Domino's gradients; never updates
    plain: nn.ModuleList             # the same layers and weights, chunk by chunk


def build(config: Config, mesh: Mesh, trace: Trace) -> Parts:
    model, placement, plain = train.model_builder(config, mesh), config.placement, nn.ModuleList()
    for chunk in range(placement.chunks):
        place = placement.virtual_stage(mesh.pp_rank, chunk)
        layers = stage_layers(config.num_layers, place, placement.last + 1)
        plain.append(Plain(config, layers, place == 0, place == placement.last).load(model.state_dict()))
    if len(plain) > 1 and plain[0].pre_process and plain[-1].post_process:     # tied, as in the model
        plain[-1].embedding.word_embeddings = plain[0].embedding.word_embeddings
    optimizer = ZeroOptimizer(model, config, mesh)
    return Parts(placement, mesh, trace, Domino(model, config.slices, config.columns, trace=trace), optimizer,
                 plain.to(mesh.device, config.params_dtype))


class DominoSide:
    """Runs schedules as train.py does. step() returns the sum of the losses on the last stage, 0 on the others."""

    def __init__(self, config: Config, parts: Parts, tokens):
        self.config, self.parts, self.tokens = config, parts, tokens

    def step(self) -> float:
        self.parts.optimizer.zero_grad()
        totals = train.run_schedule(self.config.timetable, 0, self.parts.domino, self.tokens, self.config,
                                    self.parts.mesh)
        return totals.loss_sum.item()

    def gradients(self):
        return [bucket.main_grad for bucket in self.parts.optimizer.buckets]


class PlainSide(DominoSide):
    def gradients(self):
        return [weight.grad for weight in self.parts.plain.parameters()]


class RunnerSide(PlainSide):
    """Runs schedules with the same runner and the plain stage, whose tape is autograd's graph."""

    def step(self) -> float:
        config, mesh, plain = self.config, self.parts.mesh, self.parts.plain
        plain.zero_grad(set_to_none=True)
        get_batch = partial(train.get_batch, self.tokens, config, mesh, 0, False)
        return pipeline.run(config.timetable, self, mesh, get_batch, self.forward_step, config.residual_shape,
                            config.params_dtype, trace=self.parts.trace).loss_sum.item()

    def forward_step(self, batch, stage, hidden, chunk, training):
        x = batch.tokens if hidden is None else hidden.requires_grad_()
        with torch.enable_grad():
            output = self.parts.plain[chunk](x)
        return output.detach(), (x, output), lambda logits: (loss_sum(logits, batch.labels), batch.labels.numel())
        yield

    def backward(self, tape, gradient, on_gradients_ready, later):
        x, output = tape
        output.backward(gradient)
        return x.grad
        yield


class TorchSide(PlainSide):
    """Runs torch's schedules. The losses are summed, so the gradients need no scaling."""

    def __init__(self, config: Config, parts: Parts, tokens):
        super().__init__(config, parts, tokens)
        kind = getattr(pipelining, TORCHS[config.schedule])
        stages = [RecordedStage(parts, chunk) for chunk in range(parts.placement.chunks)]
        self.schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], config.microbatches,
                             self.loss, scale_grads=False)
        # The logits are not needed; older versions of torch always concatenate them.
        names = inspect.signature(self.schedule.step).parameters
        self.options = {"return_outputs": False} if "return_outputs" in names else {}

    def loss(self, logits, labels):
        with self.parts.trace.span("forward"):
            return loss_sum(logits, labels)

    def step(self) -> float:
        tokens, plain, losses = self.tokens.tokens, self.parts.plain, []
        plain.zero_grad(set_to_none=True)
        self.schedule.step(*([tokens[:, :-1]] if plain[0].pre_process else []), losses=losses,
                           target=tokens[:, 1:] if plain[-1].post_process else None, **self.options)
        return sum(losses).item() if losses else 0.0


class RecordedStage(pipelining.PipelineStage):
    """torch's stage, recording the same spans as pipeline.run."""

    def __init__(self, parts: Parts, chunk: int):
        super().__init__(parts.plain[chunk], parts.placement.virtual_stage(parts.mesh.pp_rank, chunk),
                         parts.placement.last + 1, parts.mesh.device)
        self.trace = parts.trace

    def forward_one_chunk(self, *arguments, **options):
        with self.trace.span("forward"):
            return super().forward_one_chunk(*arguments, **options)

    def backward_one_chunk(self, *arguments, **options):
        with self.trace.span("backward" if options.get("full_backward", True) else "input_backward"):
            return super().backward_one_chunk(*arguments, **options)

    def backward_weight_one_chunk(self, *arguments, **options):
        with self.trace.span("weight_backward"):
            return super().backward_weight_one_chunk(*arguments, **options)


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def sides_of(config: Config, parts: Parts, tokens) -> dict:
    """Return the sides that can run config's schedule, by name."""
    sides, kinds = {"domino": DominoSide}, {action.kind for row in config.timetable.rows for action in row}
    if kinds <= {"forward", "backward"}:
        sides["runner"] = RunnerSide
    if config.schedule in TORCHS:
        sides["torch"] = TorchSide
    return {(config.schedule, name): side(config, parts, tokens) for name, side in sides.items()}


# ---- measurements

def measure(configs: dict[str, Config], parts: dict, trace: Trace, repeats: int) -> list[dict]:
    """Return a row for each schedule and side, with one number of microbatches."""
    first = configs["1f1b"]
    device, sides = parts[first.placement].mesh.device, {}
    tokens = RandomTokens(first, device)
    for config in configs.values():
        sides |= sides_of(config, parts[config.placement], tokens)
    loss = check_same_work(first, sides)
    times = compare({key: side.step for key, side in sides.items()}, repeats, device, about=f"m {first.microbatches}, ")
    steps, works = record(sides, trace, device, min(repeats, RECORDED_ROUNDS))
    rows, simulated = [], {}
    for schedule, name in sides:
        key, rivals = (schedule, name), (schedule, "torch") in sides
        found = idle(configs[schedule].timetable, steps[key], works[key], with_simulation=name != "torch")
        simulated[key] = found.pop("simulated_step_s")
        rows.append(dict(
            microbatches=first.microbatches, schedule=schedule, side=name, loss=loss, time=times[key],
            speed=ratios(times[schedule, "torch"], times[key]) if rivals else None,
            of_1f1b=ratios(times[key], times["1f1b", name]),
            simulated_of_1f1b=simulated[key] and simulated[key] / simulated["1f1b", name], **found))
    return rows


def check_same_work(config: Config, sides) -> float:
    """Run a step of each side and return the mean loss. Raises UserError if losses differ, or gradient norms of sides
    with the same placement.
    """
    norms, losses, first_of = {}, {}, {}
    for key, side in sides.items():
        loss = side.step() / (config.global_batch_size * config.seq_length)
        norm = sum(gradient.double().square().sum() for gradient in side.gradients()).sqrt().item()
        ranks = gathered((loss, norm))
        losses[key], norms[key] = sum(loss for loss, _ in ranks), [norm for _, norm in ranks]
        alike = first_of.setdefault(side.parts.placement, key)
        pairs = [(losses[key], losses[first := next(iter(sides))]), *zip(norms[key], norms[alike])]
        require(all(abs(mine - expected) <= SAME[config.dtype] * max(abs(expected), 1e-30)     # false for NaN
                    for mine, expected in pairs),
                f"{' '.join(key)} and {' '.join(first)} or {' '.join(alike)} do different work: losses "
                f"{losses[key]} and {losses[first]}, the stages' gradient norms {norms[key]} and {norms[alike]}, so "
                "their times can't be compared; this is a bug")
    return losses[first]


def record(sides, trace: Trace, device, rounds: int):
    """Return ({key: [round] seconds of a step}, {key: [stage][round] {(kind, chunk): seconds of each action}})."""
    works = {key: [] for key in sides}

    def recorded(key):
        trace.recording = True
        sides[key].step()
        trace.recording = False
        works[key].append(work_of(trace.take()))

    times = compare({key: partial(recorded, key) for key in sides}, rounds, device, about="recorded ")
    return ({key: time.seconds for key, time in times.items()},
            {key: gathered(each[1:]) for key, each in works.items()})


def work_of(events) -> dict[tuple, list[float]]:
    """Return the seconds of each action without its waits, by (kind, chunk)."""
    found, waited = defaultdict(list), spans_of(events, "wait")
    for spans in actions(events):
        kind = "pair" if len({span.kind for span in spans}) > 1 else spans[0].kind
        work = difference(union((span.begin, span.end) for span in spans), waited)
        found[kind, spans[0].args.get("chunk", 0)].append(sum(end - begin for begin, end in work) / 1e9)
    return dict(found)


def idle(timetable: Timetable, steps, works, with_simulation=True) -> dict:
    """Return idle shares, measured and simulated. steps, works: as record() returns them for one side."""
    busy = [[sum(map(sum, work.values())) for work in stage] for stage in works]
    shares = [[1 - seconds / step for seconds, step in zip(stage, steps)] for stage in busy]
    figure = Figure(tuple(statistics.mean(stages) for stages in zip(*shares)), most=1.0, size=1.0)
    each = [statistics.median(stage) for stage in busy]
    found = dict(idle=figure, idle_of_stages=[statistics.median(stage) for stage in shares],
                 even=idle_share(simulate(timetable)), imbalance=max(each) / statistics.mean(each),
                 simulated=None, simulated_step_s=None, seconds=None)
    if with_simulation:
        lengths = [{key: statistics.median(statistics.mean(work[key]) for work in stage) for key in stage[0]}
                   for stage in works]
        rows = simulate(timetable, lambda stage, action: lengths[stage][action.kind, action.halves[0].chunk])
        found |= dict(simulated=idle_share(rows), simulated_step_s=step_time(rows),
                      seconds=[{f"{kind} {chunk}": seconds for (kind, chunk), seconds in stage.items()}
                               for stage in lengths])
    return found


def idle_share(rows) -> float:
    """Return the idle share of the step, averaged over the stages."""
    return 1 - statistics.mean(sum(end - begin for _, begin, end in row) for row in rows) / step_time(rows)


# ---- the report

def report(config: Config, device, repeats: int, rows: list[dict]):
    """Return (text, record)."""
    cores = os.cpu_count() or 1
    shared = device.type == "cpu" and config.pp > cores
    lines = [[row["microbatches"], row["schedule"], row["side"], row["time"],
              ratio_text(row["speed"]) if row["speed"] and row["side"] != "torch" else "",
              f"{row['of_1f1b']:.2f}", text_of(row["simulated_of_1f1b"], ".2f"),
              f"{row['idle']:.1%}", text_of(row["simulated"], ".1%"), f"{row['even']:.1%}"] for row in rows]
    speeds = {}
    for row in rows:
        if row["speed"] and row["side"] != "torch":
            speeds.setdefault(f"{row['schedule']}_{row['side']}", []).append(row["speed"])
    least = {key: min(figures, key=lambda speed: speed.median) for key, figures in speeds.items()}
    farthest = max(rows, key=distance)
    text = "\n".join([
        f"{config.pp} stages on {device.type}, {cores} cores{', fewer than stages' if shared else ''}; "
        f"{config.num_layers} layers of {config.hidden_size}, microbatches of {config.micro_batch_size} x "
        f"{config.seq_length}, vocabulary {config.vocab_size}, {config.dtype}; forward and backward of m microbatches",
        table(["m", "schedule", "side", "step: median [min .. max]", "speed", "of 1f1b's", "simulated", "idle",
               "simulated", "even"], lines),
        "lowest speed of all m, relative to torch: "
        + "; ".join(f"{key.replace('_', ' ')} {speed:.2f}" for key, speed in least.items()),
        *kinds_of_work(rows),
        f"the largest difference between idle share and simulation is {100 * distance(farthest):.1f} points, of "
        f"{farthest['schedule']} {farthest['side']} with {farthest['microbatches']} microbatches; the busiest stage "
        f"computes up to {max(row['imbalance'] for row in rows) - 1:.1%} more than the mean; losses and gradients "
        "agree"])
    return text, {"question": "pipeline", "pp": config.pp,
                  **{f"speed_{key}": speed.value for key, speed in least.items()},
                  "rows": [as_json(row) for row in rows], **shape_of(config), "device": device.type, "cores": cores,
                  "shared_cores": shared, "repeats": repeats}


def kinds_of_work(rows: list[dict]) -> list[str]:
    """Return a line on the durations of F, B and W in the last schedule that splits them on every stage."""
    for row in reversed(rows):
        parts = [[sum(seconds for name, seconds in stage.items() if name.split()[0] == kind)
                  for kind in ("forward", "input_backward", "weight_backward")] for stage in row["seconds"] or []]
        if parts and all(map(all, parts)):
            words = ", ".join(f"{letter} {1000 * statistics.mean(of_stages):.1f} ms"
                              for letter, of_stages in zip("FBW", zip(*parts)))
            return [f"a microbatch takes {words} per stage on average, in {row['schedule']} with "
                    f"{row['microbatches']} microbatches"]
    return []


def text_of(value, form: str) -> str:
    return "" if value is None else format(value, form)


def distance(row: dict) -> float:
    """Return the difference between the idle share and its simulation."""
    return 0.0 if row["simulated"] is None else abs(row["idle"].median - row["simulated"])


def as_json(row: dict) -> dict:
    figures = row["of_1f1b"].record("of_1f1b") | row["idle"].record("idle")
    figures |= row["speed"].record("speed") if row["speed"] else {"speed": None}
    return {name: value for name, value in row.items() if name != "time"} | {"step_s": row["time"].median} | figures
