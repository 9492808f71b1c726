"""What stands between two sums: the end of one sublayer and the norm that opens the next, forward and backward.

    x' = x + dropout(y + bias)        y, bias of the sublayer before
    h  = norm(x')                     of the one that follows

Row by row: each token for itself, so it does not ask whether the rank has all rows of the stream or some (stream.py);
[b, s, h] means the rows that it has. No product, but as many bytes through memory as there are: where a compiler is on,
each direction is one kernel of it.
"""

from dataclasses import dataclass

import torch

from nanodomino.layers.main_grad import wide
from nanodomino.layers.sublayer import add_residual, drop


@dataclass
class Bridge:
    """What backward needs of one."""
    weights: tuple                       # of the norm: weight, bias
    before: object                       # domino.Step of the sublayer that it closes; None at a chunk's start
    x: torch.Tensor                      # x' [b, s, h], at which the norm is differentiated
    statistics: tuple


def bridge(x, y, bias, mask, weight, norm_bias, epsilon, kind):
    """Close the sublayer before (y is its sum over ranks; None at a stage's start), open the next with a norm of this
    kind: x', h, both [b, s, h], and the norm's statistics.

    So it straddles two: x, y, bias and mask belong to the sublayer before, the norm to the one that follows. A
    sublayer's row.bias gets its gradient from the bridge behind it, whose backward has run when backward is through
    with that sublayer.
    """
    if y is not None:
        x = add_residual(x, y, bias, mask)
    return x, *kind.forward(x, weight, norm_bias, epsilon)


def bridge_backward(grad_x, grad_h, x, statistics, weight, norm_bias, mask, closes, has_bias, kind):
    """Gradients of x, y, bias (None where it `closes` nothing, or that has none), and of the norm's weight and bias,
    from those of x' (None if only h is used) and h."""
    gradient, grad_weight, grad_norm_bias = kind.backward(grad_h, x, statistics, weight, norm_bias)
    if grad_x is not None:
        gradient = gradient.add_(grad_x)
    if not closes:
        return gradient, None, None, grad_weight, grad_norm_bias
    return *add_residual_backward(gradient, mask, has_bias), grad_weight, grad_norm_bias


def add_residual_backward(gradient, mask, has_bias):
    """Gradients of x, y and bias. Of x and y they may be one tensor: whoever gets them writes to neither."""
    grad_y = drop(gradient, mask)
    return gradient, grad_y, grad_y.sum(dim=(0, 1), dtype=wide(grad_y)) if has_bias else None
