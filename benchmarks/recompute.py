"""How much time does recomputation cost, and how much memory does it save?

A step is forward and backward of all microbatches, without the optimizer. It runs with each --recompute-granularity in
turn (none, selective, full), always with the same weights. The gradients must have the same bits each time.

    x none        the step's time divided by its time without recomputation
    FLOPs         the FLOPs of the busiest rank's matmuls in a dry run, divided by those without recomputation
    activations   measured peak bytes between two actions, besides the state, on the rank with the most: what forward
                  keeps for backward
    dry run       the same in a dry run

    python bench.py recompute
    python bench.py recompute --tp 2 --slices 2 --columns 2
"""

import dataclasses
from functools import partial
from types import SimpleNamespace

import torch

import train
from benchmarks import measured
from benchmarks.runner import (CONFIG_FLAGS, Times, about, add_config_flags, bytes_text, compare, describe, gathered,
                               ratio_text, ratios, slowest, table)
from benchmarks.measured import processes  # noqa: F401, called by runner.main
from nanodomino.estimate.accounts import Operation
from nanodomino.errors import require
from nanodomino.options.recompute import GRANULARITIES

FLAGS = tuple(name for name in CONFIG_FLAGS if name not in ("recompute_granularity", "checkpoint_in_cpu"))


def add_flags(parser):
    add_config_flags(parser, FLAGS, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256,
                     vocab_size=257, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
                     data_parallel_size=1, micro_batch_size=8, global_batch_size=8)


def answer(flags, launch):
    config = measured.config_for(flags, launch)
    predicted = {name: measured.dry_runs(with_granularity(config, name), launch) for name in GRANULARITIES}
    optimizer, stage, dataset = measured.build(config, launch)

    def step(granularity, *_, on_action=None):
        stage.tape_policy = with_granularity(config, granularity).tape_policy(stage.mesh.device, config.slices,
                                                                              stage.residual_norm)
        optimizer.zero_grad()
        train.run_schedule(config.timetable, 0, stage, dataset, config, stage.mesh, on_action=on_action)

    activations, first_gradients = {}, None
    for granularity in GRANULARITIES:
        program = SimpleNamespace(train_step=partial(step, granularity))
        activations[granularity] = measured.measure(optimizer, stage, dataset, config, program).activations
        gradients = [bucket.main_grad.clone() for bucket in optimizer.buckets]
        first_gradients = first_gradients or gradients
        different = sum(not torch.equal(*pair) for pair in zip(gradients, first_gradients))
        require(slowest(different) == 0, f"{granularity} recomputation changes the gradients' bits, so the times "
                "can't be compared; this is a bug")
    times = compare({name: partial(step, name) for name in GRANULARITIES}, flags.repeats, stage.mesh.device)
    found = gathered(activations)
    return report(config, times, predicted, found) if launch.rank == 0 else ("", {})


def with_granularity(config, granularity: str):
    return dataclasses.replace(config, recompute_granularity=granularity)


def report(config, times: dict[str, Times], predicted: dict, found: list[dict]):
    """Return (text, record). predicted: {granularity: each rank's RankRun}; found: for each rank {granularity: measured
    bytes of activations}."""
    rows, record = [], about(config)
    for granularity, time in times.items():
        ratio, flops = ratios(time, times["none"]), most_flops(predicted[granularity]) / most_flops(predicted["none"])
        dry, real = [run.activations for run in predicted[granularity]], [by_rank[granularity] for by_rank in found]
        rows.append([granularity, time, ratio_text(ratio), f"{flops:.2f}", bytes_text(max(real)),
                     bytes_text(max(dry))])
        record |= {f"{granularity}_s": time.median, **ratio.record(f"{granularity}_ratio"),
                   f"{granularity}_products": flops, f"{granularity}_activations": max(real),
                   f"{granularity}_activations_error": max(abs(one / other - 1) for one, other in zip(real, dry))}
    text = "\n".join([
        describe(config),
        table(["", "step: median [min .. max]", "x none", "FLOPs", "activations", "dry run"], rows),
        "the gradients are bit-equal"])
    return text, record


def most_flops(runs: list) -> float:
    """Return the FLOPs of the busiest rank's matmuls and attention."""
    return max(sum(event.flops for event in run.events if type(event) is Operation) for run in runs)
