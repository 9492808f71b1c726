"""Adds a sublayer's output to the residual stream, with bias and dropout: x' = x + dropout(y + bias).

Plain autograd differentiates add_residual(). Training calls residual_backward() instead, which is written by hand.

A dropout mask is drawn from a generator that is seeded by (seed, sample, site). So every layout, slicing and rerun
draws the same mask (dropout_and_positions.py).
"""

import hashlib

import torch

from nanodomino.layers.gradients import wide_dtype


def seeded_generator(device, *key) -> torch.Generator:
    """Return a generator seeded only by `key`, so that every rank, layout and run draws the same numbers."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    device = "cpu" if torch.device(device).type == "meta" else device
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def drop(x, mask):
    """Return x * mask in x's dtype; x if mask is None. Masks are fp32, because 16 bits would round 1/(1 - p)."""
    return x if mask is None else (x * mask).to(x.dtype)


def add_residual(x, y, bias, mask):
    """Return x + dropout(y + bias), the residual stream after a sublayer.

    x, y, mask: [b, s, h]; y is already summed over the ranks. bias: [h]. bias and mask may be None.
    """
    branch = drop(y if bias is None else y + bias, mask)
    return x + branch if branch is y else branch.add_(x)


def residual_backward(gradient, mask, has_bias):
    """Turn the gradient of x + dropout(y + bias) into the gradients of x, y and bias (None without a bias).

    Without dropout, the gradients of x and y are the same tensor, so the caller must not write to either.
    """
    grad_y = drop(gradient, mask)
    return gradient, grad_y, grad_y.sum(dim=(0, 1), dtype=wide_dtype(grad_y)) if has_bias else None
