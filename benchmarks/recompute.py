"""What does it cost to compute activations again, and what does it save?

One model, one batch, each --recompute-granularity in turn, on the same weights: forward and backward of a step's
microbatches, as train.py's schedule runs them, without the update. Gradients must have the same bits, or there is no
comparison.

    x none        seconds, relative to keeping everything
    products      what step_time.py says of it: FLOPs of the products alone, on the busiest stage
    activations   bytes that this rank's tapes hold at most, and what formulas.py says of them

    python bench.py recompute
    python bench.py recompute --tp 2 --slices 2 --columns 2
"""

import dataclasses
import os

import torch

import train
from benchmarks import comm
from benchmarks.comm import processes  # noqa: F401, as bench.py asks for it
from benchmarks.common import (CONFIG_FLAGS, Times, add_config_flags, bytes_text, compare, config_of, gathered,
                               layout_of, ratio_text, ratios, schedule_text, shape_of, table)
from benchmarks.memory import CopiedRandomTokens, TapeMeter, state_storages
from nanodomino.analysis import expected_memory, sizes, step_time
from nanodomino.analysis.step_time import slowest
from nanodomino.errors import require
from nanodomino.overlap.recompute import GRANULARITIES, TapePolicy

FLAGS = tuple(name for name in CONFIG_FLAGS if name not in ("recompute_granularity", "checkpoint_in_cpu"))


def add_flags(parser):
    add_config_flags(parser, FLAGS, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256,
                     vocab_size=257, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
                     data_parallel_size=1, micro_batch_size=8, global_batch_size=8)


def answer(flags, launch):
    config, mesh, optimizer, stage = comm.build(config_of(flags, launch.world_size), launch)
    dataset = CopiedRandomTokens(config, mesh.device)

    def step(granularity, watched=None):
        stage.tape_policy = TapePolicy(changed(config, granularity), mesh.device, config.slices, stage.residual_norm)
        optimizer.zero_grad()
        train.run_schedule(config.timetable, 0, watched or stage, dataset, config, mesh)

    held, first = {}, None
    for granularity in GRANULARITIES:
        watched = TapeMeter(stage, state_storages(stage.model, optimizer))
        step(granularity, watched)
        held[granularity] = watched.most
        gradients = [bucket.main_grad.clone() for bucket in optimizer.buckets]
        first = first or gradients
        different = sum(not torch.equal(one, other) for one, other in zip(gradients, first))
        require(slowest(different) == 0, f"the gradients of {granularity} recomputation have other bits than without; "
                "so the two can't be compared; this is a bug")
    times = compare({one: lambda one=one: step(one) for one in GRANULARITIES}, flags.repeats, mesh.device)
    return report(config, times, gathered(held))


def changed(config, granularity: str):
    return dataclasses.replace(config, recompute_granularity=granularity)


def report(config, times: dict[str, Times], held: list[dict]):
    """held: by rank. The figures of activations are those of the rank that holds most."""
    rows, record = [], {"question": "recompute"}
    for granularity, one in times.items():
        here, ratio = changed(config, granularity), ratios(one, times["none"])
        said = [expected_memory.tape_bytes(here, at) for at in sizes.all_meshes(here)]
        found = [by_rank[granularity] for by_rank in held]
        error = max(abs(measured / formula - 1) for measured, formula in zip(found, said))
        layer = sum(expected_memory.layer_tape_bytes(here).values()) / sizes.hidden_bytes(here)
        rows.append([granularity, one, ratio_text(ratio), f"{products(here):.2f}", bytes_text(max(found)),
                     bytes_text(max(said)), f"{layer:.2f}"])
        record |= {f"{granularity}_s": one.median, **ratio.record(f"{granularity}_ratio"),
                   f"{granularity}_products": products(here), f"{granularity}_activations": max(found),
                   f"{granularity}_activations_error": error}
    text = "\n".join([
        f"{config.num_layers} layers of {config.hidden_size}, {config.microbatches} microbatches of "
        f"{config.micro_batch_size} x {config.seq_length} tokens, {config.dtype} on {config.device}; tp {config.tp}, "
        f"pp {config.pp}, dp {config.dp}, slices {config.slices}, columns {config.columns}, {schedule_text(config)}",
        table(["", "step: median [least .. most]", "x none", "products", "activations", "formula", "a layer, X"], rows),
        "gradients have the same bits in all three"])
    layout = {name: value for name, value in layout_of(config).items() if name in FLAGS or name in ("tp", "pp", "dp")}
    return text, record | layout | shape_of(config) | {
        "global_batch_size": config.global_batch_size, "device": config.device, "cores": os.cpu_count(),
        "repeats": len(times["none"].seconds)}


def products(config) -> float:
    """FLOPs of a step with what is computed again, relative to those without: of the stage that has most."""
    work, again = max((step_time.stage_flops(config, at) for at in sizes.all_meshes(config)), key=sum)
    return 1 + again / work
