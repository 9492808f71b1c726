"""What the tape keeps of a sublayer, and what backward computes again (2205.05198, sections 4 and 5).

Forward computes one thing from the other, and backward needs them all but the last:

    x, h = bridge(x, y)    c = h W1^T + b1    a = core(c)    y = sum over tp of a W2^T

Whatever stands behind one that was kept can be computed again from it. --recompute-granularity says what is kept of a
sublayer; of a layer of GPT-2's, with X bytes an activation [b, s, h] (formulas.py counts it for others):

    none         x, h, what the core keeps, a     (4 + 12/t) X     nothing is computed again
    selective    x, h, c                          (4 +  7/t) X     the core: attention, gelu
    full         x                                       2 X       the norm, the column-parallel product, the core

Where the stream is cut along its tokens (stream.py) x and h are parts of 1/t, so each number with no 1/t gets one, and
h is gathered for c again, which is the gather that its weight gradient needs anyway.

**No sum is repeated.** x is what it was after the sum before, and a is the last that backward needs, so what is
computed again stands between two sums, and has none of its own. Nor is the row-parallel product repeated, whose result
nobody needs: full recomputation costs 7/12 of the layers' products once more (with SwiGLU 2/3 or so), and attention.
Dropout masks are no state: they are drawn again, from sample and site, and are the same.

Each operation runs again on the same operands, so gradients have the same bits, with one exception: where a compiler
has fused the bridge, h came from a sum that was not yet rounded to 16 bit, and comes from a rounded one now.

What is computed again waits for no sum, so it is cover: backward computes a sublayer's things again while the sum of
the sublayer above is still on its way (input_gradient in domino.py), and holds those of one sublayer at a time. Where
input and weight gradients are apart, what a weight gradient needs stays until that.

--checkpoint-in-cpu (DeepSpeed's name) moves what full recomputation keeps to the host's memory. Each x leaves a GPU
behind the work that follows, and comes back one sublayer before it is needed. On a CPU it is there already.
"""

from dataclasses import dataclass, replace

import torch

from nanodomino.overlap.host_offload import HostMemory


@dataclass
class Link:
    """What backward needs of one sublayer: the bridge into it, its core, and the inputs of its two products. What the
    tape does not keep of it is None."""
    step: object                         # domino.Step
    bridge: object                       # bridge.Bridge: into it
    h: torch.Tensor | None               # into the column-parallel product, as it is in the stream
    c: torch.Tensor | None               # [b, s, .../t], out of it, into the core
    kept: object                         # of the core
    activation: torch.Tensor | None      # [b, s, .../t], into the row-parallel product
    arriving: list | None = None         # for backward: Flights of all of h [b, s, h], in chunks of its features


# What the tape forgets of a link as soon as forward is through with it.
GRANULARITIES = {"none": ("c",),                               # the core keeps what it needs of it
                 "selective": ("kept", "activation"),
                 "full": ("h", "c", "kept", "activation")}


def in_words(config) -> str:
    """', full recomputation from the host's memory'; nothing where nothing is computed again."""
    if config.recompute_granularity == "none":
        return ""
    return f", {config.recompute_granularity} recomputation" + " from the host's memory" * config.checkpoint_in_cpu


class TapePolicy:
    """What a stage's tapes keep."""

    def __init__(self, config, device, slices: int):
        self.forgets = GRANULARITIES[config.recompute_granularity]
        self.keeps_masks = "h" not in self.forgets
        self.host = HostMemory(device, slices) if config.checkpoint_in_cpu and device.type == "cuda" else None

    def keep(self, link):
        """The link, as the tape has it."""
        for name in self.forgets:
            setattr(link, name, None)
        if self.host:
            link.bridge = replace(link.bridge, x=self.host.leave(link.bridge.x))
        return link

    def prepare(self, stage, piece):
        """Begin to bring back what backward of the last link needs, if there is one: x from the host, all rows of h
        from the other ranks. stage: the Domino whose tape it is."""
        if not piece.links:
            return
        link = piece.links[-1]
        if self.host:
            link.bridge.x = self.host.take(link.bridge.x)
            if len(piece.links) > 1:
                self.host.fetch(piece.links[-2].bridge.x)
        if link.h is None:
            _, link.h, *_ = stage.bridge(link.bridge.x, None, None, None, *link.step.norm)
        link.arriving, link.h = stage.spread(piece, link.step.site, link.h), None

    def restore(self, stage, piece):
        """Compute again what the tape has forgotten of the last link, if there is one, after prepare()."""
        if not piece.links or piece.links[-1].activation is not None:
            return
        link = piece.links[-1]
        if link.c is None:
            link.c = stage.product(piece, link.step.site, link.arriving, link.step.column, link.step.column_bias)
        link.activation, link.kept = stage.core(piece, link.step, link.c)
        link.c = None
