"""Computes what lies between two all-reduces: the end of one sublayer and the start of the next.

    x' = x + dropout(y + bias)        y: the previous sublayer's output, summed over ranks; bias: its row-parallel bias
    h  = norm(x')                     the norm of the sublayer that follows

                     attention              |  residual + norm  |            MLP
      ... W1 -> core -> W2 -> all-reduce -> | + bias, drop, add |  norm  -> W1 -> gelu -> W2 -> all-reduce -> ...
                                            |  of attention     | of MLP

So a residual + norm belongs to two sublayers: y, bias and dropout mask to the previous one, the norm's weights to the
next one. A sublayer's row bias gets its gradient when the backward of the residual + norm *above* it runs, which is
before the backward of the sublayer itself.

Every operation treats each token on its own, so it does not matter whether a rank holds all rows or a shard; [b, s, h]
below means the rows that the rank holds. There is no matmul, but many bytes are read and written: where a compiler is
on, each direction is one kernel.
"""

from dataclasses import dataclass

import torch

from nanodomino.layers.dropout_and_positions import add_residual, drop
from nanodomino.layers.main_grad import add_gradients, wide_dtype


@dataclass
class SavedResidualNorm:
    """Holds what backward needs of a residual + norm."""
    weights: tuple                       # of the norm: (weight, bias)
    previous: object                     # domino.SublayerParts whose output is added; None at a chunk's start
    x: torch.Tensor                      # x' [b, s, h], the input of the norm
    statistics: tuple


class ResidualNorm:
    """Runs residual + norm for slices. norm: any norm of the model, since all are of one kind."""

    def __init__(self, norm, compiled):
        kind, epsilon = norm.normalization, norm.epsilon
        # lambdas, because torch.compile takes every functools.partial for one function and keeps few versions of it
        self.forward_kernel = compiled(lambda *inputs: residual_norm(*inputs, epsilon, kind))
        self.backward_kernel = compiled(lambda *inputs: residual_norm_backward(*inputs, kind))

    def forward(self, slice, x, y, previous, weights):
        """Turn x, y [b, s, h] of the previous sublayer (y None at a chunk's start) into (h, what backward needs)."""
        x, h, *statistics = self.forward_kernel(x, y, *bias_and_mask(slice, previous, y), *weights)
        return h, SavedResidualNorm(weights, previous, x, statistics)

    def norm_again(self, saved: SavedResidualNorm):
        """Recompute h from the saved x'."""
        return self.forward_kernel(saved.x, None, None, None, *saved.weights)[1]

    def backward(self, slice, saved: SavedResidualNorm, grad_x, grad_h):
        """Return the gradients of x and y, given those of x' (None if only h is used) and of h. The gradients of bias
        and norm weights are added to main_grad."""
        bias, mask = bias_and_mask(slice, saved.previous, grad_h)
        grad_x, grad_y, *gradients = self.backward_kernel(
            grad_x, grad_h, saved.x, saved.statistics, *saved.weights, mask, saved.previous is not None,
            bias is not None)
        add_gradients((bias, *saved.weights), gradients)
        return grad_x, grad_y


def bias_and_mask(slice, sublayer, like):
    """Return the row-parallel bias and the dropout mask of a sublayer's output; (None, None) without a sublayer."""
    if sublayer is None:
        return None, None
    return sublayer.output_bias, slice.masks_and_positions.hidden_dropout_mask(sublayer.site + ".hidden", like)


def residual_norm(x, y, bias, mask, weight, norm_bias, epsilon, kind):
    """Return x', h (both [b, s, h]) and the norm's statistics. y None: there is nothing to add."""
    if y is not None:
        x = add_residual(x, y, bias, mask)
    return x, *kind.forward(x, weight, norm_bias, epsilon)


def residual_norm_backward(grad_x, grad_h, x, statistics, weight, norm_bias, mask, has_residual, has_bias, kind):
    """Turn the gradients of x' and h into those of x, y, bias, norm weight, norm bias; y's and bias's may be None."""
    gradient, grad_weight, grad_norm_bias = kind.backward(grad_h, x, statistics, weight, norm_bias)
    if grad_x is not None:
        gradient = gradient.add_(grad_x)
    if not has_residual:
        return gradient, None, None, grad_weight, grad_norm_bias
    return *residual_backward(gradient, mask, has_bias), grad_weight, grad_norm_bias


def residual_backward(gradient, mask, has_bias):
    """Turn the gradient of x + dropout(y + bias) into those of x, y and bias. x's and y's may be the same tensor, so do
    not write to either."""
    grad_y = drop(gradient, mask)
    return gradient, grad_y, grad_y.sum(dim=(0, 1), dtype=wide_dtype(grad_y)) if has_bias else None
