"""Is the model as fast as the same model in plain torch.nn?

One process runs full training steps of two implementations in turn, on the same batch and from the same weights:

    nanodomino   train.py's train_step: Domino with one slice, flat buckets, clipping, AdamW
    plain        plain.py in nanoGPT's loop: zero_grad, forward and backward of the microbatches, clip_grad_norm_, fused
                 AdamW; for bfloat16, autocast with fp32 weights

With --against transformers, the same loop trains the model of Hugging Face Transformers instead of plain.py's. This
works for every model that nanodomino can export.

With --compile (the default on CUDA) both are compiled. The losses of the first steps must agree. MFU is relative to the
device's dense 16-bit peak and counts 6 N + 12 L h s FLOPs per token. It is null if that peak is unknown.

    python bench.py throughput                                  the nano preset
    python bench.py throughput --model gpt2 --dtype bfloat16 --global-batch-size 64
    python bench.py throughput --model nano-llama --against transformers
"""

import dataclasses
import os
from argparse import BooleanOptionalAction
from contextlib import nullcontext

import torch
from torch import nn

import train
from benchmarks.common import (GPT2, SAME, RandomTokens, Times, add_config_flags, compare, config_here, ratio_text,
                               ratios, shape_of, table)
from benchmarks.plain import Plain, adamw, mean_loss
from nanodomino.analysis.hardware import find_peak_flops
from nanodomino.analysis.sizes import flops_per_token, parameter_count
from nanodomino.comm.world import find_device, start_world
from nanodomino.domino import Domino
from nanodomino.errors import UserError, counted, require
from nanodomino.huggingface.families import family_of, write_config
from nanodomino.huggingface.tensor_mapping import map_tensors
from nanodomino.mesh import make_mesh
from nanodomino.zero import ZeroOptimizer

FLAGS = ("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
         "seq_length", "vocab_size", "micro_batch_size", "global_batch_size", "dtype", "bf16", "device")
COMPARED_STEPS = 3
BYTES = 257                  # vocabulary size: 256 bytes and the end of text


def add_flags(parser):
    add_config_flags(parser, FLAGS)
    parser.add_argument("--against", choices=("plain", "transformers"), default="plain",
                        help="the implementation to compare with (default plain)")
    parser.add_argument("--compile", action=BooleanOptionalAction,
                        help="apply torch.compile to both implementations (default: only on CUDA)")


def processes(flags) -> int:
    require(flags.dtype != "float16",
            "--dtype must not be float16, because only nanodomino scales the loss here; try --dtype bfloat16")
    return 1


def answer(flags, launch):
    flags.vocab_size = flags.vocab_size or (BYTES if flags.model in ("nano", "nano-llama") else GPT2)
    config = config_here(flags, launch.world_size, lr_decay_style="constant", lr_warmup_fraction=0.0)
    device = find_device(config, launch)
    config = dataclasses.replace(config, compile=flags.compile).with_device(device)
    start_world(launch, device)
    mesh = make_mesh(1, 1, 1, device)
    tokens = RandomTokens(config, device)

    ours = OurTraining(config, mesh, tokens)
    make = {"plain": plain_model, "transformers": model_of_transformers}[flags.against]
    sides = {"nanodomino": ours, flags.against: PlainTraining(config, mesh, tokens, make(config, ours.model))}
    times = compare({name: side.step for name, side in sides.items()}, max(flags.repeats, COMPARED_STEPS - 1), device)
    return report(config, mesh, times, {name: side.losses for name, side in sides.items()})


# ---- the two implementations

class OurTraining:
    """Trains nanodomino's model with train.py's train_step."""

    def __init__(self, config, mesh, tokens):
        self.config, self.mesh, self.tokens, self.losses = config, mesh, tokens, []
        self.model = train.model_builder(config, mesh)
        self.optimizer = ZeroOptimizer(self.model, config, mesh)
        self.stage = Domino(self.model, config.slices, config.columns, config.active_compile_backend)

    def step(self):
        result = train.train_step(len(self.losses) + 1, self.stage, self.optimizer, self.tokens, self.config, self.mesh)
        self.losses.append(result.loss)


class PlainTraining:
    """Trains a model with nanoGPT's step. model: maps tokens [b, s] to logits [b, s, v]."""

    def __init__(self, config, mesh, tokens, model):
        self.config, self.tokens, self.losses = config, tokens, []
        dtype = config.params_dtype
        self.autocast = nullcontext()
        if dtype == torch.bfloat16:
            self.autocast, dtype = torch.autocast(mesh.device.type, dtype), torch.float32
        self.model = model.to(mesh.device, dtype)
        self.optimizer = adamw(self.model, config)
        self.loss_of = lambda tokens, labels: mean_loss(self.model(tokens), labels)
        if config.compile:
            self.loss_of = torch.compile(self.loss_of, backend=config.compile_backend)

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


def plain_model(config, ours):
    """Return plain.py's model with the weights of `ours`. Raises UserError if plain.py can't build such a model."""
    require(config.normalization == "LayerNorm" and config.position_embedding_type == "learned_absolute"
            and not config.swiglu and config.num_query_groups == config.num_attention_heads and config.tied,
            "plain.py has only GPT-2's LayerNorm, learned positions, GELU, multi-head attention and tied head, but "
            "this model differs; add --against transformers")
    model = Plain(config)
    model.load(ours.state_dict())
    return model


class Logits(nn.Module):
    """Wraps a model of Transformers, so that it maps tokens [b, s] to logits [b, s, v]."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens, use_cache=False).logits


def model_of_transformers(config, ours):
    """Return Transformers' model of the same family with the weights of `ours`. Raises UserError without the package.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"--against transformers needs the package transformers, which can't be imported ({error}); "
                        "pip install -r requirements-extra.txt") from None
    record = write_config(config, config.dtype)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**record | {"torch_dtype": None}), dtype=torch.float32)
    weights = dict(ours.named_parameters())
    theirs = {}
    for mapping in map_tensors(config, family_of(config).modules):
        parts = mapping.conversion.to_hf(weights[mapping.name].detach().float().view(mapping.shape), config)
        theirs |= {name: part.clone() for name, part in zip(mapping.hf_shapes, parts)}
    missing = [name for name in model.load_state_dict(theirs, strict=False).missing_keys if name != "lm_head.weight"]
    require(not missing, f"Transformers' model also needs {', '.join(missing[:3])}, which nanodomino does not export; "
                         "this is a bug")
    return Logits(model)


# ---- the report

def report(config, mesh, times: dict[str, Times], losses: dict[str, list]):
    """Return (text, record). Raises UserError if the losses differ."""
    _, other_side = losses
    ours, theirs = (losses[name][:COMPARED_STEPS] for name in losses)
    difference = max(abs(loss - expected) / abs(expected) for loss, expected in zip(ours, theirs))
    require(difference <= SAME[config.dtype],
            f"the losses of the first {COMPARED_STEPS} steps are {ours} in nanodomino and {theirs} in {other_side}; "
            f"their relative difference must be at most {SAME[config.dtype]:.0e}, but is {difference:.1e}, so the "
            "speeds can't be compared; this is a bug")
    tokens, peak = config.global_batch_size * config.seq_length, find_peak_flops(config, mesh.device)
    speeds = {name: tokens / time.median for name, time in times.items()}
    mfu = {name: speed * flops_per_token(config) / peak if peak else None for name, speed in speeds.items()}
    ratio = ratios(times[other_side], times["nanodomino"])
    rows = [[name, time, f"{speeds[name]:,.0f}", f"{mfu[name]:.1%}" if peak else "n/a"] for name, time in times.items()]
    text = "\n".join([
        f"{config.model}: {parameter_count(config):,} parameters, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.dtype} on {mesh.device.type}, {'compiled' if config.compile else 'not compiled'}; a step is "
        f"{counted(config.microbatches, 'microbatch')} of {config.micro_batch_size} x {config.seq_length}",
        table(["", "step: median [min .. max]", "tokens/s", "MFU"], rows),
        f"nanodomino's speed / {other_side}'s: {ratio_text(ratio)}; the losses of the first {len(ours)} steps agree to "
        f"{difference:.0e}"])
    record = {"question": "throughput", "against": other_side, "nanodomino_tokens_per_s": speeds["nanodomino"],
              "plain_tokens_per_s": speeds[other_side], **ratio.record("ratio"), "mfu": mfu["nanodomino"],
              "plain_mfu": mfu[other_side], "nanodomino_s": times["nanodomino"].median,
              "plain_s": times[other_side].median,
              "losses": ours, "plain_losses": theirs, "loss_difference": difference, "model": config.model,
              "parameters": parameter_count(config), **shape_of(config),
              "global_batch_size": config.global_batch_size, "compile": config.compile,
              "device": mesh.device.type, "cores": os.cpu_count(), "repeats": len(times[other_side].seconds)}
    return text, record
