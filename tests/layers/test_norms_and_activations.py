"""Norms and activations: against torch's own, and their hand-written backward against autograd."""

import pytest
import torch
from support.harness import tiny

from nanodomino.layers.activations import ACTIVATIONS
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.mesh import meta_mesh
from nanodomino.model import meta_stage


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_a_normalization_and_its_gradients_are_torchs_own(name):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
                                 for shape in ((2, 3, 16), (16,), (16,), (2, 3, 16)))
    kind = NORMALIZATIONS[name]
    theirs = getattr(torch.nn, name)(16, eps=1e-3).double()
    parameters = [weight, bias] if kind.has_bias else [weight]
    with torch.no_grad():
        for parameter, value in zip(theirs.parameters(), parameters):
            parameter.copy_(value)
    ours, expected = kind.function(x, weight, bias, 1e-3), theirs(x)
    assert torch.allclose(ours, expected, rtol=1e-13, atol=1e-13)
    found = torch.autograd.grad(ours, [x, *parameters], gradient)
    for grad, their_grad in zip(found, torch.autograd.grad(expected, [x, *theirs.parameters()], gradient), strict=True):
        assert torch.allclose(grad, their_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.bfloat16, 0.05),
                                              (torch.float16, 0.05 / 8)])
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
def test_a_normalization_in_16_bit_stays_within_its_rounding(name, dtype, rounding):
    """bfloat16 rounds each of a few operations to 8 bits, fp16 to 11: a relative error of 2^-8 or 2^-11 each."""
    # the squares of these overflow fp16
    x = torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(2)) * 500
    weight, bias = torch.ones(256), torch.zeros(256)
    kind = NORMALIZATIONS[name]
    exact = kind.function(x.to(dtype).double(), weight.double(), bias.double(), 1e-5)
    for ours in (kind.function(x.to(dtype), weight.to(dtype), bias.to(dtype), 1e-5),
                 kind.forward(x.to(dtype), weight.to(dtype), bias.to(dtype) if kind.has_bias else None, 1e-5)[0]):
        assert ours.dtype == dtype
        assert ((ours.double() - exact).abs() <= 4 * rounding * exact.abs() + rounding / 4).all()


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
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_a_meta_model_has_the_parameters_of_its_norm(name):
    config = tiny(1, normalization=name)
    names = {parameter for parameter, _ in meta_stage(config).named_parameters()}
    assert ("layers.0.mlp.norm.bias" in names) == ("final_norm.bias" in names) == NORMALIZATIONS[name].has_bias
    assert all(parameter.is_meta for parameter in meta_stage(config).parameters())
    assert meta_mesh(2, 3, 4, 1, 2, 3).rank_of(1, 2, 3) == 23
