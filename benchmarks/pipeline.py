"""Are stages idle for as long as the schedule predicts, and are the schedules as fast as torch's?

A step is forward and backward of m microbatches on p stages, without the optimizer. For every schedule and several m,
these implementations, called sides, run in turn with the same weights and tokens. Losses and gradients must agree:

    domino    nanodomino as it trains: pipeline.run with Domino's stages
    runner    pipeline.run with stages of plain torch.nn and autograd (plain.py). Their backward cannot be split or take
              turns with a forward, so this side runs only the schedules that need neither
    torch     torch.distributed.pipelining with the same plain stages, for the schedules that torch also has

So runner versus torch compares the code that runs a schedule and exchanges messages; domino versus runner compares the
stages. The columns of the table:

    speed       torch's time / this side's time
    of 1f1b's   this schedule's time / 1F1B's time on the same side
    idle        the share of the step's time in which a stage does not compute, averaged over the stages. It is measured
                in extra rounds, in which each stage records when it computes
    simulated   there are two such columns. Each predicts the column to its left by a simulation. The simulation takes
                the recorded duration of each kind of action (F, B, I, W, pair) on each stage; messages take no time
    even        the idle share if stages are equal and F, I and W take equally long: (p - 1)/(m + p - 1) for 1F1B and
                GPipe. (2104.04473, section 2.2, divides by the ideal time instead of the step's and gets (p - 1)/m)

The torch sides are not simulated, because torch may order the actions of a schedule differently. torch has no class for
zb-h1, but its ScheduleInterleavedZeroBubble with one chunk per stage is that schedule.

On CPUs each stage has one core. The core also handles the stage's network traffic, which makes actions longer. If there
are fewer cores than stages, a stage that waits leaves its core to another stage, and idle times mean little.

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

import train
from benchmarks.common import (SAME, Figure, RandomTokens, add_config_flags, bind_to_one_core, compare, config_here,
                               gathered, ratio_text, ratios, shape_of, table)
from benchmarks.plain import Plain
from nanodomino import pipeline
from nanodomino.comm.trace import Trace
from nanodomino.comm.world import find_device, start_world
from nanodomino.config.config import Config
from nanodomino.domino import Domino
from nanodomino.errors import counted, require
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.model import stage_layers
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement_and_messages import Placement, Timetable
from nanodomino.schedules.simulation import simulate, step_time
from nanodomino.timeline.merged_trace import actions, difference, spans_of, union
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
    """Holds this rank's stage twice, as Domino and as plain modules, with the same layers and weights.

    Sides and schedules that place the layers alike share one Parts.
    """
    placement: Placement
    mesh: Mesh
    trace: Trace
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
    return Parts(placement, mesh, trace, Domino(model, config.slices, config.columns, trace=trace), optimizer,
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


class PlainSide(DominoSide):
    """Runs the plain stage; the base class of RunnerSide and TorchSide."""

    def gradients(self):
        return [weight.grad for weight in self.parts.plain.parameters()]


class RunnerSide(PlainSide):
    """Runs the plain stage with pipeline.run. The tape of a forward is (input, output), the ends of autograd's graph.

    pipeline.run expects generators, so forward_step() and backward() contain a yield that is never reached.
    """

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
    """Runs a schedule of torch.distributed.pipelining. The loss is a sum over tokens, as on the other sides, so torch
    must not divide the gradients by the number of microbatches (scale_grads=False).
    """

    def __init__(self, config: Config, parts: Parts, tokens):
        # Imports torch's compiler, which takes seconds: not needed for --help or a refusal.
        from torch.distributed import pipelining
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti

        super().__init__(config, parts, tokens)
        schedule_class = getattr(pipelining, TORCH_CLASSES[config.schedule])
        stages = [recorded(pipelining.PipelineStage(part, parts.placement.virtual_stage(parts.mesh.pp_rank, chunk),
                                                    parts.placement.last + 1, parts.mesh.device), parts.trace)
                  for chunk, part in enumerate(parts.plain)]
        several_chunks = issubclass(schedule_class, PipelineScheduleMulti)
        self.schedule = schedule_class(stages if several_chunks else stages[0], config.microbatches, self.loss,
                                       scale_grads=False)
        # Without this option torch concatenates all logits, which costs time; older versions lack the option.
        names = inspect.signature(self.schedule.step).parameters
        self.options = {"return_outputs": False} if "return_outputs" in names else {}

    def loss(self, logits, labels):
        with self.parts.trace.span("forward"):
            return loss_sum(logits, labels)

    def step(self) -> float:
        tokens, plain, losses = self.tokens.tokens.to(self.tokens.device), self.parts.plain, []
        plain.zero_grad(set_to_none=True)
        self.schedule.step(*([tokens[:, :-1]] if plain[0].pre_process else []), losses=losses,
                           target=tokens[:, 1:] if plain[-1].post_process else None, **self.options)
        return sum(losses).item() if losses else 0.0


def recorded(stage, trace: Trace):
    """Make torch's PipelineStage record the same kinds of spans as pipeline.run, and return it."""
    def in_span(kind_of, method):
        def recording(*arguments, **options):
            with trace.span(kind_of(options)):
                return method(*arguments, **options)
        return recording

    stage.forward_one_chunk = in_span(lambda options: "forward", stage.forward_one_chunk)
    stage.backward_one_chunk = in_span(
        lambda options: "backward" if options.get("full_backward", True) else "input_backward",
        stage.backward_one_chunk)
    stage.backward_weight_one_chunk = in_span(lambda options: "weight_backward", stage.backward_weight_one_chunk)
    return stage


def loss_sum(logits, labels):
    """Return the sum of the losses of logits [b, s, v] and labels [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def sides_of(config: Config, parts: Parts, tokens) -> dict:
    """Return {(schedule, name): side} for those sides (domino, runner, torch) that can run config's schedule."""
    sides, kinds = {"domino": DominoSide}, {action.kind for row in config.timetable.rows for action in row}
    if kinds <= {"forward", "backward"}:
        sides["runner"] = RunnerSide
    if config.schedule in TORCH_CLASSES:
        sides["torch"] = TorchSide
    return {(config.schedule, name): side(config, parts, tokens) for name, side in sides.items()}


# ---- measurements

def measure(configs: dict[str, Config], parts: dict, trace: Trace, repeats: int) -> list[dict]:
    """Compare all schedules and sides for one number of microbatches. Return a dict for each schedule and side.

    configs: {schedule: Config}; parts: {placement: Parts}.
    """
    first = configs["1f1b"]
    device, sides = parts[first.placement].mesh.device, {}
    tokens = RandomTokens(first, device)
    for config in configs.values():
        sides |= sides_of(config, parts[config.placement], tokens)
    loss = check_same_work(first, sides)
    times = compare({key: side.step for key, side in sides.items()}, repeats, device, about=f"m {first.microbatches}, ")
    steps, actions_of = record(sides, trace, device, min(repeats, RECORDED_ROUNDS))
    rows, simulated = [], {}
    for schedule, name in sides:
        key, torch_has_it = (schedule, name), (schedule, "torch") in sides
        found = idle(configs[schedule].timetable, steps[key], actions_of[key], with_simulation=name != "torch")
        simulated[key] = found.pop("simulated_step_s")
        rows.append(dict(
            microbatches=first.microbatches, schedule=schedule, side=name, loss=loss, time=times[key],
            speed=ratios(times[schedule, "torch"], times[key]) if torch_has_it else None,
            of_1f1b=ratios(times[key], times["1f1b", name]),
            simulated_of_1f1b=simulated[key] and simulated[key] / simulated["1f1b", name], **found))
    return rows


def check_same_work(config: Config, sides) -> float:
    """Run a step of each side and return the mean loss per token.

    Raises UserError if the losses of two sides differ, or a stage's gradient norms on two sides with the same
    placement. (With another placement the stage has other layers.)
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
                f"{' '.join(key)} has the loss {losses[key]} and the gradient norms {norms[key]}, but must have the "
                f"loss of {' '.join(first)}, {losses[first]}, and the gradient norms of {' '.join(alike)}, "
                f"{norms[alike]}, so the times can't be compared; this is a bug")
    return losses[first]


def record(sides, trace: Trace, device, rounds: int):
    """Run extra rounds with recording on. Return two dicts with the keys of `sides`:

        the seconds of each round's step
        for each stage and round the durations of its actions, as work_of() returns them
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


def idle(timetable: Timetable, steps, works, with_simulation=True) -> dict:
    """Return the figures on idle time for one side's row: idle shares measured, simulated, and with equal stages.

    steps: the seconds of each recorded round; works: for each stage and round what work_of() returned.
    """
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
    """Return the share of a simulated step in which a stage is idle, averaged over the stages.

    rows: the result of simulate().
    """
    return 1 - statistics.mean(sum(end - begin for _, begin, end in row) for row in rows) / step_time(rows)


# ---- the report

def report(config: Config, device, repeats: int, rows: list[dict]):
    """Return (text, record). rows: measure()'s dicts for all numbers of microbatches."""
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
        "lowest speed over all m, relative to torch's: "
        + "; ".join(f"{key.replace('_', ' ')} {speed:.2f}" for key, speed in least.items()),
        *line_on_durations(rows),
        f"measured and simulated idle share differ by at most {100 * distance(farthest):.1f} percentage points "
        f"({farthest['schedule']} {farthest['side']}, {counted(farthest['microbatches'], 'microbatch')}); the busiest "
        f"stage computes up to {max(row['imbalance'] for row in rows) - 1:.1%} longer than the average stage; losses "
        "and gradients agree"])
    return text, {"question": "pipeline", "pp": config.pp,
                  **{f"speed_{key}": speed.value for key, speed in least.items()},
                  "rows": [as_json(row) for row in rows], **shape_of(config), "device": device.type, "cores": cores,
                  "shared_cores": shared, "repeats": repeats}


def line_on_durations(rows: list[dict]) -> list[str]:
    """Return a line with the durations of F, I and W, taken from the last row in which every stage ran all three.
    Return [] if there is no such row.
    """
    for row in reversed(rows):
        parts = [[sum(seconds for name, seconds in stage.items() if name.split()[0] == kind)
                  for kind in ("forward", "input_backward", "weight_backward")] for stage in row["seconds"] or []]
        if parts and all(map(all, parts)):
            words = ", ".join(f"{letter} {1000 * statistics.mean(of_stages):.1f} ms"
                              for letter, of_stages in zip("FIW", zip(*parts)))
            return [f"for one microbatch an average stage needs {words} ({row['schedule']}, {row['microbatches']} "
                    "microbatches)"]
    return []


def text_of(value, form: str) -> str:
    """Format a number, or return '' for None."""
    return "" if value is None else format(value, form)


def distance(row: dict) -> float:
    """Return the absolute difference between the measured and the simulated idle share; 0 if not simulated."""
    return 0.0 if row["simulated"] is None else abs(row["idle"].median - row["simulated"])


def as_json(row: dict) -> dict:
    """Return a row for the JSON line, with each Figure replaced by its value and its spread."""
    figures = row["of_1f1b"].record("of_1f1b") | row["idle"].record("idle")
    figures |= row["speed"].record("speed") if row["speed"] else {"speed": None}
    return {name: value for name, value in row.items() if name != "time"} | {"step_s": row["time"].median} | figures
