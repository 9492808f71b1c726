"""What sublayers are told beside the stream: what is dropped, where tokens stand, what they may look at.

All of it follows from the samples that are in a slice, and from nothing that happened before. Dropout's masks are a
pure function of (seed, sample, site in the model), on one type of device: the layout never shows, not even in dropout.
"""

import hashlib
from dataclasses import dataclass

import torch

from nanodomino.layers.positions import attention_bias, rotation
from nanodomino.overlap.sequence_parallel import Whole


@dataclass(frozen=True)
class Around:
    """What an attention is told beside its input; each may be None."""
    mask: torch.Tensor | None            # dropout of the probabilities [b, heads, s, s]
    turn: torch.Tensor | None            # (cos, sin) of rotary positions, see rotary_table in positions.py
    bias: torch.Tensor | None            # [b, 1, s, s], added to the scores; None: everything before


class Surroundings:
    """Of a slice's samples.

    A mask is drawn for the whole sample and all heads, from a generator seeded by the sample's number in the run (its
    place in the data order) and the name of the site. So tensor-parallel ranks agree where the stream is replicated,
    hold different heads' masks where it is sharded, and any slicing or resuming repeats the same bits.
    Without sample_ids (evaluation) there are none. keep: those of the stream, of which backward asks for each again.
    stream: how it lies on the ranks (stream.py); None: whole. positions, documents [b, s]: see positions.py; None: a
    sample is one document, from place 0 on.
    """

    def __init__(self, config, mesh, sample_ids=None, keep=False, stream=None, positions=None,
                 documents=None):
        self.config, self.mesh, self.sample_ids, self.keep, self.kept = config, mesh, sample_ids, keep, {}
        self.stream, self.positions, self.documents = stream or Whole(mesh.tp_group), positions, documents
        self.places = None                                     # (turn, bias): one for all sublayers

    def draw(self, site, shape, probability, like):
        """Masks [b, *shape], scaled by 1/(1 - probability); None where nothing is dropped."""
        if self.sample_ids is None or probability == 0.0:
            return None
        wide = torch.promote_types(like.dtype, torch.float32)
        masks = torch.empty(len(self.sample_ids), *shape, device=like.device, dtype=wide)
        for mask, sample in zip(masks, self.sample_ids):
            mask.bernoulli_(1.0 - probability, generator=seeded_generator(like.device, self.config.seed, sample, site))
        return masks.div_(1.0 - probability)

    def hidden(self, site, x):
        """For a residual stream, of whose rows this rank has x [b, s, h]."""
        if site in self.kept:
            return self.kept.pop(site)
        mask = self.draw(site, (x.size(1) * self.stream.parts, x.size(2)), self.config.hidden_dropout, x)
        mask = mask if mask is None else self.stream.own(mask)
        if self.keep:
            self.kept[site] = mask
        return mask

    def core(self, sublayer, x) -> Around | None:
        """For an attention, of this rank's heads; for an MLP None. x: [b, s, ..], of all s tokens."""
        if not sublayer.attends:
            return None
        heads, s = self.config.num_attention_heads, x.size(1)
        mask = self.draw(sublayer.site + ".core", (heads, s, s), self.config.attention_dropout, x)
        if mask is not None:                                   # a view would keep all heads' masks in memory
            mask = mask.chunk(self.mesh.tp, dim=1)[self.mesh.tp_rank].clone()
        if self.places is None:
            self.places = (rotation(self.config, self.positions, s, x.device),
                           None if self.documents is None else attention_bias(self.documents, x.dtype))
        return Around(mask, *self.places)


def seeded_generator(device, *key) -> torch.Generator:
    """A generator whose stream depends on the key alone: the same on every rank, layout and run."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
