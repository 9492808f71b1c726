"""Where a token stands, and what it may look at.

Attention sees a set: without a word about places, "dog bites man" is "man bites dog". Two ways of telling it:

    learned_absolute   a vector for each place, added to the word's at the model's begin (GPT-2); none beyond the last
    rope               in each head, q and k are turned by angles that grow with their place (RoFormer, 2104.09864)

**Rotary positions.** Take d numbers of a head as d/2 pairs, the first half with the second. Pair i of a token at place
m is turned by the angle m w_i, w_i = base^(-2i/d): the first by a radian a place, the last hardly at all. A turn by A
and one by B differ by A - B, so a product of q at m with k at n depends on m - n alone:

    (R(m) q) . (R(n) k)  =  q . R(n - m) k             R: block diagonal, [[cos, -sin], [sin, cos]] for each pair

Nothing is learned, nothing added to the stream; a window may begin anywhere. Backward turns gradients back. Angles are
of fp32, computed in the order in which Llama's own code and Transformers do it: they are off by up to about 2^-24 of
the place, 0.01 radian at 131,072, and models have been trained with just that.

**More places than a model was trained with.** Interpolation (2306.15595): places are divided by a factor. Llama 3.1's
scaling divides the slow frequencies by it, whose wave is longer than the text was (8192), keeps the fast ones, which
tell neighbours apart, and goes from one to the other in between.

**Documents.** A sample is a window of a long row of documents. Tokens can be kept from looking into the document before
their own, and begin to count places anew (Megatron-LM's --reset-attention-mask and --reset-position-ids): then a packed
sample is what its documents would be one by one. The end-of-text belongs to the document that it ends.

    tokens      a  b  c  #  d  e  #  f         #: end-of-text
    documents   0  0  0  0  1  1  1  2
    positions   0  1  2  3  0  1  2  0
"""

import math
from functools import lru_cache

import torch

# Llama 3.1's, of which its makers publish the factor alone as a choice
ORIGINAL_LENGTH, LOW_FREQUENCY, HIGH_FREQUENCY = 8192, 1.0, 4.0
POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")


def rotary_frequencies(config) -> torch.Tensor:
    """w [pairs]: radians a place, in fp32."""
    size = rotary_size(config)
    frequencies = 1.0 / config.rotary_base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    frequencies = frequencies / config.rotary_seq_len_interpolation_factor
    if not config.use_rope_scaling:
        return frequencies
    waves = 2 * math.pi / frequencies
    kept = ((ORIGINAL_LENGTH / waves - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / config.rope_scaling_factor + kept * frequencies


def rotary_size(config) -> int:
    """Of a head's numbers, how many are turned: the first ones."""
    return int(config.kv_channels * config.rotary_percent)


@lru_cache(maxsize=8)
def rotary_table(config, device: torch.device) -> torch.Tensor:
    """(cos, sin) of each place's angles, [2, places, 1, 1, pairs] in fp32: the same for every group and head."""
    places = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(places, rotary_frequencies(config))
    return torch.stack([angles.cos(), angles.sin()]).to(device)[:, :, None, None]


def rotation(config, positions, s: int, device):
    """(cos, sin) for s tokens at these positions [b, s] (None: 0 .. s - 1); None where nothing is turned."""
    if not config.rope:
        return None
    table = rotary_table(config, device)
    return table[:, :s] if positions is None else table[:, positions]


def rotate(x, rotary):
    """x [b, s, groups, heads of each, d] turned, in fp32 or wider; rotary: (cos, sin). Its backward: inverse_rotation(rotary)."""
    cos, sin = rotary
    first, second, rest = x.split([cos.size(-1), cos.size(-1), x.size(-1) - 2 * cos.size(-1)], dim=-1)
    turned = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    return torch.cat([*(one.to(x.dtype) for one in turned), rest], dim=-1)


def inverse_rotation(rotary):
    """The opposite turn."""
    cos, sin = rotary
    return cos, -sin


# ---- documents

def document_ids(tokens, end_of_text: int):
    """tokens [b, s] -> the number, in its sample, of each one's document [b, s]."""
    ends = (tokens == end_of_text).long()
    return ends.cumsum(dim=1) - ends


def positions_within_documents(documents):
    """documents [b, s] -> each token's place in its own [b, s]."""
    places = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(dim=1).values


def attention_bias(documents, dtype):
    """[b, 1, s, s] of 0 and -inf, to be added to scores: nobody looks ahead, or into another document."""
    s = documents.size(1)
    past = torch.ones(s, s, dtype=torch.bool, device=documents.device).tril()
    allowed = (documents[:, :, None] == documents[:, None, :]) & past
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, -torch.inf).unsqueeze(1)
