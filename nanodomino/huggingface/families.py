"""The model families that can be imported and exported, and how their config.json maps to a Config.

A Family is a table. read_config() uses it for import, and write_config() for export. Export chooses the first family
that fits, so a model that could be a Llama or a Mistral becomes a Llama. Most entries correspond to one setting with
another name. Functions translate the others, such as the scaling of RoPE. read_x(ConfigReader) returns
{setting: value}, and write_x(Config) returns {entry: value}. Both may raise UserError.

A model that differs a little from the original would load and train without an error, but its losses would be worse. So
an entry that no family reads must be off (null, false, 0, empty) or match HARMLESS. Otherwise the model is refused.
"""

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

from nanodomino.errors import UserError, require
from nanodomino.huggingface.tensors import GPT2_MODULES, LLAMA_MODULES, with_experts
from nanodomino.layers.attention_mask import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_LENGTH
from nanodomino.settings.config import Config
from nanodomino.settings.flags import MAX_INT, flag_name, flag_settings
from nanodomino.settings.presets import PRESETS
from nanodomino.settings.rules import holds

# ---- the entries of a config.json

# Entries for training, generation or bookkeeping.
HARMLESS = re.compile(
    r"architectures|model_type|transformers.*|unsloth.*|.*name_or_path|_commit_hash|(torch_)?dtype|use_cache|.*token_id|"
    r"prefix|tokenizer_class|initializer_range|pretraining_tp|.*dropout|.*pdrop|summary_\w+|task_specific_params|"
    r".*label.*|predict_special_tokens|return_dict.*|chunk_size_feed_forward|n_ctx|max_window_layers|"
    r"_?attn_implementation.*|is_llama_config|is_decoder|gradient_checkpointing|torchscript|problem_type|"
    r"finetuning_task|do_sample|temperature|top_[kp]|(min|max)_length|num_beams|num_return_sequences|.*_penalty|"
    r"output_(attentions|hidden_states|scores|logits|past|router_logits)|router_(aux_loss_coef|jitter_noise)")


class ConfigReader:
    """Reads the entries of a config.json, and remembers which were read. defaults: see Family. source: the name of the
    file, for messages."""

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
    """Read which layers have a sliding window. Its length counts the token itself, but --window-size does not. Mistral
    has a window in all layers unless the entry is null. Qwen has one only with use_sliding_window: in Qwen2 and Qwen3
    from layer max_window_layers on, or where layer_types says so. A window of the longest sequence is none."""
    used = reader.get("use_sliding_window") if "use_sliding_window" in reader.defaults else True
    by_layer, longest = "max_window_layers" in reader.defaults, reader.get("max_position_embeddings")
    layers, types, window = map(reader.get, ("num_hidden_layers", "layer_types", "sliding_window"))
    full = reader.get("max_window_layers") if by_layer else 0
    require(not used or window is None or type(window) is int and window > 1 and type(full) is int and full >= 0,
            f"{reader.source} has sliding_window {shown(window)} and max_window_layers {shown(full)}, but they must be "
            "whole numbers, and the window above 1; correct it")
    limits = bool(used) and window is not None and window < longest
    full = min(full, layers) if limits else layers
    if types is not None:
        given = types.count("full_attention") if isinstance(types, list) else 0
        require(types == ["full_attention"] * given + ["sliding_attention"] * (layers - given)
                and (given == full or by_layer and limits),
                f"{reader.source} has layer_types {shown(types)} and sliding_window {shown(window)}, but nanodomino "
                "supports only windows in all layers from some layer on; import another model")
        full = given
    return {} if full == layers else dict(window_size=window - 1, full_attention_layers=full)


def write_windows(config: Config, qwen=False) -> dict:
    """Return the entries that read_windows() reads. A model without a window needs none: Qwen has no window by default,
    and a Mistral without one is exported as a Llama."""
    if config.window_size is None:
        return {}
    choices = dict(use_sliding_window=True, max_window_layers=config.full_attention_layers) if qwen else {}
    return dict(sliding_window=config.window_size + 1) | choices


# ---- the families

IMPORTED_SEQ_LENGTH = 1024     # default seq-length of an imported model; less if the model has fewer positions
HEADS, HEAD_SIZE = (lambda sizes: sizes.num_attention_heads,
                    lambda sizes: None if sizes.hidden_size % sizes.num_attention_heads
                    else sizes.hidden_size // sizes.num_attention_heads)


@dataclass(frozen=True)
class Family:
    """Describes a family's config.json, its settings and its tensors. A key of config.json is called an entry here."""
    architecture: str           # class name in Transformers
    prefix: str                 # start of all tensor names except lm_head's; some files leave it out
    modules: dict               # a table of tensors.py
    ignored_tensors: str        # regular expression of buffers in old files; they are not weights
    sizes: dict                 # {entry: (setting, function of the sizes read so far that replaces null, or None)}
    epsilon: str                # the entry with the norms' epsilon
    settings: dict              # {setting: value in all models of the family, or a function of the sizes}
    supported: dict             # {entry: supported values}; the first is the default, which export writes
    defaults: dict              # {entry: the value that Transformers assumes if it is missing}
    read: tuple = ()            # functions that read the other entries
    write: tuple = ()           # their inverses
    aliases: dict = dataclasses.field(default_factory=dict)    # {another name of an entry in Transformers: entry}
    translated: frozenset = frozenset()    # settings that only this family's functions read and write


GPT2 = Family(
    "GPT2LMHeadModel", "transformer.", GPT2_MODULES, r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    sizes={"vocab_size": ("vocab_size", None), "n_layer": ("num_layers", None), "n_embd": ("hidden_size", None),
           "n_head": ("num_attention_heads", None), "n_inner": ("ffn_hidden_size", lambda sizes: 4 * sizes.hidden_size),
           "n_positions": ("max_position_embeddings", None)},
    epsilon="layer_norm_epsilon",
    settings=dict(normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False,
                  disable_bias_linear=False, add_qkv_bias=False, qk_layernorm=False, num_query_groups=HEADS,
                  kv_channels=HEAD_SIZE),
    supported={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,)},
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    write=(lambda config: {"attn_pdrop": config.attention_dropout,          # or Transformers would train with 0.1
                           **dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.hidden_dropout)},),
    aliases={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
             "max_position_embeddings": "n_positions"})
LLAMA = Family(
    "LlamaForCausalLM", "model.", LLAMA_MODULES, r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    sizes={"vocab_size": ("vocab_size", None), "num_hidden_layers": ("num_layers", None),
           "hidden_size": ("hidden_size", None), "num_attention_heads": ("num_attention_heads", None),
           "num_key_value_heads": ("num_query_groups", HEADS), "head_dim": ("kv_channels", HEAD_SIZE),
           "intermediate_size": ("ffn_hidden_size", None),
           "max_position_embeddings": ("max_position_embeddings", None)},
    epsilon="rms_norm_eps",
    settings=dict(normalization="RMSNorm", position_embedding_type="rope", rotary_percent=1.0, swiglu=True,
                  add_qkv_bias=False, qk_layernorm=False),
    supported={"hidden_act": ("silu", "swish")},
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False},
    read=(read_rope, read_biases), write=(write_rope, lambda config: dict.fromkeys(
        ("attention_bias", "mlp_bias"), not config.disable_bias_linear)))
MISTRAL = dataclasses.replace(
    LLAMA, architecture="MistralForCausalLM", read=(read_rope, read_windows), write=(write_rope, write_windows),
    translated=frozenset({"window_size"}), settings=LLAMA.settings | dict(disable_bias_linear=True),
    defaults=LLAMA.defaults | {"num_key_value_heads": 8, "sliding_window": 4096})
QWEN2 = dataclasses.replace(
    MISTRAL, architecture="Qwen2ForCausalLM", write=(write_rope, partial(write_windows, qwen=True)),
    translated=MISTRAL.translated | {"full_attention_layers"}, settings=MISTRAL.settings | dict(add_qkv_bias=True),
    defaults=MISTRAL.defaults | {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28})
QWEN3 = dataclasses.replace(
    QWEN2, architecture="Qwen3ForCausalLM", settings=MISTRAL.settings | dict(qk_layernorm=True),
    defaults=QWEN2.defaults | {"head_dim": 128})
EXPERTS = dict(moe_layer_freq=1, moe_router_score_function="softmax", moe_router_topk_scaling_factor=1.0,
               moe_router_enable_expert_bias=False, moe_shared_expert_intermediate_size=None)
MIXTRAL = dataclasses.replace(
    MISTRAL, architecture="MixtralForCausalLM", modules=with_experts("block_sparse_moe", "w1", "w3", "w2"),
    # the unused ffn_hidden_size gets the width of the experts; the preset's might not suit tp
    read=(*MISTRAL.read, lambda reader: dict(ffn_hidden_size=reader.get("intermediate_size"))),
    sizes=LLAMA.sizes | {"intermediate_size": ("moe_ffn_hidden_size", None), "num_local_experts": ("num_experts", None),
                         "num_experts_per_tok": ("moe_router_topk", None)},
    settings=MISTRAL.settings | EXPERTS | dict(moe_router_pre_softmax=False),
    defaults=LLAMA.defaults | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                               "num_local_experts": 8, "num_experts_per_tok": 2})
QWEN3_MOE = dataclasses.replace(
    QWEN3, architecture="Qwen3MoeForCausalLM", modules=with_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    # whether the weights of a token's experts add up to 1: softmax over the chosen logits instead of over all
    read=(*QWEN3.read, lambda reader: dict(moe_router_pre_softmax=not reader.get("norm_topk_prob"))),
    write=(*QWEN3.write, lambda config: dict(norm_topk_prob=not config.moe_router_pre_softmax)),
    sizes=LLAMA.sizes | {"moe_intermediate_size": ("moe_ffn_hidden_size", None), "num_experts": ("num_experts", None),
                         "num_experts_per_tok": ("moe_router_topk", None)},
    settings=QWEN3.settings | EXPERTS,
    supported=QWEN3.supported | {"decoder_sparse_step": (1,), "norm_topk_prob": (False, True)},
    translated=MISTRAL.translated,                             # all layers have a window, or none
    defaults=MISTRAL.defaults | {"use_sliding_window": False, "num_key_value_heads": 4, "head_dim": None,
                                 "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    aliases={"num_local_experts": "num_experts"})

# The settings of a model that read and write functions translate, or that do not change what a family's model computes.
# A model with any other setting that its family does not name is not exported, unless the setting is off.
TRANSLATED = {"layernorm_epsilon", "untie_embeddings_and_output_weights", "disable_bias_linear", "rotary_base",
              "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor",
              "moe_router_pre_softmax", "model", "make_vocab_size_divisible_by", "ffn_hidden_size"}

FAMILIES = dict(gpt2=GPT2, llama=LLAMA, mistral=MISTRAL, qwen2=QWEN2, qwen3=QWEN3, mixtral=MIXTRAL, qwen3_moe=QWEN3_MOE)


# ---- import

def family_of_json(values: dict, source) -> Family:
    """Return the family that a config.json names. Raises UserError."""
    name = values.get("model_type")
    require(isinstance(name, str) and name in FAMILIES, f"{source} describes a model of type {shown(name)}, but only "
            f"{', '.join(FAMILIES)} can be imported; import one of these")
    return FAMILIES[name]


def read_config(values: dict, source) -> Config:
    """Return the Config that a config.json describes, resolved for one process. Raises UserError."""
    family = family_of_json(values, source)
    values = values.copy()
    for name in family.aliases.keys() & values.keys():
        entry, value = family.aliases[name], values.pop(name)
        require(values.setdefault(entry, value) == value, f"{source} has {entry} {shown(values[entry])} and {name} "
                f"{shown(value)}, which mean the same; correct it")
    defaults = {entry: supported[0] for entry, supported in family.supported.items()} | family.defaults
    reader, sizes = ConfigReader(values, defaults, source), SimpleNamespace()
    for entry, (setting, default) in family.sizes.items():
        missing = reader.get(entry) is None and default
        setattr(sizes, setting, default(sizes) if missing else reader.number(entry, int))
    for entry, supported in family.supported.items():
        reader.require_in(entry, *supported)
    reader.require_in("tie_word_embeddings", True, False)
    settings = settings_of_family(family, sizes) | vars(sizes)
    settings |= dict(layernorm_epsilon=reader.number(family.epsilon, float),
                     untie_embeddings_and_output_weights=not reader.get("tie_word_embeddings"))
    for read in family.read:
        settings |= read(reader)
    reader.check_all_read()
    settings |= dict(model=nearest_preset(settings), trained_positions=sizes.max_position_embeddings,
                     seq_length=min(sizes.max_position_embeddings, IMPORTED_SEQ_LENGTH))
    try:
        config = Config(**settings, given=tuple(sorted(settings))).resolve(1)
        return config.with_vocabulary(sizes.vocab_size)
    except UserError as error:
        rule = str(error).split("; ")[0].removeprefix("--")         # without the advice, which names flags of train.py
        raise UserError(f"{source} describes an impossible model: {rule}; correct it") from None


def settings_of_family(family: Family, sizes) -> dict:
    """Return Family.settings as {setting: value}, computed for a model with these sizes."""
    return {setting: value(sizes) if callable(value) else value for setting, value in family.settings.items()}


def nearest_preset(settings: dict) -> str:
    """Return the preset with the nearest hidden_size; among several, the one with the fewest other differences. Runs
    that start from the imported model take their learning rate and batch size from it. A model without experts gets a
    preset without experts, because a preset adds the settings that are not given."""
    presets = [name for name in PRESETS if "num_experts" in settings or "num_experts" not in PRESETS[name]]
    return min(presets, key=lambda name: (abs(math.log(PRESETS[name]["hidden_size"] / settings["hidden_size"])),
                                          sum(settings.get(setting) != value
                                              for setting, value in PRESETS[name].items())))


# ---- export

def family_of(config: Config) -> Family:
    """Return the first family that fits the model. If none fits, the UserError says what the nearest family needs."""
    differences = {}
    for name, family in FAMILIES.items():
        if bool(config.num_experts) != any(setting == "num_experts" for setting, _ in family.sizes.values()):
            continue
        needed = settings_of_family(family, config)
        actual = {setting: getattr(config, setting) for setting in needed}
        if not config.disable_bias_linear:                     # all matrices have a bias, so add_qkv_bias adds nothing
            actual["add_qkv_bias"] = False
        for setting in unnamed_settings(family, config):
            needed[setting.name], actual[setting.name] = setting.default, getattr(config, setting.name)
        differences[name] = [f"{flag_name(setting)[2:]} {value}, not {actual[setting]}"
                             for setting, value in needed.items() if actual[setting] != value]
    nearest = min(differences, key=lambda name: len(differences[name]))
    require(not differences[nearest], "no Hugging Face architecture known to nanodomino fits this model, not even the "
            f"nearest: {FAMILIES[nearest].architecture} needs {', '.join(differences[nearest])}; export another model")
    return FAMILIES[nearest]


def unnamed_settings(family: Family, config: Config) -> list:
    """Return the settings that change this model, and that neither the family nor TRANSLATED names."""
    named = TRANSLATED | family.translated | family.settings.keys() | {setting for setting, _ in family.sizes.values()}
    return [setting for setting in flag_settings(config)
            if setting.metadata["affects"] in ("model", "positions") and setting.name not in named
            and getattr(config, setting.name) and all(holds(need, config) for need in setting.metadata["needs"])]


def write_config(config: Config, dtype: str) -> dict:
    """Return the entries of a config.json for this model. Raises UserError. dtype: a name, such as "bfloat16"."""
    family = family_of(config)
    (model_type,) = (name for name, candidate in FAMILIES.items() if candidate is family)
    values = {"architectures": [family.architecture], "model_type": model_type, "torch_dtype": dtype,
              "tie_word_embeddings": config.tied,
              **{entry: getattr(config, setting) for entry, (setting, _) in family.sizes.items()},
              family.epsilon: config.layernorm_epsilon,
              **{entry: supported[0] for entry, supported in family.supported.items()}}
    for write in family.write:
        values |= write(config)
    return values
