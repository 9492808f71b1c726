"""What Hugging Face calls a model's sizes, choices and tensors, family by family: pure functions.

The same numbers, under other names and in another order. n heads of d numbers in g groups, r = n/g heads in each:

    ours                            GPT-2's                         Llama's, and those of its kin
    qkv  [g x (r q's, k, v) x d, h]      c_attn [h, (q, k, v) n d]       q_proj [n d, h], k_proj, v_proj [g d, h]
    dense_h_to_4h         [f, h]         c_fc   [h, f]
      with swiglu      [2, f, h]                                         gate_proj, up_proj [f, h]
    word_embeddings  [padded v, h]       wte    [v, h]                   embed_tokens [v, h]

Ours lies group by group, so that a contiguous cut of its rows is a set of whole groups, which a tensor-parallel rank
can attend with alone. GPT-2's matrices are multiplied from the right, x W (its Conv1D), and so are the transposed of
what everybody else stores.

A family is one entry of FAMILIES: how its config.json says what Config says, both ways, and how its tensors are made of
ours, both ways (Packing). What is exported as what follows from the entries too: the first that has all of the model's
choices. In a config.json, what neither an entry asks for nor is known to leave the logits alone is refused, unless it
is off: a model that is a little another one would train on without a word, only worse.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from nanodomino.checkpoint.shards import LocalBoxes
from nanodomino.config.config import Config
from nanodomino.config.presets import PRESETS
from nanodomino.config.setting import MAX_INT, flag_name
from nanodomino.errors import UserError, require
from nanodomino.layers.positions import HIGH_FREQUENCY, LOW_FREQUENCY, ORIGINAL_LENGTH
from nanodomino.model import meta_model

LONGEST_SAMPLE = 1024      # of an imported model's seq-length, unless its positions end before

# What training, generation or bookkeeping reads, and the logits do not depend on.
HARMLESS = re.compile(
    r"architectures|model_type|transformers_version|transformers\.js_config|_?name_or_path|_commit_hash|(torch_)?dtype|"
    r"use_cache|(bos|eos|pad|unk|sep|cls|decoder_start)_token_id|tokenizer_class|prefix|initializer_range|"
    r"pretraining_tp|(attn|resid|embd|attention|hidden)_(pdrop|dropout)|summary_\w+|task_specific_params|"
    r"id2label|label2id|_?num_labels|predict_special_tokens|n_special|problem_type|return_dict(_in_generate)?|chunk_size_feed_forward|n_ctx|"
    r"max_window_layers|is_llama_config|_?attn_implementation(_\w+)?|do_sample|temperature|top_[kp]|typical_p|"
    r"(max|min)_length|num_beams|num_beam_groups|num_return_sequences|(repetition|length|diversity)_penalty|"
    r"(encoder_)?no_repeat_ngram_size|early_stopping|output_(attentions|hidden_states|scores|logits|past)")


# ---- tensors

@dataclass(frozen=True)
class Packing:
    """split(ours, config) -> theirs, a tuple; join(theirs, config) -> ours. Biases are split as their matrices are."""
    split: Callable
    join: Callable


def split_groups(ours, config: Config):
    """[g x (r q's, k, v) x d, ..] -> q [n d, ..], k, v [g d, ..]."""
    groups, heads = config.num_query_groups, config.num_attention_heads // config.num_query_groups
    grouped = ours.unflatten(0, (groups, heads + 2, config.kv_channels))
    return tuple(part.flatten(0, 2) for part in grouped.split([heads, 1, 1], dim=1))


def join_groups(theirs, config: Config):
    return torch.cat([part.unflatten(0, (config.num_query_groups, -1, config.kv_channels)) for part in theirs],
                     dim=1).flatten(0, 2)


def pad_vocabulary(theirs, config: Config):
    (words,) = theirs
    return torch.cat([words, words.new_zeros(config.padded_vocab_size - config.vocab_size, words.size(1))])


SAME = Packing(lambda ours, config: (ours,), lambda theirs, config: theirs[0])
TRANSPOSED = Packing(lambda ours, config: (ours.t(),), lambda theirs, config: theirs[0].t())      # of a vector: itself
GROUPS = Packing(split_groups, join_groups)
GROUPS_TRANSPOSED = Packing(lambda ours, config: (torch.cat(split_groups(ours, config)).t(),),
                            lambda theirs, config: join_groups(theirs[0].t().chunk(3), config))
GATE_AND_UP = Packing(lambda ours, config: ours.unbind(), lambda theirs, config: torch.stack(theirs))
VOCABULARY = Packing(lambda ours, config: (ours[:config.vocab_size],), pad_vocabulary)

# our module -> (their modules, how they are packed); # is a layer's number
GPT2_TENSORS = {
    "embedding.word_embeddings": (["transformer.wte"], VOCABULARY),
    "embedding.position_embeddings": (["transformer.wpe"], SAME),
    "layers.#.attention.norm": (["transformer.h.#.ln_1"], SAME),
    "layers.#.attention.qkv": (["transformer.h.#.attn.c_attn"], GROUPS_TRANSPOSED),
    "layers.#.attention.dense": (["transformer.h.#.attn.c_proj"], TRANSPOSED),
    "layers.#.mlp.norm": (["transformer.h.#.ln_2"], SAME),
    "layers.#.mlp.dense_h_to_4h": (["transformer.h.#.mlp.c_fc"], TRANSPOSED),
    "layers.#.mlp.dense_4h_to_h": (["transformer.h.#.mlp.c_proj"], TRANSPOSED),
    "final_norm": (["transformer.ln_f"], SAME),
    "output_layer": (["lm_head"], VOCABULARY),
}
LLAMA_TENSORS = {
    "embedding.word_embeddings": (["model.embed_tokens"], VOCABULARY),
    "layers.#.attention.norm": (["model.layers.#.input_layernorm"], SAME),
    "layers.#.attention.qkv": ([f"model.layers.#.self_attn.{one}_proj" for one in "qkv"], GROUPS),
    "layers.#.attention.q_layernorm": (["model.layers.#.self_attn.q_norm"], SAME),
    "layers.#.attention.k_layernorm": (["model.layers.#.self_attn.k_norm"], SAME),
    "layers.#.attention.dense": (["model.layers.#.self_attn.o_proj"], SAME),
    "layers.#.mlp.norm": (["model.layers.#.post_attention_layernorm"], SAME),
    "layers.#.mlp.dense_h_to_4h": ([f"model.layers.#.mlp.{one}_proj" for one in ("gate", "up")], GATE_AND_UP),
    "layers.#.mlp.dense_4h_to_h": (["model.layers.#.mlp.down_proj"], SAME),
    "final_norm": (["model.norm"], SAME),
    "output_layer": (["lm_head"], VOCABULARY),
}


def whole_shapes(config: Config) -> dict[str, torch.Size]:
    """{global name: shape} of every parameter, as a checkpoint holds it."""
    model = meta_model(config)
    return {name: LocalBoxes.of(weight, model.mesh).size() for name, weight in model.named_parameters()}


# ---- config.json

class Record:
    """A config.json that notes what it has been asked for. absent: what Transformers takes for what is not in it."""

    def __init__(self, values: dict, absent: dict, source):
        self.values, self.absent, self.source, self.asked = values, absent, source, set()

    def get(self, name: str):
        self.asked.add(name)
        return self.values.get(name, self.absent.get(name))

    def number(self, name: str, kind: type, default=None):
        """A whole number from 1 on, or a positive float; `default` in place of null."""
        value = self.get(name)
        value = default if value is None else value
        rule, largest = ("a whole number from 1 on", MAX_INT) if kind is int else ("a positive number", math.inf)
        fits = type(value) is int or kind is float and type(value) is float
        require(fits and 0 < value and value <= largest and value < math.inf,
                f"{self.source} must have {rule} as {name}, but has {shown(value)}; correct it")
        return kind(value)

    def allow(self, name: str, *allowed):
        """Refuse other values than these."""
        value = self.get(name)
        require(value in allowed, f"{self.source} has {name} {shown(value)}, but the model that is built here can have "
                f"{' or '.join(map(shown, allowed))} alone; import another one")

    def check_rest(self):
        """Refuse what nobody has asked for, is not known to be harmless, and is on."""
        for name, value in self.values.items():
            require(name in self.asked or HARMLESS.fullmatch(name) or value in (None, False, "", [], {}),
                    f"{self.source} has {name[:80]} {shown(value)}, of which nothing is known here, so that the model "
                    "may be another one; import another, or take the line out if the logits do not depend on it")


def shown(value) -> str:
    return json.dumps(value)[:80]


@dataclass(frozen=True)
class Rule:
    """What is not a number for a number: read(record) -> settings; write(config) -> what stands in config.json."""
    read: Callable
    write: Callable


ROPE_TYPES = ("default", "linear", "llama3")


def read_rope(record: Record) -> dict:
    """rope_theta and rope_scaling, or rope_parameters that hold both, as Transformers 5 has it."""
    theta, part, length, longest, *inner = (record.get(name) for name in (
        "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings",
        "rope_scaling", "rope_parameters"))
    values = inner[0] or inner[1] or {}
    require(isinstance(values, dict), f"{record.source} must have an object as rope_scaling, but has {shown(values)}; "
            "correct it")
    rope = Record(values, dict(rope_theta=theta, partial_rotary_factor=part, original_max_position_embeddings=longest),
                  f"{record.source}, in its rope,")
    old_name, name = rope.get("type"), rope.get("rope_type")
    kind = name or old_name or "default"
    require(kind in ROPE_TYPES, f"{record.source} has rope of type {shown(kind)}, but what is built here has "
            f"{', '.join(ROPE_TYPES)} alone; import another model")
    rope.allow("partial_rotary_factor", None, 1)             # Transformers' models of these families know no other
    settings = dict(rotary_base=rope.number("rope_theta", float, 10_000.0), use_rope_scaling=kind == "llama3",
                    rotary_seq_len_interpolation_factor=rope.number("factor", float) if kind == "linear" else 1.0)
    if kind == "llama3":
        settings |= dict(rope_scaling_factor=rope.number("factor", float))
        rope.allow("low_freq_factor", int(LOW_FREQUENCY))
        rope.allow("high_freq_factor", int(HIGH_FREQUENCY))
        require((length or rope.get("original_max_position_embeddings")) == ORIGINAL_LENGTH,
                f"{record.source} has rope that was scaled from original_max_position_embeddings "
                f"{shown(length or rope.get('original_max_position_embeddings'))}, but what is built here knows Llama "
                f"3's {ORIGINAL_LENGTH} alone; import another model")
    rope.check_rest()
    return settings


def write_rope(config: Config) -> dict:
    """As all versions of Transformers read it."""
    factor = config.rotary_seq_len_interpolation_factor
    require(factor == 1.0 or not config.use_rope_scaling,
            f"a config.json can tell of one scaling of rope alone, but this model has --use-rope-scaling and "
            f"--rotary-seq-len-interpolation-factor {factor:g}; export another one")
    scaling = None if factor == 1.0 else dict(rope_type="linear", factor=factor)
    if config.use_rope_scaling:
        scaling = dict(rope_type="llama3", factor=config.rope_scaling_factor, low_freq_factor=LOW_FREQUENCY,
                       high_freq_factor=HIGH_FREQUENCY, original_max_position_embeddings=ORIGINAL_LENGTH)
    return dict(rope_theta=config.rotary_base, rope_scaling=scaling)


def read_biases(record: Record) -> dict:
    """Llama's two switches: of attention's four matrices, of the MLP's three."""
    attention, mlp = record.get("attention_bias"), record.get("mlp_bias")
    require(bool(attention) == bool(mlp),
            f"{record.source} has attention_bias {shown(attention)} and mlp_bias {shown(mlp)}, but the model that is "
            "built here can have all biases or none; import another one")
    return dict(disable_bias_linear=not attention)


def write_biases(config: Config) -> dict:
    return dict.fromkeys(("attention_bias", "mlp_bias"), not config.disable_bias_linear)


def read_window(record: Record) -> dict:
    """Mistral's. One that reaches as far as there are positions cuts nothing off."""
    window, longest = record.get("sliding_window"), record.get("max_position_embeddings")
    require(window is None or type(window) is int and window >= longest,
            f"{record.source} has sliding_window {shown(window)}, within max_position_embeddings {shown(longest)}, but "
            "attention here sees all that was before; import another model, or lower max_position_embeddings to the "
            "window, with no longer text")
    return {}


def read_layer_types(record: Record) -> dict:
    """Qwen's windows, layer by layer."""
    record.allow("use_sliding_window", False, None)
    record.get("sliding_window")
    kinds = record.get("layer_types") or []
    require(isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds),
            f"{record.source} has layer_types {shown(kinds)}, but every layer here has full attention; import another "
            "model")
    return {}


def require_whole_heads(config: Config) -> dict:
    """Transformers' LlamaConfig asks for it, though with head_dim it need not."""
    require(config.hidden_size % config.num_attention_heads == 0,
            f"Transformers takes no Llama whose hidden-size {config.hidden_size} can't be divided by its "
            f"num-attention-heads {config.num_attention_heads}; export another model")
    return {}


def nothing(_) -> dict:
    return {}


ROPE, BIASES = Rule(read_rope, write_rope), Rule(read_biases, write_biases)
WINDOW, LAYER_TYPES = Rule(read_window, nothing), Rule(read_layer_types, nothing)
WHOLE_HEADS = Rule(nothing, require_whole_heads)


# ---- the families

def each_head(sizes) -> int:
    return sizes.num_attention_heads


def share_of_a_head(sizes) -> int:
    return sizes.hidden_size // sizes.num_attention_heads


def four_times(sizes) -> int:
    return 4 * sizes.hidden_size


@dataclass(frozen=True)
class Family:
    """An entry of FAMILIES; the functions below say how it is used.

    sizes: {their name: (our name, what null means, as a function of the sizes before)}; epsilon: their name of the
    norms'; choices: what all of its models have in Config, a value or a function of the sizes; fixed: {their name: the
    values that it can have here, the first of which is exported}; rules: the rest, in both directions; told: {their
    name: ours} of what export says and import passes over, since the logits do not depend on it; absent: what is meant
    by what is not in a config.json, where that is not null; prefix: what some files leave out before all names but
    lm_head's; leftovers: tensors of old files that are no weights.
    """
    architecture: str
    prefix: str
    tensors: dict
    leftovers: str
    sizes: dict
    epsilon: str
    choices: dict
    fixed: dict
    told: dict
    absent: dict
    rules: tuple = ()


GPT2 = Family(
    "GPT2LMHeadModel", "transformer.", GPT2_TENSORS, r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    sizes={"vocab_size": ("vocab_size", None), "n_layer": ("num_layers", None), "n_embd": ("hidden_size", None),
           "n_head": ("num_attention_heads", None), "n_inner": ("ffn_hidden_size", four_times),
           "n_positions": ("max_position_embeddings", None)},
    epsilon="layer_norm_epsilon",
    choices=dict(normalization="LayerNorm", position_embedding_type="learned_absolute", swiglu=False,
                 disable_bias_linear=False, add_qkv_bias=False, qk_layernorm=False, num_query_groups=each_head,
                 kv_channels=share_of_a_head),
    fixed={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
           "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
           "add_cross_attention": (False,)},
    told={"attn_pdrop": "attention_dropout", "resid_pdrop": "hidden_dropout", "embd_pdrop": "hidden_dropout",
          "initializer_range": "init_method_std"},
    absent={"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False, "add_cross_attention": False, "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True})
LLAMA = Family(
    "LlamaForCausalLM", "model.", LLAMA_TENSORS, r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    sizes={"vocab_size": ("vocab_size", None), "num_hidden_layers": ("num_layers", None),
           "hidden_size": ("hidden_size", None), "num_attention_heads": ("num_attention_heads", None),
           "num_key_value_heads": ("num_query_groups", each_head), "head_dim": ("kv_channels", share_of_a_head),
           "intermediate_size": ("ffn_hidden_size", None),
           "max_position_embeddings": ("max_position_embeddings", None)},
    epsilon="rms_norm_eps",
    choices=dict(normalization="RMSNorm", position_embedding_type="rope", rotary_percent=1.0, swiglu=True,
                 add_qkv_bias=False, qk_layernorm=False),
    fixed={"hidden_act": ("silu", "swish")},
    told={"attention_dropout": "attention_dropout", "initializer_range": "init_method_std"},
    absent={"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    rules=(ROPE, BIASES, WHOLE_HEADS))
MISTRAL = dataclasses.replace(
    LLAMA, architecture="MistralForCausalLM", rules=(ROPE, WINDOW),
    choices=LLAMA.choices | dict(disable_bias_linear=True),
    absent=LLAMA.absent | {"num_key_value_heads": 8, "sliding_window": 4096})
QWEN2 = dataclasses.replace(
    LLAMA, architecture="Qwen2ForCausalLM", rules=(ROPE, LAYER_TYPES),
    choices=LLAMA.choices | dict(disable_bias_linear=True, add_qkv_bias=True),
    absent=LLAMA.absent | {"num_key_value_heads": 32})
QWEN3 = dataclasses.replace(
    LLAMA, architecture="Qwen3ForCausalLM", rules=(ROPE, LAYER_TYPES),
    choices=LLAMA.choices | dict(disable_bias_linear=True, qk_layernorm=True),
    fixed=LLAMA.fixed | {"attention_bias": (False,)},
    absent=LLAMA.absent | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False})

# by model_type; what several could hold is exported as the first of them
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}


def family_of_record(values: dict, source) -> Family:
    """Of a config.json. Raises UserError."""
    architectures, model_type = values.get("architectures"), values.get("model_type")
    known = {family.architecture: family for family in FAMILIES.values()}
    if architectures:
        name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
        require(isinstance(name, str) and name in known, f"{source} has the architecture {shown(name)}, but what can "
                f"be imported are {', '.join(known)}; import one of these")
        require(model_type is None or FAMILIES.get(str(model_type)) is known[name],
                f"{source} has the architecture {name} and model_type {shown(model_type)}, which contradict each "
                "other; correct one")
        return known[name]
    require(isinstance(model_type, str) and model_type in FAMILIES,
            f"{source} has model_type {shown(model_type)} and no architectures, but what can be imported are "
            f"{', '.join(FAMILIES)}; import one of these")
    return FAMILIES[model_type]


def read_config(values: dict, source) -> Config:
    """The resolved Config, of one process, of a config.json. Raises UserError."""
    family = family_of_record(values, source)
    record, sizes = Record(values, family.absent, source), SimpleNamespace()
    for theirs, (ours, default) in family.sizes.items():
        missing = record.get(theirs) is None and default
        setattr(sizes, ours, default(sizes) if missing else record.number(theirs, int))
    for theirs, allowed in family.fixed.items():
        record.allow(theirs, *allowed)
    record.allow("tie_word_embeddings", True, False)
    settings = {ours: value(sizes) if callable(value) else value for ours, value in family.choices.items()}
    settings |= vars(sizes) | dict(layernorm_epsilon=record.number(family.epsilon, float),
                                   untie_embeddings_and_output_weights=not record.get("tie_word_embeddings"))
    for rule in family.rules:
        settings |= rule.read(record)
    record.check_rest()
    spread = record.get("initializer_range")
    settings |= dict(init_method_std=float(spread)) if type(spread) in (int, float) and 0 < spread < math.inf else {}
    settings |= dict(model=nearest_preset(settings), seq_length=min(sizes.max_position_embeddings, LONGEST_SAMPLE))
    try:
        config = Config(**settings, given=tuple(sorted(settings))).resolve(1)
        return config.with_vocabulary(sizes.vocab_size)
    except UserError as error:
        raise UserError(f"{source} can't be built: {error}") from None


def nearest_preset(settings: dict) -> str:
    """Where a run that is loaded from it finds rate and batch, unless they are given: with the preset that is about as
    wide, and of those with the one that shares most of its choices."""
    return min(PRESETS, key=lambda name: (abs(math.log(PRESETS[name]["hidden_size"] / settings["hidden_size"])),
                                          sum(settings.get(one) != value for one, value in PRESETS[name].items())))


def family_of(config: Config) -> Family:
    """The first that has all choices of this model. Raises UserError that says what the nearest lacks."""
    found = {}
    for family in FAMILIES.values():
        wanted = {ours: value(config) if callable(value) else value for ours, value in family.choices.items()}
        here = {ours: getattr(config, ours) for ours in wanted}
        if not config.disable_bias_linear:                   # all have one: that this matrix has one too says nothing
            here["add_qkv_bias"] = False
        other = [f"{flag_name(ours)[2:]} {value} and not {here[ours]}" for ours, value in wanted.items()
                 if here[ours] != value]
        found[family.architecture] = family, other
    nearest, other = min(found.values(), key=lambda one: len(one[1]))
    require(not other, f"Hugging Face has no architecture, of those known here, for this model: the nearest, "
            f"{nearest.architecture}, would have {', '.join(other)}; export another model")
    return nearest


def write_config(config: Config, dtype: str) -> dict:
    """Of a model, its config.json. Raises UserError."""
    family = family_of(config)
    (model_type,) = (name for name, one in FAMILIES.items() if one is family)
    record = dict(architectures=[family.architecture], model_type=model_type, torch_dtype=dtype,
                  tie_word_embeddings=config.tied)
    record |= {theirs: getattr(config, ours) for theirs, (ours, _) in family.sizes.items()}
    record |= {family.epsilon: config.layernorm_epsilon}
    record |= {theirs: allowed[0] for theirs, allowed in family.fixed.items()}
    record |= {theirs: getattr(config, ours) for theirs, ours in family.told.items()}
    for rule in family.rules:
        record |= rule.write(config)
    return record


@dataclass(frozen=True)
class Placed:
    """One of our tensors, and what a family makes of it."""
    name: str                   # ours
    shape: torch.Size
    packing: Packing
    theirs: dict                # {their name: shape}, in the order of packing


def tensors_of(config: Config, family: Family) -> list[Placed]:
    """Every parameter of the model."""
    placed = []
    for name, shape in whole_shapes(config).items():
        module, _, kind = name.rpartition(".")
        number = re.search(r"(?<=layers\.)\d+", module)
        number = number[0] if number else ""
        modules, packing = family.tensors[re.sub(r"(?<=layers\.)\d+", "#", module)]
        parts = packing.split(torch.empty(shape, device="meta"), config)
        placed.append(Placed(name, shape, packing, {f"{one.replace('#', number)}.{kind}": part.shape
                                                    for one, part in zip(modules, parts, strict=True)}))
    return placed
