"""The model families that can be imported and exported, and how their config.json maps to a Config.

A Family is a table. read_config() uses it for import, and write_config() for export. Export chooses the first family
that fits, so a model that could be a Llama or a Mistral becomes a Llama.
"""

import dataclasses
import math
from dataclasses import dataclass
from types import SimpleNamespace

from nanodomino.errors import UserError, require
from nanodomino.huggingface.families import ConfigReader, read_biases, read_rope, read_windows, shown, write_rope
from nanodomino.huggingface.tensors import GPT2_MODULES, LLAMA_MODULES, MIXTRAL_MODULES, QWEN3_MOE_MODULES
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name, flag_settings
from nanodomino.settings.presets import PRESETS
from nanodomino.settings.rules import holds

IMPORTED_SEQ_LENGTH = 1024     # default seq-length of an imported model; less if the model has fewer positions
HEADS, HEAD_SIZE = (lambda sizes: sizes.num_attention_heads,
                    lambda sizes: None if sizes.hidden_size % sizes.num_attention_heads
                    else sizes.hidden_size // sizes.num_attention_heads)


@dataclass(frozen=True)
class Family:
    """Describes a family's config.json, its settings and its tensors. A key of config.json is called an entry here.

    A size that is null in config.json is computed as default(sizes read so far). Without a default, null is an error.
    """
    architecture: str           # class name in Transformers
    prefix: str                 # start of all tensor names except lm_head's; some files leave it out
    modules: dict               # a table of tensor_mapping.py
    ignored_tensors: str        # regular expression of buffers in old files; they are not weights
    sizes: dict                 # {entry: (setting, default or None)}
    epsilon: str                # the entry with the norms' epsilon
    settings: dict              # {setting: value in all models of the family, or a function of the sizes}
    supported: dict             # {entry: supported values}; the first is the default, which export writes
    defaults: dict              # {entry: the value that Transformers assumes if it is missing}
    read: tuple = ()            # functions of config_rules.py for the other entries
    write: tuple = ()           # their inverses
    aliases: dict = dataclasses.field(default_factory=dict)    # {another name of an entry in Transformers: entry}


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
    LLAMA, architecture="MistralForCausalLM", read=(read_rope, read_windows), write=(write_rope,),
    settings=LLAMA.settings | dict(disable_bias_linear=True),
    defaults=LLAMA.defaults | {"num_key_value_heads": 8, "sliding_window": 4096})
QWEN2 = dataclasses.replace(
    MISTRAL, architecture="Qwen2ForCausalLM", settings=MISTRAL.settings | dict(add_qkv_bias=True),
    defaults=MISTRAL.defaults | {"num_key_value_heads": 32, "use_sliding_window": False})
QWEN3 = dataclasses.replace(
    MISTRAL, architecture="Qwen3ForCausalLM", settings=MISTRAL.settings | dict(qk_layernorm=True),
    defaults=QWEN2.defaults | {"head_dim": 128})
EXPERTS = dict(moe_layer_freq=1, moe_router_score_function="softmax",
               moe_router_topk_scaling_factor=1.0, moe_router_enable_expert_bias=False,
               moe_shared_expert_intermediate_size=None)
MIXTRAL = dataclasses.replace(
    MISTRAL, architecture="MixtralForCausalLM", modules=MIXTRAL_MODULES,
    # the unused ffn_hidden_size gets the width of the experts; the preset's might not suit tp
    read=(*MISTRAL.read, lambda reader: dict(ffn_hidden_size=reader.get("intermediate_size"))),
    sizes=LLAMA.sizes | {"intermediate_size": ("moe_ffn_hidden_size", None), "num_local_experts": ("num_experts", None),
                         "num_experts_per_tok": ("moe_router_topk", None)},
    settings=MISTRAL.settings | EXPERTS | dict(moe_router_pre_softmax=False),
    defaults=LLAMA.defaults | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                               "num_local_experts": 8, "num_experts_per_tok": 2})
QWEN3_MOE = dataclasses.replace(
    QWEN3, architecture="Qwen3MoeForCausalLM", modules=QWEN3_MOE_MODULES,
    # whether the weights of a token's experts add up to 1: softmax over the chosen logits instead of over all
    read=(*QWEN3.read, lambda reader: dict(moe_router_pre_softmax=not reader.get("norm_topk_prob"))),
    write=(*QWEN3.write, lambda config: dict(norm_topk_prob=not config.moe_router_pre_softmax)),
    sizes=LLAMA.sizes | {"moe_intermediate_size": ("moe_ffn_hidden_size", None), "num_experts": ("num_experts", None),
                         "num_experts_per_tok": ("moe_router_topk", None)},
    settings=QWEN3.settings | EXPERTS,
    supported=QWEN3.supported | {"decoder_sparse_step": (1,), "norm_topk_prob": (False, True)},
    defaults=QWEN3.defaults | {"num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 768,
                               "num_experts": 128, "num_experts_per_tok": 8},
    aliases={"num_local_experts": "num_experts"})

# The settings of a model that read and write functions translate, or that do not change what a family's model computes.
# A model with any other setting that its family does not name is not exported, unless the setting is off.
TRANSLATED = {"layernorm_epsilon", "untie_embeddings_and_output_weights", "disable_bias_linear", "rotary_base",
              "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor",
              "moe_router_pre_softmax", "model", "make_vocab_size_divisible_by", "ffn_hidden_size"}

FAMILIES = dict(gpt2=GPT2, llama=LLAMA, mistral=MISTRAL, qwen2=QWEN2, qwen3=QWEN3, mixtral=MIXTRAL,
                qwen3_moe=QWEN3_MOE)                           # {model_type: family}


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
    """Return the preset with the nearest hidden_size; among several, the one with the fewest other differences.

    It gives runs that start from the imported model their default learning rate and batch size. A model without experts
    gets a preset without experts, because a preset adds the settings that are not given.
    """
    presets = [name for name in PRESETS if "num_experts" in settings or "num_experts" not in PRESETS[name]]
    return min(presets, key=lambda name: (abs(math.log(PRESETS[name]["hidden_size"] / settings["hidden_size"])),
                                          sum(settings.get(setting) != value
                                              for setting, value in PRESETS[name].items())))


# ---- export

def family_of(config: Config) -> Family:
    """Return the first family that fits the model. If none fits, the UserError says what the nearest family needs."""
    differences, experts = {}, config.num_experts
    for name, family in FAMILIES.items():
        if bool(experts) != any(setting == "num_experts" for setting, _ in family.sizes.values()):
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
    named = TRANSLATED | family.settings.keys() | {setting for setting, _ in family.sizes.values()}
    return [setting for setting in flag_settings(config)
            if setting.metadata["affects"] in ("model", "positions") and setting.name not in named
            and getattr(config, setting.name) and all(holds(need, config) for need in setting.metadata["needs"])]


def write_config(config: Config, dtype: str) -> dict:
    """Return the entries of a config.json for this model. Raises UserError. dtype: a name, such as "bfloat16"."""
    family = family_of(config)
    (model_type,) = (name for name, candidate in FAMILIES.items() if candidate is family)
    values = dict(architectures=[family.architecture], model_type=model_type, torch_dtype=dtype,
                  tie_word_embeddings=config.tied)
    values |= {entry: getattr(config, setting) for entry, (setting, _) in family.sizes.items()}
    values |= {family.epsilon: config.layernorm_epsilon}
    values |= {entry: supported[0] for entry, supported in family.supported.items()}
    for write in family.write:
        values |= write(config)
    return values
