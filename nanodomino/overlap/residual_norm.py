"""Computes what lies between two all-reduces: the end of one sublayer and the start of the next.

    x' = x + dropout(y + bias)        y: the previous sublayer's output, summed over ranks; bias: its row-parallel bias
    h  = norm(x')                     the next sublayer's norm

                     attention              |  residual + norm  |            MLP
      ... W1 -> core -> W2 -> all-reduce -> | + bias, drop, add |  norm  -> W1 -> gelu -> W2 -> all-reduce -> ...
                                            |  of attention     | of MLP

So a residual + norm belongs to two sublayers: y, bias and dropout mask to the previous one, the norm's weights to the
next one. The residual + norm *after* a sublayer applies that sublayer's row-parallel bias and computes its gradient, so
in backward this gradient is ready before those of the sublayer's other weights.

Every operation treats each token by itself, so it does not matter whether a rank holds all rows or a shard. Below,
[b, s, h] means the rows that this rank holds. There is no matmul, but many bytes are read and written. So torch.compile
(--compile) fuses forward into one kernel, and backward into another.
"""

from dataclasses import dataclass

import torch

from nanodomino.layers.dropout_and_positions import add_residual, drop
from nanodomino.layers.gradients import add_gradients, wide_dtype
from nanodomino.overlap.linear_pair import Inside


@dataclass
class SavedResidualNorm:
    """Holds what forward keeps of a residual + norm for backward."""
    weights: tuple                       # (weight, bias) of the norm
    previous: Inside | None              # the inside whose output is added; None at a chunk's start
    x: torch.Tensor                      # x' [b, s, h], the input of the norm
    statistics: tuple                    # from the norm's forward: for example mean and 1 / deviation of each token


class ResidualNorm:
    """Runs residual + norm for slices.

    norm: any Norm of the model; all of them have the same normalization and epsilon
    compiled: torch.compile with its backend, or a function that returns its argument
    """

    def __init__(self, norm, compiled):
        normalization, epsilon = norm.normalization, norm.epsilon
        # lambdas, because torch.compile treats all functools.partials as one function and keeps few versions of it
        self.forward_kernel = compiled(lambda *inputs: residual_norm(*inputs, epsilon, normalization))
        self.backward_kernel = compiled(lambda *inputs: residual_norm_backward(*inputs, normalization))

    def forward(self, slice, x, y, previous, weights):
        """Return (h, SavedResidualNorm).

        x, y [b, s, h]: the residual stream, and the output of the sublayer `previous`. y is None at a chunk's start.
        weights: (weight, bias) of the next sublayer's norm.
        """
        x, h, *statistics = self.forward_kernel(x, y, *bias_and_mask(slice, previous, y), *weights)
        return h, SavedResidualNorm(weights, previous, x, statistics)

    def norm_again(self, saved: SavedResidualNorm):
        """Return h, recomputed from the saved x'."""
        return self.forward_kernel(saved.x, None, None, None, *saved.weights)[1]

    def backward(self, slice, saved: SavedResidualNorm, grad_x, grad_h):
        """Return the gradients of x and y. Add the gradients of the bias and the norm's weights to main_grad.

        grad_x, grad_h: the gradients of x' and h; grad_x is None in the head, which uses only h.
        """
        bias, mask = bias_and_mask(slice, saved.previous, grad_h)
        grad_x, grad_y, *gradients = self.backward_kernel(
            grad_x, grad_h, saved.x, saved.statistics, *saved.weights, mask, saved.previous is not None,
            bias is not None)
        add_gradients((bias, *saved.weights), gradients)
        return grad_x, grad_y


def bias_and_mask(slice, sublayer, like):
    """Return the row-parallel bias and the dropout mask for a sublayer's output; (None, None) if sublayer is None."""
    if sublayer is None:
        return None, None
    return sublayer.output_bias, slice.masks_and_positions.hidden_dropout_mask(sublayer.site + ".hidden", like)


def residual_norm(x, y, bias, mask, weight, norm_bias, epsilon, normalization):
    """Return (x', h, *statistics of the norm); x' and h are [b, s, h]. If y is None, x' is x."""
    if y is not None:
        x = add_residual(x, y, bias, mask)
    return x, *normalization.forward(x, weight, norm_bias, epsilon)


def residual_norm_backward(grad_x, grad_h, x, statistics, weight, norm_bias, mask, has_residual, has_bias,
                           normalization):
    """Return the gradients of x, y, bias, norm weight and norm bias; None for those that do not exist.

    grad_x, grad_h: the gradients of x' and h. x: x' itself.
    """
    gradient, grad_weight, grad_norm_bias = normalization.backward(grad_h, x, statistics, weight, norm_bias)
    if grad_x is not None:
        gradient = gradient.add_(grad_x)
    if not has_residual:
        return gradient, None, None, grad_weight, grad_norm_bias
    return *residual_backward(gradient, mask, has_bias), grad_weight, grad_norm_bias


def residual_backward(gradient, mask, has_bias):
    """Turn the gradient of x + dropout(y + bias) into the gradients of x, y and bias (None without a bias).

    Without dropout, the gradients of x and y are the same tensor, so the caller must not write to either.
    """
    grad_y = drop(gradient, mask)
    return gradient, grad_y, grad_y.sum(dim=(0, 1), dtype=wide_dtype(grad_y)) if has_bias else None
