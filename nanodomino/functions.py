"""What a model has a choice of, by name: pure functions of tensors, which know no config, no mesh and no parameters.

A choice is one entry of a table here; the setting's values, its flag and its error sentences are the table's keys, and
model.py calls what the entry holds. Whoever schedules the work (domino.py, pipeline.py) never learns of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Normalization:
    """function(x [.., h], weight [h], bias [h] or None, epsilon) -> [.., h].

    statistics(element, wide, cuda): bytes that its backward keeps of each token beside x, by the bytes of a number of x
    and of one in fp32 or wider, and whether it runs on CUDA.
    """
    function: Callable
    has_bias: bool
    statistics: Callable


def layer_norm(x, weight, bias, epsilon):
    """(x - mean) / deviation * weight + bias, over the last dimension (1607.06450)."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


class RMSNorm(torch.autograd.Function):
    """x / rms * weight, over the last dimension (1910.07467). By hand, since torch's own keeps x / rms too, in fp32:
    with n = x r, r = 1 / rms and g the gradient,  dx = r (w g - n mean(n w g)),  dw = sum(n g)."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, inverse = ctx.saved_tensors
        normal, scaled = x * inverse, gradient * weight
        grad_x = inverse * (scaled - normal * (normal * scaled).mean(dim=-1, keepdim=True))
        return grad_x.to(x.dtype), (normal * gradient).flatten(0, -2).sum(dim=0).to(weight.dtype), None


NORMALIZATIONS = {
    "LayerNorm": Normalization(layer_norm, has_bias=True,
                               statistics=lambda element, wide, cuda: 2 * (wide if cuda else element)),
    "RMSNorm": Normalization(lambda x, weight, bias, epsilon: RMSNorm.apply(x, weight, epsilon), has_bias=False,
                             statistics=lambda element, wide, cuda: wide),
}
