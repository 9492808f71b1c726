"""Small models of every family that can be imported, and ways to change the folders that Transformers writes."""

import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from nanodomino.checkpoint.load import full_weights
from nanodomino.checkpoint.format import read_manifest
from nanodomino.settings.config import Config
from nanodomino.settings.records import from_record

VOCABULARY, LENGTH = 300, 24
SIZES = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=104, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=5,
             pad_token_id=None)
GPT2_SIZES = dict(vocab_size=VOCABULARY, n_embd=48, n_inner=104, n_layer=3, n_head=4, n_positions=LENGTH,
                  bos_token_id=None, eos_token_id=5)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192, rope_theta=500_000.0)
LINEAR = dict(rope_type="linear", factor=3.0, rope_theta=5000.0)
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, head_dim=20)
MODELS = {       # name: (model_type, its configuration)
    "gpt2": ("gpt2", GPT2_SIZES),
    "gpt2 untied": ("gpt2", GPT2_SIZES | dict(tie_word_embeddings=False, n_inner=None, layer_norm_epsilon=1e-3)),
    "llama": ("llama", SIZES),
    "llama tied": ("llama", SIZES | dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=10,
                                         rms_norm_eps=1e-3)),
    "llama 3.1": ("llama", SIZES | dict(max_position_embeddings=16384, num_key_value_heads=1, head_dim=32,
                                        rope_parameters=LLAMA3)),
    "llama interpolated": ("llama", SIZES | dict(rope_parameters=LINEAR)),
    "llama with biases": ("llama", SIZES | dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", SIZES | dict(sliding_window=LENGTH, head_dim=14)),
    "mistral with a window": ("mistral", SIZES | dict(sliding_window=5)),
    "qwen2 with a window": ("qwen2", SIZES | dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3 with a window": ("qwen3", SIZES | dict(use_sliding_window=True, sliding_window=2, max_window_layers=2)),
    "mixtral with a window": ("mixtral", SIZES | dict(
        num_local_experts=4, num_experts_per_tok=2, head_dim=12, sliding_window=6)),
    "qwen3-moe with a window": ("qwen3_moe", SIZES | EXPERTS | dict(
        use_sliding_window=True, sliding_window=3, norm_topk_prob=True)),
    "qwen2": ("qwen2", SIZES | dict(tie_word_embeddings=True)), "qwen3": ("qwen3", SIZES | dict(head_dim=20)),
    "mixtral": ("mixtral", SIZES | dict(num_local_experts=4, num_experts_per_tok=2, head_dim=14)),
    "qwen3-moe": ("qwen3_moe", SIZES | EXPERTS | dict(norm_topk_prob=True)),
    "qwen3-moe unnormalized": ("qwen3_moe", SIZES | EXPERTS | dict(norm_topk_prob=False, num_experts_per_tok=1)),
}


def change_config(folder: Path, **entries):
    """Change entries of config.json; ... removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def change_tensors(folder: Path, change):
    """Call change({name: tensor}) on the weights of a folder, and write them back."""
    from safetensors.torch import load_file, save_file
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def with_exact_norms(model):
    """Let a Transformers model compute RMSNorm and the router's softmax in the dtype of their input, not in fp32, and
    loop over the experts, since its grouped matmul refuses float64. The rest is its own code."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, norm=module: F.rms_norm(
                x, norm.weight.shape, norm.weight, norm.variance_epsilon)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = partial(exact_router, module)
            model.set_experts_implementation("eager")
    return model


def exact_router(router, h):
    logits = F.linear(h.flatten(0, -2), router.weight)
    weights, experts = logits.softmax(dim=-1).topk(router.top_k)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights, experts


def config_of(checkpoint: Path) -> Config:
    return from_record(read_manifest(checkpoint)["config"], checkpoint)


def weights_of(checkpoint: Path) -> dict:
    """{global name: full weight} of a checkpoint, without the vocabulary's padding."""
    weights, words = full_weights(checkpoint), config_of(checkpoint).vocab_size
    return {name: weight[:words] if "word_embeddings" in name or "output_layer" in name else weight
            for name, weight in weights.items()}


def same_bits(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in found)
