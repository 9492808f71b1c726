"""All settings of a run, as one flat dataclass, and the sizes that follow from them.

Each setting is declared once, in one line of Config (setting.py). A run's Config is made in three steps:

    flags, a run's config.json  ->  Config  ->  resolve(world_size)  ->  with_vocabulary(size)  ->  the run
    run/command_line.py                         presets, layout,         the data's vocabulary,
                                                checks (rules.py)        padded

Every step is a pure function of the flags, the files that they name, the world size and the data folder. Hence all
ranks arrive at the same Config, or at the same UserError, before they communicate, and no rank waits in a collective
for a rank that has already failed.

    world_size        = tp x pp x dp
    global_batch_size = micro_batch_size x dp x microbatches
    tp divides the attention heads, the query groups, ffn_hidden_size and the padded vocabulary

No default that changes the result depends on the number of processes: global_batch_size is fixed, and the number of
microbatches follows. Names are Megatron-LM's where it has the same setting.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import torch

from nanodomino.config.presets import DEFAULT_LAYOUTS, DTYPES, GPT2, LR_DECAY_STYLES, PRESETS, SHORT_DTYPES
from nanodomino.config.rules import check_rules, check_trace, default_ffn_hidden_size, default_schedule, largest_divisor
from nanodomino.config.setting import check_values, setting
from nanodomino.errors import require
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.layers.positions import POSITION_EMBEDDING_TYPES
from nanodomino.optim.loss_scale import LOSS_SCALE_LIMIT
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement_and_messages import Placement, Timetable, timetable

model_setting = partial(setting, "The model", affects="model")
layout_setting = partial(setting, "The layout", affects="nothing")
training_setting = partial(setting, "The training", affects="losses")
data_setting = partial(setting, "The data", affects="run")
run_setting = partial(setting, "The run", affects="nothing")
machine_setting = partial(setting, "The machine", affects="nothing")


def family_setting(name, help, **options):
    """Declare a setting that each family of presets chooses. Before the setting existed, every model used GPT-2's."""
    return model_setting(None, f"{help} (default: the preset's)", legacy_default=GPT2[name], **options)


@dataclass(frozen=True)
class Config:
    model: str = model_setting("nano", "preset that sets every size not set by its own flag", choices=PRESETS)
    num_layers: int = model_setting(None, "number of transformer layers")
    hidden_size: int = model_setting(None, "width h of the residual stream")
    ffn_hidden_size: int = model_setting(
        None, "width of the MLP (default: the preset's; else 4 h, or with --swiglu 8/3 h in multiples of 64)",
        derived=True)
    num_attention_heads: int = model_setting(None, "number of attention heads")
    group_query_attention: bool = model_setting(
        False, "share keys and values within --num-query-groups, which implies this")
    num_query_groups: int = model_setting(
        None, "number of groups of heads that share keys and values (default: the preset's, else one per head)",
        derived=True, legacy_default=lambda record: record["num_attention_heads"])
    kv_channels: int = model_setting(
        None, "size of each attention head (default: the preset's, else h / heads)", derived=True,
        legacy_default=lambda record: record["hidden_size"] // record["num_attention_heads"])
    seq_length: int = model_setting(None, "tokens per sample", affects="run")
    max_position_embeddings: int = model_setting(None, "number of positions (default: --seq-length)", derived=True)
    position_embedding_type: str = family_setting(
        "position_embedding_type", "how the model encodes token positions", choices=POSITION_EMBEDDING_TYPES)
    rotary_percent: float = model_setting(1.0, "fraction of each head's channels that RoPE rotates", above=0.0)
    rotary_base: float = family_setting("rotary_base", "base of RoPE's frequencies, base^(-2i/d)", above=0.0)
    use_rope_scaling: bool = family_setting("use_rope_scaling", "divide RoPE's low frequencies, as Llama 3.1 does")
    rope_scaling_factor: float = family_setting("rope_scaling_factor", "divisor of --use-rope-scaling", above=0.0)
    rotary_seq_len_interpolation_factor: float = model_setting(
        1.0, "divisor of all positions before RoPE (position interpolation)", above=0.0)
    vocab_size: int = model_setting(None, "vocabulary size (default: the data's)", derived=True)
    make_vocab_size_divisible_by: int = model_setting(128, "pad the vocabulary to a multiple of this, whatever tp is")
    untie_embeddings_and_output_weights: bool = family_setting(
        "untie_embeddings_and_output_weights", "give the output head its own weight matrix")
    normalization: str = family_setting("normalization", "norm at the start of each sublayer", choices=NORMALIZATIONS)
    layernorm_epsilon: float = family_setting("layernorm_epsilon", "added to the variance in each norm", above=0.0)
    swiglu: bool = family_setting("swiglu", "use SwiGLU, silu(gate) x up, in the MLP instead of GELU")
    disable_bias_linear: bool = family_setting("disable_bias_linear", "omit the biases of linear layers")
    add_qkv_bias: bool = family_setting("add_qkv_bias", "give q, k and v a bias even with --disable-bias-linear")
    qk_layernorm: bool = family_setting("qk_layernorm", "normalize each head's q and k before RoPE")
    hidden_dropout: float = model_setting(
        0.0, "dropout on the embeddings and on each sublayer's output", below=1.0, affects="losses")
    attention_dropout: float = model_setting(0.0, "dropout on the attention probabilities", below=1.0, affects="losses")
    init_method_std: float = model_setting(
        None, "standard deviation of the initial weights (default: the preset's)", affects="run")

    tensor_model_parallel_size: int = layout_setting(
        None, "number of ranks that split each layer's matrices", alias="--tp", derived=True)
    pipeline_model_parallel_size: int = layout_setting(
        None, "number of pipeline stages that split the layers", alias="--pp", derived=True)
    data_parallel_size: int = layout_setting(
        None, "number of replicas that split the batch (default: processes / (tp x pp))", alias="--dp", derived=True)
    micro_batch_size: int = layout_setting(
        None, "samples per microbatch (default: the preset's, at most a replica's share of the batch)", derived=True)
    slices: int = layout_setting(
        None, "Domino's row split: slices of a microbatch; while the all-reduce of one slice is in flight, another "
              "slice computes (default: 2 with tensor parallelism, else 1)", derived=True)
    columns: int = layout_setting(
        1, "Domino's column split: chunks of a row-parallel matmul; each is reduced while the next is computed")
    schedule: str = layout_setting(
        None, "pipeline schedule (default: the first that supports --virtual-stages)", choices=SCHEDULES, derived=True)
    virtual_stages: int = layout_setting(
        None, "chunks of layers per pipeline stage (default: as few as the schedule allows)",
        alias="--num-virtual-stages-per-pipeline-rank", derived=True, legacy_default=1)
    sequence_parallel: bool = layout_setting(False, "split the residual stream along the sequence over the tp ranks")
    recompute_granularity: str = layout_setting(
        "none", "what backward recomputes instead of storing: selective, the attention core and the activation; full, "
                "everything but the input of each sublayer", choices=GRANULARITIES)
    checkpoint_in_cpu: bool = layout_setting(False, "offload what full recomputation stores to host memory")
    zero_stage: int = layout_setting(
        1, "what is sharded over the replicas: 0, nothing; 1, the optimizer state; 2, the gradients too",
        choices=(0, 1, 2), at_least=0)
    bucket_size: int = layout_setting(10_000_000, "parameters per gradient bucket, reduced while backward continues")

    train_iters: int = training_setting(200, "number of optimizer steps")
    global_batch_size: int = training_setting(None, "samples per optimizer step", affects="run")
    optimizer: str = training_setting("adamw", "optimizer", choices=OPTIMIZERS, affects="optimizer")
    lr: float = training_setting(None, "peak learning rate (default: the preset's, meant for AdamW)")
    min_lr: float = training_setting(None, "final learning rate (default: lr / 10)", derived=True)
    lr_decay_style: str = training_setting(
        "cosine", "decay of the learning rate from --lr to --min-lr", choices=LR_DECAY_STYLES)
    lr_warmup_fraction: float = training_setting(
        0.05, "fraction of --train-iters in which the learning rate rises linearly to --lr", below=1.0)
    weight_decay: float = training_setting(0.1, "decoupled weight decay; applies to matrices only")
    clip_grad: float = training_setting(1.0, "maximum global gradient norm; 0 turns clipping off")
    adam_beta1: float = training_setting(0.9, "AdamW's decay of the first moment", below=1.0)
    adam_beta2: float = training_setting(0.95, "AdamW's decay of the second moment", below=1.0)
    adam_eps: float = training_setting(1e-8, "added to the denominator of AdamW's update", above=0.0)
    lion_beta1: float = training_setting(0.9, "weight of the moment in Lion's update", below=1.0)
    lion_beta2: float = training_setting(0.99, "Lion's decay of the moment", below=1.0)
    dtype: str = training_setting(
        "float32", "type of weights and activations; bfloat16 and float16 keep fp32 master weights and gradients",
        choices=DTYPES)
    bf16: bool = training_setting(False, "short for --dtype bfloat16")
    fp16: bool = training_setting(
        False, "short for --dtype float16; the loss scale is dynamic unless --loss-scale is set")
    loss_scale: float = training_setting(
        None, "constant factor of each token's loss gradient, best a power of two (default: dynamic in fp16, else 1)",
        above=0.0, below=LOSS_SCALE_LIMIT)
    initial_loss_scale: float = training_setting(2.0**15, "first dynamic loss scale", above=0.0, below=LOSS_SCALE_LIMIT)
    min_loss_scale: float = training_setting(1.0, "smallest dynamic loss scale", above=0.0, below=LOSS_SCALE_LIMIT)
    loss_scale_window: int = training_setting(1000, "steps without overflow after which a dynamic loss scale doubles")
    hysteresis: int = training_setting(2, "overflows after which a dynamic loss scale is halved")
    fp16_lm_cross_entropy: bool = training_setting(False, "compute the cross entropy's temporaries in fp16, not fp32")
    seed: int = training_setting(1234, "seed of initial weights, data order and dropout", affects="run", at_least=0)

    data_path: str = data_setting(
        None, "folder made by data/prepare.py (default: the source of Python's standard library)", affects="nothing")
    eod_mask_loss: bool = data_setting(False, "do not train on predicting the end-of-text token")
    reset_position_ids: bool = data_setting(False, "restart positions at 0 after each end-of-text token")
    reset_attention_mask: bool = data_setting(False, "let tokens attend only to their own document")

    run_dir: str = run_setting(
        None, "folder of the run; an existing run resumes with its own settings (default: runs/MODEL-NUMBER)",
        affects="launch")
    config: str = run_setting(
        None, "JSON file of settings, like a run's config.json; flags override it", affects="launch")
    load: str = run_setting(None, "checkpoint to start from, or a run's folder for its newest one")
    finetune: bool = run_setting(
        False, "load only the weights from --load: start at step 0 with a new optimizer, any data and any batch size")
    log_interval: int = run_setting(25, "steps between progress lines")
    eval_interval: int = run_setting(100, "steps between validations")
    eval_iters: int = run_setting(10, "global batches per validation; 0 turns validation off", at_least=0)
    save_interval: int = run_setting(100, "steps between checkpoints; the last step is always saved")
    keep_last: int = run_setting(3, "number of checkpoints to keep")
    exit_interval: int = run_setting(None, "save and stop after the next step divisible by this", affects="launch")
    max_skipped_steps: int = run_setting(
        10, "give up after this many skipped steps in a row; a step is skipped if its loss or gradient is not finite, "
            "and counts unless a smaller loss scale may help")
    tensorboard_dir: str = run_setting(None, "folder for TensorBoard's view of metrics.jsonl; each run needs its own")
    trace: str = run_setting(None, "steps FIRST:LAST to record and draw as a timeline", affects="launch")
    timeout: int = run_setting(600, "seconds that a collective may take before the run ends")
    sample_tokens: int = run_setting(120, "number of tokens to generate at the end; 0 for none", at_least=0)
    temperature: float = run_setting(0.8, "sampling temperature of this text; 0 is greedy")
    top_k: int = run_setting(20, "sample this text from the k most likely tokens; 0 for all", at_least=0)

    device: str = machine_setting("auto", "auto uses CUDA if torch finds a GPU", choices=("auto", "cpu", "cuda"))
    compile: bool = machine_setting(None, "torch.compile the code between collectives (default: on CUDA)", derived=True)
    compile_backend: str = machine_setting("inductor", "backend of torch.compile", choices=("inductor", "aot_eager"))
    deterministic_mode: bool = machine_setting(False, "ask for deterministic CUDA kernels (the CPU's always are)")

    # Not flags: filled in on the way to a run, and stored in config.json.
    given: tuple[str, ...] = field(default=(), metadata=dict(affects="launch"))     # see setting.py
    world_size: int = field(default=1, metadata=dict(affects="nothing", legacy_default=1))
    data_sha256: str | None = field(default=None, metadata=dict(affects="run", legacy_default=None))    # of train.bin

    # ---- sizes that follow from the settings

    tp = property(attrgetter("tensor_model_parallel_size"))
    pp = property(attrgetter("pipeline_model_parallel_size"))
    dp = property(attrgetter("data_parallel_size"))

    @property
    def sequence_shards(self) -> int:
        """The number of shards that the residual stream is split into along the sequence."""
        return self.tp if self.sequence_parallel else 1

    @property
    def residual_shape(self) -> tuple[int, int, int]:
        """The shape [b, s, h] of a rank's part of the residual stream, for one microbatch."""
        return self.micro_batch_size, self.seq_length // self.sequence_shards, self.hidden_size

    @property
    def params_dtype(self) -> torch.dtype:
        """The torch.dtype of weights and activations; Megatron-LM's name."""
        return DTYPES[self.dtype]

    @property
    def active_compile_backend(self) -> str | None:
        """The backend for torch.compile, or None if compilation is off."""
        return self.compile_backend if self.compile else None

    @property
    def microbatches(self) -> int:
        """The number of microbatches per replica and step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def placement(self) -> Placement:
        """Which chunk of layers each pipeline stage holds."""
        return Placement(self.pp, self.virtual_stages, SCHEDULES[self.schedule].folded)

    @property
    def timetable(self) -> Timetable:
        """The actions of each pipeline stage in one step."""
        return timetable(self.schedule, self.pp, self.microbatches, self.virtual_stages)

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the embedding: vocab_size rounded up to a multiple that does not depend on tp."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def tied(self) -> bool:
        """Whether the output head uses the weight of the word embedding."""
        return not self.untie_embeddings_and_output_weights

    @property
    def traced_steps(self) -> range:
        """The steps of --trace FIRST:LAST, both included."""
        first, last = map(int, self.trace.split(":")) if self.trace else (1, 0)
        return range(first, last + 1)

    @property
    def uses_document_boundaries(self) -> bool:
        """Whether positions or attention depend on where the documents in a sample end."""
        return self.reset_position_ids or self.reset_attention_mask

    @property
    def rope(self) -> bool:
        """Whether attention rotates q and k (RoPE)."""
        return self.position_embedding_type == "rope"

    @property
    def context_length(self) -> int:
        """The most tokens that the model can attend to. Learned positions beyond seq_length were never trained."""
        return self.seq_length if self.position_embedding_type == "learned_absolute" else self.max_position_embeddings

    @property
    def activation(self) -> str:
        """The MLP's activation, a key of layers.activations.ACTIVATIONS."""
        return "swiglu" if self.swiglu else "gelu"

    @property
    def qkv_size(self) -> int:
        """The output size of attention's column-parallel matmul: q of each head, k and v of each group."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels

    # ---- from flags to a complete Config

    def resolve(self, world_size: int) -> "Config":
        """Return a copy with all defaults filled in but the vocabulary size. Raises UserError if a rule is broken."""
        require(self.model in PRESETS, f"unknown model '{self.model}'; try one of {', '.join(PRESETS)}")
        check_values(self)
        check_trace(self)
        filled = {name: value for name, value in PRESETS[self.model].items() if getattr(self, name) is None}
        filled["world_size"] = world_size
        for flag, dtype in SHORT_DTYPES.items():
            if getattr(self, flag):
                previous = filled.get("dtype", self.dtype)
                require(previous == dtype or previous == "float32" and "dtype" not in self.given,
                        f"--{flag} and --dtype {previous} contradict each other; give one of them")
                filled |= {"dtype": dtype, flag: False}
        config = dataclasses.replace(self, **filled)

        heads = config.num_attention_heads
        groups = config.num_query_groups or heads
        require(groups == heads or self.group_query_attention or "group_query_attention" not in self.given,
                f"--no-group-query-attention and --num-query-groups {groups} contradict each other, since there are "
                f"{heads} heads; try --num-query-groups {heads}")
        require(groups < heads or not self.group_query_attention,
                f"--group-query-attention needs --num-query-groups below num-attention-heads {heads}, but there are "
                f"{groups}; try --num-query-groups {largest_divisor(heads, heads // 2) or 1}")
        default_tp, default_pp = 1, 1
        if self.tp is None and self.pp is None:
            ranks_per_replica = world_size // self.dp if self.dp else 4 if world_size % 4 == 0 else world_size
            default_tp, default_pp = DEFAULT_LAYOUTS.get(ranks_per_replica, (1, 1))
        tp, pp = self.tp or math.gcd(default_tp, groups), self.pp or default_pp
        dp = self.dp or max(world_size // (tp * pp), 1)
        micro_batch_size = self.micro_batch_size or min(config.micro_batch_size, max(config.global_batch_size // dp, 1))
        schedule = self.schedule or default_schedule(self.virtual_stages or 1)
        config = dataclasses.replace(
            config, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp,
            micro_batch_size=micro_batch_size,
            slices=config.slices or (min(2, micro_batch_size) if tp > 1 else 1),
            schedule=schedule, virtual_stages=self.virtual_stages or SCHEDULES[schedule].chunks[0],
            ffn_hidden_size=config.ffn_hidden_size or default_ffn_hidden_size(config),
            group_query_attention=groups < heads, num_query_groups=groups,
            kv_channels=config.kv_channels or config.hidden_size // heads,
            max_position_embeddings=config.max_position_embeddings or config.seq_length,
            min_lr=config.lr / 10 if config.min_lr is None else config.min_lr)
        check_rules(config)
        return config

    def with_device(self, device: torch.device) -> "Config":
        """Return a copy in which `compile` has a value: on for CUDA, unless it was set."""
        return dataclasses.replace(self, compile=device.type == "cuda" if self.compile is None else self.compile)

    def with_vocabulary(self, data_vocab_size: int) -> "Config":
        """Return a copy with the vocabulary of the data. Raises UserError if vocab_size is smaller."""
        vocab_size = self.vocab_size or data_vocab_size
        require(data_vocab_size <= vocab_size, f"the data's vocabulary of {data_vocab_size} tokens does not fit "
                f"--vocab-size {vocab_size}; leave the flag out or give at least {data_vocab_size}")
        config = dataclasses.replace(self, vocab_size=vocab_size)
        require(config.padded_vocab_size % config.tp == 0,
                f"the padded vocabulary of {config.padded_vocab_size} tokens must be divisible by "
                f"tensor-model-parallel-size {config.tp}; try --make-vocab-size-divisible-by {128 * config.tp}")
        return config
