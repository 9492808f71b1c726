"""The state of a slice while domino.py runs it forward and backward: its tensors, its tape, its reports.

WholeTape and NothingBehindHead are defaults, which options may replace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nanodomino.layers.dropout_and_positions import MasksAndPositions
from nanodomino.overlap.ends import HeadTape, SavedResidualNorm
from nanodomino.overlap.linear_pair import Inside
from nanodomino.overlap.slices import Flight


if TYPE_CHECKING:
    from nanodomino.data import Batch
    from nanodomino.model import Chunk


@dataclass
class LinearPairTape:
    """Holds what backward needs of a LinearPair. A field is None after a tape policy has dropped it."""
    column_output: torch.Tensor | None   # c [b, s, .../t]
    core: object                         # what core_backward needs
    activation: torch.Tensor | None      # a [b, s, .../t], the input of the row-parallel matmul


@dataclass
class TapeEntry:
    """Holds what forward keeps of one sublayer. Dropped tensors are None."""
    inside: Inside
    norm: SavedResidualNorm
    h: torch.Tensor | None               # the norm's output [b, s, h]; only this rank's rows if the stream is sharded
    inside_tape: LinearPairTape          # or what another inside keeps
    h_flights: list[Flight] | None = None    # set in backward: the flights that gather all rows of h


@dataclass(eq=False)
class Slice:
    """Holds the state of one slice (some samples of a microbatch) in one chunk of the stage."""
    index: int
    chunk: Chunk
    batch: Batch
    hidden: torch.Tensor | None                        # [b, s, h] from the previous chunk; None in the first
    masks_and_positions: MasksAndPositions
    training: bool
    tape: list[TapeEntry] = field(default_factory=list)
    head: HeadTape | None = None
    behind_head: object = None                         # the tape of what an option runs behind the head
    output: torch.Tensor | None = None                 # hidden states [b, s, h]; the last chunk: losses [b, s]
    deferred: list | None = None                       # (site, matmuls, modules) for weight_backward()
    loss_scale: float = 1.0                            # the scale of losses that options add by themselves


class GradientsReady:
    """Collects the slices' reports. Each slice calls this object with the modules whose gradients it has finished. The
    last slice's call passes them to on_gradients_ready, if any; several times, if a slice uses them several times."""

    def __init__(self, slices: int, on_gradients_ready):
        self.slices, self.on_gradients_ready, self.remaining = slices, on_gradients_ready, {}

    def __call__(self, *modules):
        self.remaining[modules] = (self.remaining.get(modules) or self.slices) - 1
        if self.on_gradients_ready and self.remaining[modules] == 0:
            self.on_gradients_ready(modules)


class WholeTape:
    """Keeps all that backward needs. This is the default of a tape policy; options may keep less and restore it."""
    restores = False                     # whether backward must call an inside's restore()
    keeps_masks = True                   # whether the dropout masks of the residual stream are kept

    def keep(self, entry: TapeEntry) -> TapeEntry:
        """Drop from the entry what backward does not need."""
        entry.inside_tape.column_output = None                 # `core` holds what backward needs of it
        return entry

    def bring_back_h(self, tape: list[TapeEntry]):
        """Return h of the tape's last entry."""
        return tape[-1].h


class NothingBehindHead:
    """Runs nothing between a slice's head and the end of its forward. Options may run further layers there."""
    chunks = ()                          # chunks of further layers

    def forward(self, slice):
        """Return a generator, or an empty tuple if there is nothing to run."""
        return ()

    def backward(self, slice, ready):
        """Return a generator whose result is the gradient of the slice's hidden states; () if there is none."""
        return ()
