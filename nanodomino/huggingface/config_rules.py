"""Reads the entries of a config.json, and refuses an entry that might change the logits in an unknown way.

A model that differs a little from the original would load and train without an error, but its losses would be worse. So
an entry that no family reads must be off (null, false, 0, empty) or match HARMLESS. Otherwise the model is refused.

Most entries correspond to one setting with another name; families.py lists them. The functions below translate the
others, such as the scaling of RoPE: read_x(ConfigReader) returns {setting: value}, and write_x(Config) returns
{entry: value}. Both may raise UserError.
"""

import json
import math
import re

from nanodomino.errors import require
from nanodomino.layers.attention_mask import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_LENGTH
from nanodomino.settings.config import Config
from nanodomino.settings.flags import MAX_INT

# Entries for training, generation or bookkeeping.
HARMLESS = re.compile(
    r"architectures|model_type|transformers.*|unsloth.*|.*name_or_path|_commit_hash|(torch_)?dtype|use_cache|.*token_id|"
    r"prefix|tokenizer_class|initializer_range|pretraining_tp|.*dropout|.*pdrop|summary_\w+|task_specific_params|"
    r".*label.*|predict_special_tokens|return_dict.*|chunk_size_feed_forward|n_ctx|max_window_layers|"
    r"_?attn_implementation.*|is_llama_config|is_decoder|gradient_checkpointing|torchscript|problem_type|"
    r"finetuning_task|do_sample|temperature|top_[kp]|(min|max)_length|num_beams|num_return_sequences|.*_penalty|"
    r"output_(attentions|hidden_states|scores|logits|past|router_logits)|router_(aux_loss_coef|jitter_noise)")


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

    def number(self, name: str, type_: type):
        """Return an entry that must be a positive int or float. Raises UserError."""
        value = self.get(name)
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

    def check_all_read(self):
        """Raise UserError if an entry was not read, is not HARMLESS and is not off."""
        for name, value in self.values.items():
            require(name in self.read or HARMLESS.fullmatch(name) or value in (None, False, "", [], {}),
                    f"{self.source} has {name[:80]} {shown(value)}, which may change the logits and which nanodomino "
                    "does not know; import another model, or remove the entry if you know that it has no effect")


def shown(value) -> str:
    """Return a value as JSON, cut to 80 characters, for messages."""
    return json.dumps(value)[:80]


def read_rope(reader: ConfigReader) -> dict:
    """Read rope_theta and rope_scaling, or the entry rope_parameters, which combines both in Transformers 5."""
    original = "original_max_position_embeddings"
    above = {name: reader.get(name) for name in ("rope_theta", "partial_rotary_factor", original)}
    scaling, parameters = reader.get("rope_scaling"), reader.get("rope_parameters")
    values = scaling or parameters or {}
    require(isinstance(values, dict),
            f"{reader.source} has rope_scaling {shown(values)}, but it must be an object; correct it")
    rope = ConfigReader({"rope_type": values.get("type") or "default"} | values, above,
                        f"{reader.source}, in rope_scaling or rope_parameters,")
    rope.get("type")                                           # the entry's name in old files
    rope.require_in("rope_type", "default", "linear", "llama3")
    rope.require_in("partial_rotary_factor", None, 1)          # in these families Transformers ignores other values
    kind = rope.get("rope_type")
    settings = dict(rotary_base=rope.number("rope_theta", float), use_rope_scaling=kind == "llama3",
                    rotary_seq_len_interpolation_factor=rope.number("factor", float) if kind == "linear" else 1.0)
    if kind == "llama3":
        settings |= dict(rope_scaling_factor=rope.number("factor", float))
        rope.require_in("low_freq_factor", int(LOW_FREQUENCY))
        rope.require_in("high_freq_factor", int(HIGH_FREQUENCY))
        rope.require_in(original, ORIGINAL_LENGTH)
        reader.require_in(original, None, ORIGINAL_LENGTH)     # Transformers prefers this to rope_scaling's entry
    rope.check_all_read()
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
    """Require that no layer has a sliding window, or only one that is as long as the longest sequence. Mistral has a
    window unless the entry is null; Qwen has one only with use_sliding_window."""
    used = reader.get("use_sliding_window") if "use_sliding_window" in reader.defaults else True
    types, window, longest = map(reader.get, ("layer_types", "sliding_window", "max_position_embeddings"))
    full = isinstance(types, list | None) and all(type_ == "full_attention" for type_ in types or ())
    require(full and (not used or window is None or type(window) is int and window >= longest),
            f"{reader.source} has sliding_window {shown(window)}, max_position_embeddings {shown(longest)} and "
            f"layer_types {shown(types)}, but nanodomino's attention sees all previous tokens; import another model, "
            "or lower max_position_embeddings to the window")
    return {}
