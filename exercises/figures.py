"""The numbers and pictures of the playground's pages, drawn by the project's own code.

    grid(..)       mesh.py: the ranks of each group, and what a rank holds
    schedule(..)   schedules/: the simulated schedule, as the timeline of a run (pictures/drawing.py)
    domino(..)     benchmarks/ideal_wire.py: one rank's step on an ideal wire, as a timeline
    memory(..)     estimate/: the bytes of a rank of each stage
    search(..)     benchmarks/plan_search.py: the fastest layouts

Each function returns a Figure, or raises UserError if the settings break a rule. One figure is computed at a time,
because the browser's sessions are threads of one process, which can be in only one world. Figures are remembered.
"""

import threading
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps

import torch
import torch.distributed as dist

from benchmarks import plan
from benchmarks.ideal_wire import IdealStage, MatmulClock, log_of, pipeline_step
from benchmarks.runner import bytes_text, parse, seconds_text
from nanodomino.comm.trace import Event, Trace
from nanodomino.domino import Domino
from nanodomino.errors import counted
from nanodomino.estimate.formulas import GPUS, state_bytes_per_parameter
from nanodomino.mesh import lay_out
from nanodomino.model import meta_stage
from nanodomino.pictures.drawing import svg, timeline
from nanodomino.pictures.merged_trace import COLLECTIVES, Recording
from nanodomino.schedules import simulation
from nanodomino.schedules.simulation import describe_stage, message_sent
from nanodomino.settings.config import Config
from nanodomino.settings.presets import PUBLISHED_VOCABULARIES

LOCK = threading.RLock()
UNIT = 1e6                   # nanoseconds: a unit of a schedule's time is drawn as a millisecond
# The colours of ranks and of the parts of a GPU's memory, and what a rank does with its partners.
GROUPS = {"this rank": ("#ee8866", ""), "tp": ("#f3df6b", "sums activations with"),
          "pp": ("#9bd1f4", "exchanges activations and their gradients in a pipeline with"),
          "dp": ("#8cc63f", "sums gradients with"), "cp": ("#d0759c", "shares the tokens of each sample with"),
          "ep": ("#c8a2d8", "exchanges tokens for experts with")}
MEMORY = dict(zip(plan.MEMORY_TERMS, ("#9bd1f4", "#4fae8b", "#f3df6b", "#e69f00", "#d0759c", "#b5b5b5")))


@dataclass(frozen=True)
class Figure:
    """Holds a picture, the numbers that it shows, and words about them in Markdown."""
    svg: str
    numbers: dict
    words: str


def remembered(function):
    """Compute one figure at a time, and each only once."""
    found = lru_cache(maxsize=512)(function)

    @wraps(function)
    def locked(*arguments, **options):
        with LOCK:
            torch.set_num_threads(1)             # the tensors are so small that more threads only wait for each other
            return found(*arguments, **options)
    return locked


# ---- the grid

@remembered
def grid(world=8, tp=2, pp=2, cp=1, ep=1, rank=0) -> Figure:
    """Draw all ranks, with the partners of one of them. numbers: {group: its other ranks}, "rank", "parameters".

    The model is `nano`; with ep above 1 its layers have 8 experts.
    """
    experts = dict(num_experts=8, expert_model_parallel_size=ep, disable_bias_linear=True) if ep > 1 else {}
    config = Config(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
                    global_batch_size=64, micro_batch_size=1, **experts).resolve(world).with_vocabulary(256)
    sizes = {"pp": pp, "dp": config.dp, **config.inner_axes, "tp": tp}
    mesh, _ = lay_out(min(rank, world - 1), sizes, torch.device("meta"), config.mesh_options["more_groups"])
    partners = {name: ranks for name in GROUPS
                if (ranks := [one for one in mesh.rows.get(name, ()) if one != mesh.rank])}
    held = sum(weight.numel() for weight in meta_stage(config, mesh.pp_rank).parameters())
    stages = [describe_stage(config, stage) for stage in range(pp)]

    groups, per_row = {"this rank": [mesh.rank], **partners}, world // pp

    def draw(figure):
        figure.set_figheight(0.6 * pp + 0.2 * len(groups) + 0.1)
        axis = figure.add_axes((0.02, 0, 0.96, 1), ylim=(pp + 0.4 * len(groups), -0.4))
        axis.set_xlim(0, max(1.4 * per_row, 24))
        axis.axis("off")
        for number in range(world):
            stage, place = divmod(number, per_row)
            x = place + 0.4 * (place // tp)
            colours = [GROUPS[name][0] for name, ranks in groups.items() if number in ranks] or ["#eee"]
            for i, colour in enumerate(colours):               # one above the other
                axis.barh(stage + 0.5 * i / len(colours), 0.9, 0.5 / len(colours), x, align="edge", color=colour)
            axis.text(x + 0.45, stage + 0.25, number, ha="center", va="center_baseline")
        for stage, words in enumerate(stages):
            axis.text(0, stage - 0.05, f"stage {stage}: {words}", color="#666")
        for i, (name, ranks) in enumerate(groups.items()):
            axis.text(0, pp + 0.2 + 0.35 * i, f"{name}: {', '.join(map(str, ranks))}",
                      bbox={"facecolor": GROUPS[name][0], "edgecolor": "none", "pad": 1})

    lines = [f"- `{name}`: {GROUPS[name][1]} rank{'s' * (len(ranks) > 1)} **{', '.join(map(str, ranks))}**"
             for name, ranks in partners.items()] or ["It talks to no other rank."]
    words = [f"Rank **{mesh.rank}** holds {stages[mesh.pp_rank]}: {held:,} parameters of the model `nano`. Of the 64 "
             f"samples of a step, its replica trains on {config.global_batch_size // config.dp}.\n", *lines]
    return Figure(svg(draw), {**partners, "rank": mesh.rank, "parameters": held}, "\n".join(words))


# ---- schedules

@remembered
def schedule(name="1f1b", stages=4, microbatches=8, chunks=None, F=1.0, I=1.0, W=1.0, message=0.0) -> Figure:  # noqa: E741
    """Draw a schedule. F, I, W: what a stage takes for the forward, the input gradients and the weight gradients of a
    microbatch. chunks: per stage; None: as few as the schedule allows.

    numbers: step, bubble, held [per stage]. The docstring of schedules/definitions.py has their formulas.
    """
    config = Config(num_layers=stages * (chunks or 2), tensor_model_parallel_size=1, schedule=name,
                    pipeline_model_parallel_size=stages, virtual_stages=chunks, micro_batch_size=1,
                    global_batch_size=microbatches).resolve(stages)
    table, v = config.timetable, config.virtual_stages
    takes = {"forward": F / v, "backward": (I + W) / v, "input_backward": I / v, "weight_backward": W / v}
    rows = simulation.simulate(table, lambda stage, action: sum(takes[half.kind] for half in action.halves), message)
    held = [simulation.peak_microbatches(row) / v for row in table.rows]
    found = {"step": simulation.step_time(rows), "bubble": simulation.bubble(rows), "held": held}
    words = (f"A step takes **{found['step']:g}** units of time. The bubble is **{found['bubble']:.1%}** of the "
             "busiest stage's computing time. The docstring of `schedules/definitions.py` has formulas for the bubble "
             f"and for the microbatches held: {', '.join(f'{number:.3g}' for number in held)} on stages 0, 1 ...")
    caption = f"{name}: {counted(stages, 'stage')}, {counted(microbatches, 'microbatch')}; 1 ms is a unit of time"
    places, events = [f"stage {stage}" for stage in range(stages)], events_of(table, rows, takes, message)
    return Figure(svg(timeline, [Recording(caption, places, events)]), found, words)


def events_of(table, rows, takes, message) -> list[list[Event]]:
    """Return what each stage would have recorded, had it run the simulated schedule. `ready` is the end of each wait,
    so that merged_trace.py counts the whole wait as idle."""
    last = simulation.step_time(rows)
    events = [[event("step", 0, last, step=1)] for _ in rows]
    for stage, row in enumerate(rows):
        for begin, end in zip([0, *(end for _, _, end in row)], [*(begin for _, begin, _ in row), last]):
            events[stage].append(event("wait", begin, end, group="pp", ready=end * UNIT))
        for action, begin, end in row:
            turns = [(half, takes[half.kind]) for half in action.halves]
            if len(turns) > 1:                       # a pair takes turns: half of its backward, the forward, the rest
                (backward, seconds), forward = turns
                turns = [(backward, seconds / 2), forward, (backward, seconds / 2)]
            for half, seconds in turns:
                events[stage].append(event(half.kind, begin, begin + seconds, microbatch=half.microbatch,
                                           chunk=half.chunk))
                begin += seconds
            for peer, name in (message_sent(table.placement, stage, half) or (stage, "") for half in action.halves):
                if peer != stage:
                    events[stage].append(event("send", end, end, message=str(name), peer=peer))
                    events[peer].append(event("receive", end + message, end + message, message=str(name), peer=stage))
    return events


def event(kind, begin, end, **args) -> Event:
    return Event(kind, round(begin * UNIT), round(end * UNIT), args)


# ---- Domino

class WireTrace(Trace):
    """Records at the times of the wire's clock. blocking: also wait for each collective right after its launch."""

    def __init__(self, wire, blocking):
        super().__init__()
        self.wire, self.blocking = wire, blocking

    def mark(self):
        return round(self.wire.now() * 1e9)

    def watch(self, kind, work, **args):
        now = self.mark()
        self.events.append(Event(kind, now, round(self.wire.last_done * 1e9), args | {"ready": 0}))
        if self.blocking:
            with self.span("wait", group=args["group"]):
                work.wait()


@remembered
def domino(ratio=1.0, slices=2, columns=1, sequence_parallel=False, way="Domino") -> Figure:
    """Draw forward and backward of one layer and two microbatches, on one of two tensor-parallel ranks.

    ratio: the seconds that the wires need, divided by the seconds of the matmuls. way: Domino, paired or blocking,
        which has one slice and one column
    numbers: bound = step / max(work, wires), where 1 is perfect; step, work and wires in milliseconds
    """
    if way == "blocking":
        slices = columns = 1
    config = Config(num_layers=1, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, seq_length=16,
                    micro_batch_size=8, global_batch_size=16, vocab_size=32, make_vocab_size_divisible_by=32,
                    tensor_model_parallel_size=2, pipeline_model_parallel_size=1, slices=slices, columns=columns,
                    sequence_parallel=sequence_parallel, device="cpu").resolve(2).with_vocabulary(32)
    try:
        with MatmulClock() as clock:
            stage = IdealStage(config, clock=clock)
            model, wire, bandwidth = stage.model(config), stage.wire, float("inf")
            for _ in range(2):                           # the first step tells the work and the bytes
                wire.bandwidth, trace = bandwidth, WireTrace(stage.wire, way == "blocking")
                with trace.span("step", step=1):
                    log = log_of(wire, partial(pipeline_step, Domino(model, slices, columns, trace=trace),
                                               stage.batches, "paired" if way == "paired" else "1f1b"))
                bandwidth = log.sent / (ratio * log.work)
            events = trace.take()
            events = [replace(one, begin=one.begin - events[0].begin, end=one.end - events[0].begin) for one in events]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    numbers = {"bound": log.bound(ratio), "step": (events[0].end - events[0].begin) / 1e6, "work": 1e3 * log.work,
               "wires": 1e3 * log.sent / wire.bandwidth, "collectives": sum(one.kind in COLLECTIVES for one in events)}
    cut = f", {counted(slices, 'slice')}, {counted(columns, 'column')}" * (way != "blocking")
    recording = Recording(f"{way}{cut}: step / perfect step = {numbers['bound']:.2f}", ["tp 0 of 2"], [events])
    return Figure(svg(timeline, [recording]), numbers, (
        f"A step takes **{numbers['bound']:.2f}** times as long as a perfect one, in which the shorter of work "
        f"({numbers['work']:.1f} ms) and wires ({numbers['wires']:.1f} ms) is hidden entirely; a millisecond stands "
        f"for a million multiplications. The step launches {numbers['collectives']} collectives."))


# ---- memory

@remembered
def memory(model="gpt3-13b", gpus=64, gpu="H100", tp=8, pp=4, zero_stage=1, recompute="none",
           dtype="bfloat16") -> Figure:
    """Draw the memory of a rank of each stage as a stacked bar.

    numbers: stages [{part: bytes}], usable, fits, state: bytes of model state per parameter
    """
    config = Config(model=model, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, zero_stage=zero_stage,
                    recompute_granularity=recompute, dtype=dtype, device="cuda",
                    vocab_size=PUBLISHED_VOCABULARIES.get(model, PUBLISHED_VOCABULARIES["gpt2"])).resolve(gpus)
    config = config.with_vocabulary(config.vocab_size)
    needs = [{name: found[name] for name in MEMORY} for found in plan.memory_of_stages(config)]
    bars = [(f"stage {stage}", need, bytes_text(sum(need.values()))) for stage, need in enumerate(needs)]
    usable, most = GPUS[gpu].memory * (1 - plan.RESERVE), max(sum(need.values()) for need in needs)
    fits, state = most <= usable, state_bytes_per_parameter(config)
    verdict = f"fits: every rank needs at most {bytes_text(most)}" if fits else plan.why_not(needs, usable)
    return Figure(svg(stacked_bars, bars, MEMORY, usable, f"usable: {bytes_text(usable)}"),
                  {"stages": needs, "usable": usable, "fits": fits, "state": state},
                  f"dp is **{config.dp}**, and the model state takes **{state:g}** bytes per parameter. The layout "
                  f"{verdict}.\n\n```\n" + plan.table(["", *MEMORY, "total"], [
                      [label, *map(bytes_text, need.values()), total] for label, need, total in bars]) + "\n```")


# ---- plan

@remembered
def search(model="gpt2-xl", gpus=8, gpu="H100", gpus_per_host=8) -> Figure:
    """Search for the fastest layouts. numbers: the record of bench.py plan --search."""
    command = f"plan --search --model {model} --gpus {gpus} --gpu {gpu} --gpus-per-host {gpus_per_host}"
    flags = parse(plan, command.split())
    plan.processes(flags)
    answer, record = plan.answer(flags, None)
    layouts = record["layouts"]
    if not layouts:
        return Figure("", record, answer)
    names = [", ".join([f"{name} {one[name]}" for name in ("tp", "pp", "cp", "dp") if one[name] > 1]
                       + [f"micro batch {one['micro_batch_size']}", one["schedule"]]) for one in layouts]
    ends = [f"{seconds_text(one['step_s'])}, {bytes_text(one['bytes'])}, MFU {one['mfu']:.0%}" for one in layouts]
    bars = [(name, {"step": one["step_s"]}, end) for name, one, end in zip(names, layouts, ends)]
    return Figure(
        svg(stacked_bars, bars, {"step": "#4fae8b"}), record,
        f"The fastest layout of **{model}** takes **{layouts[0]['step_s']:.3f} s** per step. The commands that train "
        "with these layouts:\n\n```sh\n" + "\n".join(one["command"] for one in layouts) + "\n```\n")


def stacked_bars(figure, bars, colours: dict, limit=0.0, words=""):
    """Draw horizontal bars (label, {part: size}, words at its end), and a line at `limit`. colours: {part: colour}"""
    figure.set_figheight(0.3 * len(bars) + 0.7)
    axis = figure.add_axes((0.006 * max(len(label) for label, *_ in bars) + 0.02, 0.3 / figure.get_figheight(), 0.55,
                            0.3 * len(bars) / figure.get_figheight()), frame_on=False, xticks=[])
    ends = [0.0] * len(bars)
    for name, colour in colours.items():
        sizes = [parts[name] for _, parts, _ in bars]
        drawn = axis.barh(range(len(bars)), sizes, 0.7, ends, color=colour, edgecolor="white", label=name)
        ends = [end + size for end, size in zip(ends, sizes)]
    axis.bar_label(drawn, [end for *_, end in bars], padding=4)
    if limit:
        axis.axvline(limit, color="#d62728")
        axis.text(limit, -0.7, words, ha="center")
    axis.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axis.invert_yaxis()
    axis.grid(False)
    if len(colours) > 1:
        figure.legend(loc="lower left", ncols=len(colours))
