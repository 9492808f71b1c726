"""The model families that can be imported and exported, and how a configuration of Transformers maps to a Config.

Transformers reads and writes config.json. Its configuration objects know the defaults, aliases and older spellings of
all entries. What remains is which entry (LlamaConfig.rms_norm_eps) is which setting (Config.layernorm_epsilon), and
which settings a family fixes (Config.swiglu). A Family is a table of both.

Import compares the logits of a few tokens with those of Transformers (convert.py), which finds any entry that changes
the model and that no table names. What a few tokens do not show, read_config() reads exactly or refuses.

Export takes the first family that fits: reading what it writes must give the same model. So a model that could be a
Llama or a Mistral becomes a Llama.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from nanodomino.errors import UserError, attempt, import_optional, require
from nanodomino.files import read_json
from nanodomino.huggingface.tensors import GPT2_MODULES, LLAMA_MODULES, with_experts
from nanodomino.layers.attention_mask import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_LENGTH
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name, flag_settings
from nanodomino.settings.presets import PRESETS
from nanodomino.settings.records import from_record
from nanodomino.settings.rules import holds

IMPORTED_SEQ_LENGTH = 1024     # default seq-length of an imported model; less if the model has fewer positions
try_model = partial(attempt, advice="correct it, or use another model")
GELU = ("gelu_new", "gelu_pytorch_tanh")                       # two names of our gelu; "gelu" is slightly different
OPPOSITE = {"tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"}     # entries: true if ours is false


@dataclass(frozen=True)
class Family:
    """Describes the models that a class of Transformers computes. A key of config.json is called an entry here."""
    architecture: str           # name of the class
    modules: dict               # a table of tensors.py
    entries: dict               # {entry, or an alias of it: setting}
    settings: dict              # {setting: value in all models of the family}


SIZES = {"vocab_size": "vocab_size", "num_hidden_layers": "num_layers", "hidden_size": "hidden_size",
         "num_attention_heads": "num_attention_heads", "max_position_embeddings": "max_position_embeddings",
         "tie_word_embeddings": "untie_embeddings_and_output_weights"}
GPT2 = Family(
    "GPT2LMHeadModel", GPT2_MODULES, SIZES | {
        "n_inner": "ffn_hidden_size", "layer_norm_epsilon": "layernorm_epsilon",
        "attn_pdrop": "attention_dropout", "resid_pdrop": "hidden_dropout", "embd_pdrop": "hidden_dropout"},
    dict(normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False, disable_bias_linear=False,
         add_qkv_bias=False, qk_layernorm=False))
ROPE = SIZES | {"num_key_value_heads": "num_query_groups", "head_dim": "kv_channels", "attention_dropout":
                "attention_dropout", "intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layernorm_epsilon"}
LLAMA = Family(
    "LlamaForCausalLM", LLAMA_MODULES, ROPE | dict.fromkeys(("attention_bias", "mlp_bias"), "disable_bias_linear"),
    dict(normalization="RMSNorm", position_embedding_type="rope", swiglu=True, add_qkv_bias=False, qk_layernorm=False))
WINDOW = ROPE | {"sliding_window": "window_size"}
MISTRAL = replace(LLAMA, architecture="MistralForCausalLM", entries=WINDOW,
                  settings=LLAMA.settings | dict(disable_bias_linear=True))
QWEN2 = replace(MISTRAL, architecture="Qwen2ForCausalLM", settings=MISTRAL.settings | dict(add_qkv_bias=True),
                entries=WINDOW | {"max_window_layers": "full_attention_layers"})
QWEN3 = replace(QWEN2, architecture="Qwen3ForCausalLM", settings=MISTRAL.settings | dict(qk_layernorm=True))
EXPERTS = WINDOW | {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_router_topk"}
MIXTRAL = replace(
    MISTRAL, architecture="MixtralForCausalLM", modules=with_experts("block_sparse_moe", "w1", "w3", "w2"),
    entries=EXPERTS | {"intermediate_size": "moe_ffn_hidden_size"},
    settings=MISTRAL.settings | dict(moe_router_pre_softmax=False))
QWEN3_MOE = replace(
    QWEN3, architecture="Qwen3MoeForCausalLM", modules=with_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    # norm_topk_prob: the weights of a token's experts add up to 1, as after a softmax over only the chosen experts
    entries=EXPERTS | {"moe_intermediate_size": "moe_ffn_hidden_size", "norm_topk_prob": "moe_router_pre_softmax"})
FAMILIES = dict(gpt2=GPT2, llama=LLAMA, mistral=MISTRAL, qwen2=QWEN2, qwen3=QWEN3, mixtral=MIXTRAL, qwen3_moe=QWEN3_MOE)


def import_transformers():
    """Return the package, which then prints no warnings and no progress bars. Raises UserError."""
    package = import_optional("transformers", "Hugging Face's format")
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    return package


# ---- import

def load_configuration(folder: Path):
    """Return the configuration of Transformers that config.json describes. Raises UserError."""
    name = read_json(folder / "config.json").get("model_type")
    require(str(name) in FAMILIES, f"{folder}/config.json describes a model of type {str(name)[:80]}, but only "
            f"{', '.join(FAMILIES)} can be imported; import one of these")
    return try_model(f"Transformers can't read {folder}/config.json", import_transformers().AutoConfig.from_pretrained,
                     folder, local_files_only=True, trust_remote_code=False)


def read_config(configuration, source) -> Config:
    """Return the Config that a configuration of Transformers describes, resolved for one process. source: the name of
    its file, for messages. Raises UserError."""
    family, get = FAMILIES[configuration.model_type], partial(getattr, configuration)
    settings = {setting: get(entry, None) for entry, setting in family.entries.items() if "dropout" not in setting}
    settings |= {setting: not get(entry) for entry, setting in family.entries.items() if entry in OPPOSITE}
    width, heads, length = get("hidden_size"), max(get("num_attention_heads"), 1), get("max_position_embeddings")
    # a preset would replace None by its own value
    defaults = dict(num_query_groups=heads, kv_channels=None if width % heads else width // heads,
                    ffn_hidden_size=settings.get("moe_ffn_hidden_size") or 4 * width)
    settings = defaults | {name: value for name, value in settings.items() if value is not None} | family.settings
    # Hugging Face counts the token itself in the length of a window. The first layers of a Qwen may have none
    window, full = settings.pop("window_size", None), settings.pop("full_attention_layers", None)
    types = ["sliding_attention"] if full is None else get("layer_types")
    if window is not None and window < length and "sliding_attention" in types:
        settings |= dict(window_size=window - 1, full_attention_layers=types.index("sliding_attention"))
    rope = {name: value for name, value in (get("rope_parameters", None) or {}).items() if name != "type"}
    if rope:
        kind, factor = rope.get("rope_type"), rope.get("factor")
        settings |= dict(rotary_base=rope.get("rope_theta"), use_rope_scaling=kind == "llama3",
                         rope_scaling_factor=factor if kind == "llama3" else None,
                         rotary_seq_len_interpolation_factor=factor if kind == "linear" else 1.0)
    settings |= dict(model=nearest_preset(settings), trained_positions=length,
                     seq_length=min(length, IMPORTED_SEQ_LENGTH))
    config = try_model(f"{source} describes an impossible model",
                       lambda: from_record(settings | {"given": sorted(settings)}, source).resolve(1))
    for entry, found, computed in (("rope_parameters", rope, [write_rope(config)]),
                                   ("activation_function", get("activation_function", GELU[0]), GELU)):
        require(found in computed, f"{source} has {entry} {found}, but nanodomino would compute {computed[0]}; import "
                "another model")
    return config


def nearest_preset(settings: dict) -> str:
    """Return the preset with the nearest hidden_size, and the fewest other differences. Runs that start from the model
    take their learning rate and batch size from it, and all settings that are not given. So a model without experts
    gets a preset without experts."""
    presets = [name for name in PRESETS if "num_experts" in settings or "num_experts" not in PRESETS[name]]
    return min(presets, key=lambda name: (abs(math.log(PRESETS[name]["hidden_size"] / settings["hidden_size"])), sum(
        settings.get(setting) != value for setting, value in PRESETS[name].items())))


# ---- export

def write_config(config: Config, dtype: str):
    """Return the configuration of Transformers for this model. dtype: a name, such as "bfloat16". If no family fits,
    the UserError says what the nearest family needs."""
    import_transformers()
    wanted, differences = choices(config), {}
    for name, family in FAMILIES.items():
        if bool(config.num_experts) == ("num_experts" in family.entries.values()):
            with suppress(UserError):                          # the family can't have such sizes
                configuration = write_family(config, name, dtype)
                found = choices(read_config(configuration, name))
                if found == wanted:
                    return configuration
                differences[family.architecture] = [
                    f"{flag_name(setting)[2:]} {found.get(setting)}, not {wanted.get(setting)}"
                    for setting in found | wanted if found.get(setting) != wanted.get(setting)]
    require(differences, "no model that Transformers knows can have these sizes; export another model")
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise UserError("no Hugging Face architecture known to nanodomino fits this model, not even the nearest: "
                    f"{nearest} needs {', '.join(differences[nearest])}; export another model")


def write_family(config: Config, model_type: str, dtype: str):
    """Return the configuration of this family with the model's sizes and choices. Raises UserError."""
    family = FAMILIES[model_type]
    values = {entry: getattr(config, setting) for entry, setting in family.entries.items()}
    values |= {entry: not values[entry] for entry in OPPOSITE & values.keys()}
    if config.rope:
        values |= dict(rope_parameters=write_rope(config))
    if config.window_size is not None:
        values |= dict(sliding_window=config.window_size + 1)
        values |= dict(use_sliding_window=True) if model_type.startswith("qwen") else {}
    return try_model(f"{family.architecture} can't have these sizes", import_transformers().AutoConfig.for_model,
                     model_type, architectures=[family.architecture], dtype=dtype, **values)


def write_rope(config: Config) -> dict:
    """Return the entry rope_parameters, {} without RoPE."""
    if not config.rope:
        return {}
    rope = dict(rope_type="default", rope_theta=config.rotary_base)
    if config.rotary_seq_len_interpolation_factor != 1.0:
        rope |= dict(rope_type="linear", factor=config.rotary_seq_len_interpolation_factor)
    if config.use_rope_scaling:
        rope |= dict(rope_type="llama3", factor=config.rope_scaling_factor, low_freq_factor=LOW_FREQUENCY,
                     high_freq_factor=HIGH_FREQUENCY, original_max_position_embeddings=ORIGINAL_LENGTH)
    return rope


def choices(config: Config) -> dict:
    """Return {setting: value} of the settings that change what this model computes."""
    unused = ("model", "make_vocab_size_divisible_by", "ffn_hidden_size" if config.num_experts else "")
    return {setting.name: getattr(config, setting.name) for setting in flag_settings(config)
            if setting.metadata["affects"] in ("model", "positions") and setting.name not in unused
            and all(holds(need, config) for need in setting.metadata["needs"])}
