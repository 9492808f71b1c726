"""Says at which position each token is, and to which tokens it may attend.

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

**Documents.** A sample is a window of a long sequence of documents, so it may hold parts of several documents. With two
settings, the model treats each document as if it stood alone. --reset-attention-mask keeps attention inside the token's
own document. --reset-position-ids lets positions restart at 0 in each document (both are Megatron-LM's names). An
end-of-text token belongs to the document that it ends:

    tokens      a  b  c  #  d  e  #  f         #: end-of-text
    documents   0  0  0  0  1  1  1  2
    positions   0  1  2  3  0  1  2  0

**Shared samples.** With context parallelism (context_parallel.py) c ranks share the tokens of a sample. A token's
*place* is its index in the sample. A token attends to all places up to its own. If rank r held the r-th of c equal
parts, the last rank would compute about 2 c - 1 times as many scores as the first. So the sample is cut into 2 c parts,
and rank r holds parts r and 2 c - 1 - r (Llama 3, 2407.21783, section 3.3.2). For c = 2:

    place    0  1 | 2  3 | 4  5 | 6  7         rank 0 computes 1 + 2 + 7 + 8 = 18 scores,
    rank     0  0 | 1  1 | 1  1 | 0  0         rank 1 computes 3 + 4 + 5 + 6 = 18
"""

import math
from functools import lru_cache

import torch

from nanodomino.comm.device import kind_of

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


# ---- documents

def document_ids(tokens, end_of_text: int):
    """Return the number of each token's document within its sample, [b, s], for tokens [b, s]."""
    ends = (tokens == end_of_text).long()
    return ends.cumsum(dim=1) - ends


def positions_within_documents(documents):
    """Return each token's position within its own document, [b, s], for the document numbers [b, s]."""
    positions = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    return positions - positions.where(first_of_document(documents), 0).cummax(dim=1).values


def first_of_document(documents):
    """Return whether each token is the first of its document in this sample, [b, s], for document numbers [b, s]."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def attention_bias(documents, dtype):
    """Return what is added to the scores, [b, 1, s, s]: -inf for later tokens and other documents, 0 for the rest."""
    s = documents.size(1)
    causal = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    allowed = (documents[:, :, None] == documents[:, None, :]) & causal
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, -torch.inf).unsqueeze(1)


# ---- context parallelism

def by_rank(whole, ranks: int, dim=1) -> list[torch.Tensor]:
    """Cut `whole` [b, s, ..] into each rank's places: a list of c tensors [b, s/c, ..]. dim: the dimension of s."""
    parts = whole.chunk(2 * ranks, dim)
    return [torch.cat(both, dim) for both in zip(parts[:ranks], reversed(parts[ranks:]))]


def in_order(own_of_each) -> torch.Tensor:
    """Undo by_rank(): join the places of each rank, c tensors [b, s/c, ..], to whole samples [b, s, ..]."""
    first, second = zip(*(own.chunk(2, dim=1) for own in own_of_each))
    return torch.cat([*first, *reversed(second)], dim=1)


def own_places(whole, mesh, dim=1) -> torch.Tensor:
    """Return this rank's places of `whole` [b, s, ..]; without context parallelism, `whole` itself."""
    return whole if mesh.cp == 1 else by_rank(whole, mesh.cp, dim)[mesh.cp_rank]


# ---- host and device

def to_device(x, device: torch.device):
    """Return a tensor of the host's memory on `device`. A GPU copies it from pinned memory, so the host does not wait.
    """
    return x.pin_memory().to(device, non_blocking=True) if kind_of(device) == "cuda" else x
