"""Is a stage idle for as long as the schedule says, and is a schedule as fast as torch's?

One step is the forward and the backward of m microbatches over p stages, without an optimizer. In turn, within one run,
from the same weights and on the same tokens, with every schedule and for several m:

    domino    nanodomino as it trains: pipeline.run over a timetable, the stages are Domino's
    runner    pipeline.run again, with stages of plain torch.nn (plain.py) and autograd, where no backward is cut in two
              and nothing is paired, which autograd can't
    torch     torch.distributed.pipelining's own schedule, where it has the same, with the very same plain stages

So runner beside torch compares schedules and messages alone, domino beside runner the stages alone. All must find the
same loss, and each stage the same gradients, or there is no comparison.

    speed       torch's time / this one's
    of 1f1b's   the time of a step / that of 1F1B, on the same side
    idle        the part of the step in which a stage does no action, mean over the stages; from a few more rounds, in
                which that is recorded
    simulated   the same two, when the schedule is played through with what was recorded: how long each stage takes for
                each kind of action (F, B, I, W, or a pair), and messages that take no time
    even        that idle time with even stages, and F = B = W: of 1F1B and GPipe (p - 1)/(m + p - 1) of the step, which
                is (p - 1)/m of the ideal time (2104.04473, section 2.2)

torch decides by itself how it orders its actions, so a simulation of ours says nothing about it. Its
ScheduleInterleavedZeroBubble is run with one chunk a stage, where it is zb-h1.

On CPUs each stage has one core, which also does the network's work: it shows as work that takes longer. Where there are
fewer cores than stages, a stage that waits lends its core to one that works, and idle times mean little.

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
from nanodomino.schedules.placement import Placement, Timetable
from nanodomino.schedules.simulation import simulate, step_time
from nanodomino.timeline.recording import actions, difference, spans_of, union
from nanodomino.zero import ZeroOptimizer

RECORDED_ROUNDS = 3          # at most; for the idle times
TORCHS = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B",
          "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble"}
FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size",
         "pipeline_model_parallel_size", "dtype", "device")


def add_flags(parser):
    # a small vocabulary keeps the stages even: the last one has the head
    add_config_flags(parser, FLAGS, pipeline_model_parallel_size=2, num_layers=8, hidden_size=256,
                     num_attention_heads=8, seq_length=128, vocab_size=256, micro_batch_size=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8], metavar="M",
                        help="microbatches of a step, one after the other (default 2 4 8)")


def processes(flags) -> int:
    stages, least = flags.pipeline_model_parallel_size, min(flags.microbatches)
    require(stages >= 2, f"--pp must be at least 2, but is {stages}: one stage alone has no bubble")
    require(least >= stages,
            f"--microbatches must be at least --pp {stages}, since torch's Schedule1F1B refuses fewer, but one is "
            f"{least}; try --microbatches {stages} {2 * stages}")
    for m in flags.microbatches:
        rounds = m // stages
        require(m % rounds == 0, f"--microbatches {m} must be divisible by the {rounds} rounds that torch's "
                f"interleaved schedules cut it into; try {rounds * stages}")
    configs_for(flags, least)
    return stages


def configs_for(flags, microbatches: int) -> dict[str, Config]:
    """By schedule; each with as few chunks as it can do with."""
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
    """What the sides are made of, on this stage, with one placement of the layers."""
    placement: Placement
    mesh: Mesh
    trace: Trace
    domino: Domino
    optimizer: ZeroOptimizer         # holds Domino's gradients; it updates nothing here
    plain: nn.ModuleList             # the same layers and weights, chunk by chunk


def build(config: Config, mesh: Mesh, trace: Trace) -> Parts:
    model, placement, plain = train.model_builder(config, mesh), config.placement, nn.ModuleList()
    for chunk in range(placement.chunks):
        place = placement.virtual_stage(mesh.pp_rank, chunk)
        layers = stage_layers(config.num_layers, place, placement.last + 1)
        plain.append(Plain(config, layers, place == 0, place == placement.last).load(model.state_dict()))
    if len(plain) > 1 and plain[0].pre_process and plain[-1].post_process:     # one tied matrix, as the model's
        plain[-1].embedding.word_embeddings = plain[0].embedding.word_embeddings
    optimizer = ZeroOptimizer(model, config, mesh)
    return Parts(placement, mesh, trace, Domino(model, config.slices, config.columns, trace=trace), optimizer,
                 plain.to(mesh.device, config.params_dtype))


class DominoSide:
    """train.py's own way through a schedule. step() gives the sum of the losses at the model's end, 0 elsewhere."""

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
    """The same runner over the plain stage, whose tape is autograd's graph."""

    def step(self) -> float:
        config, mesh, plain = self.config, self.parts.mesh, self.parts.plain
        plain.zero_grad(set_to_none=True)
        get_batch = partial(train.get_batch, self.tokens, config, mesh, 0, False)
        return pipeline.run(config.timetable, self, mesh, get_batch, self.forward_step, config.hidden_shape,
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
    """torch's schedules. The losses are summed, so the gradients need no scaling."""

    def __init__(self, config: Config, parts: Parts, tokens):
        super().__init__(config, parts, tokens)
        kind = getattr(pipelining, TORCHS[config.schedule])
        stages = [RecordedStage(parts, chunk) for chunk in range(parts.placement.chunks)]
        self.schedule = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], config.microbatches,
                             self.loss, scale_grads=False)
        # Nobody wants the logits; older versions always put them together.
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
    """torch's stage, with spans named as pipeline.run names its own."""

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
    """Those that can run config's schedule, by name."""
    kinds = {action.kind for row in config.timetable.rows for action in row}
    sides = {"domino": DominoSide}
    if kinds <= {"forward", "backward"}:
        sides["runner"] = RunnerSide
    if config.schedule in TORCHS:
        sides["torch"] = TorchSide
    return {(config.schedule, name): side(config, parts, tokens) for name, side in sides.items()}


# ---- what is measured

def measure(configs: dict[str, Config], parts: dict, trace: Trace, repeats: int) -> list[dict]:
    """With one number of microbatches: what was found of each schedule and side."""
    one = configs["1f1b"]
    device, sides = parts[one.placement].mesh.device, {}
    tokens = RandomTokens(one, device)
    for config in configs.values():
        sides |= sides_of(config, parts[config.placement], tokens)
    loss = check_same_work(one, sides)
    times = compare({key: side.step for key, side in sides.items()}, repeats, device, about=f"m {one.microbatches}, ")
    steps, works = record(sides, trace, device, min(repeats, RECORDED_ROUNDS))
    rows, played = [], {}
    for schedule, name in sides:
        key, rivals = (schedule, name), (schedule, "torch") in sides
        found = idle(configs[schedule].timetable, steps[key], works[key], with_simulation=name != "torch")
        played[key] = found.pop("simulated_step_s")
        rows.append(dict(
            microbatches=one.microbatches, schedule=schedule, side=name, loss=loss, time=times[key],
            speed=ratios(times[schedule, "torch"], times[key]) if rivals else None,
            of_1f1b=ratios(times[key], times["1f1b", name]),
            simulated_of_1f1b=played[key] and played[key] / played["1f1b", name], **found))
    return rows


def check_same_work(config: Config, sides) -> float:
    """One step of each side: the mean loss. Raises UserError if losses differ, or a stage's gradients among the sides
    that place the layers alike."""
    norms, losses, first_of = {}, {}, {}
    for key, side in sides.items():
        loss = side.step() / (config.global_batch_size * config.seq_length)
        norm = sum(gradient.double().square().sum() for gradient in side.gradients()).sqrt().item()
        ranks = gathered((loss, norm))
        losses[key], norms[key] = sum(loss for loss, _ in ranks), [norm for _, norm in ranks]
        alike = first_of.setdefault(side.parts.placement, key)
        pairs = [(losses[key], losses[first := next(iter(sides))]), *zip(norms[key], norms[alike])]
        require(all(abs(mine - expected) <= SAME[config.dtype] * max(abs(expected), 1e-30)     # NaN is not
                    for mine, expected in pairs),
                f"{' '.join(key)} and {' '.join(first)} or {' '.join(alike)} do different work: losses are "
                f"{losses[key]} and {losses[first]}, the stages' gradient norms {norms[key]} and {norms[alike]}; so "
                "their times can't be compared; this is a bug")
    return losses[first]


def record(sides, trace: Trace, device, rounds: int):
    """({key: [round] seconds of a step}, {key: [stage][round] {action: seconds that each took}})."""
    works = {key: [] for key in sides}

    def recorded(key):
        trace.recording = True
        sides[key].step()
        trace.recording = False
        works[key].append(work_of(trace.take()))

    times = compare({key: partial(recorded, key) for key in sides}, rounds, device, about="recorded ")
    return ({key: one.seconds for key, one in times.items()},
            {key: gathered(each[1:]) for key, each in works.items()})


def work_of(events) -> dict[tuple, list[float]]:
    """Seconds of each action, without its waits, by (kind, chunk)."""
    found, waited = defaultdict(list), spans_of(events, "wait")
    for spans in actions(events):
        kind = "pair" if len({span.kind for span in spans}) > 1 else spans[0].kind
        work = difference(union((span.begin, span.end) for span in spans), waited)
        found[kind, spans[0].args.get("chunk", 0)].append(sum(end - begin for begin, end in work) / 1e9)
    return dict(found)


def idle(timetable: Timetable, steps, works, with_simulation=True) -> dict:
    """steps: [round] seconds; works: [stage][round] {(kind, chunk): [seconds]}. Medians over the rounds."""
    busy = [[sum(map(sum, work.values())) for work in stage] for stage in works]
    shares = [[1 - one / step for one, step in zip(stage, steps)] for stage in busy]
    figure = Figure(tuple(statistics.mean(of_round) for of_round in zip(*shares)), most=1.0, size=1.0)
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
    """Of the step, mean over the stages."""
    return 1 - statistics.mean(sum(end - begin for _, begin, end in row) for row in rows) / step_time(rows)


# ---- what came out

def report(config: Config, device, repeats: int, rows: list[dict]):
    """(text, record)."""
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
        table(["m", "schedule", "side", "step: median [least .. most]", "speed", "of 1f1b's", "simulated", "idle",
               "simulated", "even"], lines),
        "the least speed of all m, torch's being 1: "
        + "; ".join(f"{key.replace('_', ' ')} {speed:.2f}" for key, speed in least.items()),
        *kinds_of_work(rows),
        f"farthest from its simulation is the idle time of {farthest['schedule']} {farthest['side']} with "
        f"{farthest['microbatches']} microbatches: {100 * distance(farthest):.1f} points; the stage with most work has "
        f"up to {max(row['imbalance'] for row in rows) - 1:.1%} more than the mean; losses and gradients agree"])
    return text, {"question": "pipeline", "pp": config.pp,
                  **{f"speed_{key}": speed.value for key, speed in least.items()},
                  "rows": [as_json(row) for row in rows], **shape_of(config), "device": device.type, "cores": cores,
                  "shared_cores": shared, "repeats": repeats}


def kinds_of_work(rows: list[dict]) -> list[str]:
    """A line on F, B and W, of the last schedule that does them apart on every stage."""
    for row in reversed(rows):
        parts = [[sum(seconds for name, seconds in stage.items() if name.split()[0] == kind)
                  for kind in ("forward", "input_backward", "weight_backward")] for stage in row["seconds"] or []]
        if parts and all(map(all, parts)):
            words = ", ".join(f"{letter} {1000 * statistics.mean(of_stages):.1f} ms"
                              for letter, of_stages in zip("FBW", zip(*parts)))
            return [f"a microbatch on a stage takes {words}, the mean of the stages, in {row['schedule']} with "
                    f"{row['microbatches']} microbatches"]
    return []


def text_of(value, form: str) -> str:
    return "" if value is None else format(value, form)


def distance(row: dict) -> float:
    """Of idle time from its simulation, in parts of the step."""
    return 0.0 if row["simulated"] is None else abs(row["idle"].median - row["simulated"])


def as_json(row: dict) -> dict:
    figures = row["of_1f1b"].record("of_1f1b") | row["idle"].record("idle")
    figures |= row["speed"].record("speed") if row["speed"] else {"speed": None}
    return {name: value for name, value in row.items() if name != "time"} | {"step_s": row["time"].median} | figures
