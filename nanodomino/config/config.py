"""Every setting of a run: one flat dataclass, the model presets, the rules.

A setting is declared once, in a line of Config: its default, what it does, what values it may have, and what it would
mean to change it when a run goes on (its `role`). Flags, --help, docs/settings.md, the checks, what a checkpoint must
agree with and what a benchmark takes as a flag all follow from that line.

    flags, a run's config.json  ->  Config -> resolve(world_size)  -> with_vocabulary(corpus) -> the run
    (flags.py)                                presets, layout,        the vocabulary's size,
                                              every divisibility      padded to a multiple

All of it is a pure function of the flags, the files that they name, the world size and the data folder, so each rank
comes to the same Config or to the same `UserError`, before any process talks to another, and nobody is left waiting in
a collective for a rank that has given up.

The rules that tie the sizes together:

    world_size        = tp x pp x dp
    global_batch_size = micro_batch_size x dp x microbatches
    heads, ffn_hidden_size and the padded vocabulary are divisible by tp

No default that changes the result depends on the number of processes: `global_batch_size` is fixed and the number
of microbatches follows. Names and spellings are Megatron-LM's where it has one.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial

import torch

from nanodomino.config.presets import DEFAULT_LAYOUTS, DTYPES, GPT2, LR_DECAY_STYLES, PRESETS, SHORT_DTYPES
from nanodomino.config.rules import check_sizes, check_trace, default_schedule, largest_divisor, usual_ffn_hidden_size
from nanodomino.config.setting import check_values, setting
from nanodomino.errors import require
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.layers.positions import POSITION_EMBEDDING_TYPES
from nanodomino.optim.loss_scale import LOSS_SCALE_LIMIT
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement import Placement, Timetable, timetable

of_model = partial(setting, "The model", affects="model")


def of_choice(name, text, **options):
    """What the preset's family has chosen; GPT-2's choice was the only one when the setting was new."""
    return of_model(None, f"{text} (default the preset's)", type=type(GPT2[name]), legacy_default=GPT2[name], **options)


of_layout = partial(setting, "The layout", affects="nothing")
of_training = partial(setting, "The training", affects="losses")
of_data = partial(setting, "The data", affects="run")
of_run = partial(setting, "The run", affects="nothing")
of_machine = partial(setting, "The machine", affects="nothing")


@dataclass(frozen=True)
class Config:
    model: str = of_model("nano", "preset that fills every size not given by its own flag", choices=PRESETS)
    num_layers: int = of_model(None, "transformer layers", type=int)
    hidden_size: int = of_model(None, "width h of the residual stream", type=int)
    ffn_hidden_size: int = of_model(None, "width of the MLP (default the preset's, else 4 h; with swiglu 8/3 h, in "
                                          "64s)", type=int, derived=True)
    num_attention_heads: int = of_model(None, "attention heads", type=int)
    group_query_attention: bool = of_model(False, "heads share keys and values, as --num-query-groups says; which "
                                                  "alone says it too")
    num_query_groups: int = of_model(None, "groups of heads, each with keys and values of its own (default the "
                                           "preset's, else one for each head)", type=int, derived=True,
                                     legacy_default=lambda record: record["num_attention_heads"])
    kv_channels: int = of_model(None, "numbers in a head (default the preset's, else h / heads)", type=int,
                                derived=True,
                                legacy_default=lambda record: record["hidden_size"] // record["num_attention_heads"])
    seq_length: int = of_model(None, "tokens in a sample", type=int, affects="run")
    max_position_embeddings: int = of_model(None, "positions that there are (default seq-length)", type=int,
                                            derived=True)
    position_embedding_type: str = of_choice("position_embedding_type", "how places are told",
                                             choices=POSITION_EMBEDDING_TYPES)
    rotary_percent: float = of_model(1.0, "part of a head's numbers that rope turns", above=0.0)
    rotary_base: float = of_choice("rotary_base", "base of rope's frequencies, base^(-2i/d)", above=0.0)
    use_rope_scaling: bool = of_choice("use_rope_scaling", "Llama 3.1's: rope's low frequencies are divided")
    rope_scaling_factor: float = of_choice("rope_scaling_factor", "what use-rope-scaling divides them by", above=0.0)
    rotary_seq_len_interpolation_factor: float = of_model(1.0, "rope's places are divided by it", above=0.0)
    vocab_size: int = of_model(None, "vocabulary (default: the data's)", type=int, derived=True)
    make_vocab_size_divisible_by: int = of_model(128, "the embedding is padded to a multiple of this, whatever tp is")
    untie_embeddings_and_output_weights: bool = of_choice("untie_embeddings_and_output_weights",
                                                          "give the head a matrix of its own")
    normalization: str = of_choice("normalization", "what opens each sublayer", choices=NORMALIZATIONS)
    layernorm_epsilon: float = of_choice("layernorm_epsilon", "added to the variance in a norm", above=0.0)
    swiglu: bool = of_choice("swiglu", "the MLP's silu(gate) x up, two products of the input, in place of gelu")
    disable_bias_linear: bool = of_choice("disable_bias_linear", "linear layers have no bias")
    add_qkv_bias: bool = of_choice("add_qkv_bias", "a bias of q, k and v, also with disable-bias-linear")
    qk_layernorm: bool = of_choice("qk_layernorm", "a norm of each head's q and k, before rope")
    hidden_dropout: float = of_model(0.0, "dropout on the embedding and on what each sublayer adds", below=1.0,
                                     affects="losses")
    attention_dropout: float = of_model(0.0, "dropout on the attention probabilities", below=1.0, affects="losses")
    init_method_std: float = of_model(None, "standard deviation of the initial weights (default 0.02; nano 0.06)",
                                      type=float, affects="run")

    tensor_model_parallel_size: int = of_layout(None, "processes that share each layer's matrices", alias="--tp",
                                                type=int, derived=True)
    pipeline_model_parallel_size: int = of_layout(None, "stages that share the layers", alias="--pp", type=int,
                                                  derived=True)
    data_parallel_size: int = of_layout(None, "replicas that share the batch (default: what is left)", alias="--dp",
                                        type=int, derived=True)
    micro_batch_size: int = of_layout(None, "samples that pass through a stage at once", type=int, derived=True)
    slices: int = of_layout(None, "Domino's row split: pieces of a microbatch, computing while another's reduce "
                                  "travels (default 2 where there are wires to hide)", type=int, derived=True)
    columns: int = of_layout(1, "Domino's column split: chunks of a row-parallel matmul, each reduced while the next "
                                "is computed")
    schedule: str = of_layout(None, "pipeline schedule (default the first that takes --virtual-stages)", type=str,
                              choices=SCHEDULES, derived=True)
    virtual_stages: int = of_layout(None, "runs of layers, chunks, that each stage holds (default as few as the "
                                          "schedule can do with)", alias="--num-virtual-stages-per-pipeline-rank",
                                    type=int, derived=True, legacy_default=1)
    sequence_parallel: bool = of_layout(False, "tensor-parallel ranks cut what lies between matrices along its tokens")
    recompute_granularity: str = of_layout("none", "what backward computes again instead of keeping it: attention and "
                                                   "activation, or all of a layer but its input",
                                           choices=GRANULARITIES)
    checkpoint_in_cpu: bool = of_layout(False, "what full recomputation keeps goes to the host's memory")
    zero_stage: int = of_layout(1, "1: a replica keeps 1/dp of the optimizer; 2: of the gradients too; 0: all of both",
                                choices=(0, 1, 2), at_least=0)
    bucket_size: int = of_layout(10_000_000, "parameters in a gradient bucket, reduced while backward goes on")

    train_iters: int = of_training(200, "optimizer steps")
    global_batch_size: int = of_training(None, "samples in an optimizer step", type=int, affects="run")
    optimizer: str = of_training("adamw", "what updates the weights", choices=OPTIMIZERS, affects="optimizer")
    lr: float = of_training(None, "peak learning rate (default: the preset's, for AdamW)", type=float)
    min_lr: float = of_training(None, "last learning rate (default lr / 10)", type=float, derived=True)
    lr_decay_style: str = of_training("cosine", "from lr down to min-lr", choices=LR_DECAY_STYLES)
    lr_warmup_fraction: float = of_training(0.05, "part of train-iters in which the rate climbs to lr", below=1.0)
    weight_decay: float = of_training(0.1, "pulls matrices towards 0, apart from the gradient, and nothing else")
    clip_grad: float = of_training(1.0, "largest global gradient norm; 0 turns clipping off")
    adam_beta1: float = of_training(0.9, "AdamW's decay of the first moment", below=1.0)
    adam_beta2: float = of_training(0.95, "AdamW's decay of the second moment", below=1.0)
    adam_eps: float = of_training(1e-8, "AdamW's addition to the denominator", above=0.0)
    lion_beta1: float = of_training(0.9, "the moment's part in Lion's update", below=1.0)
    lion_beta2: float = of_training(0.99, "Lion's decay of the moment", below=1.0)
    dtype: str = of_training("float32", "of the weights; bfloat16 and float16 keep fp32 master weights and gradients",
                             choices=DTYPES)
    bf16: bool = of_training(False, "the same as --dtype bfloat16")
    fp16: bool = of_training(False, "the same as --dtype float16; the loss scale goes up and down by itself")
    loss_scale: float = of_training(None, "factor on the gradient of each token's loss, for good (default: found in "
                                          "fp16, else 1); a power of two rounds nothing", type=float, above=0.0,
                                    below=LOSS_SCALE_LIMIT)
    initial_loss_scale: float = of_training(2.0**15, "the first one in fp16", above=0.0, below=LOSS_SCALE_LIMIT)
    min_loss_scale: float = of_training(1.0, "the least one in fp16", above=0.0, below=LOSS_SCALE_LIMIT)
    loss_scale_window: int = of_training(1000, "steps without an overflow, after which the scale is doubled")
    hysteresis: int = of_training(2, "overflows after which the scale is halved")
    fp16_lm_cross_entropy: bool = of_training(False, "temporaries of the cross entropy in fp16, not fp32")
    seed: int = of_training(1234, "draws weights, data order and dropout", affects="run", at_least=0)

    data_path: str = of_data(None, "folder made by data/prepare.py (default: Python's own standard library)", type=str,
                             affects="nothing")
    eod_mask_loss: bool = of_data(False, "do not train on predicting end-of-text")
    reset_position_ids: bool = of_data(False, "positions begin anew behind each end-of-text")
    reset_attention_mask: bool = of_data(False, "tokens look at their own document alone, which end-of-text ends")

    run_dir: str = of_run(None, "everything the run makes (default runs/MODEL-NUMBER); the folder of a run that has "
                                "begun goes on with it, with its settings", type=str, affects="launch")
    config: str = of_run(None, "take the settings of this file, such as a run's config.json; flags count more",
                         type=str, affects="launch")
    load: str = of_run(None, "start from this checkpoint, or from the newest of this run's folder", type=str)
    finetune: bool = of_run(False, "of --load take the weights alone: step 0, a new optimizer, any data and batch")
    log_interval: int = of_run(25, "steps between lines on the screen")
    eval_interval: int = of_run(100, "steps between validations")
    eval_iters: int = of_run(10, "global batches in a validation; 0 for none", at_least=0)
    save_interval: int = of_run(100, "steps between checkpoints; there is one at the end too")
    keep_last: int = of_run(3, "checkpoints that are kept")
    exit_interval: int = of_run(None, "save and stop after the next step that is divisible by this", type=int,
                                affects="launch")
    max_skipped_steps: int = of_run(10, "steps in a row with a loss or gradient that is not finite, which no "
                                        "smaller loss scale may mend, after which the run gives up")
    tensorboard_dir: str = of_run(None, "folder of this run alone, where TensorBoard finds what metrics.jsonl holds",
                                  type=str)
    trace: str = of_run(None, "steps FIRST:LAST whose timeline is drawn into the run's folder", type=str, affects="launch")
    timeout: int = of_run(600, "seconds that a collective may take before the run ends")
    sample_tokens: int = of_run(120, "tokens that the model writes at the end; 0 for none", at_least=0)
    temperature: float = of_run(0.8, "of that sample; 0 is greedy")
    top_k: int = of_run(20, "tokens that the sample chooses among; 0 for all", at_least=0)

    device: str = of_machine("auto", "where to compute; auto takes CUDA where it is found",
                             choices=("auto", "cpu", "cuda"))
    compile: bool = of_machine(None, "torch.compile pieces between the wires (default: on CUDA)", type=bool,
                               derived=True)
    compile_backend: str = of_machine("inductor", "torch.compile's backend",
                                      choices=("inductor", "aot_eager"))
    deterministic_mode: bool = of_machine(False, "ask CUDA's libraries for the same bits every time (the CPU gives "
                                                 "them anyway)")

    # Filled in on the way; not flags
    given: tuple[str, ...] = field(default=(), metadata=dict(affects="launch"))     # settings that somebody asked for
    world_size: int = field(default=1, metadata=dict(affects="nothing", legacy_default=1))
    data_sha256: str | None = field(default=None, metadata=dict(affects="run", legacy_default=None))    # of the training tokens

    # Derived sizes
    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def dp(self) -> int:
        return self.data_parallel_size

    @property
    def sequence_shards(self) -> int:
        """Into how many parts the residual stream is cut along its tokens."""
        return self.tp if self.sequence_parallel else 1

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """[b, s, h] of what a rank has of a microbatch between two sublayers, or stages."""
        return self.micro_batch_size, self.seq_length // self.sequence_shards, self.hidden_size

    @property
    def params_dtype(self) -> torch.dtype:
        """Of weights and activations, as Megatron-LM calls it."""
        return DTYPES[self.dtype]

    @property
    def active_compile_backend(self) -> str | None:
        """torch.compile's backend where it is on; else None."""
        return self.compile_backend if self.compile else None

    @property
    def microbatches(self) -> int:
        """Microbatches that each replica runs in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def placement(self) -> Placement:
        """Which layers each stage holds."""
        return Placement(self.pp, self.virtual_stages, SCHEDULES[self.schedule].folded)

    @property
    def timetable(self) -> Timetable:
        """What each stage does in a step."""
        return timetable(self.schedule, self.pp, self.microbatches, self.virtual_stages)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple that does not depend on tp."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def tied(self) -> bool:
        """The head multiplies by the word embedding itself."""
        return not self.untie_embeddings_and_output_weights

    @property
    def traced_steps(self) -> range:
        """The steps of --trace FIRST:LAST, both included."""
        first, last = map(int, self.trace.split(":")) if self.trace else (1, 0)
        return range(first, last + 1)

    @property
    def uses_document_boundaries(self) -> bool:
        """Whether positions or attention depend on where a sample's documents end."""
        return self.reset_position_ids or self.reset_attention_mask

    @property
    def rope(self) -> bool:
        """Whether q and k are turned."""
        return self.position_embedding_type == "rope"

    @property
    def context_length(self) -> int:
        """Tokens that the model can look at: of learned positions those that were trained."""
        return self.seq_length if self.position_embedding_type == "learned_absolute" else self.max_position_embeddings

    @property
    def activation(self) -> str:
        """Which of functions.ACTIVATIONS the MLP has."""
        return "swiglu" if self.swiglu else "gelu"

    @property
    def qkv_size(self) -> int:
        """Numbers that attention's column-parallel product makes of a token: q of each head, k and v of each group."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels

    def resolve(self, world_size: int) -> "Config":
        """Fill in what was left open for this many processes, then check it. Raises UserError."""
        require(self.model in PRESETS, f"unknown model '{self.model}'; try one of {', '.join(PRESETS)}")
        check_values(self)
        check_trace(self)
        filled = {name: value for name, value in PRESETS[self.model].items() if getattr(self, name) is None}
        filled["world_size"] = world_size
        for name, dtype in SHORT_DTYPES.items():
            if getattr(self, name):
                before = filled.get("dtype", self.dtype)
                require(before == dtype or before == "float32" and "dtype" not in self.given,
                        f"--{name} and --dtype {before} contradict each other; give one")
                filled |= {"dtype": dtype, name: False}
        config = dataclasses.replace(self, **filled)

        heads = config.num_attention_heads
        groups = config.num_query_groups or heads
        require(groups == heads or self.group_query_attention or "group_query_attention" not in self.given,
                f"--no-group-query-attention and --num-query-groups {groups} contradict each other, of {heads} heads; "
                f"try --num-query-groups {heads}")
        require(groups < heads or not self.group_query_attention,
                f"--group-query-attention needs --num-query-groups below num-attention-heads {heads}, but there are "
                f"{groups}; try --num-query-groups {largest_divisor(heads, heads // 2) or 1}")
        default_tp, default_pp = 1, 1
        if self.tp is None and self.pp is None:
            share_a_model = world_size // self.dp if self.dp else 4 if world_size % 4 == 0 else world_size
            default_tp, default_pp = DEFAULT_LAYOUTS.get(share_a_model, (1, 1))
        tp, pp = self.tp or math.gcd(default_tp, groups), self.pp or default_pp
        dp = self.dp or max(world_size // (tp * pp), 1)
        micro_batch_size = self.micro_batch_size or min(config.micro_batch_size, max(config.global_batch_size // dp, 1))
        schedule = self.schedule or default_schedule(self.virtual_stages or 1)
        config = dataclasses.replace(
            config, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp,
            micro_batch_size=micro_batch_size,
            slices=config.slices or (min(2, micro_batch_size) if tp > 1 else 1),
            schedule=schedule, virtual_stages=self.virtual_stages or SCHEDULES[schedule].chunks[0],
            ffn_hidden_size=config.ffn_hidden_size or usual_ffn_hidden_size(config),
            group_query_attention=groups < heads, num_query_groups=groups,
            kv_channels=config.kv_channels or config.hidden_size // heads,
            max_position_embeddings=config.max_position_embeddings or config.seq_length,
            min_lr=config.lr / 10 if config.min_lr is None else config.min_lr)
        check_sizes(config)
        return config

    def with_device(self, device: torch.device) -> "Config":
        """The same with what follows from the device: compiled on CUDA, if nothing else is said."""
        return dataclasses.replace(self, compile=device.type == "cuda" if self.compile is None else self.compile)

    def with_vocabulary(self, data_vocab_size: int) -> "Config":
        """The same with the vocabulary of the data. Raises UserError if the model's own is smaller."""
        vocab_size = self.vocab_size or data_vocab_size
        require(data_vocab_size <= vocab_size, f"the data's vocabulary of {data_vocab_size} tokens does not fit "
                f"--vocab-size {vocab_size}; leave the flag out or give at least {data_vocab_size}")
        config = dataclasses.replace(self, vocab_size=vocab_size)
        require(config.padded_vocab_size % config.tp == 0,
                f"the vocabulary, padded to {config.padded_vocab_size}, must be divisible by "
                f"tensor-model-parallel-size {config.tp}; try --make-vocab-size-divisible-by {128 * config.tp}")
        return config
