"""How much time does recomputation cost, and how much memory does it save?

A step is forward and backward of all microbatches, without the optimizer. It runs with each --recompute-granularity in
turn (none, selective, full), always with the same weights. The gradients must have the same bits each time.

    x none        the step's time divided by its time without recomputation
    activations   measured peak bytes between two actions, besides the state, on the rank with the most: what forward
                  keeps for backward

    python bench.py recompute
    python bench.py recompute --tp 2 --slices 2 --columns 2
"""

import dataclasses
from functools import partial
from types import SimpleNamespace

import torch

import train
from benchmarks.memory import config_for, measure, processes  # noqa: F401, runner.main calls processes
from benchmarks.runner import (CONFIG_FLAGS, Training, about, add_config_flags, bytes_text, compare, describe, gathered,
                               join, ratios, table)
from nanodomino.errors import require
from nanodomino.options.recompute import GRANULARITIES


def add_flags(parser):
    names = [name for name in CONFIG_FLAGS if name not in ("recompute_granularity", "checkpoint_in_cpu")]
    add_config_flags(parser, names, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256,
                     vocab_size=257, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
                     data_parallel_size=1, micro_batch_size=8, global_batch_size=8)


def answer(flags, launch):
    config = config_for(flags, launch)
    configs = {name: dataclasses.replace(config, recompute_granularity=name) for name in GRANULARITIES}
    training = Training(*join(config, launch))
    optimizer, stage, dataset = training.optimizer, training.stage, training.tokens

    def step(name, *_, on_action=None):
        stage.tape_policy = configs[name].tape_policy(stage.mesh.device, config.slices, stage.residual_norm)
        optimizer.zero_grad()
        train.run_schedule(config.timetable, 0, stage, dataset, config, stage.mesh, on_action=on_action)

    activations, gradients = {}, {}
    for name in GRANULARITIES:
        run = measure(optimizer, stage, dataset, config, SimpleNamespace(train_step=partial(step, name)))
        activations[name] = max(gathered(run.activations))
        gradients[name] = [bucket.main_grad.clone() for bucket in optimizer.buckets]
        require(all(gathered(all(map(torch.equal, gradients[name], gradients["none"])))),
                f"{name} recomputation changes the gradients' bits, so the times can't be compared; this is a bug")
    times = compare({name: partial(step, name) for name in GRANULARITIES}, flags.repeats, stage.mesh.device)

    slower = {name: ratios(time, times["none"]) for name, time in times.items()}
    text = table(["", "step: median [min .. max]", "x none", "activations"],
                 [[name, time, slower[name], bytes_text(activations[name])] for name, time in times.items()])
    return f"{describe(config)}\n{text}\nthe gradients are bit-equal", {
        **about(config), **times, **{f"{name}_ratio": ratio for name, ratio in slower.items()},
        **{f"{name}_activations": size for name, size in activations.items()}}
