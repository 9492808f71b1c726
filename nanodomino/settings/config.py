"""All settings of a run, as one flat dataclass, and the sizes that follow from them.

Each setting is declared once, in one statement of Config; flags.py explains its arguments. A run's Config is made in
three steps:

    flags, a run's config.json  ->  Config  ->  resolve(world_size)  ->  with_vocabulary(size)  ->  the run
    run/session.py                              presets, layout,         the data's vocabulary,
                                                rules (rules.py)         padded

Every step is a pure function of the flags, the files that they name, the world size and the data folder. So all ranks
get the same Config, or the same UserError, before they communicate. No rank can wait in a collective for a rank that
has already failed.

    world_size        = tp x cp x pp x dp
    global_batch_size = micro_batch_size x dp x microbatches
    tp divides the attention heads, the query groups, ffn_hidden_size and the padded vocabulary

A default that changes the result never depends on the number of processes. Where Megatron-LM has the same setting, it
has the same name here. `python -m nanodomino.settings.config` prints docs/settings.md.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

import torch

from nanodomino.comm.device import can_compile
from nanodomino.errors import require, run_command
from nanodomino.layers.attention_mask import POSITION_EMBEDDING_TYPES
from nanodomino.layers.sublayers import NORMALIZATIONS
from nanodomino.optim.optimizers import (DECAY_CURVES, LOSS_SCALE_LIMIT, LR_DECAY_STYLES, OPTIMIZERS,
                                         SMALLEST_LOSS_SCALE)
from nanodomino.schedules.definitions import SCHEDULES, Schedule
from nanodomino.schedules.simulation import Placement, Timetable, timetable
from nanodomino.settings.choices import CP_COMM_TYPES, FP8_FORMATS, FP8_RECIPES, GRANULARITIES, SCORES, Choices
from nanodomino.settings.flags import (check_values, data_setting, family_setting, layout_setting, machine_setting,
                                       markdown, model_setting, run_setting, training_setting)
from nanodomino.settings.presets import DTYPES, FINETUNE_BATCH_SIZE, FINETUNE_LR_DIVISOR, PRESETS
from nanodomino.settings.rules import check_rules, with_defaults

# what several settings need to have an effect
ROPE, DYNAMIC = "--position-embedding-type rope", ("--dtype float16", "no --loss-scale")
EXPERTS, FP8, WSD = "--num-experts", "--fp8-format", "--lr-decay-style WSD"
expert_setting = partial(model_setting, needs=EXPERTS)
DECAYING = "--lr-decay-style " + " or ".join(name for name in LR_DECAY_STYLES if name != "constant")
LR_FACTORS = f", times {OPTIMIZERS['muon'].lr_factor:g} with --optimizer muon"
SCALES = dict(at_least=SMALLEST_LOSS_SCALE, below=LOSS_SCALE_LIMIT)


@dataclass(frozen=True)
class Config(Choices):
    """All settings of a run."""
    model: str = model_setting("nano", "preset of sizes, lr and batch size; other flags override it", choices=PRESETS)
    num_layers: int = model_setting(None, "number of transformer layers", at_most=4096)
    hidden_size: int = model_setting(None, "width h of the residual stream", at_most=2**24)
    ffn_hidden_size: int = model_setting(None, "width of the MLP (default: the preset's; else 4 h, or with --swiglu "
                                               "8/3 h rounded down to a multiple of 64)", derived=True, at_most=2**24)
    num_attention_heads: int = model_setting(None, "number of attention heads", at_most=2**16)
    num_query_groups: int = model_setting(None, "number of query groups; the heads of a group share keys and values "
                                                "(default: the preset's, else one group per head)", derived=True)
    kv_channels: int = model_setting(None, "head size (default: preset's, else h / heads)", derived=True, at_most=2**16)
    seq_length: int = model_setting(None, "tokens per sample", affects="run")
    max_position_embeddings: int = model_setting(
        None, "number of positions that the model supports (default: --seq-length)", derived=True, affects="positions")
    position_embedding_type: str = family_setting("how the model encodes positions", choices=POSITION_EMBEDDING_TYPES)
    rotary_percent: float = model_setting(1.0, "share of a head that RoPE rotates", above=0.0, at_most=1.0, needs=ROPE)
    rotary_base: float = family_setting("base of RoPE's frequencies", at_least=1.0, needs=ROPE, affects="positions")
    use_rope_scaling: bool = family_setting(
        "divide RoPE's low frequencies for longer contexts, as Llama 3.1 does", needs=ROPE, affects="positions")
    rope_scaling_factor: float = family_setting("number by which --use-rope-scaling divides the low frequencies",
                                                at_least=1.0, needs=(ROPE, "--use-rope-scaling"), affects="positions")
    rotary_seq_len_interpolation_factor: float = model_setting(
        1.0, "divide positions by this number (position interpolation)", at_least=1.0, needs=ROPE, affects="positions")
    vocab_size: int = model_setting(None, "vocabulary size (default: the data's)", derived=True)
    make_vocab_size_divisible_by: int = model_setting(
        128, "pad the vocabulary to a multiple of this number (Megatron-LM: times tp)", at_most=2**20)
    untie_embeddings_and_output_weights: bool = family_setting("give the output head a matrix of its own")
    normalization: str = family_setting("norm at the start of each sublayer", choices=NORMALIZATIONS)
    layernorm_epsilon: float = family_setting("epsilon under the square root of each norm", above=0.0, at_most=1.0)
    swiglu: bool = family_setting("use SwiGLU, silu(gate) x up, in the MLP instead of GELU")
    disable_bias_linear: bool = family_setting("omit the biases of linear layers")
    add_qkv_bias: bool = family_setting("give only q, k and v a bias", needs="--disable-bias-linear")
    qk_layernorm: bool = family_setting("normalize each head's q and k before RoPE")
    hidden_dropout: float = model_setting(
        0.0, "dropout rate of the embeddings and of each sublayer's output", below=1.0, affects="losses")
    attention_dropout: float = model_setting(0.0, "dropout rate inside attention", below=1.0, affects="losses")
    window_size: int = model_setting(None, "previous tokens that a token attends to; Megatron-LM's N,0 (default: all)")
    full_attention_layers: int = model_setting(
        0, "number of layers at the start that ignore --window-size", at_least=0, at_most=4096, needs="--window-size")
    init_method_std: float = model_setting(
        None, "standard deviation of the initial weights (default: the preset's)", affects="run", needs="no --load")

    num_experts: int = model_setting(None, "experts per layer (default: preset's or none)", derived=True, at_most=4096)
    moe_layer_freq: int = expert_setting(1, "give every Nth layer experts instead of an MLP, from the first layer on")
    moe_router_topk: int = family_setting("number of experts that each token uses", needs=EXPERTS)
    moe_ffn_hidden_size: int = expert_setting(
        None, "width of each expert (default: --ffn-hidden-size)", derived=True, at_most=2**24)
    moe_shared_expert_intermediate_size: int = expert_setting(
        None, "width of an expert that every token uses besides (default: none)", derived=True, at_most=2**24)
    moe_router_score_function: str = expert_setting("softmax", "how routers turn logits into scores", choices=SCORES)
    moe_router_pre_softmax: bool = model_setting(False, "weight chosen experts by the softmax over all experts",
                                                 needs=(EXPERTS, "--moe-router-score-function softmax"))
    moe_router_topk_scaling_factor: float = expert_setting(1.0, "factor on the chosen experts' weights", above=0.0)
    moe_router_enable_expert_bias: bool = expert_setting(
        False, "balance the experts by a bias on their scores that grows while an expert has too few tokens")
    moe_router_bias_update_rate: float = model_setting(1e-3, "change of the bias in a step", affects="losses",
                                                       above=0.0, needs=(EXPERTS, "--moe-router-enable-expert-bias"))
    moe_aux_loss_coeff: float = family_setting("coefficient of each sample's load-balancing loss; it and the z-loss "
                                               "count all tokens, also masked ones", affects="losses", needs=EXPERTS)
    moe_z_loss_coeff: float = expert_setting(0.0, "coefficient of the router's z-loss", affects="losses")
    mtp_num_layers: int = model_setting(0, "depths of multi-token prediction; depth d predicts the token d places "
                                           "after the next", affects="optimizer", at_least=0, at_most=64)
    mtp_loss_scaling_factor: float = model_setting(
        0.1, "factor f; training adds f / depths times all depths' losses", affects="losses", needs="--mtp-num-layers")

    tensor_model_parallel_size: int = layout_setting(None, "ranks that split each layer's matrices", alias="--tp")
    pipeline_model_parallel_size: int = layout_setting(None, "pipeline stages that split the layers", alias="--pp")
    data_parallel_size: int = layout_setting(
        None, "number of replicas that split the batch (default: processes / (tp x cp x pp))", alias="--dp")
    context_parallel_size: int = layout_setting(
        1, "number of ranks that share the tokens of each sample, if these are too many for one rank", alias="--cp")
    cp_comm_type: str = layout_setting(
        "all_gather", "what the ranks of a sample exchange for attention (all_gather: all keys and values; a2a: whole "
                      "samples of some heads)", choices=CP_COMM_TYPES, needs="--cp above 1")
    expert_model_parallel_size: int = layout_setting(
        1, "number of ranks that share experts; divides dp x cp and --num-experts", alias="--ep", needs=EXPERTS)
    sequence_parallel: bool = layout_setting(
        False, "split the residual stream along the sequence over the tensor-parallel ranks", needs="--tp above 1")
    micro_batch_size: int = layout_setting(
        None, "samples per microbatch (default: the preset's, but at most --global-batch-size / dp)", at_most=2**16)
    slices: int = layout_setting(
        None, "slices per microbatch (Domino's row split); one slice computes while another's all-reduce is in flight "
              "(default: with tensor or context parallelism 2, but at most --micro-batch-size; else 1)", at_most=256)
    columns: int = layout_setting(
        None, "parts of a row-parallel matmul (Domino's column split); one part is computed while another's all-reduce "
              "is in flight (default: 2 with tensor parallelism and, by default, one slice; else 1)", at_most=256)
    schedule: str = layout_setting(None, "schedule (default: the first that fits --virtual-stages)", choices=SCHEDULES)
    look_ahead: int = layout_setting(
        1, "further warm-up forwards for each later stage", needs="--schedule eager-1f1b", at_least=0, at_most=2**16)
    virtual_stages: int = layout_setting(None, "chunks of layers per pipeline stage (default: the schedule's fewest)",
                                         alias="--num-virtual-stages-per-pipeline-rank")
    recompute_granularity: str = layout_setting(
        "none", "what backward recomputes to save memory (selective: attention's core and the activation function; "
                "full: all that it needs inside a sublayer, from the stored input)", choices=GRANULARITIES)
    checkpoint_in_cpu: bool = layout_setting(
        False, "move the stored sublayer inputs from the GPU to host memory", needs="--recompute-granularity full")
    zero_stage: int = layout_setting(1, "ZeRO stage: 0 shards nothing over the replicas, 1 shards the optimizer state, "
                                        "2 also the gradients", choices=(0, 1, 2))
    bucket_size: int = layout_setting(10_000_000, "parameters per gradient bucket, which is reduced during backward")

    train_iters: int = training_setting(200, "optimizer steps; 0 only validates, tests and prints a sample", at_least=0)
    global_batch_size: int = training_setting(
        None, f"samples per optimizer step (default: the preset's; with --finetune at most {FINETUNE_BATCH_SIZE})")
    optimizer: str = training_setting("adamw", "optimizer", choices=OPTIMIZERS, affects="optimizer")
    lr: float = training_setting(
        None, f"peak learning rate (default: the preset's{LR_FACTORS}; 1/{FINETUNE_LR_DIVISOR} of it with --finetune)")
    min_lr: float = training_setting(None, "final learning rate (default: lr / 10)", derived=True, needs=DECAYING)
    lr_decay_style: str = training_setting("cosine", "how lr decays from --lr to --min-lr (constant: not at all; WSD: "
                                                     "only in the last steps)", choices=LR_DECAY_STYLES)
    lr_decay_iters: int = training_setting(None, "step at which lr reaches --min-lr and stays (default: --train-iters)")
    lr_wsd_decay_iters: int = training_setting(
        None, "steps up to --lr-decay-iters in which WSD decays (default: a tenth of --lr-decay-iters)", needs=WSD)
    lr_wsd_decay_style: str = training_setting(
        "exponential", "curve of WSD's decay (exponential: 2 x 0.5^s - 1, minus_sqrt: 1 - sqrt(s), if a share s of its "
                       "steps is done)", choices=DECAY_CURVES, needs=WSD)
    lr_warmup_fraction: float = training_setting(0.05, "share of --lr-decay-iters with a linear warm-up", at_most=1.0)
    weight_decay: float = training_setting(0.1, "decoupled weight decay, for matrices only")
    clip_grad: float = training_setting(1.0, "maximum global gradient norm; 0 turns clipping off")
    adam_beta1: float = training_setting(0.9, "decay rate of AdamW's first moment", below=1.0)
    adam_beta2: float = training_setting(0.95, "decay rate of AdamW's second moment", below=1.0)
    adam_eps: float = training_setting(1e-8, "epsilon in the denominator of AdamW's update", above=0.0)
    muon_momentum: float = training_setting(0.95, "Muon's momentum", below=1.0, needs="--optimizer muon")
    dtype: str = training_setting(
        "float32", "type of weights and activations; with bfloat16 and float16, master weights and gradients are fp32",
        choices=DTYPES, short={"--bf16": "bfloat16", "--fp16": "float16"})
    loss_scale: float = training_setting(None, "fixed factor on all gradients during backward, preferably a power of "
                                               "two (default: a dynamic loss scale in fp16, else 1)", **SCALES)
    initial_loss_scale: float = training_setting(2.0**15, "first dynamic loss scale", **SCALES, needs=DYNAMIC)
    min_loss_scale: float = training_setting(1.0, "smallest value of the dynamic loss scale", **SCALES, needs=DYNAMIC)
    loss_scale_window: int = training_setting(1000, "steps without overflow until the scale doubles", needs=DYNAMIC)
    hysteresis: int = training_setting(2, "overflows until the loss scale is halved; each further one halves it again; "
                                          "doubling restarts the count", needs=DYNAMIC)
    fp16_lm_cross_entropy: bool = training_setting(
        False, "compute the cross entropy's exponentials in fp16 instead of fp32", needs="--dtype float16")
    fp8_format: str = training_setting(
        None, "8-bit types for the matmuls of attention and MLP; embedding, head and experts stay in --dtype (hybrid: "
              "e5m2 for gradients, e4m3 for the rest; e4m3: for all; default: no fp8)", choices=FP8_FORMATS)
    fp8_recipe: str = training_setting("tensorwise", "whether each tensor or each of its rows has its own scale in fp8",
                                       choices=FP8_RECIPES, needs=FP8)
    fp8_wgrad: bool = training_setting(True, "compute weight gradients in fp8, too, and not in --dtype", needs=FP8)
    first_last_layers_bf16: bool = training_setting(False, "compute the first and the last layer in --dtype", needs=FP8)
    seed: int = training_setting(1234, "seed of initial weights, data order and dropout", affects="run", at_least=0)

    data_path: str = data_setting(None, "folder made by data/prepare.py; it may move, but a resumed run needs the same "
                                        "text (default: the source code of Python's library)", affects="nothing")
    eod_mask_loss: bool = data_setting(False, "leave predictions of the end-of-text token out of the loss")
    reset_position_ids: bool = data_setting(
        False, "restart positions after each end of text", needs="--position-embedding-type rope or learned_absolute")
    reset_attention_mask: bool = data_setting(False, "let tokens attend only to their own document")

    run_dir: str = run_setting(None, "folder of the run; a run that it holds resumes with its settings (default: a new "
                                     "folder runs/MODEL-NUMBER)", affects="launch")
    config: str = run_setting(None, "JSON file like a run's config.json; flags override its settings", affects="launch")
    load: str = run_setting(None, "checkpoint to start from, or a run's folder for its newest; once the new run has a "
                                  "checkpoint, any other --load is refused")
    finetune: bool = run_setting(False, "take only the weights from --load, validate, and start at step 0")
    log_interval: int = run_setting(25, "steps between progress lines")
    eval_interval: int = run_setting(100, "steps between validations")
    eval_iters: int = run_setting(10, "global batches per validation during training; 0 for no validation", at_least=0)
    save_interval: int = run_setting(100, "steps between checkpoints; the last step is always saved")
    keep_last: int = run_setting(3, "number of newest checkpoints to keep")
    exit_interval: int = run_setting(None, "save and stop after the next multiple of this many steps", affects="launch")
    max_skipped_steps: int = run_setting(10, "skipped steps in a row (loss or gradient not finite) that end the run; "
                                             "overflows do not count while the loss scale can shrink")
    tensorboard_dir: str = run_setting(None, "folder for TensorBoard; each run needs its own", affects="launch")
    trace: str = run_setting(None, "steps FIRST:LAST to record and draw as a timeline", affects="launch")
    timeout: int = run_setting(600, "seconds that a collective may take before the run ends")
    sample_tokens: int = run_setting(120, "tokens to generate at the end; 0 for none", at_least=0, at_most=2**16)
    temperature: float = run_setting(
        0.8, "temperature of the text at the end; 0 takes the most likely token", needs="--sample-tokens above 0")
    top_k: int = run_setting(20, "sample the text at the end from this many most likely tokens; 0: all", at_least=0,
                             needs=("--sample-tokens above 0", "--temperature above 0"))

    tp_max_ctas: int = machine_setting(
        None, "most thread blocks of a tensor-parallel collective on a GPU (default: NCCL's)", needs="--tp above 1")
    device: str = machine_setting("auto", "auto uses CUDA if torch finds a GPU", choices=("auto", "cpu", "cuda"))
    compile: bool = machine_setting(None, "compile the code between collectives (default: only on CUDA)", derived=True)
    compile_backend: str = machine_setting("inductor", "backend of torch.compile", choices=("inductor", "aot_eager"))
    deterministic_mode: bool = machine_setting(False, "use only deterministic CUDA kernels (CPU kernels always are)")

    # These fields are not flags. The program fills them in and stores them in config.json.
    given: tuple[str, ...] = field(default=(), metadata=dict(affects="launch"))     # see flags.py
    world_size: int = field(default=1, metadata=dict(affects="nothing"))
    data_sha256: str = field(default=None, metadata=dict(affects="run"))    # the SHA-256 of train.bin
    sample_offset: int = field(default=0, metadata=dict(affects="launch"))  # see consumed_train_samples()
    trained_positions: int = field(default=None, metadata=dict(affects="nothing"))      # see context_length

    # ---- sizes that follow from the settings

    tp = property(attrgetter("tensor_model_parallel_size"))
    pp = property(attrgetter("pipeline_model_parallel_size"))
    dp = property(attrgetter("data_parallel_size"))
    cp = property(attrgetter("context_parallel_size"))
    ep = property(attrgetter("expert_model_parallel_size"))

    preset = property(lambda self: PRESETS[self.model])
    optimizer_spec = property(lambda self: OPTIMIZERS[self.optimizer])
    params_dtype = property(lambda self: DTYPES[self.dtype])               # named as in Megatron-LM
    tied = property(lambda self: not self.untie_embeddings_and_output_weights)
    rope = property(lambda self: self.position_embedding_type == "rope")
    activation = property(lambda self: "swiglu" if self.swiglu else "gelu")
    fuses = property(lambda self: self.compile_backend == "inductor")      # whether --compile saves temporaries
    microbatches = property(lambda self: self.global_batch_size // (self.micro_batch_size * self.dp))    # per replica
    # the assignment of chunks of layers to pipeline stages
    placement = property(lambda self: Placement(self.pp, self.virtual_stages, SCHEDULES[self.schedule].folded))
    # the output size of attention's first matmul over all ranks: q for each head, k and v for each query group
    qkv_size = property(lambda self: (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels)

    @property
    def compiler(self):
        """torch.compile, or None. Each shape gets kernels of its own. By default, torch would compile kernels for
        dynamic shapes at the second shape of a function, and they can't assume that rows are divisible by 16. The limit
        covers fp8's conversions, which meet each shape of a layer's matrices, also transposed, and of slices."""
        return None if not self.compile else partial(
            torch.compile, backend=self.compile_backend, dynamic=False, recompile_limit=64)

    @property
    def residual_shape(self) -> tuple[int, int, int]:
        """The shape [b, s, h] of a rank's part of the residual stream, for one microbatch."""
        return self.micro_batch_size, self.seq_length // (self.cp * self.sequence_shards), self.hidden_size

    def consumed_train_samples(self, steps: int) -> int:
        """Return how many samples have been read. The offset is for steps with another batch size or seq_length."""
        return self.sample_offset + steps * self.global_batch_size

    @property
    def schedule_with_settings(self) -> Schedule:
        """The schedule, with the values of its own settings."""
        own = (("look_ahead", self.look_ahead),) if self.schedule == "eager-1f1b" else ()
        return dataclasses.replace(SCHEDULES[self.schedule], settings=own)

    @property
    def timetable(self) -> Timetable:
        """The actions of each pipeline stage in one step."""
        return timetable(self.schedule_with_settings, self.pp, self.microbatches, self.virtual_stages)

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the word embedding: vocab_size rounded up to a multiple of make_vocab_size_divisible_by."""
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    @property
    def traced_steps(self) -> range:
        """The steps from FIRST to LAST of --trace FIRST:LAST, both included."""
        first, last = map(int, self.trace.split(":")) if self.trace else (1, 0)
        return range(first, last + 1)

    @property
    def context_length(self) -> int:
        """The largest number of tokens that the model can attend to. With learned positions these are the trained ones:
        the longest seq_length of all runs that trained the weights, or all positions of an imported model."""
        learned = self.position_embedding_type == "learned_absolute"
        return self.trained_positions if learned else self.max_position_embeddings

    # ---- from flags to a complete Config

    def resolve(self, world_size: int) -> "Config":
        """Return a copy with all defaults filled in that depend on the preset, the processes or other settings. Raises
        UserError if a value or a combination of values is not valid."""
        check_values(self)
        config = with_defaults(self, world_size)
        check_rules(config)
        return config

    def with_device(self, device: torch.device) -> "Config":
        """Return a copy in which `compile` is True or False: True instead of None on CUDA, unless that can't work."""
        compile = device.type == "cuda" if self.compile is None else self.compile
        works = not compile or not self.fuses or device.type == "cpu" or can_compile(self.params_dtype, device)
        return dataclasses.replace(self, compile=compile and works)

    def with_vocabulary(self, data_vocab_size: int) -> "Config":
        """Return a copy in which vocab_size is set; if it was None, to the size of the data's vocabulary. Raises
        UserError if the data's vocabulary is larger than vocab_size, or if tp does not divide the padded size."""
        vocab_size = self.vocab_size or data_vocab_size
        require(data_vocab_size <= vocab_size, f"the data's vocabulary of {data_vocab_size} tokens is larger "
                f"than the model's of {vocab_size}; prepare the text with the tokenizer of the model to load, or give "
                f"a new model at least --vocab-size {data_vocab_size}")
        config = dataclasses.replace(self, vocab_size=vocab_size)
        require(config.padded_vocab_size % config.tp == 0,
                f"the padded vocabulary of {config.padded_vocab_size} tokens must be divisible by "
                f"tensor-model-parallel-size {config.tp}; try --make-vocab-size-divisible-by {128 * config.tp}")
        return config


if __name__ == "__main__":
    run_command(print, markdown(Config))
