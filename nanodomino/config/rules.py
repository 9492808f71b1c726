"""The rules that settings must obey together, and the defaults that depend on several settings.

A rule is one require() call, whose message gives the rule, the numbers and a fix. Config.resolve() checks all rules.
"""

import math

import torch

from nanodomino.config.presets import PRESETS
from nanodomino.config.setting import flag_name, flag_settings
from nanodomino.errors import counted, require
from nanodomino.layers.positions import rotary_size
from nanodomino.schedules.definitions import SCHEDULES

# The most forwards that all stages together may run in a step. Every rank lists them all, with their backwards, before
# the first step. For this many that takes a few seconds and a few hundred megabytes.
MAX_FORWARDS = 2**16

# What a setting may need to have an effect: {needs= in its declaration: (the setting that decides, whether it holds)}
NEEDS = {
    "--position-embedding-type rope": ("position_embedding_type", lambda c: c.rope),
    "--use-rope-scaling": ("use_rope_scaling", lambda c: c.use_rope_scaling),
    "--position-embedding-type rope or learned_absolute": (
        "position_embedding_type", lambda c: c.position_embedding_type != "none" or c.mtp_num_layers),
    "--sample-tokens above 0": ("sample_tokens", lambda c: c.sample_tokens),
    "--temperature above 0": ("temperature", lambda c: c.temperature),
    "--moe-layer-freq above 1 or no --moe-ffn-hidden-size": (
        "moe_layer_freq", lambda c: not c.num_experts or not all(map(c.has_experts, range(c.num_layers)))
        or c.moe_ffn_hidden_size == c.ffn_hidden_size),
    "--num-experts": ("num_experts", lambda c: c.num_experts),
    "--mtp-num-layers": ("mtp_num_layers", lambda c: c.mtp_num_layers),
    "--moe-router-score-function softmax": (
        "moe_router_score_function", lambda c: c.moe_router_score_function == "softmax"),
    "--moe-router-enable-expert-bias": ("moe_router_enable_expert_bias", lambda c: c.moe_router_enable_expert_bias),
    "--disable-bias-linear": ("disable_bias_linear", lambda c: c.disable_bias_linear),
    "random initial weights": ("load", lambda c: not c.load),
    "--cp above 1": ("context_parallel_size", lambda c: c.cp > 1),
    "--tp above 1": ("tensor_model_parallel_size", lambda c: c.tp > 1),
    "--recompute-granularity full": ("recompute_granularity", lambda c: c.recompute_granularity == "full"),
    "--optimizer adamw": ("optimizer", lambda c: c.optimizer == "adamw"),
    "--optimizer lion": ("optimizer", lambda c: c.optimizer == "lion"),
    "--lr-decay-style cosine or linear": ("lr_decay_style", lambda c: c.lr_decay_style != "constant"),
    "--fp16": ("dtype", lambda c: c.dtype == "float16"),
    "--fp8-format": ("fp8_format", lambda c: c.fp8_format),
    "no --loss-scale": ("loss_scale", lambda c: c.loss_scale is None),
    "--compile": ("compile", lambda c: c.compile or c.compile is None and has_gpu(c)),
}

# Megatron-LM's flags that are refused: {flag: the reason}
REFUSED_FLAGS = dict.fromkeys(
    ("--moe-expert-capacity-factor", "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy"),
    "no token is dropped: which tokens exceed an expert's capacity depends on how the batch is cut into microbatches "
    "and replicas, so the layout would change the loss; leave it out, and balance the experts with "
    "--moe-aux-loss-coeff or --moe-router-enable-expert-bias")


def has_gpu(config) -> bool:
    """Return whether --device allows a GPU and torch finds one."""
    return config.device != "cpu" and torch.cuda.is_available()


def default_ffn_hidden_size(config) -> int:
    """Return the default width of the MLP: 4 h with GELU; with SwiGLU 8/3 h, rounded down to a multiple of 64.

    An MLP has two matrices with GELU and three with SwiGLU; with these widths both have about as many parameters.
    Megatron-LM rounds in the same way.
    """
    return max(8 * config.hidden_size // (3 * 64), 1) * 64 if config.swiglu else 4 * config.hidden_size


def default_schedule(virtual_stages: int) -> str:
    """Return the first schedule that supports this many chunks per stage; if none does, the one with the most."""
    return next((name for name, schedule in SCHEDULES.items() if virtual_stages in schedule.chunks),
                max(SCHEDULES, key=lambda name: SCHEDULES[name].chunks[-1]))


def divisors(number: int, limit: int = 64) -> str:
    """Return the divisors of `number` up to `limit`, as text for a message."""
    return ", ".join(str(d) for d in range(1, min(number, limit) + 1) if number % d == 0)


def largest_divisor(number: int, limit: int) -> int | None:
    """Return the largest divisor of `number` up to `limit`; None if limit < 1."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return max((d for d in [*small, *(number // d for d in small)] if d <= limit), default=None)


def flags_for_enough_layers(c) -> str:
    """Return flags that give each chunk a layer, as text for a message: "--num-layers 8 or --pp 2"."""
    advice = f"--num-layers {c.pp * c.virtual_stages}"
    fewer_chunks = c.num_layers // c.pp
    if fewer_chunks < c.virtual_stages and fewer_chunks in SCHEDULES[c.schedule].chunks:
        advice += f" or --virtual-stages {fewer_chunks}"
    fewer_stages = largest_divisor(c.world_size // c.tp, c.num_layers // c.virtual_stages)
    return advice + (f" or --pp {fewer_stages}" if fewer_stages else "")


def check_needs(config, names):
    """Raise UserError if a flag has no effect because another setting does not have the value that it needs (NEEDS).

    names: the settings whose flags were given. Settings from a run, a preset or a --config file are not checked: the
    user did not ask for them now, and they may have an effect in a later launch on another layout. Values that equal
    the default, and --no-SETTING, are accepted too.
    """
    for setting in flag_settings(config):
        value, default = getattr(config, setting.name), PRESETS[config.model].get(setting.name, setting.default)
        if setting.name not in names or value is False or value == default:
            continue
        for words in setting.metadata["needs"]:
            decisive, holds = NEEDS[words]
            flag = flag_name(setting.name) + ("" if value is True else f" {value}")
            now = getattr(config, decisive)
            require(holds(config), f"{flag} needs {words} to have an effect, but {flag_name(decisive)} is "
                    f"{'not given' if now is None else 'off' if now is False else now}; change that, or leave out "
                    f"{flag_name(setting.name)}")


def check_trace(config):
    """Check --trace FIRST:LAST. Raises UserError."""
    if config.trace is None:
        return
    numbers = config.trace.split(":")
    require(len(numbers) == 2 and all(number.isdecimal() for number in numbers) and len(config.trace) < 20
            and 1 <= int(numbers[0]) <= int(numbers[1]),
            f"--trace must be FIRST:LAST, two steps with 1 <= FIRST <= LAST, but is {config.trace}; try --trace 10:12")
    require(int(numbers[1]) <= config.train_iters,
            f"--trace {config.trace} must not go beyond --train-iters {config.train_iters}; lower LAST, or raise "
            "--train-iters")


def check_rules(c):
    """Check a resolved Config. Raises UserError."""
    tp, pp, dp = c.tp, c.pp, c.dp
    needed, (context, sizes, flag) = tp * pp * dp * c.cp, ("", "", "") if c.cp == 1 else (
        " x context", f" x {c.cp}", " --cp,")
    require(needed == c.world_size,
            f"world size {c.world_size} must equal tensor x pipeline x data{context} parallel = "
            f"{tp} x {pp} x {dp}{sizes} = {needed}; start {counted(needed, 'process')} with torchrun, "
            f"or change --tp,{flag} --pp, --dp")
    require(c.hidden_size % c.num_attention_heads == 0 or c.kv_channels != c.hidden_size // c.num_attention_heads,
            f"hidden-size {c.hidden_size} must be divisible by num-attention-heads {c.num_attention_heads}; "
            f"try --hidden-size {c.num_attention_heads * max(c.hidden_size // c.num_attention_heads, 1)}")
    require(c.num_attention_heads % tp == 0,
            f"num-attention-heads {c.num_attention_heads} must be divisible by tensor-model-parallel-size {tp}; "
            f"try --tp {divisors(c.num_attention_heads)}")
    require(c.num_attention_heads % c.num_query_groups == 0,
            f"num-attention-heads {c.num_attention_heads} must be divisible by num-query-groups {c.num_query_groups}; "
            f"try --num-query-groups {divisors(c.num_attention_heads)}")
    require(c.num_query_groups % tp == 0,
            f"num-query-groups {c.num_query_groups} must be divisible by tensor-model-parallel-size {tp}, since each "
            f"rank holds whole groups; try --tp {divisors(c.num_query_groups)}")
    require(not c.rope or 0 < rotary_size(c) <= c.kv_channels and rotary_size(c) % 2 == 0,
            f"RoPE must rotate an even number of channels from 2 to {c.kv_channels}, but rotary-percent "
            f"{c.rotary_percent:g} x kv-channels {c.kv_channels} is {rotary_size(c)}; try "
            + (f"--kv-channels {c.kv_channels + 1}" if c.kv_channels % 2 else "--rotary-percent 1"))
    require(c.ffn_hidden_size % tp == 0,
            f"ffn-hidden-size {c.ffn_hidden_size} must be divisible by tensor-model-parallel-size {tp}; "
            f"try --tp {divisors(c.ffn_hidden_size)}")
    if c.num_experts:
        check_expert_rules(c)
    if c.cp > 1:
        check_context_rules(c)
    if c.fp8_format:
        check_fp8_rules(c)
    chunks = SCHEDULES[c.schedule].chunks
    allowed = str(chunks[0]) if len(chunks) == 1 else f"from {chunks[0]} to {chunks[-1]}"
    require(c.virtual_stages in chunks,
            f"virtual-stages must be {allowed} with schedule {c.schedule}, but is {c.virtual_stages}; "
            f"try --virtual-stages {min(chunks, key=lambda count: abs(count - c.virtual_stages))}"
            + "".join(f" or --schedule {name}" for name, schedule in SCHEDULES.items()
                      if c.virtual_stages in schedule.chunks))
    require(c.num_layers >= pp * c.virtual_stages,
            f"num-layers {c.num_layers} must be at least pipeline-model-parallel-size {pp}"
            + (f" x virtual-stages {c.virtual_stages} = {pp * c.virtual_stages}" if c.virtual_stages > 1 else "")
            + f", since each chunk needs at least one layer; try {flags_for_enough_layers(c)}")
    require(c.global_batch_size % (c.micro_batch_size * dp) == 0,
            f"global-batch-size {c.global_batch_size} must be divisible by micro-batch-size x data parallel = "
            f"{c.micro_batch_size} x {dp} = {c.micro_batch_size * dp}; try --global-batch-size "
            f"{-(-c.global_batch_size // (c.micro_batch_size * dp)) * c.micro_batch_size * dp}")
    most = MAX_FORWARDS // (pp * c.virtual_stages)
    require(c.microbatches <= most,
            f"a step may have at most {MAX_FORWARDS} / (pipeline-model-parallel-size {pp} x virtual-stages "
            f"{c.virtual_stages}) = {most} microbatches per replica, but global-batch-size {c.global_batch_size} / "
            f"(micro-batch-size {c.micro_batch_size} x data parallel {dp}) is {c.microbatches}; "
            f"try --global-batch-size {most * c.micro_batch_size * dp} or a larger --micro-batch-size")
    require(c.slices <= c.micro_batch_size,
            f"slices {c.slices} must be at most micro-batch-size {c.micro_batch_size}, since each slice needs a "
            f"sample; try --slices {c.micro_batch_size}, or --columns 2 to overlap within a slice")
    require(c.columns <= c.hidden_size, f"columns {c.columns} must be at most hidden-size {c.hidden_size}; try 2 or 4")
    require(c.seq_length % c.sequence_shards == 0,
            f"seq-length {c.seq_length} must be divisible by tensor-model-parallel-size {tp} with --sequence-parallel, "
            f"which splits the sequence; try --seq-length {-(-c.seq_length // tp) * tp}")
    require(c.seq_length <= c.max_position_embeddings,
            f"seq-length {c.seq_length} must be at most max-position-embeddings {c.max_position_embeddings}; "
            f"try --max-position-embeddings {c.seq_length}")
    require(c.mtp_num_layers < c.seq_length,
            f"mtp-num-layers {c.mtp_num_layers} must be below seq-length {c.seq_length}, or the last depth predicts "
            f"nothing; try --mtp-num-layers {c.seq_length - 1}")
    require(c.load or not c.finetune, "--finetune needs a checkpoint to take the weights from; add --load FOLDER")
    require(c.min_loss_scale <= c.initial_loss_scale, f"min-loss-scale {c.min_loss_scale:g} must be at most "
            f"initial-loss-scale {c.initial_loss_scale:g}; try --min-loss-scale {c.initial_loss_scale:g}")
    require(c.min_lr <= c.lr, f"min-lr {c.min_lr} must be at most lr {c.lr}; lower --min-lr, or leave it out")


def check_context_rules(c):
    """Check the rules for context parallelism of a resolved Config. Raises UserError."""
    parts = c.cp * math.lcm(2, c.sequence_shards)
    shards = f", and by cp x tp = {c.cp * c.tp} with --sequence-parallel" * (c.sequence_shards > 1)
    require(c.seq_length % parts == 0,
            f"seq-length {c.seq_length} must be divisible by 2 x context-parallel-size = {2 * c.cp}, since each rank "
            f"holds two equal parts of a sample{shards}; try --seq-length {-(-c.seq_length // parts) * parts}")
    require(c.cp_comm_type == "all_gather" or c.num_query_groups % (c.tp * c.cp) == 0,
            f"num-query-groups {c.num_query_groups} must be divisible by tp x cp = {c.tp} x {c.cp} = {c.tp * c.cp} "
            "with --cp-comm-type a2a, which gives every rank whole groups; try --cp-comm-type all_gather")


def check_expert_rules(c):
    """Check the rules for experts of a resolved Config. Raises UserError."""
    require(c.disable_bias_linear, "experts have no biases, so --num-experts needs --disable-bias-linear; add it")
    require(c.moe_router_topk <= c.num_experts, f"moe-router-topk {c.moe_router_topk} must be at most num-experts "
            f"{c.num_experts}; try --moe-router-topk {c.num_experts}")
    require(c.moe_router_topk > 1 or c.moe_router_score_function != "softmax" or c.moe_router_pre_softmax,
            "moe-router-topk must be at least 2 with --moe-router-score-function softmax, but is 1: the softmax over a "
            "single chosen expert is always 1, so the router would learn nothing from the loss of the model; add "
            "--moe-router-pre-softmax")
    both = math.gcd(c.num_experts, c.dp * c.cp)
    size = f"data parallel size {c.dp}" if c.cp == 1 else f"data x context parallel size {c.dp} x {c.cp}"
    require(both % c.ep == 0, f"expert-model-parallel-size {c.ep} must divide num-experts {c.num_experts} and the "
            f"{size}; try --ep {divisors(both)}")
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        width = getattr(c, name) or 0
        require(width % c.tp == 0, f"{name.replace('_', '-')} {width} must be divisible by tensor-model-parallel-size "
                f"{c.tp}; try {flag_name(name)} {-(-width // c.tp) * c.tp}")


def check_fp8_rules(c):
    """Check the rules for fp8 of a resolved Config. A CPU multiplies matrices of all sizes. Raises UserError."""
    require(c.dtype != "float64", "--fp8-format adds up in fp32, so --dtype must not be float64; try --bf16")
    require(c.num_layers > 2 or c.mtp_num_layers or not c.first_last_layers_bf16,
            f"num-layers {c.num_layers} must be at least 3 with --first-last-layers-bf16, or no layer multiplies in "
            "8 bits; try --num-layers 3, or leave out --first-last-layers-bf16")
    if not (c.device == "cuda" or has_gpu(c)):
        return
    require(c.fp8_recipe == "tensorwise" or c.dtype == "bfloat16", "on GPUs --fp8-recipe rowwise needs --bf16, but "
            f"--dtype is {c.dtype}; add --bf16, or use --fp8-recipe tensorwise")
    for name, size, parts, fix in (
            ("hidden-size", c.hidden_size, c.columns, "--columns"), ("seq-length", c.seq_length, c.cp, "--cp"),
            ("num-attention-heads x kv-channels", c.num_attention_heads * c.kv_channels, c.tp, "--tp"),
            ("(num-attention-heads + 2 num-query-groups) x kv-channels", c.qkv_size, c.tp, "--tp"),
            ("ffn-hidden-size", c.ffn_hidden_size, c.tp, "--tp")):
        require(size % (16 * parts) == 0, "on GPUs fp8 multiplies matrices whose sizes are multiples of 16, so "
                f"{name} {size} must be divisible by 16 x {parts} = {16 * parts}; change it or {fix}, or leave out "
                "--fp8-format")
