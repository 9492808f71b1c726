"""What fp8 must satisfy: checks that test_fp8.py and pitfalls.py share.

    matmuls        equal those of the numbers rounded to 8 bits, in float64, up to the rounding of the result
    new weights    are used after an update: another model that starts with these weights gives the same bits
    near fp32      gradients differ from those of fp32 by rounding; a wrong scale moves them further
"""

from types import SimpleNamespace

import torch
from support.harness import build, full_tensors, tiny, train_rank, weights_and_data

import train
from nanodomino.layers.gradients import main_grad_of
from nanodomino.options.fp8 import FORMATS, Fp8Recipe, Fp8Weight
from nanodomino.overlap.slices import add_gradient, multiply

FP32 = dict(dtype="float32", micro_batch_size=6, lr=1e-3)


def normal(*shape, seed=0, dtype=torch.float32):
    """Return numbers whose rows and columns differ in size by up to 100, so that a scale of another row shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * torch.logspace(-1, 1, shape[-1]) * torch.logspace(-1, 1, shape[-2])[:, None]).to(dtype)


def recipe_of(name, recipe, dtype=torch.float32) -> Fp8Recipe:
    return Fp8Recipe(name, recipe, dtype, lambda function: function)


def weight_of(tensor, recipe) -> Fp8Weight:
    weight = torch.nn.Parameter(tensor)
    weight.bucket, weight.main_grad = SimpleNamespace(derived={}), torch.zeros(tensor.shape)
    return Fp8Weight(weight, recipe)


def rounded(x, dtype, rowwise):
    """Return x [.., k] in float64, rounded to 8 bits with the scale of its tensor or of each row: the definition."""
    x = x.double()
    amax = x.abs().amax(-1, keepdim=True) if rowwise else x.abs().max()
    scale = (amax.float() / torch.finfo(dtype).max).double()
    return (x / scale).float().to(dtype).double() * scale


def check_matmuls(name, recipe, dtype=torch.float32, tolerance=1e-6, sizes=(32, 48)):
    """Check the three matmuls and their sums with a bias, a total and main_grad."""
    (operand, gradient), rowwise, (inputs, outputs) = FORMATS[name], recipe == "rowwise", sizes
    x, weight, bias = (normal(*shape, seed=seed, dtype=dtype)
                       for seed, shape in enumerate([(2, 24, inputs), (outputs, inputs), (1, outputs)]))
    grad_y = normal(2, 24, outputs, seed=7, dtype=dtype) * 1e-9
    w = weight_of(weight, recipe_of(name, recipe, dtype))

    def check(what, found, expected):
        error = float((found.double() - expected).abs().max() / expected.abs().max())
        assert error <= tolerance, f"{what} is off by {error:.1e}"

    flat, flat_grad = x.flatten(0, 1), grad_y.flatten(0, 1)
    y = rounded(flat, operand, rowwise) @ rounded(weight, operand, rowwise).t()
    check("y", multiply(x, w).flatten(0, 1), y)
    check("y + bias", multiply(x, w, bias[0]).flatten(0, 1), y + bias.double())
    check("total", multiply(x, w, None, multiply(x, w)).flatten(0, 1), 2 * y)
    grad_x = rounded(flat_grad, gradient, rowwise) @ rounded(weight.t(), operand, rowwise).t()
    check("the input gradient", multiply(grad_y, w.t()).flatten(0, 1), grad_x)
    grad_w = rounded(flat_grad.t(), gradient, rowwise) @ rounded(flat.t(), operand, rowwise).t()
    for given in ((grad_y, x), (w.t().convert_once(grad_y), w.convert_once(x))):
        w.weight.main_grad.fill_(1e-9)
        add_gradient(w, *given)
        check("the weight gradient", main_grad_of(w.weight) - 1e-9, grad_w)


def check_new_weights(recipe="tensorwise", zero_stage=1):
    """Check that the evaluation after an update uses the new weights. Runs in a worker of the pool."""
    config = tiny(1, **FP32, fp8_format="hybrid", fp8_recipe=recipe, zero_stage=zero_stage)
    weights, data = weights_and_data(config, 1)
    mesh, model, optimizer, stage = build(config, weights)
    train.train_step(1, stage, optimizer, data, config, mesh)
    found = train.evaluate(stage, data, config, mesh)
    trained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    mesh, _, _, fresh = build(config, trained)
    expected = train.evaluate(fresh, data, config, mesh)
    assert found == expected, f"the evaluation gives {found}, and a new model with the same weights {expected}"


# Bounds on a matrix's gradient g beside that of fp32, g0: on <g, g0> / <g0, g0> - 1, which a wrong scale moves and
# rounding hardly does, and on |g - g0| / |g0|, which is the rounding. Measured: up to 0.07 and 0.23.
SCALE, ROUNDING = 0.12, 0.35
IN_FP32 = []             # the loss and the gradients in fp32, computed once


def compare(ours: dict, theirs: dict) -> tuple[float, float]:
    """Return the largest of each of the two numbers over all matrices."""
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs if theirs[name].dim() > 1]
    return (max(abs(float((g * g0).sum() / g0.square().sum()) - 1) for g, g0 in pairs),
            max(float((g - g0).norm() / g0.norm()) for g, g0 in pairs))


def first_step(pool, config, weights, data):
    outcomes = pool.run(train_rank, config, weights, data, 1, world_size=config.world_size)
    return outcomes[-1].losses[0], full_tensors(outcomes, lambda outcome: outcome.gradients[0])


def check_near_fp32(pool, layout, name, recipe):
    """Check the loss and the gradients of the first step. Returns full_tensors() of the gradients."""
    size = 2 if any(name.endswith("parallel_size") for name in layout) else 1
    weights, data = weights_and_data(tiny(1, **FP32), 1)
    if not IN_FP32:
        IN_FP32.extend(first_step(pool, tiny(1, **FP32), weights, data))
    loss, gradients = IN_FP32
    found, here = first_step(pool, tiny(size, **FP32 | layout, fp8_format=name, fp8_recipe=recipe), weights, data)
    scale, rounding = compare(here, gradients)
    assert scale < SCALE and rounding < ROUNDING and abs(found / loss - 1) < 0.01, (
        f"a gradient is off by {scale:.2f} in scale and {rounding:.2f} in all, the loss by {abs(found / loss - 1):.4f}")
    return here
