"""The numbers and pictures of the playground's tabs, drawn by the project's own code.

    grid(..)       mesh.py: the ranks of each group, and what a rank holds
    schedule(..)   schedules/: the simulated schedule, as the timeline of a run (timeline/draw.py)
    domino(..)     benchmarks/ideal_wire.py: one rank's step on an ideal wire, as a timeline
    memory(..)     dry_run/: the bytes of a rank of each stage
    search(..)     benchmarks/plan_search.py: the fastest layouts

Each returns a Figure. UserErrors of the rules pass through. A process can be in only one world, and the browser's
sessions are threads of one process, so one figure is computed at a time. Figures are remembered.
"""

import re
import threading
from dataclasses import dataclass
from functools import lru_cache, wraps

import torch
import torch.distributed as dist

import train
from benchmarks import ideal_wire, plan, plan_search
from benchmarks.runner import bytes_text, parse, seconds_text
from benchmarks.ideal_wire import IdealGroup, IdealStage, MatmulClock, Wire
from nanodomino import pipeline
from nanodomino.analysis.formulas import state_bytes_per_parameter
from nanodomino.analysis.hardware import GPUS
from nanodomino.comm.trace import Event, Trace
from nanodomino.config.config import Config
from nanodomino.domino import Domino
from nanodomino.dry_run.stages import stage_memory
from nanodomino.errors import counted
from nanodomino.mesh import lay_out
from nanodomino.model import meta_stage
from nanodomino.plot.svg import LETTER, LINE, box, frame, text
from nanodomino.run.report import describe_stage
from nanodomino.schedules import definitions, simulation
from nanodomino.schedules.placement_and_messages import message_sent, timetable
from nanodomino.settings.presets import PUBLISHED_VOCABULARIES
from nanodomino.timeline import draw
from nanodomino.timeline.merged_trace import COLLECTIVES, Recording

LOCK = threading.RLock()
UNIT = 1e6                   # nanoseconds: a unit of a schedule's time is drawn as a millisecond
RESERVE = 0.05               # the share of a GPU's memory that stays free, as in bench.py plan
# The colours of the chosen rank, of its partners, and of the parts of a GPU's memory.
CHOSEN = "#ee8866"
PARTNERS = {"tp": "#f3df6b", "pp": "#9bd1f4", "dp": "#8cc63f", "cp": "#d0759c", "ep": "#c8a2d8"}
ROLES = {"tp": "sums activations with", "pp": "exchanges activations and their gradients in a pipeline with",
         "dp": "sums gradients with", "cp": "shares the tokens of each sample with",
         "ep": "exchanges tokens for experts with"}
MEMORY = dict(zip(plan.MEMORY_TERMS, ("#9bd1f4", "#4fae8b", "#f3df6b", "#e69f00", "#d0759c", "#b5b5b5")))


@dataclass(frozen=True)
class Figure:
    """svg: the picture. numbers: what it shows. table: rows of text to print below it, the heading first."""
    svg: str
    numbers: dict
    table: tuple = ()


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
    """Draw all ranks, with the partners of one of them. numbers: {group: its ranks}, "holds", "parameters".

    The model is `nano`; with ep above 1 its layers have 8 experts.
    """
    experts = dict(num_experts=8, expert_model_parallel_size=ep, disable_bias_linear=True) if ep > 1 else {}
    config = Config(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
                    global_batch_size=64, micro_batch_size=1, **experts).resolve(world).with_vocabulary(256)
    sizes = {"pp": pp, "dp": config.dp, **config.inner_axes, "tp": tp}
    mesh, _ = lay_out(min(rank, world - 1), sizes, torch.device("meta"), config.more_groups)
    partners = {name: ranks for name in PARTNERS
                if (ranks := [one for one in mesh.rows.get(name, ()) if one != mesh.rank])}
    held = sum(weight.numel() for weight in meta_stage(config, mesh.pp_rank, mesh.tp_rank).parameters())
    stages = [describe_stage(config, stage) for stage in range(pp)]

    side, gap, left = 34, 14, 76
    per_row = world // pp
    width = max(left + per_row * side + per_row // tp * gap, 560)
    body, y = [], 8
    for stage in range(pp):
        body += [text(8, y + 22, f"stage {stage}"), text(left, y + side + LINE - 4, stages[stage], "small pale")]
        for place in range(per_row):
            number, x = stage * per_row + place, left + place * side + place // tp * gap
            colours = [CHOSEN] * (number == mesh.rank) + [
                PARTNERS[name] for name, ranks in partners.items() if number in ranks]
            body += [box(x + i * (side - 4) / len(colours), y, (side - 4) / len(colours), side - 4, colour)
                     for i, colour in enumerate(colours)] or [box(x, y, side - 4, side - 4, "#eee")]
            body.append(text(x + side / 2 - 2, y + 20, number, "middle"))
        y += side + LINE + 8
    for name, ranks in {"this rank": [mesh.rank], **partners}.items():
        body += [box(8, y, 14, 12, PARTNERS.get(name, CHOSEN)),
                 text(28, y + 11, f"{name}: {', '.join(map(str, ranks))}")]
        y += LINE
    return Figure(frame(width, y + 6, body), {
        **partners, "rank": mesh.rank, "holds": stages[mesh.pp_rank], "parameters": held,
        "samples": config.global_batch_size // config.dp})


# ---- schedules

def formulas() -> dict[str, tuple[str, str]]:
    """Return {schedule: (idle time of a step, microbatches held)} from the table in definitions.py."""
    rows = re.findall(r"^    (\S+) +(\S.*?) {2,}(\S.*?) {2,}\S.*$", definitions.__doc__, re.MULTILINE)
    return {name: tuple(both) for name, *both in rows if name in definitions.SCHEDULES}


def value_of(formula: str, **values) -> float:
    """Compute a formula of that table, such as "(p - 1)(F + I + W)/v"."""
    product = re.sub(r"(?<=[\w)])\s*(?=\()|(?<=[\d)])\s+(?=[A-Za-z])", "*", formula)
    return eval(product, {"__builtins__": {}}, values)


@remembered
def schedule(name="1f1b", stages=4, microbatches=8, chunks=None, F=1.0, I=1.0, W=1.0, message=0.0) -> Figure:  # noqa: E741
    """Draw a schedule. F, I, W: what a stage takes for the forward, the input gradients and the weight gradients of a
    microbatch. chunks: per stage; None: as few as the schedule allows.

    numbers: step, bubble, held [per stage]; by the formulas: formula_bubble, formula_held; None without a formula
    """
    config = Config(num_layers=stages * (chunks or 2), tensor_model_parallel_size=1, schedule=name,
                    pipeline_model_parallel_size=stages, virtual_stages=chunks, micro_batch_size=1,
                    global_batch_size=microbatches).resolve(stages)
    table, v = config.timetable, config.virtual_stages
    takes = {"forward": F / v, "backward": (I + W) / v, "input_backward": I / v, "weight_backward": W / v}
    rows = simulation.simulate(table, lambda stage, action: sum(takes[half.kind] for half in action.halves), message)
    held = [simulation.peak_microbatches(row, lambda chunk: 1 / v) for row in table.rows]
    idle, most = formulas().get(name, (None, None))
    found = {"step": simulation.step_time(rows), "bubble": simulation.bubble(rows), "held": held,
             "formula_bubble": None, "formula_held": [None] * stages}
    if idle:
        found["formula_bubble"] = value_of(idle, p=stages, v=v, F=F, I=I, W=W) / simulation.busy_time(rows)
        found["formula_held"] = [min(microbatches, value_of(most, p=stages, r=r, v=v, m=microbatches))
                                 for r in range(stages)]
    heading = ("stage", "microbatches held", f"formula: {most}" if most else "no formula")
    table_rows = [(str(stage), f"{held[stage]:.3g}", f"{number:.3g}" if number is not None else "")
                  for stage, number in enumerate(found["formula_held"])]
    caption = f"{name}: {counted(stages, 'stage')}, {counted(microbatches, 'microbatch')}; 1 ms is a unit of time"
    places = [f"stage {stage}" for stage in range(stages)]
    recording = Recording(caption, places, events_of(table, rows, takes, message))
    return Figure(draw.picture([recording]), found | {"idle_formula": idle}, (heading, *table_rows))


def events_of(table, rows, takes, message) -> list[list[Event]]:
    """Return what each stage would have recorded, had it run the simulated schedule. `ready` is the end of a wait, so
    all of it counts as idle; see merged_trace.py."""
    last = simulation.step_time(rows)
    events = [[event("step", 0, last, step=1)] for _ in rows]
    for stage, row in enumerate(rows):
        now = 0
        for action, start, end in row:
            if start > now:
                events[stage].append(event("wait", now, start, group="pp", ready=start * UNIT))
            now, begin = end, start
            halves = [(half, takes[half.kind]) for half in action.halves]
            if len(halves) > 1:                      # a pair takes turns: half of its backward, the forward, the rest
                (backward, seconds), forward = halves
                halves = [(backward, seconds / 2), forward, (backward, seconds / 2)]
            for half, seconds in halves:
                events[stage].append(event(half.kind, begin, begin + seconds, microbatch=half.microbatch,
                                           chunk=half.chunk))
                begin += seconds
            for half in action.halves:
                sent = message_sent(table.placement, stage, half)
                if sent and sent[0] != stage:
                    events[stage].append(event("send", end, end, message=str(sent[1]), peer=sent[0]))
                    events[sent[0]].append(event("receive", end + message, end + message, message=str(sent[1]),
                                                 peer=stage))
        if last > now:
            events[stage].append(event("wait", now, last, group="pp", ready=last * UNIT))
    return events


def event(kind, begin, end, **args) -> Event:
    return Event(kind, round(begin * UNIT), round(end * UNIT), args)


# ---- Domino

class DrawnWire(Wire):
    """An ideal wire that also records collectives and waits."""
    trace = Trace(recording=False)

    def carry(self, size, *directions):
        begin, arrival = self.now(), super().carry(size, *directions)
        if "out" in directions and self.trace.recording:
            self.trace.events.append(event("all_reduce", begin * 1e3, arrival.done * 1e3, group="tp",
                                           ready=round(begin * 1e9)))
        return arrival

    def wait_until(self, moment):
        begin = self.now()
        super().wait_until(moment)
        if moment > begin and self.trace.recording:
            self.trace.events.append(event("wait", begin * 1e3, moment * 1e3, group="tp"))


class WireTrace(Trace):
    """Records what Domino reports, at the times of the wire's clock. The wire itself records waits and collectives."""

    def __init__(self, wire, recording):
        super().__init__(recording=recording)
        self.wire = wire

    def mark(self):
        return round(self.wire.now() * 1e9)

    def span(self, kind, **args):
        return self.nothing if kind == "wait" else super().span(kind, **args)

    def watch(self, kind, work, **args):
        if self.recording:                           # names the collective that the wire has just recorded
            last = next(one for one in reversed(self.events) if one.kind in COLLECTIVES)
            last.kind, last.args = kind, last.args | args


@remembered
def domino(ratio=1.0, slices=2, columns=1, sequence_parallel=False, way="Domino") -> Figure:
    """Draw forward and backward of one layer and two microbatches, on one of two tensor-parallel ranks.

    ratio: the seconds that the wires need, divided by the seconds of the matmuls. way: blocking, Domino or paired
    numbers: bound = step / max(work, wires), where 1 is perfect; step, work and wires in milliseconds
    """
    config = Config(num_layers=1, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, seq_length=16,
                    micro_batch_size=8, global_batch_size=16, vocab_size=32, make_vocab_size_divisible_by=32,
                    tensor_model_parallel_size=2, pipeline_model_parallel_size=1, slices=slices, columns=columns,
                    sequence_parallel=sequence_parallel, device="cpu").resolve(2).with_vocabulary(32)
    try:
        with MatmulClock() as clock:
            stage = IdealStage(config, clock=clock)
            wire = IdealGroup.wire = DrawnWire(clock=clock)
            model = stage.model(config)

            def step(recording):
                """Run a step and return (its log, its events)."""
                wire.trace, wire.waited = WireTrace(wire, recording), 0.0
                begin = wire.now()
                log = ideal_wire.log_of(wire, lambda: run(wire.trace))
                events = [Event("step", round(begin * 1e9), round(wire.now() * 1e9), {"step": 1}), *wire.trace.events]
                return log, [Event(one.kind, one.begin, one.end, one.args) for one in events]

            def run(trace):
                if way == "blocking":
                    return run_blocking(trace)
                pipeline.run(timetable("paired" if way == "paired" else "1f1b", 1, len(stage.batches)),
                             Domino(model, slices, columns, trace=trace), stage.mesh,
                             lambda i, chunk: stage.batches[i], train.forward_step, None, None, trace=trace)

            def run_blocking(trace):
                for i, batch in enumerate(stage.batches):
                    with trace.span("forward", microbatch=i, chunk=0):
                        losses = model(batch.tokens, batch.positions, batch.labels)
                    with trace.span("backward", microbatch=i, chunk=0):
                        losses.sum().backward()

            log, _ = step(recording=False)
            wire.bandwidth = log.sent / (ratio * log.work)
            drawn, events = step(recording=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    numbers = {"bound": drawn.bound(ratio), "step": (events[0].end - events[0].begin) / 1e6, "work": 1e3 * drawn.work,
               "wires": 1e3 * drawn.sent / wire.bandwidth,
               "collectives": sum(one.kind in COLLECTIVES for one in events)}
    words = way if way == "blocking" else f"{way}, {counted(slices, 'slice')}, {counted(columns, 'column')}"
    recording = Recording(f"{words}: step / perfect step = {numbers['bound']:.2f}", ["tp 0 of 2"], [events])
    return Figure(draw.picture([recording]), numbers)


# ---- memory

@remembered
def memory(model="gpt3-13b", gpus=64, gpu="H100", tp=8, pp=4, zero_stage=1, recompute="none",
           dtype="bfloat16") -> Figure:
    """Draw the memory of a rank of each stage as a stacked bar.

    numbers: stages [{part: bytes}], usable, fits, dp, state: bytes of model state per parameter
    """
    config = Config(model=model, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, zero_stage=zero_stage,
                    recompute_granularity=recompute, dtype=dtype, device="cuda",
                    vocab_size=PUBLISHED_VOCABULARIES.get(model, plan.GPT2_VOCABULARY)).resolve(gpus)
    config = config.with_vocabulary(config.vocab_size)
    needs = [{name: found[name] for name in MEMORY} for found in (
        stage_memory(train, config, stage) | {"communicators": plan_search.communicator_bytes(config, stage)}
        for stage in range(pp))]
    usable = GPUS[gpu].memory * (1 - RESERVE)
    totals = [sum(need.values()) for need in needs]
    fits = max(totals) <= usable
    rows = [("stage", *MEMORY, "total")] + [
        (str(stage), *map(bytes_text, need.values()), bytes_text(totals[stage])) for stage, need in enumerate(needs)]
    bars = [(f"stage {stage}", need, bytes_text(totals[stage])) for stage, need in enumerate(needs)]
    return Figure(stacked_bars(bars, MEMORY, usable, f"usable: {bytes_text(usable)}"), {
        "stages": needs, "usable": usable, "fits": fits, "dp": config.dp, "state": state_bytes_per_parameter(config),
        "words": f"fits: every rank needs at most {bytes_text(max(totals))}" if fits else plan.why_not(needs, usable)},
        tuple(rows))


# ---- plan

@remembered
def search(model="gpt2-xl", gpus=8, gpu="H100", gpus_per_host=8, progress=None) -> Figure:
    """Search for the fastest layouts. numbers: the record of bench.py plan --search. progress: see Search.run()"""
    arguments = ["plan", "--search", "--model", model, "--gpus", gpus, "--gpu", gpu, "--gpus-per-host", gpus_per_host]
    flags = parse(plan, [*map(str, arguments)])
    plan.processes(flags)
    answer, record = plan.answer(flags, None, **({"progress": progress} if progress else {}))
    if not record["layouts"]:
        return Figure("", record | {"words": answer})
    layouts = record["layouts"]
    bars = []
    for layout in layouts:
        sizes = [f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "dp") if layout[name] > 1]
        bars.append((", ".join([*sizes, f"micro batch {layout['micro_batch_size']}", layout["schedule"]]),
                     {"step": layout["step_s"]},
                     f"{seconds_text(layout['step_s'])}, {bytes_text(layout['bytes'])}, MFU {layout['mfu']:.0%}"))
    return Figure(stacked_bars(bars, {"step": "#4fae8b"}), record)


def stacked_bars(bars, colours: dict, limit=0.0, words="") -> str:
    """Draw horizontal bars (label, {part: size}, words at its end), and a line at `limit`. colours: of the parts"""
    left, width, y, body = max(len(label) for label, *_ in bars) * LETTER + 16, 1000, 34 * bool(limit) + 8, []
    scale = (width - left - 210) / max(limit, *(sum(parts.values()) for _, parts, _ in bars))
    for label, parts, end in bars:
        x = left
        for name, size in parts.items():
            body.append(box(x, y, size * scale, 22, colours[name], stroke="#fff"))
            x += size * scale
        body += [text(8, y + 15, label), text(x + 6, y + 15, end)]
        y += 30
    if limit:
        edge = left + limit * scale
        body += [box(edge - 1, 28, 2, y - 28, "#d62728"), text(edge, 20, words, "middle")]
    x = 8
    for name, colour in colours.items() if len(colours) > 1 else ():
        body += [box(x, y + 8, 14, 12, colour), text(x + 19, y + 19, name)]
        x += 40 + 8 * len(name)
    return frame(width, y + 28 * (x > 8), body)
