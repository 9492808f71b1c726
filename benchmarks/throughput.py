"""Is the model as fast as the same model in plain torch.nn?

One process runs full training steps of several implementations in turn, on the same batch and from the same weights:

    nanodomino   train.py's train_step: Domino with one slice, flat buckets, clipping, AdamW
    plain        plain.py in nanoGPT's loop: zero_grad, forward and backward of the microbatches, clip_grad_norm_, fused
                 AdamW; for bfloat16, autocast with fp32 weights

With --against, the same loop trains other implementations instead of plain.py's, all in the same rounds. `transformers`
is Hugging Face Transformers' model, for every model that nanodomino can export. `nanogpt` is nanoGPT's own model.py, in
a clone that --nanogpt names. `uncompiled` is nanodomino itself without torch.compile.

With --compile (the default on CUDA) all others are compiled. The losses of the first steps must agree. MFU is relative
to the device's dense 16-bit peak and counts 6 N + 12 L n d s FLOPs per token. It is null if that peak is unknown.

    python bench.py throughput                                  the nano preset
    python bench.py throughput --model gpt2 --dtype bfloat16 --global-batch-size 64
    python bench.py throughput --model nano-llama --against transformers
    python bench.py throughput --against plain nanogpt transformers --nanogpt ../nanoGPT
    python bench.py throughput --compile --against uncompiled
"""

import dataclasses
import os
from argparse import BooleanOptionalAction
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn

import train
from benchmarks import other_models
from benchmarks.common import (GPT2, SAME, RandomTokens, Times, add_config_flags, compare, config_here, ratio_text,
                               ratios, shape_of, table)
from benchmarks.plain import adamw
from nanodomino.analysis.formulas import flops_per_token, parameter_count
from nanodomino.analysis.hardware import find_peak_flops
from nanodomino.comm.world import find_device, start_world
from nanodomino.domino import Domino
from nanodomino.errors import counted, require
from nanodomino.mesh import make_mesh
from nanodomino.zero import ZeroOptimizer

FLAGS = ("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
         "seq_length", "vocab_size", "micro_batch_size", "global_batch_size", "dtype", "device")
COMPARED_STEPS = 3
BYTES = 257                  # vocabulary size: 256 bytes and the end of text


def add_flags(parser):
    add_config_flags(parser, FLAGS)
    parser.add_argument("--against", nargs="+", choices=("plain", "transformers", "nanogpt", "uncompiled"),
                        default=["plain"], help="the implementations to compare with (default plain)")
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a clone of github.com/karpathy/nanoGPT")
    parser.add_argument("--compile", action=BooleanOptionalAction,
                        help="apply torch.compile to all implementations (default: only on CUDA)")


def processes(flags) -> int:
    require(flags.dtype != "float16",
            "--dtype must not be float16, because the other implementations do not scale the loss; "
            "try --dtype bfloat16")
    require(("nanogpt" in flags.against) == (flags.nanogpt is not None),
            "--against nanogpt and --nanogpt FOLDER belong together; give both, or neither")
    require(flags.nanogpt is None or (flags.nanogpt / "model.py").is_file(),
            f"--nanogpt must be a clone of github.com/karpathy/nanoGPT, but {flags.nanogpt} has no model.py; clone it, "
            "and name its folder")
    return 1


def answer(flags, launch):
    flags.vocab_size = flags.vocab_size or (BYTES if flags.model in ("nano", "nano-llama", "nano-moe") else GPT2)
    config = config_here(flags, launch.world_size, lr_decay_style="constant", lr_warmup_fraction=0.0,
                         moe_aux_loss_coeff=0.0)               # the other implementations add no auxiliary loss
    device = find_device(config, launch)
    config = dataclasses.replace(config, compile=flags.compile).with_device(device)
    start_world(launch, device)
    mesh = make_mesh(1, 1, 1, device)
    tokens = RandomTokens(config, device)

    ours = OurTraining(config, mesh, tokens)
    make = {"plain": other_models.plain, "transformers": other_models.transformers,
            "nanogpt": partial(other_models.nanogpt, folder=flags.nanogpt)}
    sides = {"nanodomino": ours}
    for name in flags.against:
        sides[name] = (OurTraining(dataclasses.replace(config, compile=False), mesh, tokens) if name == "uncompiled"
                       else PlainTraining(config, mesh, tokens, make[name](config, ours.model)))
    times = compare({name: side.step for name, side in sides.items()}, max(flags.repeats, COMPARED_STEPS - 1), device)
    return report(config, mesh, times, {name: side.losses for name, side in sides.items()})


# ---- the implementations

class OurTraining:
    """Trains nanodomino's model with train.py's train_step."""

    def __init__(self, config, mesh, tokens):
        self.config, self.mesh, self.tokens, self.losses = config, mesh, tokens, []
        self.model = train.model_builder(config, mesh)
        self.optimizer = ZeroOptimizer(self.model, config, mesh)
        self.stage = Domino(self.model, config.slices, config.columns, config.compiler)

    def step(self):
        result = train.train_step(len(self.losses) + 1, self.stage, self.optimizer, self.tokens, self.config, self.mesh)
        self.losses.append(result.loss)


class PlainTraining:
    """Trains a model with nanoGPT's step. model: maps (tokens, labels), both [b, s], to the mean loss."""

    def __init__(self, config, mesh, tokens, model):
        self.config, self.tokens, self.losses = config, tokens, []
        dtype = config.params_dtype
        self.autocast = nullcontext()
        if dtype == torch.bfloat16:
            self.autocast, dtype = torch.autocast(mesh.device.type, dtype), torch.float32
        self.model = model.to(mesh.device, dtype)
        self.optimizer = adamw(self.model, config)
        self.loss_of = torch.compile(self.model, backend=config.compile_backend) if config.compile else self.model

    def step(self):
        config, total = self.config, 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(config.microbatches):
            batch = self.tokens.batch(len(self.losses), i, 0, 1, config.micro_batch_size, config.global_batch_size)
            with self.autocast:
                loss = self.loss_of(batch.tokens, batch.labels) / config.microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad)
        self.optimizer.step()
        self.losses.append(total.item())


# ---- the report

def report(config, mesh, times: dict[str, Times], losses: dict[str, list]):
    """Return (text, record). Raises UserError if the losses differ."""
    first = {name: side[:COMPARED_STEPS] for name, side in losses.items()}
    ours, *others = first
    differences = {name: max(abs(loss - expected) / abs(expected) for loss, expected in zip(first[ours], first[name]))
                   for name in others}
    for name, difference in differences.items():
        require(difference <= SAME[config.dtype],
                f"the losses of the first {COMPARED_STEPS} steps are {first[ours]} in nanodomino and {first[name]} in "
                f"{name}; their relative difference must be at most {SAME[config.dtype]:.0e}, but is {difference:.1e}, "
                "so the speeds can't be compared; this is a bug")
    tokens, peak = config.global_batch_size * config.seq_length, find_peak_flops(config, mesh.device)
    speeds = {name: tokens / time.median for name, time in times.items()}
    mfu = {name: speed * flops_per_token(config) / peak if peak else None for name, speed in speeds.items()}
    gains = {name: ratios(times[name], times[ours]) for name in others}
    rows = [[name, time, f"{speeds[name]:,.0f}", f"{mfu[name]:.1%}" if peak else "n/a",
             ratio_text(gains[name]) if name in gains else ""] for name, time in times.items()]
    text = "\n".join([
        f"{config.model}: {parameter_count(config):,} parameters, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.dtype} on {mesh.device.type}, {'compiled' if config.compile else 'not compiled'}; a step is "
        f"{counted(config.microbatches, 'microbatch')} of {config.micro_batch_size} x {config.seq_length}",
        table(["", "step: median [min .. max]", "tokens/s", "MFU", "nanodomino's speed / its speed"], rows),
        f"the losses of the first {len(first[ours])} steps agree to {max(differences.values()):.0e}"])
    record = {"question": "throughput", "model": config.model, "parameters": parameter_count(config),
              **shape_of(config), "global_batch_size": config.global_batch_size, "compile": config.compile,
              "device": mesh.device.type, "cores": os.cpu_count(), "repeats": len(times[ours].seconds),
              **{f"{name}_s": time.median for name, time in times.items()},
              **{f"{name}_tokens_per_s": speed for name, speed in speeds.items()},
              **{f"{name}_mfu": share for name, share in mfu.items()},
              **{f"{name}_losses": side for name, side in first.items()}, "loss_difference": differences,
              "ratio": {name: gain.value for name, gain in gains.items()},
              "spread": {name: gain.spread for name, gain in gains.items()}}
    return text, record
