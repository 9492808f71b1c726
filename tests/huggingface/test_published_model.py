"""A published model, SmolLM2-135M-Instruct, continues a text as in Transformers, in fp32, the dtype of its weights.

Skipped unless its package is installed: see tests/support/smollm2.py.
"""

import pytest
import torch

from nanodomino.checkpoint.load import load_weights
from nanodomino.corpus.tokenizers import build_tokenizer
from nanodomino.generate.generation import generate
from nanodomino.huggingface.convert import import_model
from support.harness import build
from support.huggingface import config_of
from support.smollm2 import write_smollm2

PROMPT = "The capital of France is"


def logits_and_text(checkpoint, ids, max_tokens):
    """The logits of a prompt, and the prompt with its most likely continuation."""
    mesh, model, _, _ = build(config_of(checkpoint))
    load_weights(checkpoint, model)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))
    return logits, generate(model, mesh, ids, max_tokens, model.config.vocab_size, temperature=0.0)


@pytest.mark.exhaustive
def test_smollm2_knows_the_capital_of_france(pool, transformers, tmp_path):
    folder, checkpoint = write_smollm2(tmp_path / "model"), tmp_path / "imported"
    import_model(folder, checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT)["input_ids"]
    assert build_tokenizer(folder).encode(PROMPT).tolist() == ids
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits
        text = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    (outcome,) = pool.run(logits_and_text, checkpoint, ids, 12, world_size=1)
    assert (outcome[0] - expected).abs().max() < 1e-4 * expected.abs().max()
    assert outcome[1] == text and tokenizer.decode(text).startswith(f"{PROMPT} Paris.")
