"""Rotary positions, documents, and what a batch holds of them."""

from functools import partial

import pytest
import torch
from support import needs
from support.harness import (END_OF_TEXT, count_depth_masks, count_documents, tiny)

from nanodomino.data import Batch
from nanodomino.layers.attention_mask import AttentionMask, document_begins, rotary_frequencies, rotation
from nanodomino.options.documents import document_ids, positions_within_documents


# ---- rotary positions

@pytest.mark.parametrize("kind, options", [
    ("default", dict(rotary_base=500_000.0)), ("linear", dict(rotary_seq_len_interpolation_factor=4.0)),
    ("llama3", dict(use_rope_scaling=True, rope_scaling_factor=32.0, rotary_base=500_000.0))])
def test_frequencies_are_those_of_transformers_bit_for_bit(kind, options):
    """Llama 3.1's scaling too, also at positions beyond the original context length."""
    transformers = needs("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    parameters = {"rope_type": kind, "rope_theta": options.get("rotary_base", 10_000.0)} | dict(
        default={}, linear=dict(factor=4.0), llama3=dict(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192))[kind]
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
    mask = AttentionMask(torch.arange(8), document_begins(documents), None, 8)
    seen = mask.bias(torch.float64, torch.device("cpu"))[0, 0].exp()
    assert seen.sum(dim=1).tolist() == [1, 2, 3, 4, 1, 2, 3, 1] and not seen.triu(1).any()


def batch_of(rows, counted=None, **settings):
    """Return the batch of rows of tokens that a run with these settings makes."""
    prepare = partial(tiny(1, **settings).prepare_batch, end_of_text=END_OF_TEXT)
    return Batch.from_rows(rows, list(range(len(rows))), counted, prepare=prepare)


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_a_batch_has_the_positions_and_documents_that_its_flags_ask_for(flags):
    rows = torch.tensor([[7, 3, 8, 8, 3]])
    batch = batch_of(rows, reset_position_ids=flags[0], reset_attention_mask=flags[1])
    assert batch.positions.tolist() == ([[0, 1, 0, 1]] if flags[0] else [[0, 1, 2, 3]])
    assert {name: ids.tolist() for name, ids in batch.extras.items()} == (
        dict(documents=[[0, 0, 1, 1]]) if flags[1] else {})
    assert batch.loss_mask.sum() == 4


@pytest.mark.parametrize("flags", [{}, dict(reset_position_ids=True), dict(reset_attention_mask=True)], ids=str)
@pytest.mark.parametrize("mask_loss", [False, True])
def test_each_depth_reads_the_batch_one_token_further(flags, mask_loss):
    """Depth d predicts the token d places after the next one: not beyond the last token, and not across the end of a
    document if that has effects. The loss mask belongs to the predicted token. The counts are by hand, in a loop."""
    rows = torch.randint(0, 6, (5, 13), generator=torch.Generator().manual_seed(0))
    batch = batch_of(rows, 4, eod_mask_loss=mask_loss, mtp_num_layers=3, **flags)
    masks = count_depth_masks(rows, batch.loss_mask, 3, bool(flags))
    halves = batch.split(2)
    for depth, mask in enumerate(masks, 1):
        batch, previous, halves = batch.extras["ahead"], batch, [half.extras["ahead"] for half in halves]
        assert torch.equal(batch.tokens, previous.labels)
        assert torch.equal(batch.labels[:, :12 - depth], rows[:, depth + 1:])
        assert torch.equal(batch.loss_mask, mask) and 0 < mask.sum() < mask.numel()
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(batch, name))
    assert not batch.extras and not halves[0].extras
