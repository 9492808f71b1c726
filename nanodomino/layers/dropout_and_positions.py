"""What a sublayer needs besides the residual stream: dropout masks, rotary positions, the attention mask.

All three depend only on the samples in a slice, not on anything that ran earlier. A dropout mask is a pure function of
(seed, sample, site, type of device). A site is a name such as "layers.3.mlp". So dropout does not depend on the layout:

    residual stream   [b, s, h]          every tp rank draws the same mask for its copy of the stream
    attention         [b, heads, s, s]   every tp rank draws the mask of all heads and keeps the part for its own heads

A sample is its number in the data order. So a different slicing, a recomputation or a resumed run draws the same mask.
"""

import hashlib

import torch

from nanodomino.layers.attention_mask import AttentionInputs, AttentionMask, document_begins, rotation
from nanodomino.layers.gradients import wide_dtype


def seeded_generator(device, *key) -> torch.Generator:
    """Return a generator seeded only by `key`, so that every rank, layout and run draws the same numbers."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    device = "cpu" if torch.device(device).type == "meta" else device
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class MasksAndPositions:
    """Makes the dropout masks, rotary angles and attention masks of one slice.

    sample_ids: the numbers of the b samples in the data order; None (in evaluation): no dropout
    keep: cache the residual-stream masks, because backward needs each of them once more
    stream: how tp ranks share the residual stream (overlap/slices.py); None: every rank holds all rows
    positions: [b, s], see attention_mask.py; None: each sample has positions 0 .. s - 1
    extras: what options have added to the batch; see data.Batch
    """

    def __init__(self, config, mesh, sample_ids=None, keep=False, stream=None, positions=None, extras=None):
        self.config, self.mesh, self.sample_ids, self.keep, self.kept = config, mesh, sample_ids, keep, {}
        self.stream, self.positions, self.documents = stream, positions, (extras or {}).get("documents")
        self.visible = {}                # {window: fields of AttentionInputs that all layers with this window share}

    def draw_masks(self, site, shape, probability, like):
        """Draw a mask [b, *shape] of 0 and 1/(1 - probability). Return None if nothing is dropped. probability: the
        probability of 0. like: the mask gets this tensor's device, and its dtype unless fp32 is wider."""
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

    def attention_inputs(self, sublayer, x, own_part=None, own_queries=None, ranks=1) -> AttentionInputs | None:
        """Return the AttentionInputs for this rank's heads and queries; None for an MLP. x: [b, s/ranks, ..].

        own_part: takes the dropout mask of all heads, and returns this rank's part; None: of all s queries
        own_queries: returns the fields places and stored of an AttentionMask for (b, s); None: all s tokens
        ranks: the number of ranks that share the s tokens of a sample
        """
        if not sublayer.attends:
            return None
        b, s, mesh, config = x.size(0), x.size(1) * ranks, self.mesh, self.config
        mask = self.draw_masks(sublayer.site + ".core", (config.num_attention_heads, s, s), config.attention_dropout, x)
        if mask is not None:                                   # clone: a view would keep the masks of all heads alive
            mask = own_part(mask) if own_part else mask.chunk(mesh.tp, dim=1)[mesh.tp_rank].clone()
        if not self.visible:                                   # the first attention of the slice
            self.rotary = rotation(config, self.positions, x.size(1), x.device)
            self.begins = (torch.zeros(1, 1, dtype=torch.int64).expand(1, s) if self.documents is None
                           else document_begins(self.documents))
        if sublayer.window not in self.visible:
            self.visible[sublayer.window] = {}
            if own_queries or sublayer.window is not None or self.documents is not None:       # or it is plainly causal
                places, stored = own_queries(b, s) if own_queries else (torch.arange(s), None)
                places = places.to(self.begins.device)         # the host's memory, except in a dry run
                visible = AttentionMask(places, self.begins[:, places], sublayer.window, s, stored)
                self.visible[sublayer.window] = visible.inputs(config, b, x.device)
        return AttentionInputs(mask, self.rotary, **self.visible[sublayer.window])
