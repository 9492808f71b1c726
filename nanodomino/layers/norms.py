"""What a model has a choice of, by name: pure functions of tensors, which know no config, no mesh and no parameters.

A choice is one entry of a table here; the setting's values, its flag and its error sentences are the table's keys, and
sublayers.py calls what the entry holds. Whoever schedules the work (domino.py, pipeline.py) never learns of it.

Each has its definition, which autograd differentiates, and the pair of forward and backward that training runs. The
pair says what it keeps in between, costs the host a quarter of the time, and a test holds it against the definition.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.parallel import parameter


@dataclass(frozen=True)
class Normalization:
    """function(x [.., h], weight [h], bias [h] or None, epsilon) -> [.., h]: the definition.

    forward(x, weight, bias, epsilon) -> (the same, *statistics);
    backward(gradient, x, statistics, weight, bias) -> gradients of x, weight, bias (None where there is none). Those
    of weight and bias are sums over tokens, which fp16 could not hold: they may be of a wider type.
    statistics(element, wide, cuda): bytes of the statistics of a token, by the bytes of a number of x and of one in
    fp32 or wider, and whether it runs on CUDA.
    """
    function: Callable
    forward: Callable
    backward: Callable
    has_bias: bool
    statistics: Callable


def layer_norm(x, weight, bias, epsilon):
    """(x - mean) / deviation * weight + bias, over the last dimension (1607.06450)."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def layer_norm_forward(x, weight, bias, epsilon):
    return torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)               # with mean, 1 / deviation


def layer_norm_backward(gradient, x, statistics, weight, bias):
    dtype, inputs = x.dtype, (gradient, x, *statistics, weight, bias)
    if dtype == torch.float16:
        inputs = [one.float() for one in inputs]
    gradient, x, *others = inputs
    grad_x, *gradients = torch.ops.aten.native_layer_norm_backward(gradient, x, weight.shape, *others, [True] * 3)
    return grad_x.to(dtype), *gradients


def rms_norm(x, weight, bias, epsilon):
    """x / rms * weight, over the last dimension (1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rms_norm_forward(x, weight, bias, epsilon):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * inverse).mul_(weight).to(x.dtype), inverse


def rms_norm_backward(gradient, x, statistics, weight, bias):
    """With n = x r, r = 1 / rms and g the gradient:  dx = r (w g - n mean(n w g)),  dw = sum(n g)."""
    (inverse,) = statistics
    gradient, weight = gradient.to(inverse.dtype), weight.to(inverse.dtype)
    normal = x * inverse
    product = normal * gradient
    mean = (product @ weight).unsqueeze(-1) / x.size(-1)
    grad_x = (gradient * weight).addcmul_(normal, mean, value=-1).mul_(inverse)
    return grad_x.to(x.dtype), product.flatten(0, -2).sum(dim=0), None


NORMALIZATIONS = {
    "LayerNorm": Normalization(layer_norm, layer_norm_forward, layer_norm_backward, has_bias=True,
                               statistics=lambda element, wide, cuda: 2 * (wide if cuda else element)),
    "RMSNorm": Normalization(rms_norm, rms_norm_forward, rms_norm_backward, has_bias=False,
                             statistics=lambda element, wide, cuda: wide),
}


class Norm(nn.Module):
    """Of config.normalization's kind, over `size` numbers; its parameters are whole on every rank."""

    def __init__(self, config, mesh, size: int, partial_gradient=False):
        super().__init__()
        self.normalization = NORMALIZATIONS[config.normalization]
        self.weight = parameter((size,), config, mesh, value=1.0, partial_gradient=partial_gradient)
        self.bias = parameter((size,), config, mesh, partial_gradient=partial_gradient) if self.normalization.has_bias else None
        self.epsilon = config.layernorm_epsilon

    @property
    def weights(self):
        """weight and bias [h]; no bias: None."""
        return self.weight, self.bias

    def forward(self, x):
        return self.normalization.function(x, self.weight, self.bias, self.epsilon)
