"""What a sublayer needs besides the residual stream: dropout masks, rotary positions, the attention bias.

All three depend only on the samples in a slice, not on anything that ran earlier. On a given type of device, a dropout
mask is a pure function of (seed, sample, site), where a site is a name such as "layers.3.mlp". So results don't depend
on the layout, even with dropout:

    residual stream   [b, s, h]          every tp rank draws the same mask for its copy of the stream
    attention         [b, heads, s, s]   every tp rank draws the mask of all heads and keeps the part for its own heads

A sample is identified by its number in the data order. So a different slicing, a recomputation or a resumed run draws
the same mask again.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanodomino.layers.gradients import wide_dtype
from nanodomino.layers.attention_mask import rotation


@dataclass(frozen=True)
class AttentionInputs:
    """Holds what attention needs besides q, k and v. Each field may be None."""
    dropout_mask: torch.Tensor | None        # [b, heads/t, s, s], for the attention probabilities
    rotary: torch.Tensor | None              # (cos, sin), see rotation() in positions.py
    attention_bias: torch.Tensor | None = None     # [b, 1, s, s], added to the scores; None: plain causal attention
    extend_cache: Callable | None = None     # in generation: k, v of new tokens -> k, v of all tokens
    attend: Callable | None = None           # computes attention from q, k, v in place of torch's fused kernel


class MasksAndPositions:
    """Makes the masks, rotary angles and attention bias of one slice.

    sample_ids: the numbers of the b samples in the data order; None (in evaluation): no dropout
    keep: cache the residual-stream masks, because backward needs each of them once more
    stream: how tp ranks share the residual stream (overlap/slices.py); None: every rank holds all rows
    positions: [b, s], see positions.py; None: each sample has positions 0 .. s - 1
    extras: what options have added to the batch; see data.Batch
    """

    def __init__(self, config, mesh, sample_ids=None, keep=False, stream=None, positions=None, extras=None):
        self.config, self.mesh, self.sample_ids, self.keep, self.kept = config, mesh, sample_ids, keep, {}
        self.stream, self.positions, self.extras = stream, positions, extras or {}
        self.shared = None                                     # fields of AttentionInputs that all layers share

    def draw_masks(self, site, shape, probability, like):
        """Draw a mask [b, *shape] of 0 and 1/(1 - probability). Return None if nothing is dropped.

        probability: the probability of 0. like: the mask gets this tensor's device, and its dtype unless fp32 is wider.
        """
        if self.sample_ids is None or probability == 0.0:
            return None
        masks = torch.empty(len(self.sample_ids), *shape, device=like.device, dtype=wide_dtype(like))
        for mask, sample in zip(masks, self.sample_ids):
            mask.bernoulli_(1.0 - probability, generator=seeded_generator(like.device, self.config.seed, sample, site))
        return masks.div_(1.0 - probability)

    def hidden_dropout_mask(self, site, x):
        """Return the dropout mask for the residual stream, with the shape of x: this rank's rows [b, s or s/t, h]."""
        if site in self.kept:
            return self.kept.pop(site)
        s = x.size(1) * (self.stream.shards * self.config.cp if self.stream else 1)
        mask = self.draw_masks(site, (s, x.size(2)), self.config.hidden_dropout, x)
        if mask is not None and self.stream:
            mask = self.stream.own_rows(self.config.own_places(mask, self.mesh))
        if self.keep:
            self.kept[site] = mask
        return mask

    def attention_dropout_mask(self, site, s, like):
        """Return the dropout mask [b, heads, s, s] of all heads; see draw_masks()."""
        heads = self.config.num_attention_heads
        return self.draw_masks(site + ".core", (heads, s, s), self.config.attention_dropout, like)

    def attention_inputs(self, sublayer, x) -> AttentionInputs | None:
        """Return the AttentionInputs for this rank's heads; None for an MLP. x [b, s, ..] has all s tokens."""
        if not sublayer.attends:
            return None
        s = x.size(1)
        mask = self.attention_dropout_mask(sublayer.site, s, x)
        if mask is not None:                                   # clone: a view would keep the masks of all heads alive
            mask = mask.chunk(self.mesh.tp, dim=1)[self.mesh.tp_rank].clone()
        if self.shared is None:
            self.shared = dict(rotary=rotation(self.config, self.positions, s, x.device),
                               **self.config.attention_extras(self.extras, x.device))
        return AttentionInputs(mask, **self.shared)


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
