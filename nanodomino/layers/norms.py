"""LayerNorm and RMSNorm, each as a definition and as a hand-written pair of forward and backward.

    LayerNorm(x) = (x - mean) / sqrt(variance + epsilon) * weight + bias      (1607.06450)
    RMSNorm(x)   = x / sqrt(mean of x^2 + epsilon) * weight                   (1910.07467)

both over the last dimension. Autograd differentiates the definition. Training runs the pair: it states what it keeps
for backward, and costs the host a quarter of autograd's time. A test compares the pair with the definition.

Norms are not cut over tensor-parallel ranks: each rank holds the whole weight and norms the tokens it has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.layers.main_grad import wide_dtype
from nanodomino.parallel import parameter


@dataclass(frozen=True)
class Normalization:
    """A kind of norm; x is [.., h], weight and bias are [h], bias may be None.

    function(x, weight, bias, epsilon) -> [.., h]: the definition
    forward(x, weight, bias, epsilon) -> (the same, *statistics)
    backward(gradient, x, statistics, weight, bias) -> gradients of x, weight and bias (None without a bias). The last
        two are sums over tokens, which may overflow fp16, so they may be wider than x.
    statistics(element, wide, cuda): bytes of the statistics per token. element: bytes of one element of x; wide: bytes
        of one element in fp32 or wider; cuda: whether the norm runs on CUDA
    """
    function: Callable
    forward: Callable
    backward: Callable
    has_bias: bool
    statistics: Callable


def layer_norm(x, weight, bias, epsilon):
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def layer_norm_forward(x, weight, bias, epsilon):
    """Return the result, the mean and 1 / deviation."""
    return torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)


def layer_norm_backward(gradient, x, statistics, weight, bias):
    dtype, inputs = x.dtype, (gradient, x, *statistics, weight, bias)
    if dtype == torch.float16:
        inputs = [tensor.float() for tensor in inputs]
    gradient, x, *others = inputs
    grad_x, *gradients = torch.ops.aten.native_layer_norm_backward(gradient, x, weight.shape, *others, [True] * 3)
    return grad_x.to(dtype), *gradients


def rms_norm(x, weight, bias, epsilon):
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rms_norm_forward(x, weight, bias, epsilon):
    """Return the result and 1 / rms."""
    wide_x = x.to(wide_dtype(x))
    inverse = torch.rsqrt(wide_x.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide_x * inverse).mul_(weight).to(x.dtype), inverse


def rms_norm_backward(gradient, x, statistics, weight, bias):
    """With n = x r, r = 1 / rms, w the weight and g the gradient:  dx = r (w g - n mean(n w g)),  dw = sum(n g)."""
    (inverse,) = statistics
    gradient, weight = gradient.to(inverse.dtype), weight.to(inverse.dtype)
    normed = x * inverse
    product = normed * gradient
    mean = (product @ weight).unsqueeze(-1) / x.size(-1)
    grad_x = (gradient * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
    return grad_x.to(x.dtype), product.flatten(0, -2).sum(dim=0), None


NORMALIZATIONS = {
    "LayerNorm": Normalization(layer_norm, layer_norm_forward, layer_norm_backward, has_bias=True,
                               statistics=lambda element, wide, cuda: 2 * (wide if cuda else element)),
    "RMSNorm": Normalization(rms_norm, rms_norm_forward, rms_norm_backward, has_bias=False,
                             statistics=lambda element, wide, cuda: wide),
}


class Norm(nn.Module):
    """A norm of config.normalization's kind over the last dimension, which has `size` numbers.

    partial_gradient: see parameter() in parallel.py.
    """

    def __init__(self, config, mesh, size: int, partial_gradient=False):
        super().__init__()
        self.normalization, self.epsilon = NORMALIZATIONS[config.normalization], config.layernorm_epsilon
        self.weight = parameter((size,), config, mesh, value=1.0, partial_gradient=partial_gradient)
        self.bias = None
        if self.normalization.has_bias:
            self.bias = parameter((size,), config, mesh, partial_gradient=partial_gradient)

    @property
    def weights(self):
        """Return (weight, bias), each [size]; bias None without one."""
        return self.weight, self.bias

    def forward(self, x):
        return self.normalization.function(x, self.weight, self.bias, self.epsilon)
