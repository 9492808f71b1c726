"""Keeps activations in the host's memory (--checkpoint-in-cpu, DeepSpeed's name): each x leaves the GPU while later
sublayers compute, and comes back one sublayer before backward needs it. On a CPU there is nothing to move.

Two streams copy, one in each direction, and events order the copies with training's stream:

    forward      compute   | sublayer 0 | sublayer 1 | sublayer 2 | ...      the GPU memory of x is freed only once
                 out                    | x0         | x1         | ...      training's stream has waited for the copy
    backward     compute   | ... | sublayer 2 | sublayer 1 | sublayer 0 |
                 back            | x1         | x0         |

Why not record_stream()? It would spare training's stream the wait, but then memory is free only when the *host* sees
that the copy is done. A host that runs ahead of its GPU would see no copy done, and allocate new memory for every x.
torch's allocator of pinned memory has the same problem, so this module keeps its pinned buffers and reuses each one
after an event.
"""

from collections import deque
from dataclasses import dataclass

import torch


@dataclass
class Offloaded:
    """Holds an x that is in the host's memory, or on its way."""
    host: torch.Tensor                             # pinned
    x: torch.Tensor | None                         # on the GPU: until the copy is done, and again once it is fetched
    fetched: torch.cuda.Event | None = None        # recorded after the copy back


class HostMemory:
    """Moves activations between a GPU and pinned host memory. max_leaving: copies to the host that may be in flight."""

    def __init__(self, device, max_leaving: int):
        self.device, self.max_leaving = device, max_leaving
        self.out_stream, self.back_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.leaving = deque()                     # (Offloaded, event after its copy)
        self.free = {}                             # (shape, dtype) -> [(pinned buffer, event after its last use)]

    def leave(self, x) -> Offloaded:
        """Start to copy x to the host."""
        free = self.free.setdefault((x.shape, x.dtype), [])
        host, emptied = free.pop(0) if free else (torch.empty(x.shape, dtype=x.dtype, pin_memory=True), None)
        offloaded = Offloaded(host, x)
        if emptied:
            self.out_stream.wait_event(emptied)
        self.out_stream.wait_stream(torch.cuda.current_stream())             # x may still be being computed
        with torch.cuda.stream(self.out_stream):
            offloaded.host.copy_(x, non_blocking=True)
        self.leaving.append((offloaded, self.out_stream.record_event()))
        if len(self.leaving) > self.max_leaving:
            gone, copied = self.leaving.popleft()
            torch.cuda.current_stream().wait_event(copied)
            gone.x = None
        return offloaded

    def fetch(self, offloaded: Offloaded):
        """Start to copy x back, unless it is still on the GPU."""
        if offloaded.x is None:
            offloaded.x = torch.empty(offloaded.host.shape, dtype=offloaded.host.dtype, device=self.device)
            self.back_stream.wait_stream(torch.cuda.current_stream())        # which may still use this memory
            with torch.cuda.stream(self.back_stream):
                offloaded.x.copy_(offloaded.host, non_blocking=True)
            offloaded.fetched = self.back_stream.record_event()

    def take(self, offloaded: Offloaded):
        """Return x, ready for the current stream."""
        self.fetch(offloaded)
        if offloaded.fetched:
            torch.cuda.current_stream().wait_event(offloaded.fetched)
            self.free[offloaded.host.shape, offloaded.host.dtype].append((offloaded.host, offloaded.fetched))
        return offloaded.x
