"""Decides what the tape keeps of a sublayer and what backward recomputes (2205.05198, sections 4 and 5).

In forward, a sublayer computes these tensors one after another. Backward needs all of them except y:

    x, h = residual + norm      c = h W1^T + b1      a = core(c)      y = sum over tp of a W2^T

Backward can recompute each tensor from any earlier one. --recompute-granularity says which tensors are kept. The bytes
are for one layer of GPT-2; X is one activation [b, s, h] (estimate/formulas.py has the sources):

    granularity  kept                             bytes            recomputed
    none         x, h, what the core keeps, a     (4 + 12/t) X     nothing
    selective    x, h, c                          (4 +  7/t) X     the core: attention, gelu
    full         x                                       2 X       the norm, the column-parallel matmul, the core

If the residual stream is sharded (sequence_parallel.py), a rank keeps only 1/t of x and h, so the 4 above becomes 4/t
and the 2 becomes 2/t. Recomputing c then needs all rows of h, but backward gathers them anyway for a weight gradient.

**No reduce is repeated.** The x that is kept already contains the previous all-reduce's result, and a is the last
tensor that backward needs. So everything that is recomputed lies between two all-reduces. The row-parallel matmul is
not repeated either, because backward does not need its result. So full recomputation repeats attention and 7/12 of a
GPT-2 layer's matmuls (about 2/3 with SwiGLU).

**The gradients have the same bits.** Every operation runs again on the same operands, and dropout masks are drawn again
from the same seeds. There is one exception, with torch.compile in 16 bits: forward's fused residual + norm computes h
from x' before rounding x' to 16 bits, but recomputation starts from the rounded x'.

**When.** Recomputation needs no reduce, so it can hide one. While the reduce of the gradient of sublayer k's h is in
flight, the slice restores sublayer k - 1. So at most one sublayer's activations exist beyond what the tape keeps:

    backward of k     W2, core, W1  ->  [ all-reduce of the gradient of h .................. ]  wait, residual + norm
                                        fetch x, h of k - 1 | weight gradients of k | c, a of k - 1

Three classes share the work. Domino (domino.py) owns the tape, launches and waits. RecomputingTape below decides what a
tape entry keeps, and recomputes h. The sublayer's inside (LinearPair in domino.py) recomputes c and a.

With full recomputation, --checkpoint-in-cpu also moves x to the host's memory (host_offload.py).
"""

from dataclasses import replace

from nanodomino.comm.world import kind_of
from nanodomino.options.recompute import HostMemory
from nanodomino.overlap.slices import TapeEntry

# The fields dropped at the end of a sublayer's forward: "h" is a field of TapeEntry, the others of its inside_tape.
GRANULARITIES = {"none": (),
                 "selective": ("core", "activation"),
                 "full": ("h", "column_output", "core", "activation")}


class RecomputingTape:
    """Keeps of a sublayer what --recompute-granularity says. Implements the methods of overlap.slices.WholeTape."""
    restores = True

    def __init__(self, config, device, slices: int, residual_norm):
        self.drops, self.residual_norm = GRANULARITIES[config.recompute_granularity], residual_norm
        self.keeps_masks = "h" not in self.drops               # the dropout masks of the residual stream
        self.host = HostMemory(device, slices) if config.offloads_to_host and kind_of(device) == "cuda" else None

    def keep(self, entry: TapeEntry) -> TapeEntry:
        """Drop what backward will recompute, and start to move x to the host if it is to be kept there."""
        for name in self.drops:
            setattr(entry if name == "h" else entry.inside_tape, name, None)
        if self.host:
            entry.norm = replace(entry.norm, x=self.host.leave(entry.norm.x))
        return entry

    def bring_back_h(self, tape: list[TapeEntry]):
        """Return h of the tape's last entry, recomputed if needed. Start to fetch the previous entry's x."""
        entry = tape[-1]
        if self.host:
            entry.norm.x = self.host.take(entry.norm.x)
            if len(tape) > 1:
                self.host.fetch(tape[-2].norm.x)
        return self.residual_norm.norm_again(entry.norm) if entry.h is None else entry.h
