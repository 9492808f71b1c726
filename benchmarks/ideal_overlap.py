"""How close do Domino's schedules come to the perfect step if the network costs no processor time?

`bench.py overlap --ideal-wire` runs on one process, which plays one rank of --tp (ideal_wire.py). For several
bandwidths it prints

    bound = step / max(work, wires)      work: the matmuls and everything else that the processor does
                                         wires: bytes sent / bandwidth

of these alternatives. A perfect step has the bound 1.

    one slice      Megatron's tensor parallelism: forward waits for each collective
    domino         --slices and --columns
    columns        one slice, in which each matmul is cut into two columns
    paired         domino with the schedule `paired`
    interleaved    domino with two chunks, as in the schedule `interleaved`
    zb-v           domino with two chunks and backward split in two, as in the schedule `zb-v`
    floor          the smallest bound without pairs. The collectives of a forward can be hidden only by forwards, and
                   forward has half of the bytes (with sequence parallelism two fifths), but a third of the work:
                   (max(F's work, F's wires) + max(B's work, B's wires)) / max(work, wires)

With --ep, rows also travel to the experts of other ranks. A balanced router takes the place of the model's: every
expert gets the same number of rows, so the rank knows what the ranks that do not exist would send.
"""

from dataclasses import replace
from functools import partial
from statistics import median

import torch

from benchmarks.common import (Figure, RandomTokens, bind_to_one_core, bytes_text, progress, ratio_text, shape_of,
                               table)
from benchmarks.ideal_wire import IdealTrace, log_of, start_ideal_world
from benchmarks.single_stage import domino_step
from nanodomino.comm.world import keep_freed_memory
from nanodomino.domino import Domino
from nanodomino.errors import require
from nanodomino.files import write_file
from nanodomino.layers.router import Router
from nanodomino.mesh import make_mesh
from nanodomino.model import GPT
from nanodomino.schedules.placement_and_messages import timetable
from nanodomino.timeline.draw import picture
from nanodomino.timeline.merged_trace import Recording, set_ready_times
from nanodomino.zero import ZeroOptimizer

RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0)             # wires / work


class IdealStage:
    """Runs steps of one rank on an ideal wire."""

    def __init__(self, config, **clock):
        self.wire = start_ideal_world(config.world_size, **clock)
        self.config = config
        self.mesh = make_mesh(1, config.dp, config.tp, torch.device("cpu"), ep=config.ep, cp=config.cp)
        tokens = RandomTokens(config)
        self.batches = [tokens.batch(0, i, 0, config.dp, config.micro_batch_size, config.global_batch_size)
                        .at_own_places(self.mesh) for i in range(config.microbatches)]
        self.models = {}

    def domino(self, slices: int, columns: int, chunks=1, trace=None) -> Domino:
        """Return a stage with the model cut into this many chunks."""
        if chunks not in self.models:
            config = replace(self.config, schedule="interleaved", virtual_stages=2) if chunks > 1 else self.config
            self.models[chunks] = GPT(config, self.mesh)
            for module in self.models[chunks].modules():
                if isinstance(module, Router):
                    module.choose = partial(balanced_choice, module, self.wire)
            ZeroOptimizer(self.models[chunks], config, self.mesh)      # gives each parameter its main_grad
        return Domino(self.models[chunks], slices, columns, self.config.compiler,
                      **(dict(trace=trace) if trace else {}))

    def alternatives(self) -> dict:
        """Return {name: function that runs a step}."""
        config, microbatches = self.config, len(self.batches)
        tables = {name: timetable(name, 1, microbatches, chunks)
                  for name, chunks in (("1f1b", 1), ("paired", 1), ("interleaved", 2), ("zb-v", 2))}
        stages = {"one slice": (self.domino(1, 1), "1f1b"),
                  "domino": (self.domino(config.slices, config.columns), "1f1b"),
                  "columns": (self.domino(1, 2), "1f1b"),
                  "paired": (self.domino(config.slices, config.columns), "paired")}
        if config.num_layers > 1:
            stages |= {name: (self.domino(config.slices, config.columns, chunks=2), name)
                       for name in ("interleaved", "zb-v")}
        forward = tables["1f1b"].forwards
        return {"forward": lambda: domino_step(stages["domino"][0], self.batches, forward),
                **{name: lambda stage=stage, schedule=schedule: domino_step(stage, self.batches, tables[schedule])
                   for name, (stage, schedule) in stages.items()}}

    def record(self, slices: int, columns: int, schedule: str) -> Recording:
        """Run a step and return its events, on the wire's clock."""
        trace = IdealTrace(self.wire)
        stage = self.domino(slices, columns, trace=trace)

        with trace.span("step", step=0):
            domino_step(stage, self.batches, timetable(schedule, 1, len(self.batches)))
        recording = Recording(f"slices {slices}, columns {columns}, {schedule}", [""], [trace.take()])
        begin = recording.begin
        for event in recording.ranks[0]:
            event.begin, event.end = event.begin - begin, event.end - begin
        set_ready_times(recording, [{}])
        return recording


def balanced_choice(router: Router, wire, logits):
    """Return what router.choose() returns, with the same number of tokens for each expert."""
    b, s, count = logits.shape
    rows, left = divmod(b * s * router.topk, count)
    require(not left, f"a slice's {b} x {s} tokens x moe-router-topk {router.topk} must be divisible by num-experts "
                      f"{count}, because the rows are balanced here; change one of them")
    wire.rows_per_expert = rows
    return torch.arange(b * s * router.topk).remainder(count).view(b, s, -1), torch.full((count,), rows)


def measure(stage: IdealStage, repeats: int) -> dict[str, list]:
    """Return {name: a Log for each round} of all alternatives."""
    alternatives = stage.alternatives()
    for step in alternatives.values():                                                   # warms up
        step()
    logs = {name: [] for name in alternatives}
    with progress(repeats * len(logs)) as bar:
        for _ in range(repeats):
            for name, step in alternatives.items():
                bar.set_description_str(name)
                logs[name].append(log_of(stage.wire, step))
                bar.update()
    return logs


def floor(ratio: float, forward_work: float, forward_bytes: float) -> float:
    """Return the smallest bound of a step without pairs. forward_work, forward_bytes: forward's shares of the step."""
    forward = max(forward_work, ratio * forward_bytes)
    return (forward + max(1 - forward_work, ratio * (1 - forward_bytes))) / max(1, ratio)


def report(flags, config):
    """Measure on this process, and return (text, record)."""
    bind_to_one_core(torch.device("cpu"))
    keep_freed_memory()
    latency, stage = flags.latency * 1e-6, IdealStage(config)
    logs = measure(stage, flags.repeats)
    forward, domino, one_slice = logs.pop("forward"), logs["domino"], logs["one slice"]
    bounds = {name: {ratio: Figure(tuple(log.bound(ratio, latency) for log in rounds), least=1.0) for ratio in RATIOS}
              for name, rounds in logs.items()}
    shares = median(a.work / b.work for a, b in zip(forward, domino)), forward[0].sent / domino[0].sent
    split = Figure(tuple(a.work / b.work for a, b in zip(domino, one_slice)))
    floors = {ratio: floor(ratio, *shares) for ratio in RATIOS}
    rows = [[f"{ratio:g}", *(ratio_text(bounds[name][ratio]) for name in logs), f"{floors[ratio]:.2f}"]
            for ratio in RATIOS]
    if flags.timeline:
        stage.wire.bandwidth, stage.wire.latency = domino[0].sent / median(log.work for log in domino), latency
        both = config.slices, config.columns
        write_file(flags.timeline, picture([stage.record(1, 1, "1f1b"), stage.record(*both, "1f1b"),
                                            stage.record(*both, "paired")]).encode())
    text = "\n".join([
        f"one rank of tp {config.tp}" + f", cp {config.cp} ({config.cp_comm_type})" * (config.cp > 1)
        + f", ep {config.ep}, {config.num_experts} experts" * bool(config.num_experts)
        + f" on an ideal wire, latency {flags.latency:g} us; hidden {config.hidden_size}, "
        f"{config.num_layers} layers, {config.microbatches} x batch {config.micro_batch_size} x {config.seq_length}, "
        f"{config.dtype}{', sequence parallel' * config.sequence_parallel}; a rank sends "
        f"{bytes_text(domino[0].sent)} per step",
        "step / max(work, wires): median of the rounds [min .. max]; 1 is perfect",
        table(["wires / work", *logs, "floor"], rows),
        f"domino works {ratio_text(split)} x as long as one slice; forward is {shares[0]:.0%} of domino's work and "
        f"sends {shares[1]:.0%} of its bytes"])
    record = {"question": "overlap", "wire": "ideal", "tp": config.tp, "cp": config.cp,
              "cp_comm_type": config.cp_comm_type, "ep": config.ep, "slices": config.slices, "columns": config.columns,
              "sequence_parallel": config.sequence_parallel, "latency_us": flags.latency,
              **shape_of(config), "microbatches": config.microbatches, "bytes": domino[0].sent,
              "repeats": flags.repeats, "forward_work": shares[0], "forward_bytes": shares[1],
              "work_ratio": split.value,
              "work_s": {name: median(log.work for log in rounds) for name, rounds in logs.items()},
              "bound_ratio": {name: {ratio: figure.value for ratio, figure in figures.items()}
                              for name, figures in bounds.items()},
              "spread": {name: {ratio: figure.spread for ratio, figure in figures.items()}
                         for name, figures in bounds.items()},
              "floor": floors}
    return text, record
