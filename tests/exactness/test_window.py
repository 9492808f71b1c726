"""A sliding window: every layout computes what the reference model computes, whose window is one line of its own."""

import random

import pytest
from support.harness import (END_OF_TEXT, EXPERTS, FAMILIES, build, check_against_reference, plain_text,
                             tiny)
from support.reference import random_weights

from nanodomino.generate.generation import generate

TP2, PP2, CP2 = (dict.fromkeys([f"{axis}_parallel_size"], 2) for axis in (
    "tensor_model", "pipeline_model", "context"))
DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)
A2A, DROPOUT = dict(cp_comm_type="a2a"), dict(attention_dropout=0.3, hidden_dropout=0.1)
DEPTHS, ZB_V = dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.7), dict(schedule="zb-v", num_layers=5)
LLAMA = FAMILIES["llama"]
LAYOUTS = [      # processes, settings
    (1, {}), (1, DROPOUT | DEPTHS | DOCUMENTS),
    (2, TP2 | LLAMA | DROPOUT | dict(sequence_parallel=True, recompute_granularity="full", columns=2)),
    (2, CP2 | LLAMA | dict(full_attention_layers=2)), (2, CP2 | A2A | DOCUMENTS | DROPOUT | DEPTHS),
    (2, CP2 | LLAMA | DOCUMENTS | DROPOUT | dict(slices=3, recompute_granularity="selective")),
    (4, TP2 | PP2 | LLAMA | ZB_V | dict(full_attention_layers=1, slices=2)),
    (4, CP2 | PP2 | DEPTHS | ZB_V), (4, CP2 | A2A | PP2 | ZB_V | DOCUMENTS),
    (4, dict(context_parallel_size=4, seq_length=16) | EXPERTS | DOCUMENTS)]


@pytest.mark.parametrize("world, settings", LAYOUTS, ids=str)
def test_every_layout_equals_the_reference_model(pool, world, settings):
    check_against_reference(pool, tiny(world, **dict(window_size=2) | settings), steps=2)


WINDOWS = dict(window_size=2, full_attention_layers=1)


@pytest.mark.parametrize("settings", [WINDOWS, WINDOWS | DOCUMENTS, LLAMA | WINDOWS | dict(reset_attention_mask=True)],
                         ids=str)
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
