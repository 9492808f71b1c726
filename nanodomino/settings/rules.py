"""The defaults that depend on several settings, and the rules that settings must obey together.

There are two kinds of rules. A flag that would have no effect is refused: a setting declares what it needs. A
combination that can't be computed is refused by a require() call, whose message gives the rule, the numbers and a fix.
"""

import math
import re
from dataclasses import replace

import torch

from nanodomino.errors import require
from nanodomino.layers.attention_mask import rotary_size
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.settings.flags import flag_name, flag_settings
from nanodomino.settings.presets import DEFAULT_LAYOUTS, FINETUNE_BATCH_SIZE, FINETUNE_LR_DIVISOR

# The most forwards that all stages together may run in a step. Every rank lists them all, with their backwards, before
# the first step. For this many that takes a few seconds and a few hundred megabytes.
MAX_FORWARDS = 2**16
MAX_TOKENS = 2**26               # in a microbatch: data.py and a dry run hold them in the host's memory


# ---- defaults

def with_defaults(given, world_size: int):
    """Return a copy of a Config with all defaults that depend on the preset, the processes or other settings."""
    def fill(config, **defaults):
        return replace(config, **{name: value for name, value in defaults.items() if getattr(config, name) is None})

    preset = dict(given.preset)
    preset["lr"] = preset["lr"] * given.optimizer_spec.lr_factor / (FINETUNE_LR_DIVISOR if given.finetune else 1)
    if given.finetune:
        preset["global_batch_size"] = min(preset["global_batch_size"], FINETUNE_BATCH_SIZE)
    c = fill(given, **preset)

    heads, groups = c.num_attention_heads, c.num_query_groups or c.num_attention_heads
    default_tp, default_pp = 1, 1
    if c.tp is None and c.pp is None:
        most, rest = divmod(world_size, math.lcm(c.cp, c.ep))
        most = 1 if rest else most                             # a rule is broken: check_rules() says which
        ranks_per_replica = world_size // (c.dp * c.cp) if c.dp else 4 if most % 4 == 0 else most
        default_tp, default_pp = DEFAULT_LAYOUTS.get(ranks_per_replica, (1, 1))
    tp, pp = c.tp or math.gcd(default_tp, groups), c.pp or default_pp
    dp = c.dp or max(world_size // (tp * c.cp * pp), 1)
    micro_batch_size = given.micro_batch_size or min(c.micro_batch_size, max(c.global_batch_size // dp, 1))
    if c.kv_channels is None:
        check_divisible("hidden-size", c.hidden_size, "num-attention-heads", heads,
                        f"--hidden-size {heads * max(c.hidden_size // heads, 1)}, or give --kv-channels")
    # SwiGLU has three matrices and GELU two: so both have about as many parameters. Megatron-LM rounds in the same way.
    ffn_hidden_size = c.ffn_hidden_size or (
        max(8 * c.hidden_size // (3 * 64), 1) * 64 if c.swiglu else 4 * c.hidden_size)
    # the first schedule that supports this many chunks per stage; if none does, the one with the most
    schedule = c.schedule or next((name for name, each in SCHEDULES.items() if (c.virtual_stages or 1) in each.chunks),
                                  max(SCHEDULES, key=lambda name: SCHEDULES[name].chunks[-1]))
    c = replace(c, world_size=world_size, micro_batch_size=micro_batch_size,
                trained_positions=max(c.trained_positions or 0, c.seq_length))
    return fill(c, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp,
                slices=min(2, micro_batch_size) if tp > 1 or c.cp > 1 else 1,
                columns=2 if tp > 1 and micro_batch_size == 1 and c.slices is None else 1,
                schedule=schedule, virtual_stages=SCHEDULES[schedule].chunks[0], ffn_hidden_size=ffn_hidden_size,
                num_query_groups=groups, kv_channels=c.hidden_size // heads, max_position_embeddings=c.seq_length,
                min_lr=c.lr / 10, moe_router_topk=2, moe_aux_loss_coeff=0.0,
                moe_ffn_hidden_size=ffn_hidden_size if c.num_experts else None)


# ---- flags without effect

def holds(need: str, config) -> bool:
    """Return whether a setting's need is met: "--num-experts", "no --load", "--tp above 1" or "--optimizer muon"."""
    flag, *words = need.removeprefix("no ").split()
    value = getattr(config, flag[2:].replace("-", "_"))
    if "above" in words:
        return value > int(words[-1])
    return str(value) in words if words else bool(value) != need.startswith("no ")


def check_needs(config, names):
    """Raise UserError if a flag has no effect because another setting does not have the value that it needs. names: the
    settings whose flags were given. Settings from a run, a preset or a --config file are not checked, because they may
    have an effect in a launch on another layout. A default and --no-SETTING are accepted, too."""
    for setting in flag_settings(config):
        value, default = getattr(config, setting.name), config.preset.get(setting.name, setting.default)
        if setting.name not in names or value is False or value == default:
            continue
        flag = flag_name(setting.name)
        for need in setting.metadata["needs"]:
            require(holds(need, config), f"{flag}{'' if value is True else f' {value}'} needs {need} to have an "
                    f"effect; change that, or leave out {flag}")
    require("ffn_hidden_size" not in names or not config.num_experts or config.moe_layer_freq > 1
            or config.ffn_hidden_size == config.moe_ffn_hidden_size,
            f"--ffn-hidden-size {config.ffn_hidden_size} has no effect, because every layer has experts of width "
            f"{config.moe_ffn_hidden_size}; leave it out")


# ---- combinations

def divisors(number: int, limit: int = 64) -> str:
    """Return the divisors of `number` up to `limit`, as text for a message."""
    return ", ".join(str(d) for d in range(1, min(number, limit) + 1) if number % d == 0)


def check_divisible(name: str, number: int, by: str, divisor: int, fix: str):
    """Raise UserError unless `divisor` divides `number`. name, by: the words for the two numbers."""
    require(number % divisor == 0, f"{name} {number} must be divisible by {by} {divisor}; try {fix}")


def check_rules(c):
    """Check a resolved Config. Raises UserError."""
    if c.fp8_format:
        check_fp8(c)
    if c.num_experts:
        check_experts(c)
    tp, pp, dp, heads, groups = c.tp, c.pp, c.dp, c.num_attention_heads, c.num_query_groups
    sizes = {"tensor": tp, **c.inner_axes, "pipeline": pp, "data": dp}
    needed = math.prod(sizes.values())
    require(needed == c.world_size, f"world size {c.world_size} must equal {' x '.join(sizes)} parallel = "
            f"{' x '.join(map(str, sizes.values()))} = {needed}; use {needed} processes (GPUs), or "
            f"change {', '.join('--' + axis for axis in ('tp', *c.inner_axes, 'pp', 'dp'))}")
    check_divisible("num-attention-heads", heads, "num-query-groups", groups, f"--num-query-groups {divisors(heads)}")
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size",
                 "moe_shared_expert_intermediate_size"):
        size = getattr(c, name) or 0                           # None without experts
        check_divisible(name.replace("_", "-"), size, "tensor-model-parallel-size", tp, f"--tp {divisors(size)}")
    require(not c.rope or 0 < rotary_size(c) <= c.kv_channels and rotary_size(c) % 2 == 0,
            f"RoPE must rotate an even number of channels from 2 to {c.kv_channels}, but rotary-percent "
            f"{c.rotary_percent:g} x kv-channels {c.kv_channels} is {rotary_size(c)}; "
            f"try --kv-channels {c.kv_channels + c.kv_channels % 2} --rotary-percent 1")

    v, micro, batch = c.virtual_stages, c.micro_batch_size, c.global_batch_size
    possible, most = SCHEDULES[c.schedule].chunks, MAX_FORWARDS // (pp * v)
    require(v in possible, f"virtual-stages must be from {possible[0]} to {possible[-1]} with schedule "
            f"{c.schedule}, but is {v}; try --virtual-stages {possible[0]}, or another --schedule")
    require(c.num_layers >= pp * v, f"num-layers {c.num_layers} must be at least pipeline-model-parallel-size {pp} "
            f"x virtual-stages {v}, or chunks would be empty; try --num-layers {pp * v} or a smaller --pp")
    check_divisible("global-batch-size", batch, f"micro-batch-size x data parallel = {micro} x {dp} =", micro * dp,
                    f"--global-batch-size {-(-batch // (micro * dp)) * micro * dp}")
    require(c.microbatches <= most, f"global-batch-size {batch} would be {c.microbatches} microbatches per replica, "
            f"but a step may have at most {MAX_FORWARDS} / (pipeline-model-parallel-size {pp} x virtual-stages "
            f"{v}) = {most}; try --global-batch-size {most * micro * dp} or a larger --micro-batch-size")
    require(micro * c.seq_length <= MAX_TOKENS, f"micro-batch-size {micro} x seq-length {c.seq_length} must be at most "
            f"{MAX_TOKENS} tokens; lower one of them")
    require(c.slices <= micro, f"slices {c.slices} must be at most micro-batch-size {micro}, since each slice needs a "
            f"sample; try --slices {micro}, or --columns 2 to overlap within a slice")

    length, parts, positions = c.seq_length, c.seq_length_divisor, c.max_position_embeddings
    check_divisible("seq-length", length, "2 cp (and by cp x tp with --sequence-parallel), here", parts,
                    f"--seq-length {-(-length // parts) * parts}")
    fixed = c.load and (not c.finetune or c.position_embedding_type == "learned_absolute")
    require(length <= positions, f"seq-length {length} must be at most max-position-embeddings {positions}; try "
            + (f"--seq-length {positions}" + ", or add --finetune" * c.rope if fixed
               else f"--max-position-embeddings {length}"))
    require(c.mtp_num_layers < length, f"mtp-num-layers {c.mtp_num_layers} must be below seq-length {length}, or the "
            f"last depth predicts nothing; try --mtp-num-layers {length - 1}")
    require(c.load or not c.finetune, "--finetune needs a checkpoint to take the weights from; add --load FOLDER")
    require(c.min_loss_scale <= c.initial_loss_scale, f"min-loss-scale {c.min_loss_scale:g} must be at most "
            f"initial-loss-scale {c.initial_loss_scale:g}; try --min-loss-scale {c.initial_loss_scale:g}")
    require(c.min_lr <= c.lr, f"min-lr {c.min_lr} must be at most lr {c.lr}; lower --min-lr, or leave it out")
    require(c.trace is None or re.fullmatch(r"[1-9]\d{0,8}:[1-9]\d{0,8}", c.trace)
            and len(c.traced_steps) > 0 and c.traced_steps[-1] <= c.train_iters,
            f"--trace must be FIRST:LAST, two steps with 1 <= FIRST <= LAST <= --train-iters {c.train_iters}, but is "
            f"{c.trace}; try --trace {min(10, c.train_iters)}:{min(12, c.train_iters)}")
    if c.cp > 1 and c.cp_comm_type == "a2a":
        check_divisible("num-query-groups", groups, f"tp x cp = {tp} x {c.cp} =", tp * c.cp,
                        "--cp-comm-type all_gather, since with a2a every rank gets whole groups")


def check_experts(c):
    require(c.disable_bias_linear, "experts have no biases, so --num-experts needs --disable-bias-linear; add it")
    require(c.moe_router_topk <= c.num_experts, f"moe-router-topk {c.moe_router_topk} must be at most num-experts "
            f"{c.num_experts}; try --moe-router-topk {c.num_experts}")
    require(c.moe_router_topk > 1 or c.moe_router_score_function != "softmax" or c.moe_router_pre_softmax,
            "moe-router-topk must be at least 2 with --moe-router-score-function softmax, but is 1: the softmax over a "
            "single chosen expert is always 1, so the router would learn nothing from the loss of the model; add "
            "--moe-router-pre-softmax")
    both = math.gcd(c.num_experts, c.dp * c.cp)
    require(both % c.ep == 0, f"expert-model-parallel-size {c.ep} must divide num-experts {c.num_experts} and the data "
            f"x context parallel size {c.dp} x {c.cp}; try --ep {divisors(both)}")


def check_fp8(c):
    require(c.dtype != "float64", "--fp8-format adds up in fp32, so --dtype must not be float64; try --bf16")
    require(c.num_layers > 2 or c.mtp_num_layers or not c.first_last_layers_bf16,
            f"num-layers {c.num_layers} must be at least 3 with --first-last-layers-bf16, or no layer multiplies in 8 "
            "bits; try --num-layers 3, or leave out --first-last-layers-bf16")
    if c.device == "cpu" or c.device == "auto" and not torch.cuda.is_available():
        return
    require(c.fp8_recipe == "tensorwise" or c.dtype == "bfloat16", "on GPUs --fp8-recipe rowwise needs --bf16, but "
            f"--dtype is {c.dtype}; add --bf16, or use --fp8-recipe tensorwise")
    for name, size, parts, flag in (
            ("hidden-size", c.hidden_size, c.columns, "columns"),
            ("seq-length", c.seq_length, c.cp, "cp"),
            ("num-attention-heads x kv-channels", c.num_attention_heads * c.kv_channels, c.tp, "tp"),
            ("(num-attention-heads + 2 num-query-groups) x kv-channels", c.qkv_size, c.tp, "tp"),
            ("ffn-hidden-size", c.ffn_hidden_size, c.tp, "tp")):
        check_divisible(name, size, f"16 x {parts} =", 16 * parts,
                        f"another --{flag}, or leave out --fp8-format, which on GPUs needs multiples of 16")
