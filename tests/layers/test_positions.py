"""Rotary positions, documents, the rules of the settings that choose them, and the presets that use them."""

import math
from contextlib import nullcontext

import pytest
import torch
from support.fake_world import fake_world
from support.flash_on_cpu import flash_on_cpu
from support.harness import END_OF_TEXT, FAMILIES, build, count_documents, difference, tiny, weights_and_data

from nanodomino.analysis.formulas import parameter_count
from nanodomino.config.config import Config
from nanodomino.config.presets import PRESETS
from nanodomino.data import Batch, EndOfText
from nanodomino.domino import run_to_end
from nanodomino.errors import UserError
from nanodomino.layers.positions import (attention_bias, document_ids, inverse_rotation, positions_within_documents,
                                         rotary_frequencies, rotate, rotation)
from nanodomino.model import meta_stage


def rope(**changes):
    return tiny(1, position_embedding_type="rope", num_attention_heads=2, **changes)


# ---- rotary positions

def test_a_dot_product_of_rotated_vectors_depends_on_their_distance_alone():
    config = rope(max_position_embeddings=64)
    q, k = torch.randn(2, 1, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def product(m, n):
        rotated = [rotate(x, rotation(config, torch.tensor([[position]]), 1, q.device))
                   for x, position in ((q, m), (k, n))]
        return float((rotated[0] * rotated[1]).sum())

    assert product(3, 3) == pytest.approx(float((q * k).sum()), rel=1e-6)
    assert product(40, 33) == pytest.approx(product(7, 0), rel=1e-5)
    assert abs(product(7, 0) - product(0, 7)) > 1e-3 * abs(product(7, 0))


def test_the_inverse_rotation_undoes_a_rotation_and_rotary_percent_leaves_the_rest_alone():
    config = rope(rotary_percent=0.5)                          # 4 of 8 numbers, so 2 pairs: 10000^0 and 10000^(-2/4)
    assert rotary_frequencies(config).tolist() == pytest.approx([1.0, 0.01])
    x = torch.randn(2, 8, 2, 3, 8, dtype=torch.float64)
    rotary = rotation(config, None, 8, x.device)
    rotated = rotate(x, rotary)
    assert torch.equal(rotated[..., 4:], x[..., 4:]) and not torch.allclose(rotated[:, 1:, ..., :4], x[:, 1:, ..., :4])
    assert torch.allclose(rotate(rotated, inverse_rotation(rotary)), x, rtol=1e-6, atol=1e-6)
    assert torch.equal(rotated[:, 0], x[:, 0])                 # the angle of position 0 is 0


@pytest.mark.parametrize("kind, options", [
    ("default", dict(rotary_base=500_000.0)), ("linear", dict(rotary_seq_len_interpolation_factor=4.0)),
    ("llama3", dict(use_rope_scaling=True, rope_scaling_factor=32.0, rotary_base=500_000.0))])
def test_frequencies_are_those_of_transformers_bit_for_bit(kind, options):
    """Llama 3.1's scaling too, also at positions beyond the original context length."""
    transformers = pytest.importorskip("transformers",
                                       reason="compares with Transformers: pip install -r requirements-extra.txt")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    parameters = {"rope_type": kind, "rope_theta": options.get("rotary_base", 10_000.0)}
    parameters |= {"linear": {"factor": 4.0}, "default": {}, "llama3": {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}}[kind]
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(hidden_size=256, num_attention_heads=2,
                                                           max_position_embeddings=20_000, rope_parameters=parameters))
    config = tiny(1, hidden_size=256, num_attention_heads=2, position_embedding_type="rope",
                  max_position_embeddings=20_000, **options)
    assert torch.equal(rotary_frequencies(config), theirs.inv_freq)
    positions = torch.tensor([[0, 1, 17, 8191, 8192, 19_999]])
    cos, sin = theirs(torch.zeros(1), positions)
    ours = rotation(config, positions, 6, torch.device("cpu"))
    assert torch.equal(ours[0].flatten(2), cos[..., :64]) and torch.equal(ours[1].flatten(2), sin[..., :64])


# ---- documents

def test_documents_and_positions_are_those_counted_by_hand():
    tokens = torch.tensor([[7, 8, 9, 3, 7, 8, 3, 9], [3, 3, 7, 7, 7, 7, 7, 3]])
    documents = document_ids(tokens, END_OF_TEXT)
    assert documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2, 2, 2]]
    assert positions_within_documents(documents).tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3, 4, 5]]
    drawn = torch.randint(0, 5, (20, 30), generator=torch.Generator().manual_seed(1))
    positions, expected = count_documents(drawn)
    assert torch.equal(document_ids(drawn, END_OF_TEXT), expected)
    assert torch.equal(positions_within_documents(expected), positions)
    seen = attention_bias(documents, torch.float64)[0, 0].exp()
    assert seen.sum(dim=1).tolist() == [1, 2, 3, 4, 1, 2, 3, 1] and not seen.triu(1).any()


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_a_batch_has_the_positions_and_documents_that_its_flags_ask_for(flags):
    rows = torch.tensor([[7, 3, 8, 8, 3]])
    batch = Batch.from_rows(rows, [0], end_of_text=EndOfText(3, False, *flags))
    assert batch.positions.tolist() == ([[0, 1, 0, 1]] if flags[0] else [[0, 1, 2, 3]])
    assert (batch.documents.tolist() if flags[1] else batch.documents) == ([[0, 0, 1, 1]] if flags[1] else None)
    assert batch.loss_mask.sum() == 4


def losses_and_gradients(stage, optimizer, model, batches):
    """Return the losses of all batches' tokens [all tokens], and the sum of the batches' gradients."""
    optimizer.zero_grad()
    losses = []
    for batch in batches:
        output, tape = run_to_end(stage.forward(batch))
        losses.append(output.flatten())
        run_to_end(stage.backward(tape, torch.ones_like(output)))
    return torch.cat(losses), {name: weight.main_grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("attention", [nullcontext, flash_on_cpu], ids=["bias", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_sample_is_its_documents_one_by_one(family, attention):
    """With both flags every loss and every gradient is equal, for learned positions and for rope."""
    config = tiny(1, **FAMILIES[family], reset_position_ids=True, reset_attention_mask=True, slices=2)
    weights, data = weights_and_data(config, 1)
    rows = torch.cat([data.tokens[0], data.labels[0, :, -1:]], dim=1)[:6]
    with fake_world(0, 1), attention():
        _, model, optimizer, stage = build(config, weights)
        batch = Batch.from_rows(rows, list(range(6)), end_of_text=EndOfText(END_OF_TEXT, False, True, True))
        packed, expected = losses_and_gradients(stage, optimizer, model, [batch])
        alone = []
        for row in rows:
            start = 0
            for end in [*(i + 1 for i in range(len(row) - 1) if row[i] == END_OF_TEXT and i + 2 < len(row)),
                        len(row) - 1]:
                alone.append(Batch.from_rows(row[None, start:end + 1], [0]))
                start = end
        assert len(alone) > 9
        one_by_one, gradients = losses_and_gradients(stage, optimizer, model, alone)
    assert torch.allclose(packed, one_by_one, rtol=1e-9)
    assert difference(gradients, expected) < 1e-9


# ---- the rules

LLAMA = dict(FAMILIES["llama"])


@pytest.mark.parametrize("options, sentence", [
    (dict(num_query_groups=3),
     "num-attention-heads 8 must be divisible by num-query-groups 3; try --num-query-groups 1, 2, 4, 8"),
    (dict(num_query_groups=2, tensor_model_parallel_size=4),
     "num-query-groups 2 must be divisible by tensor-model-parallel-size 4; try --tp 1, 2"),
    (dict(position_embedding_type="rope", kv_channels=3),
     "RoPE must rotate an even number of channels from 2 to 3, but "
     "rotary-percent 1 x kv-channels 3 is 3; try --kv-channels 4"),
    (dict(position_embedding_type="rope", rotary_percent=0.1),
     "RoPE must rotate an even number of channels from 2 to 2, but rotary-percent 0.1 x kv-channels 2 is 0"),
    (dict(position_embedding_type="alibi"),
     "unknown --position-embedding-type 'alibi'; try one of learned_absolute, rope, none"),
    (dict(hidden_size=18), "hidden-size 18 must be divisible by num-attention-heads 8"),
])
def test_settings_that_contradict_each_other_are_refused_in_a_sentence(options, sentence):
    world_size = options.get("tensor_model_parallel_size", 1)
    with pytest.raises(UserError) as error:
        tiny(world_size, **options)
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


# The published counts; tied embeddings count once.
@pytest.mark.parametrize("name, vocabulary, parameters", [
    ("llama2-7b", 32_000, 6_738_415_616), ("llama2-13b", 32_000, 13_015_864_320), ("llama3-8b", 128_256, 8_030_261_248),
    ("llama3.2-1b", 128_256, 1_235_814_400), ("qwen2.5-0.5b", 151_936, 494_032_768),
    ("qwen3-0.6b", 151_936, 596_049_920), ("smollm2-135m", 49_152, 134_515_008),
    ("mixtral-8x7b", 32_000, 46_702_792_704), ("qwen3-30b-a3b", 151_936, 30_532_122_624)])
def test_a_preset_has_the_published_number_of_parameters(name, vocabulary, parameters):
    config = Config(model=name).resolve(1).with_vocabulary(vocabulary)
    assert parameter_count(config) == parameters


def test_a_flag_overrides_the_preset():
    config = Config(model="nano-llama", swiglu=False, normalization="LayerNorm").resolve(1).with_vocabulary(257)
    names = dict(meta_stage(config).named_parameters())
    assert names["layers.0.mlp.dense_h_to_4h.weight"].shape == (384, 96) and "final_norm.bias" in names
    assert "layers.0.attention.qkv.bias" not in names and "embedding.position_embeddings.weight" not in names


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_on_one_node_of_eight(name):
    config = Config(model=name).resolve(8)
    assert config.num_query_groups % config.tp == 0 and config.tp * config.pp * config.dp == 8
    assert math.isfinite(config.lr)
