"""What attention and MLP have in common: a norm, two matmuls with a core between them, and a residual addition.

    x -> norm -> f -> column-parallel matmul -> core -> row-parallel matmul -> g -> + bias, dropout -> + x

The core is attention itself (attention.py), or the activation function of an MLP. It works on this rank's output of the
first matmul: the rank's own heads, or its own ffn features. So f and g (parallel.py) are the only communication. Norm
and core are written twice: once as a definition, which autograd differentiates, and once as a hand-written forward and
backward, which training runs (overlap/), and which costs the host a quarter of autograd's time. Tests compare the two.

**Norms.** Mean and variance are over the last dimension. Every tensor-parallel rank holds the whole weight:

    LayerNorm(x) = (x - mean) / sqrt(variance + epsilon) * weight + bias      (1607.06450)
    RMSNorm(x)   = x / sqrt(mean of x^2 + epsilon) * weight                   (1910.07467)

**Activations** work element by element.

    gelu(x)            = x Phi(x), Phi: the normal distribution function, approximated by tanh as in GPT-2 (1606.08415)
    swiglu(gate, up)   = silu(gate) * up, silu(x) = x sigmoid(x), as in Llama (2002.05202)

**The MLP**, cut over t tensor-parallel ranks (Megatron-LM, 1909.08053, section 3). With SwiGLU, W1 stacks two matrices,
[gate; up], of ffn rows each. They are cut separately (partition_stride=2), so that a rank has both for its features.

    h [b, s, h] -> W1 (column-parallel) -> c [b, s, ffn/t] -> activation -> [b, s, ffn/t] -> W2 (row-parallel) -> y

Shapes in this folder: b samples, s tokens, h hidden size, d numbers per head, t tensor-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.layers.gradients import add_residual, wide_dtype
from nanodomino.optim.buckets import parameter
from nanodomino.parallel import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class Normalization:
    """Holds the functions of LayerNorm or RMSNorm for x [.., h], weight [h] and bias [h] or None. The gradients of the
    latter two are sums over tokens, and may have a wider dtype than x."""
    function: Callable     # x, weight, bias, epsilon -> the norm of x [.., h]: the definition
    forward: Callable      # x, weight, bias, epsilon -> the norm of x, *statistics that backward needs
    backward: Callable     # gradient, x, statistics, weight, bias -> gradients of x, weight and bias (None without one)
    has_bias: bool


def layer_norm_backward(gradient, x, statistics, weight, bias):
    """Return the gradients of x, weight and bias. torch returns the last two in its inputs' dtype, in which sums over
    tokens may overflow (fp16) or are rounded (bfloat16). So the inputs become fp32. Compiled code makes no copies for
    that. Without a compiler, copies would multiply the memory traffic, so bfloat16 inputs stay as they are."""
    dtype, inputs = x.dtype, (gradient, x, *statistics, weight, bias)
    if dtype == torch.float16 or torch.compiler.is_compiling():
        inputs = [tensor.to(wide_dtype(tensor)) for tensor in inputs]
    gradient, x, *others = inputs
    grad_x, *gradients = torch.ops.aten.native_layer_norm_backward(gradient, x, weight.shape, *others, [True] * 3)
    return grad_x.to(dtype), *gradients


def rms_norm_forward(x, weight, bias, epsilon):
    """Return the norm of x and 1 / rms, where rms is the root of the mean of x^2 (plus epsilon)."""
    wide_x = x.to(wide_dtype(x))
    inverse = torch.rsqrt(wide_x.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide_x * inverse).mul_(weight).to(x.dtype), inverse


def rms_norm_backward(gradient, x, statistics, weight, bias):
    """Return dx = r (w g - n mean(n w g)) and dw = sum(n g). r = 1 / rms, n = x r, w is the weight, g the gradient.
    Compiled code computes the mean without a matmul, which the compiler can't fuse: dx and dw then share one kernel."""
    (inverse,) = statistics
    gradient, weight = gradient.to(inverse.dtype), weight.to(inverse.dtype)
    normed = x * inverse
    product = normed * gradient
    total = (product * weight).sum(dim=-1) if torch.compiler.is_compiling() else product @ weight
    mean = total.unsqueeze(-1) / x.size(-1)
    grad_x = (gradient * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
    return grad_x.to(x.dtype), product.flatten(0, -2).sum(dim=0), None


NORMALIZATIONS = {
    "LayerNorm": Normalization(
        lambda x, weight, bias, epsilon: F.layer_norm(x, weight.shape, weight, bias, epsilon),
        lambda x, weight, bias, epsilon: torch.native_layer_norm(x, weight.shape, weight, bias, epsilon),
        layer_norm_backward, has_bias=True),
    "RMSNorm": Normalization(
        lambda x, weight, bias, epsilon: F.rms_norm(x, weight.shape, weight, epsilon),
        rms_norm_forward, rms_norm_backward, has_bias=False)}


class Norm(nn.Module):
    """The norm that config.normalization names, over a last dimension of `size` numbers. declared: see parameter()."""

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


@dataclass(frozen=True)
class Activation:
    """Holds an activation function and its backward."""
    function: Callable     # c [.., inputs x ffn] -> [.., ffn]
    backward: Callable     # gradient [.., ffn], c -> the gradient of c
    inputs: int            # how many numbers of c make one number of the result: 2 for SwiGLU (gate and up)


def swiglu(c):
    gate, up = c.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(gradient, c):
    """Return the gradient of c. Uncompiled code writes both halves into one tensor, which saves a torch.cat."""
    gate, up = c.chunk(2, dim=-1)
    if torch.compiler.is_compiling():
        return torch.cat([torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate) * gradient], dim=-1)
    grad_c = torch.empty_like(c)
    grad_gate, grad_up = grad_c.chunk(2, dim=-1)
    torch.mul(gradient, up, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    torch.ops.aten.silu.out(gate, out=grad_up).mul_(gradient)
    return grad_c


ACTIVATIONS = {"gelu": Activation(partial(F.gelu, approximate="tanh"),
                                  partial(torch.ops.aten.gelu_backward, approximate="tanh"), inputs=1),
               "swiglu": Activation(swiglu, swiglu_backward, inputs=2)}


class Sublayer(nn.Module):
    """The base of Attention and MLP, which supply the two matmuls, `column` and `row`, and the core:

    core(c, inputs) -> activation                 the definition
    kernels(compiled) -> (forward, backward)      the functions of the core that torch.compile can fuse
    core_forward(kernel, c, inputs, training)     what training runs; returns (activation, saved for backward)
    core_backward(kernel, gradient, saved)        returns the gradient of c; adds gradients of parameters to main_grad

    c: the output of `column`. inputs: an AttentionInputs; None for an MLP. kernel: forward or backward from kernels()
    """
    attends = False                                            # True for attention

    def __init__(self, config, mesh, site: str):
        super().__init__()
        self.norm = Norm(config, mesh, config.hidden_size)
        self.site = site                                       # the name that seeds this sublayer's dropout masks

    def forward(self, x, masks_and_positions):
        """Turn x [b, s, h] into the next x, with blocking all-reduces and plain autograd. This is the definition."""
        y = self.row(self.core(self.column(self.norm(x)), masks_and_positions.attention_inputs(self, x)))
        return add_residual(x, y, self.row.bias, masks_and_positions.hidden_dropout_mask(self.site + ".hidden", x))


class MLP(Sublayer):
    """W1, the activation function, W2."""

    def __init__(self, config, mesh, site: str):
        super().__init__(config, mesh, site)
        self.activation, has_bias = ACTIVATIONS[config.activation], not config.disable_bias_linear
        matrices = self.activation.inputs
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, matrices * config.ffn_hidden_size, config, mesh,
                                                  has_bias, partition_stride=matrices)
        self.dense_4h_to_h = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, config, mesh, has_bias)

    column = property(lambda self: self.dense_h_to_4h)
    row = property(lambda self: self.dense_4h_to_h)

    def core(self, c, inputs):
        return self.activation.function(c)

    def kernels(self, compiled):
        functions = self.activation.function, self.activation.backward
        return map(compiled, functions) if self.activation.inputs > 1 else functions     # GELU is one kernel as it is

    def core_forward(self, kernel, c, inputs, training):
        """Apply the activation function to this rank's features c. Return (the result, what core_backward needs)."""
        return kernel(c), c

    def core_backward(self, kernel, gradient, c):
        """Turn the gradient of the activation into the gradient of c."""
        return kernel(gradient, c)
