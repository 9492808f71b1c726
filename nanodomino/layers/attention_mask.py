"""Says at which position each token is, and which tokens it sees.

Attention treats its input as a set: without positions, "dog bites man" equals "man bites dog". Two ways to add them:

    learned_absolute   a vector per position, added to the word embedding (GPT-2); limited to the trained positions
    rope               q and k of each head are rotated by angles proportional to the position (RoFormer, 2104.09864)

**Rotary positions.** Split the d numbers of a head into d/2 pairs: number i of the first half with number i of the
second. Rotate pair i of the token at position m by the angle m w_i, with w_i = base^(-2i/d). The first pair turns by
one radian per position, the last one hardly at all. A dot product does not change if both vectors are rotated equally,
so the score of q at position m and k at position n depends only on m - n:

    (R(m) q) . (R(n) k)  =  q . R(n - m) k         R: block diagonal, [[cos, -sin], [sin, cos]] for each pair

Rope has no parameters and adds nothing to the residual stream. Its backward rotates the gradient by the opposite angle.
Angles are computed in fp32, with the same order of operations as in Llama's own code and in Transformers. Rounding
makes an angle wrong by up to about 2^-24 times the position (0.01 radian at position 131,072). Published models were
trained with exactly these errors, so we reproduce them.

**Longer contexts than a model was trained with.** Position interpolation (2306.15595) divides all positions by a
factor. Llama 3.1's scaling divides only low frequencies, whose wavelengths exceed the original context of 8192 tokens.
High frequencies, which tell neighbouring tokens apart, stay. Frequencies in between get a blend of both.

**Which tokens a token sees.** A query sees all keys from a *first place* up to its own place. A place is the index of a
token in its sample. So every rule only moves the first place, and an AttentionMask holds the result:

    causal                   the first place is 0
    --reset-attention-mask   the start of the query's document
    --window-size W          W places before the query, but at least 0
    both                     the later of the two

The queries are all tokens of the samples, a rank's share of them (context parallelism) or the new tokens (generation).
Attention is computed in one of three ways. torch's causal attention reads no mask: it fits if all first places are 0. A
bias adds -inf to the score of each key that a query does not see. In 16 bit, the bias of 32,768 tokens takes 2.1 GB,
and many scores are computed only to be discarded. torch's varlen_attn, a form of flash attention, avoids both. But it
takes no dropout and only 16-bit numbers, and CPUs do not have it. It works on *runs*: consecutive queries of one
document, and the keys that they see.

    samples      a  b  #  c | d  e  #  #         #: end-of-text; each sample starts a document, too
    documents    0  0  0  1 | 0  0  0  1
    starts       0        3   4        7   8     the last number is the number of all queries

If a run has more keys than queries, the kernel aligns their *ends*. The keys of one run follow those of the previous
run, so a key that two runs see is copied. For two ranks that share a sample of one document:

    rank 0    queries 0 1    keys 0 1              rank 1    queries 2 3 4 5    keys 0 1 2 3 4 5
              queries 6 7    keys 0 1 .. 7
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from nanodomino.comm.device import has_flash_attention, kind_of

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
    """Return cos and sin of all angles in fp32 as one tensor [2, positions, 1, 1, pairs], to broadcast over heads."""
    if device.type == "meta":                                  # a dry run needs no numbers
        return torch.empty(2, config.max_position_embeddings, 1, 1, rotary_size(config) // 2, device=device)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, rotary_frequencies(config))
    return torch.stack([angles.cos(), angles.sin()]).to(device)[:, :, None, None]


def rotation(config, positions, s: int, device):
    """Return (cos, sin) for s tokens, or None if the model has no rope. positions: [b, s]; None: 0 .. s - 1."""
    return rotary_table(config, device)[:, slice(s) if positions is None else positions] if config.rope else None


def rotate(x, rotary):
    """Rotate x [b, s, groups, heads per group, d] by rotary = (cos, sin). Compute in fp32 or wider; keep x's dtype."""
    cos, sin = rotary
    first, second, rest = x.split([cos.size(-1), cos.size(-1), x.size(-1) - 2 * cos.size(-1)], dim=-1)
    rotated = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    return torch.cat([*(half.to(x.dtype) for half in rotated), rest], dim=-1)


def to_device(x, device: torch.device):
    """Copy a tensor from the host's memory to `device`: to a GPU from pinned memory, so that the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if kind_of(device) == "cuda" else x.to(device)


# ---- which tokens a token sees

@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Says which keys each query sees. All tensors are in the host's memory."""
    places: torch.Tensor                     # [m], the place of each query
    begins: torch.Tensor                     # [b, m], where each query's document begins; [1, m] of zeros to ignore it
    window: int | None                       # how many tokens before itself a query sees; None: all
    keys: int                                # the number of keys of a sample
    stored: torch.Tensor | None = None       # [b, keys], where each key lies in the tensor of all keys; None: in order

    @property
    def first(self):
        """The place of the first key that each query sees, [b or 1, m]."""
        return self.begins if self.window is None else self.begins.maximum(self.places - self.window)

    @property
    def causal(self) -> bool:
        """Whether each query sees exactly the keys up to its own, and there are as many queries as keys."""
        return self.stored is None and len(self.places) == self.keys and not (self.first > 0).any()

    def bias(self, dtype, device: torch.device):
        """Return what is added to the scores, [b or 1, 1, m, keys]: 0 where a query sees a key, else -inf."""
        first, places = to_device(self.first, device)[:, None, :, None], to_device(self.places, device)[:, None]
        keys = torch.arange(self.keys, device=device)
        seen = (first <= keys) & (keys <= places)
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)

    def runs(self, device: torch.device, samples: int | None = None) -> "Runs":
        """Return the runs. samples: b, needed only if `begins` is one row for all samples."""
        b, m = samples or len(self.begins), len(self.places)
        starts = torch.ones(b, m, dtype=torch.bool)
        starts[:, 1:] = (self.places.diff() != 1) | (self.begins.diff(dim=1) != 0)
        starts = F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=b * m)
        queries = to_device(starts.int(), device), int(starts.diff().max())
        if self.stored is None and m == self.keys:                                 # each run sees only its own keys
            return Runs(*queries, *queries, self.window)
        first = self.first.expand(b, m).flatten()[starts[:-1]]
        lengths = self.places.repeat(b)[starts[1:] - 1] + 1 - first
        key_starts = F.pad(lengths.cumsum(0), (1, 0))
        sample_starts = starts[:-1].div(m, rounding_mode="floor") * self.keys
        index = torch.arange(key_starts[-1]) + (first + sample_starts - key_starts[:-1]).repeat_interleave(lengths)
        index = index if self.stored is None else self.stored.flatten()[index]
        return Runs(*queries, to_device(key_starts.int(), device), int(lengths.max()), self.window,
                    to_device(index.unsqueeze(0), device))

    def inputs(self, config, samples: int, device: torch.device) -> dict:
        """Return the fields of AttentionInputs with which attention obeys this mask in training. samples: b. With
        documents, every batch takes the kernel that the warm-up has loaded."""
        if not config.reset_attention_mask and self.causal:
            return {}
        if uses_varlen(config, device):
            runs = self.runs(device, samples)
            return dict(runs=runs, keys=runs.keys)
        return dict(bias=self.bias(config.params_dtype, device),
                    keys=None if self.stored is None else to_device(self.stored, device))


@dataclass(frozen=True, eq=False)
class Runs:
    """The sequences that varlen_attn takes: all runs of a slice, one after the other, and their keys."""
    starts: torch.Tensor                     # [runs + 1] int32: the first query of each run, then the number of queries
    longest: int                             # the number of queries of the longest run
    key_starts: torch.Tensor                 # [runs + 1] int32, the same for keys
    longest_keys: int
    window: int | None                       # how many tokens before itself a query sees; None: all of the run's keys
    keys: torch.Tensor | None = None         # [1, keys of all runs], where each key is stored; None: as the queries


@dataclass(frozen=True)
class AttentionInputs:
    """Holds what attention needs besides q, k and v. Without bias and runs, attention is causal."""
    dropout_mask: torch.Tensor | None        # [b, heads/t, s, s], for the attention probabilities
    rotary: torch.Tensor | None              # (cos, sin), see rotation()
    bias: torch.Tensor | None = None         # see AttentionMask.bias()
    runs: Runs | None = None                 # for varlen_attn in place of torch's fused kernel
    keys: torch.Tensor | None = None         # which of the gathered keys attention reads (context parallelism)
    extend_cache: Callable | None = None     # in generation: k, v of new tokens -> k, v of all tokens


def uses_varlen(config, device: torch.device) -> bool:
    """Return whether attention that is not plainly causal uses varlen_attn on this device."""
    channels = config.kv_channels              # the kernel takes multiples of 8; above 192, some GPUs have no backward
    return (config.params_dtype.itemsize == 2 and config.attention_dropout == 0 and channels % 8 == 0
            and channels <= 192 and has_flash_attention(device))


def document_begins(documents):
    """Return the place where each token's document begins in its sample, [b, s], for document numbers [b, s]."""
    places = torch.arange(documents.size(1), device=documents.device).expand_as(documents)
    return places.where(F.pad(documents.diff(dim=1) != 0, (1, 0)), 0).cummax(dim=1).values
