"""Norms and activations: their hand-written forward and backward, and what 16-bit training computes in fp32. Rotary
positions, documents, and what a batch holds of them."""

from functools import partial

import pytest
import torch
from support import needs
from support.harness import END_OF_TEXT, count_depth_masks, count_documents, tiny

from nanodomino.data import Batch
from nanodomino.layers.attention_mask import AttentionMask, document_begins, rotary_frequencies, rotation
from nanodomino.layers.dropout_and_positions import MasksAndPositions
from nanodomino.layers.gradients import add_weight_gradient
from nanodomino.layers.sublayers import ACTIVATIONS, NORMALIZATIONS
from nanodomino.options.documents import document_ids, positions_within_documents
from nanodomino.overlap.compute import residual_backward


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.bfloat16, 5e-2), (torch.float16, 6e-3)])
@pytest.mark.parametrize("name", [*NORMALIZATIONS, *ACTIVATIONS])
def test_what_training_runs_is_what_the_definition_says(name, dtype, tolerance):
    """The hand-written forward and backward against the definition and autograd."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, gradient = (torch.randn(shape, generator=generator).to(dtype).requires_grad_()
                                 for shape in ((2, 3, 16), (16,), (16,), (2, 3, 16)))
    if name in ACTIVATIONS:
        kind = ACTIVATIONS[name]
        inputs, expected, ours = [x], kind.function(x), [kind.function(x.detach())]
        mine = [kind.backward(gradient.detach()[..., :16 // kind.inputs], x.detach())]
        gradient = gradient[..., :16 // kind.inputs]
    else:
        kind = NORMALIZATIONS[name]
        inputs, expected = [x, weight, bias] if kind.has_bias else [x, weight], kind.function(x, weight, bias, 1e-3)
        bias = bias if kind.has_bias else None
        with torch.no_grad():
            ours = kind.forward(x, weight, bias, 1e-3)
            mine = kind.backward(gradient, x, ours[1:], weight, bias)
    assert ours[0].dtype == dtype and torch.allclose(ours[0], expected, rtol=tolerance, atol=tolerance)
    theirs = torch.autograd.grad(expected, inputs, gradient)
    for grad, their_grad in zip([grad for grad in mine if grad is not None], theirs, strict=True):
        is_sum = grad.dim() == 1
        assert grad.dtype == dtype or is_sum and grad.dtype == torch.float32, "only a sum over tokens may be wider"
        assert grad.dtype == torch.float32 or not is_sum or dtype != torch.float16, "fp16 would overflow in that sum"
        assert torch.allclose(grad, their_grad.to(grad.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_a_normalization_in_16_bit_rounds_its_result_alone(name, dtype, rounding):
    """Everything before that is in fp32. The squares of these numbers overflow fp16."""
    kind, generator = NORMALIZATIONS[name], torch.Generator().manual_seed(2)
    x, weight, bias = ((torch.randn(size, generator=generator) * scale).to(dtype)
                       for size, scale in (((4, 8, 256), 500), (256, 1), (256, 1)))
    exact = kind.function(x.double(), weight.double(), bias.double(), 1e-5)
    ours = kind.forward(x, weight, bias if kind.has_bias else None, 1e-5)[0]
    assert ours.dtype == dtype
    assert ((ours.double() - exact).abs() <= 1.001 * rounding * exact.abs() + 1e-4 * rounding).all()


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_compiled_code_never_rounds_the_gradients_of_a_norms_weights_to_bfloat16(name):
    """They are added to fp32 gradients. Rounded to bfloat16 they would be wrong by up to 0.4 %."""
    kind, generator = NORMALIZATIONS[name], torch.Generator().manual_seed(4)
    x, gradient = (torch.randn(2, 64, 16, generator=generator).bfloat16() for _ in range(2))
    weight, bias = torch.ones(16).bfloat16(), torch.zeros(16).bfloat16() if kind.has_bias else None
    wide = [tensor if tensor is None else tensor.double() for tensor in (gradient, x, weight, bias)]
    statistics = kind.forward(wide[1], *wide[2:], 1e-5)[1:]
    exact = kind.backward(*wide[:2], statistics, *wide[2:])[1:]
    compiled = torch.compile(lambda *inputs: kind.backward(*inputs), backend="eager", fullgraph=True)
    found = compiled(gradient, x, [one.float() for one in statistics], weight, bias)
    assert found[0].dtype == torch.bfloat16
    for ours, theirs in zip(found[1:], exact):
        assert ours is theirs is None or torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.table
def test_gradients_of_biases_are_summed_in_fp32_and_masks_are_fp32():
    """In bfloat16 301 rounds to 300 and 1/(1 - 0.1) to 1.109. A bias is dropped, too, so its gradient has the mask."""
    gradient, mask, total = torch.ones(1, 602, 4).bfloat16(), torch.tensor([0.0, 1.0])[:, None], torch.zeros(4)
    assert residual_backward(gradient, mask.repeat(301, 4), True)[2].tolist() == [301.0] * 4
    add_weight_gradient(total, gradient[:, :301], None)
    assert total.tolist() == [301.0] * 4
    masks = MasksAndPositions(tiny(1), None, [0]).draw_masks("site", (64,), 0.1, gradient)
    assert masks.unique().tolist() == [0.0, 1 / torch.tensor(0.9)]


@pytest.mark.table
def test_a_mask_of_the_residual_stream_is_kept_until_backward_has_it():
    """The slice lives on while backward walks its tape, so a mask that stayed would take memory for nothing."""
    masks, x = MasksAndPositions(tiny(1, hidden_dropout=0.5), None, [0], keep=True), torch.ones(1, 8, 16)
    drawn = masks.hidden_dropout_mask("site", x)
    assert masks.hidden_dropout_mask("site", x) is drawn and not masks.kept


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
