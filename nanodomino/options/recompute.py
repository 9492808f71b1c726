"""Decides what the tape keeps of a sublayer and what backward recomputes (2205.05198, sections 4 and 5).

In forward, a sublayer computes these tensors one after another. Backward needs all of them except y:

    x, h = residual + norm      c = h W1^T + b1      a = core(c)      y = sum over tp of a W2^T

Backward can recompute each tensor from any earlier one. --recompute-granularity says which tensors are kept. The bytes
are for one layer of GPT-2; X is one activation [b, s, h] (estimate/formulas.py has the sources):

    granularity  kept                             bytes            recomputed
    none         x, h, what the core keeps, a     (4 + 12/t) X     nothing
    selective    x, h, c                          (4 +  7/t) X     the core: attention, gelu
    full         x                                       2 X       the norm, the column-parallel matmul, the core

If the residual stream is sharded (sequence_parallel.py), a rank keeps only 1/t of x and h. Recomputing c then needs all
rows of h, but backward gathers them anyway for a weight gradient.

**No reduce is repeated.** The x that is kept already contains the previous all-reduce's result, and a is the last
tensor that backward needs. So all that is recomputed lies between two all-reduces. The row-parallel matmul is not
repeated either, because backward does not need y. So full recomputation repeats attention and 7/12 of a GPT-2 layer's
matmuls (about 2/3 with SwiGLU).

**The gradients have the same bits.** Every operation runs again on the same operands, and dropout masks are drawn again
from the same seeds. There is one exception, with torch.compile in 16 bits: forward's fused residual + norm computes h
from x' before rounding x' to 16 bits, but recomputation starts from the rounded x'.

**When.** Recomputation needs no reduce, so it can hide one. While the reduce of the gradient of sublayer k's h is in
flight, the slice restores sublayer k - 1. So at most one sublayer's activations exist beyond what the tape keeps:

    backward of k     W2, core, W1  ->  [ all-reduce of the gradient of h .................. ]  wait, residual + norm
                                        fetch x, h of k - 1 | weight gradients of k | c, a of k - 1

**In the host's memory.** With full recomputation, --checkpoint-in-cpu (DeepSpeed's name) also copies each sublayer's
input x to the host while later sublayers compute, and copies it back one sublayer before backward needs it. On a CPU it
has no effect. Copies run on two CUDA streams, one for each direction, beside the compute stream:

    forward      compute   | sublayer 0 | sublayer 1 | sublayer 2 | ...
                 out                    | x0         | x1         | ...
    backward     compute   | ... | sublayer 2 | sublayer 1 | sublayer 0 |
                 back            | x1         | x0         |

CUDA events order the streams. In forward the compute stream waits for the oldest copy, and then frees the GPU memory of
the copied x. With record_stream() it would not have to wait. But then the allocator could reuse the memory only after
the *host* has seen that the copy is done. The host runs ahead of the GPU, so it would see no finished copy and allocate
new memory for every x. torch's allocator of pinned memory has the same problem. So HostMemory keeps its pinned buffers,
and reuses each one after the compute stream has waited for its copy back.
"""

from collections import deque
from dataclasses import dataclass, replace

import torch

from nanodomino.comm.device import kind_of, streams_of
from nanodomino.overlap.slices import TapeEntry

# The fields dropped at the end of a sublayer's forward: "h" is a field of TapeEntry, the others of its branch_tape.
# column_output is always dropped: while `core` is kept, it holds what backward needs of column_output.
GRANULARITIES = {"none": ("column_output",), "selective": ("core", "activation"),
                 "full": ("h", "column_output", "core", "activation")}


class TapePolicy:
    """Decides, by --recompute-granularity, what the tape keeps of a sublayer, and recomputes the rest in backward."""

    def __init__(self, config, device, slices: int, residual_norm):
        self.drops, self.residual_norm = GRANULARITIES[config.recompute_granularity], residual_norm
        self.restores = "core" in self.drops                   # whether backward must call a branch's restore()
        self.keeps_masks = "h" not in self.drops               # the dropout masks of the residual stream
        offloads = config.checkpoint_in_cpu and not self.keeps_masks and kind_of(device) == "cuda"
        self.host = HostMemory(device, slices) if offloads else None

    def keep(self, entry: TapeEntry) -> TapeEntry:
        """Drop what backward will not need or will recompute, and start to move x to the host if it is kept there."""
        for name in self.drops:
            setattr(entry if name == "h" else entry.branch_tape, name, None)
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


@dataclass
class Offloaded:
    """Holds an x that is in the host's memory, or is being copied there or back."""
    host: torch.Tensor                             # pinned
    x: torch.Tensor | None                         # on the GPU; None after the copy to the host, until it is fetched
    fetched: torch.cuda.Event | None = None        # recorded after the copy back


class HostMemory:
    """Moves activations between a GPU and pinned host memory. At most max_leaving copies to the host are in flight."""

    def __init__(self, device, max_leaving: int):
        self.device, self.max_leaving, self.streams = device, max_leaving, streams_of(device)
        self.out_stream, self.back_stream = self.streams.Stream(device), self.streams.Stream(device)
        self.leaving = deque()                     # (Offloaded, event after its copy)
        self.free = {}                             # (shape, dtype) -> [unused pinned buffer]

    def leave(self, x) -> Offloaded:
        """Start to copy x to the host."""
        free = self.free.setdefault((x.shape, x.dtype), [])
        offloaded = Offloaded(free.pop() if free else torch.empty(x.shape, dtype=x.dtype, pin_memory=True), x)
        # Wait: the GPU may still compute x. The buffer's last copy back is done then, because take() waited for it.
        self.out_stream.wait_stream(self.streams.current_stream())
        with self.streams.stream(self.out_stream):
            offloaded.host.copy_(x, non_blocking=True)
        self.leaving.append((offloaded, self.out_stream.record_event()))
        if len(self.leaving) > self.max_leaving:
            gone, copied = self.leaving.popleft()
            self.streams.current_stream().wait_event(copied)
            gone.x = None
        return offloaded

    def fetch(self, offloaded: Offloaded):
        """Start to copy x back, unless it is still on the GPU."""
        if offloaded.x is None:
            offloaded.x = torch.empty(offloaded.host.shape, dtype=offloaded.host.dtype, device=self.device)
            self.back_stream.wait_stream(self.streams.current_stream())        # the memory may still be in use
            with self.streams.stream(self.back_stream):
                offloaded.x.copy_(offloaded.host, non_blocking=True)
            offloaded.fetched = self.back_stream.record_event()

    def take(self, offloaded: Offloaded):
        """Return x on the GPU. The current stream waits until x has been copied back."""
        self.fetch(offloaded)
        if offloaded.fetched:
            self.streams.current_stream().wait_event(offloaded.fetched)
            self.free[offloaded.host.shape, offloaded.host.dtype].append(offloaded.host)
        return offloaded.x
