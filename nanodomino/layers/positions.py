"""Says at which position each token is.

Attention treats its input as a set: without positions, "dog bites man" equals "man bites dog". There are two ways to
add positions:

    learned_absolute   a vector per position, added to the word embedding (GPT-2); limited to the trained positions
    rope               q and k of each head are rotated by angles proportional to the position (RoFormer, 2104.09864)

**Rotary positions.** Split the d numbers of a head into d/2 pairs: number i of the first half with number i of the
second. Rotate pair i of the token at position m by the angle m w_i, with w_i = base^(-2i/d). The first pair turns by
one radian per position, the last one hardly at all. A dot product does not change if both vectors are rotated equally,
so the score of q at position m and k at position n depends only on m - n:

    (R(m) q) . (R(n) k)  =  q . R(n - m) k         R: block diagonal, [[cos, -sin], [sin, cos]] for each pair

Rope has no parameters, adds nothing to the residual stream, and lets a window start at any position. Its backward
rotates the gradient by the opposite angle.

Angles are computed in fp32, with the same order of operations as in Llama's own code and in Transformers. Rounding
makes an angle wrong by up to about 2^-24 times the position (0.01 radian at position 131,072). Published models were
trained with exactly these errors, so they must be reproduced.

**Longer contexts than a model was trained with.** Position interpolation (2306.15595) divides all positions by a
factor. Llama 3.1's scaling divides only the low frequencies, whose wavelengths exceed the original context of 8192
tokens. It keeps the high frequencies, which tell neighbouring tokens apart, and blends both rules in between.
"""

import math
from functools import lru_cache

import torch

from nanodomino.comm.world import kind_of

# Constants of Llama 3.1's scaling; published models differ only in the factor
ORIGINAL_LENGTH, LOW_FREQUENCY, HIGH_FREQUENCY = 8192, 1.0, 4.0
POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")


def rotary_frequencies(config) -> torch.Tensor:
    """Return the angles w [pairs] in radians per position, in fp32."""
    size = rotary_size(config)
    frequencies = 1.0 / config.rotary_base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    frequencies = frequencies / config.rotary_seq_len_interpolation_factor
    if not config.use_rope_scaling:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    kept = ((ORIGINAL_LENGTH / wavelengths - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / config.rope_scaling_factor + kept * frequencies


def rotary_size(config) -> int:
    """Return how many of the d numbers of a head are rotated. The others, at the end, stay as they are."""
    return int(config.kv_channels * config.rotary_percent)


@lru_cache(maxsize=8)
def rotary_table(config, device: torch.device) -> torch.Tensor:
    """Return (cos, sin) of all angles in fp32 as one tensor [2, positions, 1, 1, pairs], to broadcast over heads."""
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, rotary_frequencies(config))
    return torch.stack([angles.cos(), angles.sin()]).to(device)[:, :, None, None]


def rotation(config, positions, s: int, device):
    """Return (cos, sin) for s tokens, or None if the model has no rope. positions: [b, s]; None: 0 .. s - 1."""
    if not config.rope:
        return None
    table = rotary_table(config, device)
    return table[:, :s] if positions is None else table[:, positions]


def rotate(x, rotary):
    """Rotate x [b, s, groups, heads per group, d] by rotary = (cos, sin). Compute in fp32 or wider; keep x's dtype."""
    cos, sin = rotary
    first, second, rest = x.split([cos.size(-1), cos.size(-1), x.size(-1) - 2 * cos.size(-1)], dim=-1)
    rotated = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    return torch.cat([*(half.to(x.dtype) for half in rotated), rest], dim=-1)


def inverse_rotation(rotary):
    """Return the opposite rotation. The backward of rotate() is rotate(gradient, inverse_rotation(rotary))."""
    cos, sin = rotary
    return cos, -sin


def to_device(x, device: torch.device):
    """Copy a tensor from the host's memory to `device`: to a GPU from pinned memory, so that the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if kind_of(device) == "cuda" else x
