"""LayerNorm and RMSNorm. Each has a definition for autograd, and a hand-written forward and backward.

    LayerNorm(x) = (x - mean) / sqrt(variance + epsilon) * weight + bias      (1607.06450)
    RMSNorm(x)   = x / sqrt(mean of x^2 + epsilon) * weight                   (1910.07467)

Means and variance are over the last dimension. Training runs the hand-written pair: its code shows what is kept for
backward, and it costs the host a quarter of autograd's time. A test compares it with the definition.

Norms are not cut over tensor-parallel ranks: each rank holds the whole weight and normalizes the tokens that it holds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.layers.gradients import wide_dtype
from nanodomino.optim.buckets import parameter


@dataclass(frozen=True)
class Normalization:
    """Holds the functions of LayerNorm or RMSNorm. x is [.., h]; weight and bias are [h]; bias may be None.

    function(x, weight, bias, epsilon) -> the norm of x [.., h]: the definition
    forward(x, weight, bias, epsilon) -> (the norm of x, *statistics), where the statistics are kept for backward
    backward(gradient, x, statistics, weight, bias) -> gradients of x, weight and bias (None without a bias). The last
        two are sums over tokens, which may overflow fp16, so their dtype may be wider than x's.
    """
    function: Callable
    forward: Callable
    backward: Callable
    has_bias: bool


def layer_norm(x, weight, bias, epsilon):
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def layer_norm_forward(x, weight, bias, epsilon):
    """Return the norm of x, the mean and 1 / standard deviation."""
    return torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)


def layer_norm_backward(gradient, x, statistics, weight, bias):
    """Return the gradients of x, weight and bias. torch returns the last two in its inputs' dtype: fp16 sums over
    tokens may overflow, bfloat16 sums are rounded. So the inputs become fp32. Compiled code makes no copies for that.
    Without a compiler, copies would multiply the memory traffic, so bfloat16 inputs stay as they are."""
    dtype, inputs = x.dtype, (gradient, x, *statistics, weight, bias)
    if dtype == torch.float16 or torch.compiler.is_compiling():
        inputs = [tensor.to(wide_dtype(tensor)) for tensor in inputs]
    gradient, x, *others = inputs
    grad_x, *gradients = torch.ops.aten.native_layer_norm_backward(gradient, x, weight.shape, *others, [True] * 3)
    return grad_x.to(dtype), *gradients


def rms_norm(x, weight, bias, epsilon):
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rms_norm_forward(x, weight, bias, epsilon):
    """Return the norm of x and 1 / rms, where rms is the root of the mean of x^2 (plus epsilon)."""
    wide_x = x.to(wide_dtype(x))
    inverse = torch.rsqrt(wide_x.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide_x * inverse).mul_(weight).to(x.dtype), inverse


def rms_norm_backward(gradient, x, statistics, weight, bias):
    """Return dx = r (w g - n mean(n w g)) and dw = sum(n g). r = 1 / rms, n = x r, w is the weight, g the gradient."""
    (inverse,) = statistics
    gradient, weight = gradient.to(inverse.dtype), weight.to(inverse.dtype)
    normed = x * inverse
    product = normed * gradient
    mean = (product @ weight).unsqueeze(-1) / x.size(-1)
    grad_x = (gradient * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
    return grad_x.to(x.dtype), product.flatten(0, -2).sum(dim=0), None


NORMALIZATIONS = {
    "LayerNorm": Normalization(layer_norm, layer_norm_forward, layer_norm_backward, has_bias=True),
    "RMSNorm": Normalization(rms_norm, rms_norm_forward, rms_norm_backward, has_bias=False),
}


class Norm(nn.Module):
    """The norm that config.normalization names, over a last dimension of `size` numbers.

    declared: further arguments of parameter() in optim/buckets.py.
    """

    def __init__(self, config, mesh, size: int, **declared):
        super().__init__()
        self.normalization, self.epsilon = NORMALIZATIONS[config.normalization], config.layernorm_epsilon
        self.weight = parameter((size,), config, mesh, value=1.0, **declared)
        self.bias = parameter((size,), config, mesh, **declared) if self.normalization.has_bias else None

    @property
    def weights(self):
        """Return (weight, bias), each [size]; the bias is None if the norm has none."""
        return self.weight, self.bias

    def forward(self, x):
        return self.normalization.function(x, self.weight, self.bias, self.epsilon)
