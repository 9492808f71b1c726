"""Finds the Hugging Face tensors that hold the values of a parameter, and converts them in both directions.

nanodomino and Hugging Face store the same values with different names and in a different order. In the table, h is the
hidden size, f the width of the MLP, and v the size of the vocabulary. There are n heads of d channels each, in g groups
of r = n/g heads:

    nanodomino                              GPT-2                            Llama, Mistral, Qwen
    qkv  [g x (r q heads, k, v) x d, h]     c_attn [h, (q, k, v) x n d]      q_proj [n d, h], k_proj, v_proj [g d, h]
    dense_h_to_4h         [f, h]            c_fc   [h, f]
      with swiglu      [2, f, h]                                             gate_proj, up_proj [f, h]
    experts.dense_h_to_4h  [E, 2, f, h]                                      w1, w3 [f, h] of each of the E experts
    word_embeddings  [padded v, h]          wte    [v, h]                    embed_tokens [v, h]

layers/attention.py says why the rows of qkv are ordered group by group. GPT-2 computes x W (its Conv1D), the others
x W^T; therefore GPT-2's matrices are transposed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanodomino.checkpoint.format import Box
from nanodomino.model import meta_model
from nanodomino.settings.config import Config


def split_qkv(qkv, config: Config):
    """Split qkv [g x (r q heads, k, v) x d, ..] into q [n d, ..], k [g d, ..] and v [g d, ..]."""
    groups, heads = config.num_query_groups, config.num_attention_heads // config.num_query_groups
    grouped = qkv.unflatten(0, (groups, heads + 2, config.kv_channels))
    return tuple(part.flatten(0, 2) for part in grouped.split([heads, 1, 1], dim=1))


# {name: function that converts a matrix or its bias to a tuple of Hugging Face tensors}; t() does not change a bias
TO_HF = {
    "same": lambda tensor, config: (tensor,),
    "transposed": lambda tensor, config: (tensor.t(),),
    "qkv": split_qkv,
    "qkv transposed": lambda qkv, config: (torch.cat(split_qkv(qkv, config)).t(),),
    "gate and up": lambda tensor, config: tensor.unbind(),
    "vocabulary": lambda words, config: (words[:config.vocab_size],),        # without the padding
}

# {module or parameter: (Hugging Face modules, conversion)}; # stands for the layer's number, * for the expert's
GPT2_MODULES = {
    "embedding.word_embeddings": (["transformer.wte"], "vocabulary"),
    "embedding.position_embeddings": (["transformer.wpe"], "same"),
    "layers.#.attention.norm": (["transformer.h.#.ln_1"], "same"),
    "layers.#.attention.qkv": (["transformer.h.#.attn.c_attn"], "qkv transposed"),
    "layers.#.attention.dense": (["transformer.h.#.attn.c_proj"], "transposed"),
    "layers.#.mlp.norm": (["transformer.h.#.ln_2"], "same"),
    "layers.#.mlp.dense_h_to_4h": (["transformer.h.#.mlp.c_fc"], "transposed"),
    "layers.#.mlp.dense_4h_to_h": (["transformer.h.#.mlp.c_proj"], "transposed"),
    "final_norm": (["transformer.ln_f"], "same"),
    "output_layer": (["lm_head"], "vocabulary"),
}
LLAMA_MODULES = {
    "embedding.word_embeddings": (["model.embed_tokens"], "vocabulary"),
    "layers.#.attention.norm": (["model.layers.#.input_layernorm"], "same"),
    "layers.#.attention.qkv": ([f"model.layers.#.self_attn.{name}_proj" for name in "qkv"], "qkv"),
    "layers.#.attention.q_layernorm": (["model.layers.#.self_attn.q_norm"], "same"),
    "layers.#.attention.k_layernorm": (["model.layers.#.self_attn.k_norm"], "same"),
    "layers.#.attention.dense": (["model.layers.#.self_attn.o_proj"], "same"),
    "layers.#.mlp.norm": (["model.layers.#.post_attention_layernorm"], "same"),
    "layers.#.mlp.dense_h_to_4h": ([f"model.layers.#.mlp.{name}_proj" for name in ("gate", "up")], "gate and up"),
    "layers.#.mlp.dense_4h_to_h": (["model.layers.#.mlp.down_proj"], "same"),
    "final_norm": (["model.norm"], "same"),
    "output_layer": (["lm_head"], "vocabulary"),
}


def with_experts(block: str, gate: str, up: str, down: str) -> dict:
    """Return LLAMA_MODULES with experts. block: the Hugging Face module that holds a layer's router and experts; gate,
    up, down: its names for the matrices of an expert."""
    experts = f"model.layers.#.{block}.experts.*"
    return LLAMA_MODULES | {
        "layers.#.mlp.router": ([f"model.layers.#.{block}.gate"], "same"),
        "layers.#.mlp.experts.dense_h_to_4h": ([f"{experts}.{gate}", f"{experts}.{up}"], "gate and up"),
        "layers.#.mlp.experts.dense_4h_to_h": ([f"{experts}.{down}"], "same")}


@dataclass(frozen=True)
class TensorMapping:
    """A parameter or one expert's part of it, and the Hugging Face tensors that hold its values."""
    name: str
    box: Box                                # the expert's part of the whole tensor; without experts, all of it
    size: tuple[int, ...]                   # box.size, without the dimension of the experts
    to_hf: Callable                         # to_hf(tensor, config): the Hugging Face tensors
    hf_shapes: dict[str, torch.Size]        # {Hugging Face name: shape}, in the order of to_hf

    def from_hf(self, tensors, config: Config) -> torch.Tensor:
        """Convert Hugging Face tensors back. to_hf is a linear function that moves each element to another place, so
        its gradient moves the elements back. Vocabulary padding becomes zeros."""
        point = torch.empty(self.size, dtype=tensors[0].dtype, requires_grad=True)
        return torch.autograd.grad(self.to_hf(point, config), point, tensors)[0]


def map_tensors(config: Config, modules: dict) -> list[TensorMapping]:
    """Return the mappings of all parameters of the model. modules: a table such as LLAMA_MODULES."""
    mappings = []
    for name, weight in meta_model(config).named_parameters():
        shape = weight.spec.shape
        module, leaf = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name).groups(".weight")
        layer = "".join(re.findall(r"(?<=layers\.)\d+", module))
        hf_modules, kind = modules[re.sub(r"(?<=layers\.)\d+", "#", module)]
        for expert in [(i,) for i in range(config.num_experts)] if "*" in hf_modules[0] else [()]:
            size = shape[len(expert):]
            box = Box((*expert, *[0] * len(size)), (*[1] * len(expert), *size))
            hf_names = [one.replace("#", layer).replace("*", "".join(map(str, expert))) + leaf for one in hf_modules]
            parts = TO_HF[kind](torch.empty(size, device="meta"), config)
            mappings.append(TensorMapping(name, box, size, TO_HF[kind], {
                hf_name: part.shape for hf_name, part in zip(hf_names, parts, strict=True)}))
    return mappings


def element_count(mappings: list[TensorMapping]) -> int:
    """Return the number of elements in all these Hugging Face tensors. They have no vocabulary padding."""
    return sum(shape.numel() for mapping in mappings for shape in mapping.hf_shapes.values())
