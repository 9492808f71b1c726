"""A published model, SmolLM2-135M-Instruct, continues a text as in Transformers, in fp32, the dtype of its weights.

Skipped unless its package is installed: see tests/support/smollm2.py. Import compares the logits.
"""

import pytest
import torch
from support.harness import build
from support.huggingface import config_of
from support.smollm2 import write_smollm2

from nanodomino.checkpoint.load import load_weights
from nanodomino.corpus.tokenizers import build_tokenizer
from nanodomino.generate.generation import generate
from nanodomino.huggingface.convert import import_model


def continue_rank(checkpoint, ids, max_tokens):
    mesh, model, _, _ = build(config_of(checkpoint))
    load_weights(checkpoint, model)
    return generate(model, mesh, ids, max_tokens, model.config.vocab_size, temperature=0.0)


@pytest.mark.exhaustive
def test_smollm2_knows_the_capital_of_france(pool, transformers, tmp_path):
    folder, prompt = write_smollm2(tmp_path / "model"), "The capital of France is"
    import_model(folder, tmp_path / "imported")
    model, tokenizer = (each.from_pretrained(folder) for each in (
        transformers.AutoModelForCausalLM, transformers.AutoTokenizer))
    ids = tokenizer(prompt)["input_ids"]
    assert build_tokenizer(folder).encode(prompt).tolist() == ids
    text = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert pool.run(continue_rank, tmp_path / "imported", ids, 12, world_size=1) == [text]
    assert tokenizer.decode(text).startswith(f"{prompt} Paris.")
