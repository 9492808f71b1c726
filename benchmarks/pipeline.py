"""Is the bubble what the formula says, and is 1F1B as fast as torch's?

One step is the forward and the backward of m microbatches over p stages, without an optimizer. In turn, within one run,
from the same weights and on the same tokens, each with 1F1B and with GPipe, for several m:

    domino    nanodomino as it trains: pipeline.run over a list of actions, the stages are Domino's
    runner    pipeline.run again, with stages of plain torch.nn (plain.py) and autograd
    torch     torch.distributed.pipelining's Schedule1F1B and ScheduleGPipe, with the very same plain stages

So runner beside torch compares schedules and messages alone, domino beside runner the stages alone. All must find the
same loss, and each stage the same gradients, or there is no comparison.

    speed      torch's time / this one's
    idle       the part of the step in which a stage neither forwards nor backwards a microbatch, mean over the stages;
               from a few more rounds, in which that is recorded
    formula    (p - 1)/(m + p - 1) of the step, which is (p - 1)/m of the ideal time (2104.04473, section 2.2)
    uneven     the same for the stages as they are: of work t for a microbatch, the step takes sum(t) + (m - 1) max(t)

On CPUs each stage has one core, which also does the network's work: it shows as work that takes longer. Where there are
fewer cores than stages, a stage that waits lends its core to one that works, and idle times mean little.

    python bench.py pipeline                                        two stages, m of 2, 4 and 8
    python bench.py pipeline --pp 4 --microbatches 4 8 16
"""

import inspect
import os
import statistics
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import train
from benchmarks.common import (SAME, Figure, RandomTokens, add_config_flags, bind_to_one_core, compare, config_of,
                               gathered, ratio_text, ratios, shape_of, table)
from benchmarks.plain import Plain
from nanodomino import pipeline, schedules
from nanodomino.config import Config
from nanodomino.domino import Domino
from nanodomino.mesh import Mesh, find_device, make_mesh, start_world
from nanodomino.model import stage_layers
from nanodomino.settings import require
from nanodomino.trace import Trace
from nanodomino.zero import ZeroOptimizer

RECORDED_ROUNDS = 3          # at most; for the idle times
TORCHS = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
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
    config_for(flags, least)
    return stages


def config_for(flags, microbatches: int) -> Config:
    return config_of(flags, flags.pipeline_model_parallel_size, global_batch_size=flags.micro_batch_size * microbatches,
                     tensor_model_parallel_size=1, data_parallel_size=1, slices=1)


def answer(flags, place):
    configs = [config_for(flags, microbatches) for microbatches in flags.microbatches]
    device = find_device(configs[0], place)
    bind_to_one_core(device)
    start_world(place, device)
    parts = build(configs[0], make_mesh(configs[0].pp, 1, 1, device))
    rows = [row for config in configs for row in measure(config, parts, flags.repeats)]
    return report(configs[0], device, flags.repeats, rows)


# ---- the sides

@dataclass
class Parts:
    """What the sides are made of, on this stage."""
    mesh: Mesh
    trace: Trace
    domino: Domino
    optimizer: ZeroOptimizer         # holds Domino's gradients; it updates nothing here
    plain: Plain                     # the same layers and weights


def build(config: Config, mesh: Mesh) -> Parts:
    trace, model = Trace(mesh.device, recording=False), train.model_builder(config, mesh)
    layers = stage_layers(config.num_layers, mesh.pp_rank, mesh.pp)
    plain = Plain(config, layers, mesh.is_first_stage, mesh.is_last_stage).load(model.state_dict())
    optimizer = ZeroOptimizer(model, config, mesh)
    return Parts(mesh, trace, Domino(model, config.slices, config.columns, trace=trace), optimizer,
                 plain.to(mesh.device, config.params_dtype))


class DominoSide:
    """train.py's own way through a schedule. step() gives the sum of the losses on the last stage, 0 on the others."""

    def __init__(self, schedule, config, parts, tokens):
        self.config, self.parts, self.tokens = config, parts, tokens
        self.actions = schedules.SCHEDULES[schedule](parts.mesh.pp_rank, config.pp, config.microbatches)

    def step(self) -> float:
        self.parts.optimizer.zero_grad()
        totals = train.run_actions(self.actions, 0, self.parts.domino, self.tokens, self.config, self.parts.mesh)
        return totals.loss_sum.item()

    def gradients(self):
        return [bucket.main_grad for bucket in self.parts.optimizer.buckets]


class RunnerSide(DominoSide):
    """The same runner over the plain stage, whose tape is autograd's graph."""

    def step(self) -> float:
        config, mesh, plain = self.config, self.parts.mesh, self.parts.plain
        plain.zero_grad(set_to_none=True)
        get_batch = partial(train.get_batch, self.tokens, config, mesh, 0, False)
        shape = config.micro_batch_size, config.seq_length, config.hidden_size
        return pipeline.run(self.actions, self, mesh, get_batch, self.forward_step, shape, config.params_dtype,
                            trace=self.parts.trace).loss_sum.item()

    def forward_step(self, batch, stage, hidden, training):
        x = batch.tokens if hidden is None else hidden.requires_grad_()
        output = self.parts.plain(x)
        return output.detach(), (x, output), lambda logits: (loss_sum(logits, batch.labels), batch.labels.numel())

    def backward(self, tape, gradient, on_final):
        x, output = tape
        output.backward(gradient)
        return x.grad

    def gradients(self):
        return [weight.grad for weight in self.parts.plain.parameters()]


class TorchSide:
    """torch's schedules. The losses are summed, so the gradients need no scaling."""

    def __init__(self, schedule, config, parts, tokens):
        self.parts, self.tokens = parts, tokens.tokens
        self.schedule = TORCHS[schedule](RecordedStage(parts), config.microbatches, self.loss, scale_grads=False)
        # Nobody wants the logits; older versions always put them together.
        names = inspect.signature(self.schedule.step).parameters
        self.options = {"return_outputs": False} if "return_outputs" in names else {}

    def loss(self, logits, labels):
        with self.parts.trace.span("forward"):
            return loss_sum(logits, labels)

    def step(self) -> float:
        mesh, losses = self.parts.mesh, []
        self.parts.plain.zero_grad(set_to_none=True)
        self.schedule.step(*([self.tokens[:, :-1]] if mesh.is_first_stage else []), losses=losses,
                           target=self.tokens[:, 1:] if mesh.is_last_stage else None, **self.options)
        return sum(losses).item() if losses else 0.0

    def gradients(self):
        return [weight.grad for weight in self.parts.plain.parameters()]


class RecordedStage(PipelineStage):
    """torch's stage, with spans named as pipeline.run names its own."""

    def __init__(self, parts: Parts):
        super().__init__(parts.plain, parts.mesh.pp_rank, parts.mesh.pp, parts.mesh.device)
        self.trace = parts.trace

    def forward_one_chunk(self, *arguments, **options):
        with self.trace.span("forward"):
            return super().forward_one_chunk(*arguments, **options)

    def backward_one_chunk(self, *arguments, **options):
        with self.trace.span("backward"):
            return super().backward_one_chunk(*arguments, **options)


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


SIDES = {"domino": DominoSide, "runner": RunnerSide, "torch": TorchSide}


# ---- what is measured

def measure(config: Config, parts: Parts, repeats: int) -> list[dict]:
    """With config's number of microbatches: what was found of each schedule and side."""
    tokens = RandomTokens(config, parts.mesh.device)
    sides = {(schedule, name): side(schedule, config, parts, tokens)
             for schedule in TORCHS for name, side in SIDES.items()}
    loss = check_same_work(config, sides)
    times = compare({key: side.step for key, side in sides.items()}, repeats, parts.mesh.device,
                    about=f"m {config.microbatches}, ")
    steps, busy = record(sides, parts, min(repeats, RECORDED_ROUNDS))
    return [dict(microbatches=config.microbatches, schedule=schedule, side=name, loss=loss, time=times[schedule, name],
                 speed=ratios(times[schedule, "torch"], times[schedule, name]),
                 **idle(config, steps[schedule, name], busy[schedule, name])) for schedule, name in sides]


def check_same_work(config: Config, sides) -> float:
    """One step of each side: the mean loss. Raises UserError if losses or a stage's gradients differ."""
    found = {}
    for key, side in sides.items():
        loss = side.step() / (config.global_batch_size * config.seq_length)
        norm = sum(gradient.double().square().sum() for gradient in side.gradients()).sqrt().item()
        found[key] = gathered((loss, norm))
    first, *others = found
    for other in others:
        differences = [abs(one - right) / max(abs(right), 1e-30) for mine, expected in zip(found[other], found[first])
                       for one, right in zip(mine, expected)]
        require(all(difference <= SAME[config.dtype] for difference in differences),     # NaN is not
                f"{' '.join(other)} and {' '.join(first)} do different work: (loss, gradient norm) of the stages are "
                f"{found[other]} and {found[first]}; so their times can't be compared; this is a bug")
    return found[first][-1][0]


def record(sides, parts: Parts, rounds: int):
    """({key: [round] seconds of a step}, {key: [stage][round] seconds of work in it})."""
    busy = {key: [] for key in sides}

    def recorded(key):
        parts.trace.recording = True
        sides[key].step()
        parts.trace.recording = False
        work = [event for event in parts.trace.take() if event.kind in ("forward", "backward")]
        busy[key].append(sum(event.end - event.begin for event in work) / 1e9)

    times = compare({key: partial(recorded, key) for key in sides}, rounds, parts.mesh.device, about="recorded ")
    return ({key: one.seconds for key, one in times.items()},
            {key: gathered(seconds[1:]) for key, seconds in busy.items()})


def idle(config: Config, steps, busy) -> dict:
    """steps: [round] seconds; busy: [stage][round] seconds. Medians over the rounds."""
    p, m = config.pp, config.microbatches
    shares = [[1 - work / step for work, step in zip(stage, steps)] for stage in busy]
    means = [statistics.mean(of_round) for of_round in zip(*shares)]
    each = [statistics.median(stage) / m for stage in busy]                    # seconds of a microbatch's work
    idle = Figure(tuple(means), most=1.0, size=1.0)
    return dict(idle=idle, idle_of_ideal=None if idle.value is None else idle.value / (1 - idle.value),
                idle_of_stages=[statistics.median(stage) for stage in shares],
                formula=(p - 1) / (m + p - 1), formula_of_ideal=(p - 1) / m,
                uneven=1 - m * statistics.mean(each) / (sum(each) + (m - 1) * max(each)),
                imbalance=max(each) / statistics.mean(each))


# ---- what came out

def report(config: Config, device, repeats: int, rows: list[dict]):
    """(text, record)."""
    cores = os.cpu_count() or 1
    shared = device.type == "cpu" and config.pp > cores
    lines = [[row["microbatches"], row["schedule"], row["side"], row["time"],
              "" if row["side"] == "torch" else ratio_text(row["speed"]),
              f"{row['idle']:.1%}", f"{row['formula']:.1%}", f"{row['uneven']:.1%}"] for row in rows]
    least = {f"{schedule}_{name}": min((row["speed"] for row in rows
                                        if (row["schedule"], row["side"]) == (schedule, name)),
                                       key=lambda speed: speed.median)
             for schedule in TORCHS for name in ("runner", "domino")}
    text = "\n".join([
        f"{config.pp} stages on {device.type}, {cores} cores{', fewer than stages' if shared else ''}; "
        f"{config.num_layers} layers of {config.hidden_size}, microbatches of {config.micro_batch_size} x "
        f"{config.seq_length}, vocabulary {config.vocab_size}, {config.dtype}; forward and backward of m microbatches",
        table(["m", "schedule", "side", "step: median [least .. most]", "speed", "idle", "formula", "uneven"], lines),
        "the least speed of all m, torch's being 1: "
        + "; ".join(f"{name} {least[f'{name}_runner']:.2f} on the same stages, {least[f'{name}_domino']:.2f} with "
                    "Domino's" for name in TORCHS),
        f"the stage with most work has up to {max(row['imbalance'] for row in rows) - 1:.1%} more than the mean; "
        "losses and gradients agree"])
    return text, {"question": "pipeline", "pp": config.pp,
                  **{f"speed_{name}": speed.value for name, speed in least.items()},
                  "rows": [as_json(row) for row in rows], **shape_of(config), "device": device.type, "cores": cores,
                  "shared_cores": shared, "repeats": repeats}


def as_json(row: dict) -> dict:
    figures = row["speed"].record("speed") | row["idle"].record("idle")
    return {name: value for name, value in row.items() if name != "time"} | {"step_s": row["time"].median} | figures
