"""Every setting of a run: one flat dataclass, the model presets, the checks, the command line.

A run passes through here once, on every rank, before any process talks to another:

    command line -> Config -> resolve(world_size)  -> with_vocabulary(corpus) -> the run
                              presets, layout,        the vocabulary's size,
                              every divisibility      padded to a multiple

All of it is a pure function of the flags, the world size and the data folder, so each rank comes to the same
Config or to the same `UserError`, and nobody is left waiting in a collective for a rank that has given up.

The rules that tie the sizes together:

    world_size        = tp x pp x dp
    global_batch_size = micro_batch_size x dp x microbatches
    heads, ffn_hidden_size and the padded vocabulary are divisible by tp

No default that changes the result depends on the number of processes: `global_batch_size` is fixed and the number
of microbatches follows. Names and spellings are Megatron-LM's where it has one.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field


class UserError(Exception):
    """A mistake that whoever started the run can mend: one sentence with the rule, the numbers and the fix."""


# GPT-2's sizes (the "gpt2" family) and GPT-3's (2005.14165, table 2.1, with its learning rates);
# nano is made for a laptop.
PRESET_FIELDS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr", "global_batch_size",
                 "micro_batch_size", "init_method_std")
PRESETS = {name: dict(zip(PRESET_FIELDS, values)) for name, *values in (
    ("nano",         8,   96,  8,  128, 4e-3,     16,  4, 0.06),
    ("gpt2",        12,  768, 12, 1024, 6e-4,    512, 16, 0.02),
    ("gpt2-medium", 24, 1024, 16, 1024, 3e-4,    512,  8, 0.02),
    ("gpt2-large",  36, 1280, 20, 1024, 2.5e-4,  512,  8, 0.02),
    ("gpt2-xl",     48, 1600, 25, 1024, 2e-4,    512,  4, 0.02),
    ("gpt3-2.7b",   32, 2560, 32, 2048, 1.6e-4,  512,  4, 0.02),
    ("gpt3-6.7b",   32, 4096, 32, 2048, 1.2e-4, 1024,  2, 0.02),
    ("gpt3-13b",    40, 5120, 40, 2048, 1e-4,   1024,  1, 0.02),
)}

LARGEST = 2**31 - 1      # of every whole number: beyond it some C int or list of ours overflows, later and less clearly

# (tp, pp) when neither is given, by the number of processes that share a model:
# wires of every kind, as soon as there can be.
DEFAULT_LAYOUTS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}


def flag(default, text, *, choices=None, short=None, kind=None):
    """One Config field that is also a command line flag; `kind` is its type, None in `default` means 'see resolve'."""
    return field(default=default, metadata=dict(text=text, choices=choices, short=short, kind=kind or type(default)))


@dataclass(frozen=True)
class Config:
    # The model
    model: str = flag("nano", "preset that fills every size not given by its own flag", choices=tuple(PRESETS))
    num_layers: int = flag(None, "transformer layers", kind=int)
    hidden_size: int = flag(None, "width h of the residual stream", kind=int)
    ffn_hidden_size: int = flag(None, "width of the MLP (default 4 h)", kind=int)
    num_attention_heads: int = flag(None, "attention heads", kind=int)
    seq_length: int = flag(None, "tokens in a sample", kind=int)
    max_position_embeddings: int = flag(None, "learned positions (default seq-length)", kind=int)
    vocab_size: int = flag(None, "vocabulary (default: the data's)", kind=int)
    make_vocab_size_divisible_by: int = flag(128, "the embedding is padded to a multiple of this, whatever tp is")
    untie_embeddings_and_output_weights: bool = flag(False, "give the head a matrix of its own")
    hidden_dropout: float = flag(0.0, "dropout on the embedding and on what each sublayer adds")
    attention_dropout: float = flag(0.0, "dropout on the attention probabilities")
    layernorm_epsilon: float = flag(1e-5, "added to the variance in LayerNorm")
    init_method_std: float = flag(None, "standard deviation of the initial weights (default 0.02; nano 0.06)",
                                  kind=float)

    # The layout
    tensor_model_parallel_size: int = flag(None, "processes that share each layer's matrices", short="--tp", kind=int)
    pipeline_model_parallel_size: int = flag(None, "stages that share the layers", short="--pp", kind=int)
    data_parallel_size: int = flag(None, "replicas that share the batch (default: what is left)", short="--dp",
                                   kind=int)
    slices: int = flag(None, "Domino's row split: pieces of a microbatch, computing while another's reduce travels "
                             "(default 2 where there are wires to hide)", kind=int)
    columns: int = flag(1, "Domino's column split: chunks of a row-parallel matmul, each reduced while the next is "
                           "computed")
    schedule: str = flag("1f1b", "pipeline schedule", choices=("1f1b", "gpipe"))
    zero_stage: int = flag(1, "1: each replica keeps 1/dp of the optimizer; 0: all of it", choices=(0, 1))
    bucket_size: int = flag(10_000_000, "parameters in a gradient bucket, reduced while backward goes on")

    # The training
    train_iters: int = flag(200, "optimizer steps")
    micro_batch_size: int = flag(None, "samples that pass through a stage at once", kind=int)
    global_batch_size: int = flag(None, "samples in an optimizer step", kind=int)
    lr: float = flag(None, "peak learning rate", kind=float)
    min_lr: float = flag(None, "last learning rate (default lr / 10)", kind=float)
    lr_decay_style: str = flag("cosine", "from lr down to min-lr", choices=("cosine", "linear", "constant"))
    lr_warmup_fraction: float = flag(0.05, "part of train-iters in which the rate climbs to lr")
    weight_decay: float = flag(0.1, "AdamW's, on matrices only")
    clip_grad: float = flag(1.0, "largest global gradient norm; 0 turns clipping off")
    adam_beta1: float = flag(0.9, "decay of the first moment")
    adam_beta2: float = flag(0.95, "decay of the second moment")
    adam_eps: float = flag(1e-8, "added to the denominator")
    seed: int = flag(1234, "draws weights, data order and dropout")

    # The data
    data_path: str = flag(None, "folder made by data/prepare.py (default: Python's own standard library)", kind=str)
    eod_mask_loss: bool = flag(False, "do not train on predicting end-of-text")

    # The run
    run_dir: str = flag(None, "everything the run makes (default runs/MODEL-NUMBER)", kind=str)
    log_interval: int = flag(25, "steps between lines on the screen")
    eval_interval: int = flag(100, "steps between validations")
    eval_iters: int = flag(10, "global batches in a validation")
    save_interval: int = flag(100, "steps between checkpoints; there is one at the end too")
    keep_last: int = flag(3, "checkpoints that are kept")
    load: str = flag(None, "start from this checkpoint, or from the newest of this run's folder", kind=str)
    exit_interval: int = flag(None, "save and stop after the next step that is divisible by this", kind=int)
    max_skipped_steps: int = flag(10, "steps in a row with a loss or gradient that is not finite, after which the run "
                                      "gives up")
    trace: str = flag(None, "steps FIRST:LAST whose timeline is drawn into the run's folder", kind=str)
    timeout: int = flag(600, "seconds that a collective may take before the run ends")
    sample_tokens: int = flag(120, "tokens that the model writes at the end; 0 for none")
    temperature: float = flag(0.8, "of that sample; 0 is greedy")
    top_k: int = flag(20, "tokens that the sample chooses among; 0 for all")

    # The machine
    device: str = flag("auto", "where to compute; auto takes CUDA where it is found", choices=("auto", "cpu", "cuda"))
    dtype: str = flag("float32", "of the weights; bfloat16 keeps fp32 master weights and gradients",
                      choices=("float32", "bfloat16", "float64"))
    bf16: bool = flag(False, "the same as --dtype bfloat16")
    compile: bool = flag(None, "torch.compile the compute between the wires (default: on CUDA)", kind=bool)
    compile_backend: str = flag("inductor", "torch.compile's backend", choices=("inductor", "cudagraphs", "aot_eager"))
    deterministic_mode: bool = flag(False, "ask CUDA's libraries for the same bits every time (the CPU gives them "
                                           "anyway)")

    # Filled in by resolve() and train.py; not flags
    world_size: int = 1
    data_sha256: str | None = None         # of the training tokens

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
    def microbatches(self) -> int:
        """Microbatches that each replica runs in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

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
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def resolve(self, world_size: int) -> "Config":
        """Fill in what was left open for this many processes, then check it. Raises UserError."""
        require(self.model in PRESETS, f"unknown model '{self.model}'; try one of {', '.join(PRESETS)}")
        for one in dataclasses.fields(self):
            choices, value = one.metadata.get("choices"), getattr(self, one.name)
            require(not choices or value in choices,
                    f"unknown {spelling(one.name)} '{value}'; try one of {', '.join(map(str, choices or ()))}")
        require(not (self.bf16 and self.dtype == "float64"),
                "--bf16 and --dtype float64 contradict each other; give one")

        filled = {name: value for name, value in PRESETS[self.model].items() if getattr(self, name) is None}
        filled["world_size"] = world_size
        if self.bf16:
            filled["dtype"] = "bfloat16"
        config = dataclasses.replace(self, **filled)
        check_positive(config)

        default_tp, default_pp = 1, 1
        if self.tp is None and self.pp is None:
            share_a_model = world_size // self.dp if self.dp else 4 if world_size % 4 == 0 else world_size
            default_tp, default_pp = DEFAULT_LAYOUTS.get(share_a_model, (1, 1))
        tp, pp = self.tp or default_tp, self.pp or default_pp
        dp = self.dp or max(world_size // (tp * pp), 1)
        micro_batch_size = self.micro_batch_size or min(config.micro_batch_size, max(config.global_batch_size // dp, 1))
        config = dataclasses.replace(
            config, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=dp,
            micro_batch_size=micro_batch_size,
            slices=config.slices or (min(2, micro_batch_size) if tp > 1 else 1),
            ffn_hidden_size=config.ffn_hidden_size or 4 * config.hidden_size,
            max_position_embeddings=config.max_position_embeddings or config.seq_length,
            min_lr=config.lr / 10 if config.min_lr is None else config.min_lr)
        check_sizes(config)
        return config

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


def require(condition, message: str):
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)


def spelling(name: str) -> str:
    """The flag of a field: seq_length -> --seq-length."""
    return "--" + name.replace("_", "-")


def check_positive(config: Config):
    """Every size at least 1, every rate in its range, no empty name; None is left for resolve()."""
    at_least_zero = {"seed", "zero_stage", "sample_tokens", "top_k", "eval_iters"}
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        require(value != "", f"{spelling(one.name)} must not be empty; give a folder, or leave the flag out")
        if one.metadata.get("kind") is int and value is not None:
            least = 0 if one.name in at_least_zero else 1
            require(value >= least, f"{spelling(one.name)} must be at least {least}, but is {value}")
            require(value <= LARGEST, f"{spelling(one.name)} must be at most {LARGEST}, but is {value}")
    if config.trace is not None:
        numbers = config.trace.split(":")
        require(len(numbers) == 2 and all(number.isdecimal() for number in numbers) and len(config.trace) < 20
                and 1 <= int(numbers[0]) <= int(numbers[1]),
                f"--trace must be FIRST:LAST, two steps from 1 on and the second not before the first, but is {config.trace}; try --trace 10:12")
        require(int(numbers[1]) <= config.train_iters,
                f"--trace {config.trace} must end by train-iters {config.train_iters}; lower it, or train longer")
    for name in ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "lr_warmup_fraction"):
        value = getattr(config, name)
        require(0.0 <= value < 1.0, f"{spelling(name)} must be at least 0 and below 1, but is {value}")
    for name in ("lr", "min_lr", "weight_decay", "clip_grad", "temperature", "init_method_std"):
        value = getattr(config, name)
        require(value is None or 0.0 <= value < float("inf"),
                f"{spelling(name)} must be a finite number of at least 0, but is {value}")
    for name in ("layernorm_epsilon", "adam_eps"):
        value = getattr(config, name)
        require(0.0 < value < float("inf"), f"{spelling(name)} must be a finite number above 0, but is {value}")


def divisors(number: int, limit: int = 64) -> str:
    """For error messages: what would divide it."""
    return ", ".join(str(d) for d in range(1, min(number, limit) + 1) if number % d == 0)


def check_sizes(c: Config):
    """The rules that tie the sizes together; each message names the rule, the numbers and a fix. Raises UserError."""
    tp, pp, dp = c.tp, c.pp, c.dp
    require(tp * pp * dp == c.world_size,
            f"world size {c.world_size} must equal tensor x pipeline x data parallel = "
            f"{tp} x {pp} x {dp} = {tp * pp * dp}; start {tp * pp * dp} processes with torchrun, "
            "or change --tp, --pp, --dp")
    require(c.hidden_size % c.num_attention_heads == 0,
            f"hidden-size {c.hidden_size} must be divisible by num-attention-heads {c.num_attention_heads}; "
            f"try {c.num_attention_heads * max(c.hidden_size // c.num_attention_heads, 1)} or another number of heads")
    require(c.num_attention_heads % tp == 0,
            f"num-attention-heads {c.num_attention_heads} must be divisible by tensor-model-parallel-size {tp}; "
            f"try --tp {divisors(c.num_attention_heads)}")
    require(c.ffn_hidden_size % tp == 0,
            f"ffn-hidden-size {c.ffn_hidden_size} must be divisible by tensor-model-parallel-size {tp}; "
            f"try --tp {divisors(c.ffn_hidden_size)}")
    require(c.num_layers >= pp, f"num-layers {c.num_layers} must be at least pipeline-model-parallel-size {pp}, "
            f"since a stage holds a layer or more; try --pp {c.num_layers} or fewer")
    require(c.global_batch_size % (c.micro_batch_size * dp) == 0,
            f"global-batch-size {c.global_batch_size} must be divisible by micro-batch-size x data parallel = "
            f"{c.micro_batch_size} x {dp} = {c.micro_batch_size * dp}; try --global-batch-size "
            f"{-(-c.global_batch_size // (c.micro_batch_size * dp)) * c.micro_batch_size * dp}")
    require(c.slices <= c.micro_batch_size,
            f"slices {c.slices} must be at most micro-batch-size {c.micro_batch_size}, since a slice holds a sample or "
            f"more; try --slices {c.micro_batch_size} or --columns for batches this small")
    require(c.columns <= c.hidden_size, f"columns {c.columns} must be at most hidden-size {c.hidden_size}; try 2 or 4")
    require(c.seq_length <= c.max_position_embeddings,
            f"seq-length {c.seq_length} must be at most max-position-embeddings {c.max_position_embeddings}; "
            f"try --max-position-embeddings {c.seq_length}")
    require(c.min_lr <= c.lr, f"min-lr {c.min_lr} must be at most lr {c.lr}; lower it or leave it out")


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError: every rank parses, one of them prints."""

    def error(self, message):
        raise UserError(f"{message}; python train.py --help lists every flag")


def command_line_parser() -> Parser:
    """The flags, made from Config's fields."""
    parser = Parser("train.py", description="Pre-train a GPT over tensor x pipeline x data parallel processes.",
                    usage="train.py [flags], alone or under torchrun", allow_abbrev=False)
    add_flags(parser, [one.name for one in dataclasses.fields(Config) if one.metadata])
    return parser


def add_flags(parser, names, **defaults):
    """The flags of Config's fields of these names; `defaults` take the place of Config's own."""
    for one in dataclasses.fields(Config):
        if one.name not in names:
            continue
        about, default, text = one.metadata, one.default, one.metadata["text"].replace("%", "%%")
        if one.name in defaults:
            default, text = defaults[one.name], text.partition(" (default")[0]
        if default is not None and default is not False:
            text += f" (default {default})"
        spellings = [spelling(one.name)] + ([about["short"]] if about["short"] else [])
        if about["kind"] is bool:
            action = "store_true" if default is False else argparse.BooleanOptionalAction
            parser.add_argument(*spellings, action=action, default=default, help=text)
        else:
            metavar = None if about["choices"] else about["kind"].__name__.upper()
            parser.add_argument(*spellings, type=about["kind"], choices=about["choices"], metavar=metavar,
                                default=default, help=text)


def from_command_line(arguments: list[str]) -> Config:
    """Flags -> Config, not yet resolved. Raises UserError for a flag or value that does not exist."""
    return Config(**vars(command_line_parser().parse_args(arguments)))
