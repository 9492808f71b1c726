"""Is the model as fast as the same model in plain torch.nn?

One process runs full training steps of several implementations in turn, on the same batch and from the same weights:

    nanodomino   train.py's train_step: Domino with one slice, flat buckets, clipping, AdamW
    plain        plain_model.py in nanoGPT's loop: zero_grad, forward and backward of the microbatches, clip_grad_norm_,
                 fused AdamW; for bfloat16, autocast with fp32 weights

With --against, the same loop trains other implementations in place of plain_model.py, all in the same rounds.
`transformers` is Hugging Face Transformers' model, for every model that nanodomino can export. `uncompiled` is
nanodomino itself without torch.compile.

With --compile (the default on CUDA) all others are compiled, too. The losses of the first steps must agree. MFU is
relative to the device's dense 16-bit peak and counts 6 N + 12 L n d s FLOPs per token. It is null if that peak is
unknown.

    python bench.py throughput                                  the nano preset
    python bench.py throughput --model gpt2 --dtype bfloat16 --global-batch-size 64
    python bench.py throughput --model nano-llama --against transformers
    python bench.py throughput --compile --against uncompiled
"""

import dataclasses
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from benchmarks.plain_model import Plain, adamw, mean_loss
from benchmarks.runner import (RandomTokens, Times, Training, about, add_config_flags, compare, config_here, describe,
                               gathered, join, ratios, require_same_work, table)
from nanodomino.checkpoint.format import slices
from nanodomino.errors import require
from nanodomino.estimate.formulas import find_peak_flops, flops_per_token, parameter_count
from nanodomino.huggingface.families import FAMILIES, import_transformers, write_config
from nanodomino.huggingface.tensors import map_tensors

FLAGS = ("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
         "seq_length", "vocab_size", "micro_batch_size", "global_batch_size", "dtype", "device", "compile")
COMPARED_STEPS = 3
BYTES, GPT2 = 257, 50304     # vocabulary sizes: 256 bytes and the end of text; GPT-2's, rounded up as in nanoGPT


def add_flags(parser):
    add_config_flags(parser, FLAGS)
    parser.add_argument("--against", nargs="+", choices=("plain", "transformers", "uncompiled"), default=["plain"],
                        help="the implementations to compare with (default plain)")


def processes(flags) -> int:
    require(flags.dtype != "float16", "--dtype must not be float16, because the other implementations do not scale the "
            "loss; try --dtype bfloat16")
    return 1


def answer(flags, launch):
    flags.vocab_size = flags.vocab_size or (BYTES if flags.model in ("nano", "nano-llama", "nano-moe") else GPT2)
    config = config_here(flags, launch.world_size, lr_decay_style="constant", lr_warmup_fraction=0.0,
                         compile=flags.compile, moe_aux_loss_coeff=0.0)               # the others add no such loss
    config, mesh = join(config, launch)
    ours = Training(config, mesh)
    sides = {"nanodomino": ours}
    for name in flags.against:
        sides[name] = Training(dataclasses.replace(config, compile=False), mesh) if name == "uncompiled" else (
            PlainTraining(config, mesh, {"plain": plain, "transformers": transformers}[name](config, ours.model)))
    return report(config, mesh, *train_in_turn(config, sides, flags.repeats))


def train_in_turn(config, sides: dict, repeats: int) -> tuple[dict[str, Times], dict[str, list]]:
    """Train all sides in turn. Return their times and their first losses. Raises UserError if the losses differ."""
    device = next(iter(sides.values())).mesh.device
    times = compare({name: side.step for name, side in sides.items()}, max(repeats, COMPARED_STEPS - 1), device)
    # a torch side has its own replica's loss; a nanodomino side has the mean of all replicas already
    losses = {name: [sum(step) / config.dp for step in zip(*gathered(side.losses[:COMPARED_STEPS]))]
              for name, side in sides.items()}
    require_same_work(config, "losses", losses)
    return times, losses


# ---- the implementations

class PlainTraining:
    """Trains a model with nanoGPT's step.

    model: maps (tokens, labels), both [b, s], to the mean loss. A subclass may wrap it in another `network`, and set
    no_sync(). All microbatches but the last run in this context, in which DistributedDataParallel adds to the gradients
    without an all-reduce."""

    def __init__(self, config, mesh, model):
        self.config, self.mesh, self.losses, self.no_sync = config, mesh, [], nullcontext
        self.tokens = RandomTokens(config, mesh.device)
        half = config.params_dtype == torch.bfloat16
        self.autocast = partial(torch.autocast, mesh.device.type, torch.bfloat16, enabled=half)
        self.model = model.to(mesh.device, torch.float32 if half else config.params_dtype)
        self.optimizer = adamw(self.model, config)
        self.network = torch.compile(self.model, backend=config.compile_backend) if config.compile else self.model

    def step(self):
        config, mesh, total = self.config, self.mesh, 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(config.microbatches):
            batch = self.tokens.batch(len(self.losses) * config.global_batch_size, i, mesh.dp_rank, mesh.dp,
                                      config.micro_batch_size, config.global_batch_size)
            with self.no_sync() if i < config.microbatches - 1 else nullcontext():
                with self.autocast():
                    loss = self.network(batch.tokens, batch.labels) / config.microbatches
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.network.parameters(), config.clip_grad)
        self.optimizer.step()
        self.losses.append(total.item())


class MeanLoss(nn.Module):
    """Adds the loss to a model that returns the logits [b, s, v], or an object that has them."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, tokens, labels):
        logits = self.model(tokens, **self.options)
        return mean_loss(getattr(logits, "logits", logits), labels)


def plain(config, ours) -> MeanLoss:
    """Return the model of plain_model.py with the weights of `ours`. Raises UserError if it is not built like GPT-2."""
    require(config.normalization == "LayerNorm" and config.position_embedding_type == "learned_absolute"
            and not config.swiglu and config.num_query_groups == config.num_attention_heads and config.tied,
            "plain_model.py has only GPT-2's LayerNorm, learned positions, GELU, multi-head attention and tied head, "
            "but this model differs; try --against transformers")
    return MeanLoss(Plain(config).load(ours.state_dict()))


def transformers(config, ours) -> MeanLoss:
    """Return Transformers' model of this family with the weights of `ours`. Raises UserError without the package."""
    configuration = write_config(config, "float32")
    weights, theirs = dict(ours.named_parameters()), {}
    for mapping in map_tensors(config, FAMILIES[configuration.model_type].modules):
        whole = weights[mapping.name].detach().float().view(weights[mapping.name].spec.shape)
        part = whole[slices(mapping.box, (0,) * whole.dim())].view(mapping.size)
        parts = mapping.to_hf(part, config)
        theirs |= {name: part.clone() for name, part in zip(mapping.hf_shapes, parts)}
    # from_pretrained instead of load_state_dict: it joins the tensors of the experts
    model, problems = getattr(import_transformers(), configuration.architectures[0]).from_pretrained(
        None, config=configuration, dtype=torch.float32, state_dict=theirs, output_loading_info=True)
    require(not any(problems.values()), f"Transformers can't load what nanodomino exports ({problems}); this is a bug")
    return MeanLoss(model.train(), use_cache=False)


# ---- the report

def report(config, mesh, times: dict[str, Times], losses: dict[str, list]):
    """Return (text, record). losses: {side: losses of the first steps}"""
    ours, *others = losses
    tokens, peak = config.global_batch_size * config.seq_length, find_peak_flops(config, mesh.device)
    speeds = {name: tokens / time.median for name, time in times.items()}
    mfu = {name: speed * flops_per_token(config) / peak if peak else None for name, speed in speeds.items()}
    gains = {name: ratios(times[name], times[ours]) for name in others}
    text = "\n".join([
        f"{config.model}: {parameter_count(config):,} parameters; {describe(config)}",
        table(["", "step: median [min .. max]", "tokens/s", "MFU", "nanodomino's speed / its speed"],
              [[name, time, f"{speeds[name]:,.0f}", f"{mfu[name]:.1%}" if peak else "n/a", gains.get(name, "")]
               for name, time in times.items()]),
        f"the losses of the first {len(losses[ours])} steps agree"])
    return text, {"parameters": parameter_count(config), **about(config), "losses": losses, "tokens_per_s": speeds,
                  "mfu": mfu, **times, **{f"{name}_ratio": gain for name, gain in gains.items()}}
