"""Norms and activations: their hand-written forward and backward, and what 16-bit training computes in fp32."""

import pytest
import torch
from support.harness import tiny

from nanodomino.layers.dropout_and_positions import MasksAndPositions
from nanodomino.layers.gradients import add_weight_gradient
from nanodomino.layers.sublayers import ACTIVATIONS, NORMALIZATIONS
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
