"""Reads the entries of a config.json, and refuses every entry that might change the logits in an unknown way.

A model that differs a little from the original would load and train without an error, but its losses would be worse. So
an entry that no family reads must be off (null, false, 0, empty), or is judged by its name: MATTERS lists what can
change the logits without a tensor of its own. Import ignores other entries and, unless they match HARMLESS, names them.

Most entries correspond to one setting with another name; families.py lists them. The functions below translate the
others, such as the scaling of RoPE: read_x(ConfigReader) returns {setting: value}, and write_x(Config) returns
{entry: value}. Both may raise UserError.
"""

import json
import math
import re

from nanodomino.config.config import Config
from nanodomino.config.setting import MAX_INT
from nanodomino.errors import require
from nanodomino.layers.positions import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_LENGTH

# Entries for training, generation or bookkeeping, which most files have.
HARMLESS = re.compile(
    r"architectures|model_type|transformers.*|.*name_or_path|_commit_hash|(torch_)?dtype|use_cache|.*token_id|prefix|"
    r"tokenizer_class|initializer_range|pretraining_tp|.*dropout|.*pdrop|summary_\w+|task_specific_params|.*label.*|"
    r"predict_special_tokens|return_dict.*|chunk_size_feed_forward|n_ctx|max_window_layers|_?attn_implementation.*|"
    r"do_sample|temperature|top_[kp]|max_length|output_(attentions|hidden_states|scores|logits|past|router_logits)|"
    r"router_(aux_loss_coef|jitter_noise)")
# {part of an entry's name: what nanodomino does instead}; the first match counts
MATTERS = {
    "quant": "reads no quantized weights",
    "auto_map": "does not run a model's own code",
    "scal|multipl|softcap|clip|clamp|limit|mup": "has no such factor or limit",
    "bias": "has biases only where this family has them",
    "rope|rotary|alibi|position": "has only the positions of the families that it imports",
    "window|sliding|layer_types|bidirectional|sink|attn|attention": "has full causal attention in every layer",
    "norm": "normalizes only where this family does",
    "(^|_)act(_|ivation|$)|gate|glu": "has only this family's activation",
    "expert|moe|router|dense|sparse": "has only this family's experts",
    "parallel|residual|layer|embed|logit|head": "has only the layers of this family"}


class ConfigReader:
    """Reads the entries of a config.json, and remembers which were read.

    values: the entries; defaults: {entry: the value that Transformers assumes if it is missing}; source: the name of
    the file, for messages.
    """

    def __init__(self, values: dict, defaults: dict, source):
        self.values, self.defaults, self.source, self.read = values, defaults, source, set()

    def get(self, name: str):
        self.read.add(name)
        return self.values.get(name, self.defaults.get(name))

    def number(self, name: str, type_: type, default=None):
        """Return an entry that must be a positive int or float, or `default` if it is null. Raises UserError."""
        value = self.get(name)
        value = default if value is None else value
        rule, largest = ("a positive whole number", MAX_INT) if type_ is int else ("a positive number", math.inf)
        fits = type(value) is int or type_ is float and type(value) is float
        require(fits and 0 < value and value <= largest and value < math.inf,
                f"{self.source} has {name} {shown(value)}, but it must be {rule}; correct it")
        return type_(value)

    def require_in(self, name: str, *supported):
        """Raise UserError unless the entry has one of the supported values."""
        value = self.get(name)
        require(value in supported, f"{self.source} has {name} {shown(value)}, but nanodomino supports only "
                f"{' or '.join(map(shown, supported))}; import another model")

    def ignored(self, parent="") -> list[str]:
        """Return the names of the entries that were not read and that do not matter, without those that match HARMLESS.

        Raises UserError if one may matter. A text that was read under another name does not: hidden_act and activation.
        parent: the name of the object that holds the entries.
        """
        texts = [value for value in map(self.get, [*self.read]) if isinstance(value, str)]
        names = [name for name, value in self.values.items() if not (
            name in self.read or HARMLESS.fullmatch(name) or value in (None, False, "", [], {}, *texts))]
        for name in names:
            for part, instead in MATTERS.items():
                require(not re.search(part, parent + name.lower()),
                        f"{self.source} has {name[:80]} {shown(self.values[name])}, but nanodomino {instead}; import "
                        "another model, or remove the entry if you know that it has no effect")
        return names


def shown(value) -> str:
    """Return a value as JSON, cut to 80 characters, for messages."""
    return json.dumps(value)[:80]


ROPE_TYPES = ("default", "linear", "llama3")


def read_rope(reader: ConfigReader) -> dict:
    """Read rope_theta and rope_scaling, or the entry rope_parameters, which combines both in Transformers 5."""
    theta, rotary_factor, original_length, longest, scaling, parameters = map(reader.get, (
        "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings",
        "rope_scaling", "rope_parameters"))
    values = scaling or parameters or {}
    require(isinstance(values, dict),
            f"{reader.source} has rope_scaling {shown(values)}, but it must be an object; correct it")
    defaults = dict(rope_theta=theta, partial_rotary_factor=rotary_factor, original_max_position_embeddings=longest)
    rope = ConfigReader(values, defaults, f"{reader.source}, in rope_scaling or rope_parameters,")
    old_type, new_type = rope.get("type"), rope.get("rope_type")
    rope_type = new_type or old_type or "default"
    require(rope_type in ROPE_TYPES, f"{reader.source} has rope of type {shown(rope_type)}, but nanodomino supports "
            f"only {', '.join(ROPE_TYPES)}; import another model")
    rope.require_in("partial_rotary_factor", None, 1)          # in these families Transformers ignores other values
    settings = dict(rotary_base=rope.number("rope_theta", float, 10_000.0), use_rope_scaling=rope_type == "llama3",
                    rotary_seq_len_interpolation_factor=rope.number("factor", float) if rope_type == "linear" else 1.0)
    if rope_type == "llama3":
        settings |= dict(rope_scaling_factor=rope.number("factor", float))
        rope.require_in("low_freq_factor", int(LOW_FREQUENCY))
        rope.require_in("high_freq_factor", int(HIGH_FREQUENCY))
        length = original_length or rope.get("original_max_position_embeddings")
        require(length == ORIGINAL_LENGTH, f"{reader.source} scales rope from original_max_position_embeddings "
                f"{shown(length)}, but nanodomino supports only Llama 3's {ORIGINAL_LENGTH}; import another model")
    rope.ignored("rope_")
    return settings


def write_rope(config: Config) -> dict:
    """Return rope_theta and rope_scaling, which all versions of Transformers read."""
    factor = config.rotary_seq_len_interpolation_factor
    require(factor == 1.0 or not config.use_rope_scaling,
            f"a config.json can hold only one rope scaling, but this model has --use-rope-scaling and "
            f"--rotary-seq-len-interpolation-factor {factor:g}; export another model")
    scaling = None if factor == 1.0 else dict(rope_type="linear", factor=factor)
    if config.use_rope_scaling:
        scaling = dict(rope_type="llama3", factor=config.rope_scaling_factor, low_freq_factor=LOW_FREQUENCY,
                       high_freq_factor=HIGH_FREQUENCY, original_max_position_embeddings=ORIGINAL_LENGTH)
    return dict(rope_theta=config.rotary_base, rope_scaling=scaling)


def read_biases(reader: ConfigReader) -> dict:
    """Read Llama's two switches attention_bias and mlp_bias, which must be equal."""
    attention, mlp = reader.get("attention_bias"), reader.get("mlp_bias")
    require(bool(attention) == bool(mlp), f"{reader.source} has attention_bias {shown(attention)} and mlp_bias "
            f"{shown(mlp)}, but nanodomino has biases in both or in neither; import another model")
    return dict(disable_bias_linear=not attention)


def read_windows(reader: ConfigReader) -> dict:
    """Require that no layer has a sliding window, or only one that is as long as the longest sequence. Mistral has one
    unless it is null, Qwen only with use_sliding_window."""
    used = reader.get("use_sliding_window") if "use_sliding_window" in reader.defaults else True
    types, window, longest = map(reader.get, ("layer_types", "sliding_window", "max_position_embeddings"))
    full = isinstance(types, list | None) and all(type_ == "full_attention" for type_ in types or ())
    require(full and (not used or window is None or type(window) is int and window >= longest),
            f"{reader.source} has sliding_window {shown(window)}, max_position_embeddings {shown(longest)} and "
            f"layer_types {shown(types)}, but nanodomino's attention sees all previous tokens; import another model, "
            "or lower max_position_embeddings to the window")
    return {}


def require_divisible_width(config: Config) -> dict:
    """Require that the heads divide hidden_size. Transformers' LlamaConfig requires that even if head_dim is given."""
    require(config.hidden_size % config.num_attention_heads == 0,
            f"Transformers requires that a Llama's hidden-size {config.hidden_size} is divisible by its "
            f"num-attention-heads {config.num_attention_heads}; export another model")
    return {}
