"""How much time does recomputation cost, and how much memory does it save?

A step is forward and backward of all microbatches, without the optimizer. It runs with each --recompute-granularity in
turn (none, selective, full), always with the same weights. The gradients must have the same bits each time.

    x none        the step's time divided by its time without recomputation
    FLOPs         the FLOPs of the busiest stage's matmuls, divided by those without recomputation; calculated by
                  analysis/step_time.py
    activations   measured peak bytes of everything that forward keeps for backward, on the rank with the most
    formula       the same, calculated by analysis/expected_memory.py
    a layer, X    what the formula gives for one layer, in units of X, the bytes of one activation [b, s, h]

    python bench.py recompute
    python bench.py recompute --tp 2 --slices 2 --columns 2
"""

import dataclasses
import os
from functools import partial

import torch

import train
from benchmarks import comm
from benchmarks.comm import processes  # noqa: F401, called by common.main
from benchmarks.common import (CONFIG_FLAGS, RandomTokens, Times, add_config_flags, bytes_text, compare, config_here,
                               describe, gathered, layout_of, ratio_text, ratios, shape_of, table)
from benchmarks.memory import TapeMeter, state_storages
from nanodomino.analysis import expected_memory, sizes, step_time, sublayer_memory
from nanodomino.analysis.step_time import slowest
from nanodomino.errors import require
from nanodomino.overlap.recompute import GRANULARITIES, TapePolicy

FLAGS = tuple(name for name in CONFIG_FLAGS if name not in ("recompute_granularity", "checkpoint_in_cpu"))


def add_flags(parser):
    add_config_flags(parser, FLAGS, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256,
                     vocab_size=257, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
                     data_parallel_size=1, micro_batch_size=8, global_batch_size=8)


def answer(flags, launch):
    config, mesh, optimizer, stage = comm.build(config_here(flags, launch.world_size), launch)
    dataset = RandomTokens(config, mesh.device)

    def step(granularity, meter=None):
        stage.tape_policy = TapePolicy(with_granularity(config, granularity), mesh.device, config.slices,
                                       stage.residual_norm)
        optimizer.zero_grad()
        train.run_schedule(config.timetable, 0, meter or stage, dataset, config, mesh)

    peaks, first_gradients = {}, None
    for granularity in GRANULARITIES:
        meter = TapeMeter(stage, state_storages(stage.model, optimizer))
        step(granularity, meter)
        peaks[granularity] = meter.most
        gradients = [bucket.main_grad.clone() for bucket in optimizer.buckets]
        first_gradients = first_gradients or gradients
        different = sum(not torch.equal(*pair) for pair in zip(gradients, first_gradients))
        require(slowest(different) == 0, f"{granularity} recomputation changes the gradients' bits, so the times "
                "can't be compared; this is a bug")
    times = compare({name: partial(step, name) for name in GRANULARITIES}, flags.repeats, mesh.device)
    return report(config, times, gathered(peaks))


def with_granularity(config, granularity: str):
    return dataclasses.replace(config, recompute_granularity=granularity)


def report(config, times: dict[str, Times], peaks: list[dict]):
    """Return (text, record). peaks: for each rank {granularity: measured peak bytes of the tapes}."""
    rows, record = [], {"question": "recompute"}
    for granularity, time in times.items():
        here, ratio = with_granularity(config, granularity), ratios(time, times["none"])
        expected = [expected_memory.peak_tape_bytes(here, mesh) for mesh in sizes.all_meshes(here)]
        found = [by_rank[granularity] for by_rank in peaks]
        error = max(abs(measured / formula - 1) for measured, formula in zip(found, expected))
        layer = sum(sublayer_memory.layer_tape_bytes(here).values()) / sizes.hidden_bytes(here)
        rows.append([granularity, time, ratio_text(ratio), f"{relative_flops(here):.2f}", bytes_text(max(found)),
                     bytes_text(max(expected)), f"{layer:.2f}"])
        record |= {f"{granularity}_s": time.median, **ratio.record(f"{granularity}_ratio"),
                   f"{granularity}_products": relative_flops(here), f"{granularity}_activations": max(found),
                   f"{granularity}_activations_error": error}
    text = "\n".join([
        f"{describe(config)} on {config.device}",
        table(["", "step: median [min .. max]", "x none", "FLOPs", "activations", "formula", "a layer, X"], rows),
        "the gradients are bit-equal"])
    layout = {name: value for name, value in layout_of(config).items() if name in FLAGS or name in ("tp", "pp", "dp")}
    return text, record | layout | shape_of(config) | {
        "global_batch_size": config.global_batch_size, "device": config.device, "cores": os.cpu_count(),
        "repeats": len(times["none"].seconds)}


def relative_flops(config) -> float:
    """Return the FLOPs of the busiest stage's matmuls, divided by those without recomputation."""
    needed, recomputed = max((step_time.stage_flops(config, mesh) for mesh in sizes.all_meshes(config)), key=sum)
    return 1 + recomputed / needed
