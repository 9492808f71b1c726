"""Are stages idle for as long as the schedule predicts, and are the schedules as fast as torch's?

A step is forward and backward of m microbatches on p stages, without the optimizer. For every schedule and several m,
these implementations, called sides, run in turn with the same weights and tokens. Losses and gradients must agree:

    domino    nanodomino as it trains: pipeline.run with Domino's stages
    torch     torch.distributed.pipelining with stages of plain_model.py, for the schedules that torch also has

The columns of the table:

    speed       torch's time / domino's time
    of 1f1b's   this schedule's time / 1F1B's time
    idle        the share of the step's time in which a stage does not compute, averaged over the stages, each of
                which records when it computes
    simulated   there are two such columns. Each predicts the column to its left by a simulation. The simulation takes
                the recorded duration of each kind of action (F, B, I, W, pair) on each stage; messages take no time

torch has no class for zb-h1, but its ScheduleInterleavedZeroBubble with one chunk per stage is that schedule.

On CPUs each stage has one core. The core also handles the stage's network traffic, which makes actions longer. If there
are fewer cores than stages, a stage that waits leaves its core to another stage, and idle times mean little.

    python bench.py pipeline                                        two stages, m of 2, 4 and 8
    python bench.py pipeline --pp 4 --microbatches 4 8 16
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import mean, median

import torch.nn.functional as F
from torch import nn

import train
from benchmarks.plain_model import Plain
from benchmarks.runner import (Figure, RandomTokens, Times, Training, about, add_config_flags, config_here, describe,
                               entries, gathered, in_turn, join, ratios, require_same_work, table, timed)
from nanodomino.comm.trace import Trace
from nanodomino.errors import counted, require
from nanodomino.mesh import Mesh
from nanodomino.pictures.merged_trace import actions, difference, spans_of, union
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import Timetable, simulate, stage_layers, step_time
from nanodomino.settings.config import Config

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
    stages = flags.pipeline_model_parallel_size
    require(stages >= 2, f"--pp must be at least 2, but is {stages} (a single stage is never idle); try 2")
    require(all(m > 0 and m % stages == 0 for m in flags.microbatches),
            f"--microbatches must be multiples of --pp {stages}, because torch's interleaved schedules run rounds of "
            f"so many; try --microbatches {stages} {2 * stages}")
    # {schedule: its Config} for each number of microbatches, with as few chunks per stage as the schedule allows
    flags.configs = [{name: config_here(flags, stages, tensor_model_parallel_size=1, data_parallel_size=1, slices=1,
                                        schedule=name, compile=False, global_batch_size=flags.micro_batch_size * m)
                      for name in SCHEDULES} for m in flags.microbatches]
    return stages


def answer(flags, launch):
    config, mesh = join(flags.configs[0]["1f1b"], launch, one_core=True)
    trace = Trace(mesh.device)
    stages = {placement: build(config, mesh, trace)
              for placement, config in {config.placement: config for config in flags.configs[0].values()}.items()}
    return report(config, [row for configs in flags.configs for row in measure(configs, stages, trace, flags.repeats)])


# ---- the sides

def build(config: Config, mesh: Mesh, trace: Trace) -> tuple[Training, nn.ModuleList]:
    """Build this rank's stage for the placement of config's schedule: as Domino, and as one Plain module per chunk,
    with the same layers and weights. Sides and schedules that place the layers alike share them."""
    training, placement, plain = Training(config, mesh, trace=trace), config.placement, nn.ModuleList()
    for chunk in range(placement.chunks):
        place = placement.virtual_stage(mesh.pp_rank, chunk)
        layers = stage_layers(config.num_layers, place, placement.last + 1, config.mtp_num_layers)
        plain.append(Plain(config, layers, place == 0, place == placement.last).load(training.model.state_dict()))
    if len(plain) > 1 and plain[0].pre_process and plain[-1].post_process:     # tied, as in the model
        plain[-1].embedding.word_embeddings = plain[0].embedding.word_embeddings
    return training, plain.to(mesh.device, config.params_dtype)


@dataclass
class DominoSide:
    """Runs a schedule as train.py does. step() returns the sum of the losses if this stage has the head, otherwise 0.
    gradients() returns this stage's gradients after a step."""
    config: Config
    training: Training
    plain: nn.ModuleList
    tokens: RandomTokens

    def step(self) -> float:
        self.training.optimizer.zero_grad()
        totals = train.run_schedule(self.config.timetable, 0, self.training.stage, self.tokens, self.config,
                                    self.training.mesh)
        return totals.loss_sum.item()

    def gradients(self):
        return [bucket.main_grad for bucket in self.training.optimizer.buckets]


@dataclass
class TorchSide(DominoSide):
    """Runs a schedule of torch.distributed.pipelining. The loss is a sum over tokens, as on the other sides, so torch
    must not divide the gradients by the number of microbatches (scale_grads=False)."""

    def __post_init__(self):
        # Imports torch's compiler, which takes seconds: not needed for --help or a refusal.
        from torch.distributed import pipelining
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti

        config, mesh, placement = self.config, self.training.mesh, self.config.placement
        schedule_class = getattr(pipelining, TORCH_CLASSES[config.schedule])
        stages = [pipelining.PipelineStage(part, placement.virtual_stage(mesh.pp_rank, chunk), placement.last + 1,
                                           mesh.device) for chunk, part in enumerate(self.plain)]
        self.schedule = schedule_class(
            stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0], config.microbatches,
            lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"),
            scale_grads=False)

    def gradients(self):
        return [weight.grad for weight in self.plain.parameters()]

    def step(self) -> float:
        tokens, plain, losses = self.tokens.tokens.to(self.tokens.device), self.plain, []
        plain.zero_grad(set_to_none=True)
        # without return_outputs=False torch also concatenates all logits, which costs time
        self.schedule.step(*([tokens[:, :-1]] if plain[0].pre_process else []), losses=losses, return_outputs=False,
                           target=tokens[:, 1:] if plain[-1].post_process else None)
        return sum(losses).item() if losses else 0.0


# ---- measurements

def measure(configs: dict[str, Config], stages: dict, trace: Trace, repeats: int) -> list[dict]:
    """Compare all schedules for one number of microbatches. Return a dict for each schedule.

    configs: {schedule: Config}; stages: {placement: what build() returns}."""
    first = configs["1f1b"]
    device = stages[first.placement][0].mesh.device
    tokens = RandomTokens(first, device)
    sides = {(name, kind): side(config, *stages[config.placement], tokens) for kind, side in (
        ("domino", DominoSide), ("torch", TorchSide)) for name, config in configs.items()
        if kind == "domino" or name in TORCH_CLASSES}
    loss = check_same_work(first, sides)
    rounds = in_turn({key: side.step for key, side in sides.items()}, repeats,
                     lambda step: (timed(device, step), gathered(work_of(trace.take()))))
    times = {key: Times(tuple(seconds for seconds, _ in found)) for key, found in rounds.items()}
    found = {name: idle(config.timetable, *zip(*rounds[name, "domino"])) for name, config in configs.items()}
    return [dict(microbatches=first.microbatches, schedule=name, loss=loss, step=times[name, "domino"],
                 speed=ratios(times[name, "torch"], times[name, "domino"]) if name in TORCH_CLASSES else None,
                 of_1f1b=ratios(times[name, "domino"], times["1f1b", "domino"]),
                 simulated_of_1f1b=found[name]["simulated_step_s"] / found["1f1b"]["simulated_step_s"], **found[name])
            for name in configs]


def check_same_work(config: Config, sides) -> float:
    """Run a step of each side and return the mean loss per token. Raises UserError if the losses of two sides differ.

    With the same placement a stage has the same layers on two sides. Then its gradient norms must agree, too."""
    losses, norms = {}, defaultdict(dict)
    for key, side in sides.items():
        loss = side.step() / (config.global_batch_size * config.seq_length)
        norm = sum(gradient.double().square().sum() for gradient in side.gradients()).sqrt().item()
        losses[" ".join(key)] = [sum(gathered(loss))]
        norms[side.config.placement][" ".join(key)] = gathered(norm)
    for what, values in (("loss", losses), *(("gradient norms", alike) for alike in norms.values())):
        require_same_work(config, what, values)
    return next(iter(losses.values()))[0]


def work_of(events) -> dict[tuple, list[float]]:
    """Return {(kind, chunk): seconds of each such action}, without the time in which the action waits."""
    found, waited = defaultdict(list), spans_of(events, "wait")
    for spans in actions(events):
        kind = "pair" if len({span.kind for span in spans}) > 1 else spans[0].kind
        work = difference(union((span.begin, span.end) for span in spans), waited)
        found[kind, spans[0].args.get("chunk", 0)].append(sum(end - begin for begin, end in work) / 1e9)
    return dict(found)


def idle(timetable: Timetable, steps, works) -> dict:
    """Return two shares of time for which the stages of a schedule idle: measured and simulated.

    steps: the seconds of each recorded round; works: for each round and stage what work_of() returned."""
    shares = [mean(1 - sum(map(sum, work.values())) / step for work in stages) for step, stages in zip(steps, works)]
    lengths = [{key: median(mean(work[key]) for work in stage) for key in stage[0]} for stage in zip(*works)]
    rows = simulate(timetable, lambda stage, action: lengths[stage][action.kind, action.halves[0].chunk])
    busy = mean(sum(end - begin for _, begin, end in row) for row in rows)
    return dict(idle=Figure(tuple(shares), most=1.0, size=1.0), simulated=1 - busy / step_time(rows),
                simulated_step_s=step_time(rows))


# ---- the report

def report(config: Config, rows: list[dict]):
    """Return (text, record). rows: measure()'s dicts for all numbers of microbatches."""
    least = {name: min((row["speed"] for row in rows if row["schedule"] == name), key=lambda speed: speed.median)
             for name in TORCH_CLASSES}
    apart, farthest = max(((abs(row["idle"].median - row["simulated"]), row) for row in rows), key=lambda pair: pair[0])
    text = "\n".join([
        f"{describe(config)}; forward and backward of m microbatches",
        table(["m", "schedule", "step: median [min .. max]", "speed", "of 1f1b's", "simulated", "idle", "simulated"],
              [[row["microbatches"], row["schedule"], row["step"], row["speed"] or "", row["of_1f1b"],
                f"{row['simulated_of_1f1b']:.2f}", f"{row['idle']:.1%}", f"{row['simulated']:.1%}"] for row in rows]),
        "lowest speed over all m, relative to torch's: "
        + "; ".join(f"{name} {speed}" for name, speed in least.items()),
        f"measured and simulated idle share differ by at most {100 * apart:.1f} percentage points "
        f"({farthest['schedule']}, {counted(farthest['microbatches'], 'microbatch')}); losses and gradients agree"])
    return text, {**{f"speed_{name}": speed.value for name, speed in least.items()}, **about(config),
                  "rows": [*map(entries, rows)]}
