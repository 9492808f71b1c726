"""Generation with a sliding window equals the reference model's. test_layouts.py compares whole training steps."""

import random

import pytest
from support.harness import END_OF_TEXT, FAMILIES, build, plain_text, tiny
from support.reference import random_weights

from nanodomino.generate.generation import generate

WINDOWS = dict(window_size=2, full_attention_layers=1)
DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)


@pytest.mark.parametrize("settings", [
    WINDOWS, WINDOWS | DOCUMENTS, FAMILIES["llama"] | WINDOWS | dict(reset_attention_mask=True)], ids=str)
def test_generation_with_a_cache_equals_the_plain_models(pool, settings):
    """The prompts hold several documents. The last ones exceed the context of 8 tokens."""
    config, draw = tiny(1, **settings, untie_embeddings_and_output_weights=True), random.Random(3)
    weights = {name: weight * (3 if weight.dim() > 1 else 1)
               for name, weight in random_weights(config, seed=5).items()}
    prompts = [[draw.choice([*range(20), END_OF_TEXT, END_OF_TEXT]) for _ in range(length)]
               for length in (1, 2, 5, 8, 13)]
    expected = [plain_text(config, weights, prompt, 9, vocab_size=20) for prompt in prompts]
    assert pool.run(texts_rank, config, weights, prompts, world_size=1) == [expected]
    assert len(set(map(tuple, (text[-3:] for text in expected)))) > 2, "a text that repeats itself would show nothing"


def texts_rank(config, weights, prompts):
    mesh, model, _, _ = build(config, weights)
    return [generate(model, mesh, prompt, 9, 20, temperature=0.0, end_of_text=END_OF_TEXT) for prompt in prompts]
