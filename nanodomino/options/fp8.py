"""Computes the matmuls of attention and MLP with 8-bit operands (fp8, --fp8-format; 2209.05433).

A GPU with fp8 tensor cores multiplies 8-bit numbers twice as fast as 16-bit numbers. But 8 bits hold few values:

    e4m3    4 bits exponent, 3 bits mantissa    largest 448       smallest 2^-9  = 0.002     weights, activations
    e5m2    5 bits exponent, 2 bits mantissa    largest 57,344    smallest 2^-16 = 0.00002   gradients

The numbers of a gradient span more powers of two than the numbers of an activation. So the format "hybrid" uses e5m2
for gradients. The format "e4m3" uses e4m3 for all.

**Scales.** A gradient of 1e-7 would become 0 in either type. So a tensor is divided by a scale in fp32, which maps its
largest absolute value (amax) to the largest number of the type. The matmul adds up in fp32 and multiplies the sum by
both scales:

    scale = amax / 448     values = x / scale, rounded to 8 bits     x W^T = scale_x scale_W (values_x values_W^T)

Transformer Engine calls this number scale_inv, and its reciprocal scale. It comes from the tensor itself ("current
scaling") and not from earlier steps ("delayed scaling"). That needs one more pass over the tensor, but no state. The
host never reads a scale, so it never waits for the GPU.

--fp8-recipe says which numbers share a scale:

    tensorwise    all numbers of the rank's tensor
    rowwise       the numbers that a matmul adds up: a row of x and a row of W, in each matmul of the table below

**Three matmuls.** n tokens are multiplied by a weight W [out, in]. Each matmul adds up over the last dimension of both
of its operands, because fp8 tensor cores take both only in this order:

    forward            y      = x W^T         x [n, in]           W [out, in]       e4m3 x e4m3
    input gradient     grad_x = grad_y W      grad_y [n, out]     W^T [in, out]     hybrid: e5m2 x e4m3
    weight gradient    grad_W = grad_y^T x    grad_y^T [out, n]   x^T [in, n]       hybrid: e5m2 x e4m3

With --no-fp8-wgrad, weight gradients stay in the training type, as in torchao's rowwise_with_gw_hp. With few tokens
that is also faster: a matmul in 8 bits can't add to main_grad.

**Sums.** A tensor core adds products in fewer bits than fp32 has. A matmul can move its partial sums to fp32 registers
at intervals, which keeps the precision of fp32 but is slower. Backward does so. Forward uses "fast accumulation", which
leaves these moves out.

**Weights** and their master weights stay as they are without fp8. W and W^T are converted at their first use in a step.
bucket.derived keeps both, in one byte per number, until zero.py changes the weights.

**Activations.** With a tensorwise scale, x^T holds the numbers of x in another order. So x is converted once, and the
tape keeps it in 1 byte per number instead of 2 or 4. There are two exceptions. Attention's backward needs attention's
output in the training type anyway, and with a sharded residual stream backward gathers h again (sequence_parallel.py).
With rowwise scales x^T has other scales than x. So the tape keeps the training type, and backward converts once more.
With --no-fp8-wgrad the tape keeps the training type, too.

**What stays in the training type.** Embedding, head, norms, softmax(q k^T) v, routers and the merges of multi-token
prediction have few FLOPs or need the precision. Experts stay, too, because their grouped matmul is not written for 8
bits. With --first-last-layers-bf16, so do the first and the last layer.

**Results depend on the layout.** A rank's amax is that of its own shard, slice and microbatch. Another layout has other
scales, so it rounds differently. With rowwise scales, the forward of a column-parallel matmul is alike on all layouts
without --columns, because these cut no row of W1 or of h.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.torch_version import TorchVersion

from nanodomino.comm.device import capability_of, kind_of
from nanodomino.layers.gradients import add_weight_gradient, main_grad_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {"hybrid": (E4M3, E5M2), "e4m3": (E4M3, E4M3)}     # --fp8-format: type of weights and activations, gradients
RECIPES = ("tensorwise", "rowwise")
SMALLEST_SCALE = torch.finfo(torch.float32).tiny             # for a tensor of zeros, because 0 / 0 is not a number


@dataclass(frozen=True, eq=False)
class Fp8Tensor:
    """Holds a tensor x [.., k] as values * scale. values: 8 bits, [.., k]; scale: fp32, [1, 1] or [rows, 1]."""
    values: torch.Tensor
    scale: torch.Tensor

    def chunk(self, count: int, dim: int) -> list["Fp8Tensor"]:
        """Cut x [rows, k] into parts of rows (dim 0), which take their scales along, or of k (dim 1)."""
        scales = self.scale.chunk(count) if dim == 0 and len(self.scale) > 1 else [self.scale] * count
        return list(map(Fp8Tensor, self.values.chunk(count, dim), scales))


def to_8_bits(x, dtype, dim, transposed=False):
    """Return (values, scale) of x [rows, k], or of x^T if `transposed`. dim: the dimensions of x that share a scale.
    If x holds inf or NaN, so do its products. So the step is skipped, as in the training type."""
    largest = torch.finfo(dtype).max
    scale = (x.abs().amax(dim, keepdim=True).float() / largest).clamp_(min=SMALLEST_SCALE)
    # clamp: x / scale can be rounded up to a number beyond the range, which some devices cast to NaN
    values = (x / scale).clamp_(-largest, largest).to(dtype)
    return (values.t().contiguous(), scale.view(-1, 1)) if transposed else (values, scale)


def scaled_matmul(a: Fp8Tensor, b: Fp8Tensor, dtype, fast=False):
    """Return a b^T [rows of a, rows of b] in `dtype`. fast: add up in fewer bits than fp32 has."""
    return torch._scaled_mm(a.values.flatten(0, -2), b.values.t(), a.scale, b.scale.t(), out_dtype=dtype,
                            use_fast_accum=fast)


def returns_fp32(device: torch.device) -> bool:
    """Return whether a matmul with rowwise scales can return fp32, not only bfloat16: on Hopper from CUDA 12.9 on."""
    return kind_of(device) == "cpu" or (
        capability_of(device)[0] == 9 and TorchVersion(torch.version.cuda or "12.9") >= "12.9")


class Fp8Recipe:
    """Says how a sublayer multiplies in 8 bits.

    weight, activation, gradient   the function that converts such a tensor: to_8_bits without `dtype`
    transpose                      x -> contiguous x^T; torch's own kernel copies bytes at a tenth of a GPU's rate
    rowwise                        whether each row has its own scale
    wgrad                          whether weight gradients are multiplied in 8 bits, too
    dtype                          the training type, in which matmuls return their results
    """

    def __init__(self, name: str, recipe: str, dtype: torch.dtype, compiled, wgrad=True):
        """name, recipe: the values of --fp8-format and --fp8-recipe. compiled: see Domino."""
        operand, gradient = FORMATS[name]
        # one lambda each, because torch.compile keeps a limited number of versions of a function
        self.weight = compiled(lambda x, dim, transposed: to_8_bits(x, operand, dim, transposed))
        self.activation = compiled(lambda x, dim, transposed: to_8_bits(x, operand, dim, transposed))
        self.gradient = compiled(lambda x, dim, transposed: to_8_bits(x, gradient, dim, transposed))
        self.transpose = compiled(lambda values: values.t().contiguous())
        self.rowwise, self.wgrad, self.dtype = recipe == "rowwise", wgrad, dtype

    def convert(self, x, to_8_bits, transposed=False) -> Fp8Tensor:
        """Convert x [.., k] for a sum over k. If `transposed`, convert it to x^T [k, rows], for a sum over the rows.
        x may be in 8 bits already, with one scale. to_8_bits: self.weight, self.activation or self.gradient"""
        if isinstance(x, Fp8Tensor):
            return Fp8Tensor(self.transpose(x.values.flatten(0, -2)), x.scale) if transposed else x
        values, scale = to_8_bits(x.flatten(0, -2), int(not transposed) if self.rowwise else (0, 1), transposed)
        return Fp8Tensor(values if transposed else values.view(x.shape), scale)


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """Stands for a parameter W [out, in] that is multiplied in 8 bits. overlap/slices.py calls its methods.

    transposed   whether it stands for W^T, by which gradients are multiplied
    part         the part of W or W^T for which it stands; None: the whole
    """
    weight: nn.Parameter
    recipe: Fp8Recipe
    transposed: bool = False
    part: Fp8Tensor | None = None

    def t(self) -> "Fp8Weight":
        return replace(self, transposed=not self.transposed)

    def chunk(self, count: int, dim: int) -> list["Fp8Weight"]:
        return [replace(self, part=part) for part in self.in_8_bits().chunk(count, dim)]

    def in_8_bits(self) -> Fp8Tensor:
        """Return W or W^T, converted at most once a step."""
        if self.part is not None:
            return self.part
        derived, key = self.weight.bucket.derived, (self.weight, self.transposed)
        if key not in derived:
            derived[key] = self.recipe.convert(self.weight.detach(), self.recipe.weight, self.transposed)
        return derived[key]

    def convert(self, x) -> Fp8Tensor:
        """Convert x [.., k], which will be multiplied by W or W^T. x may be in 8 bits already."""
        return self.recipe.convert(x, self.recipe.gradient if self.transposed else self.recipe.activation)

    def convert_once(self, x):
        """Convert x if this matmul and the weight gradient can both use the result. Otherwise return x itself."""
        return x if self.recipe.rowwise or not self.recipe.wgrad else self.convert(x)

    def multiply(self, x, bias=None, total=None):
        """Return x W^T + bias, or add x W^T to `total`."""
        x = self.convert(x)
        y = scaled_matmul(x, self.in_8_bits(), self.recipe.dtype, fast=not self.transposed)
        y = y.view(*x.values.shape[:-1], -1)
        if total is not None:
            return total.add_(y)
        return y if bias is None else y.add_(bias)

    def add_gradient(self, grad_output, x):
        """Add grad_output^T x to main_grad [out, in]. grad_output [b, s, out], x [b, s, in]; both may be in 8 bits."""
        recipe, main_grad = self.recipe, main_grad_of(self.weight)
        if not recipe.wgrad:
            return add_weight_gradient(main_grad, grad_output, x)
        grad_output, x = recipe.convert(grad_output, recipe.gradient, True), recipe.convert(x, recipe.activation, True)
        dtype = main_grad.dtype if not recipe.rowwise or returns_fp32(main_grad.device) else recipe.dtype
        main_grad.add_(scaled_matmul(grad_output, x, dtype))
