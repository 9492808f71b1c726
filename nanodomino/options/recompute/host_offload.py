"""Keeps activations in the host's memory (--checkpoint-in-cpu, DeepSpeed's name). Each sublayer's input x is copied to
the host while later sublayers compute, and is copied back one sublayer before backward needs it. Training on a CPU
copies nothing.

Copies run on two CUDA streams, one for each direction, beside the compute stream:

    forward      compute   | sublayer 0 | sublayer 1 | sublayer 2 | ...
                 out                    | x0         | x1         | ...
    backward     compute   | ... | sublayer 2 | sublayer 1 | sublayer 0 |
                 back            | x1         | x0         |

CUDA events order the streams. In forward the compute stream waits for the oldest copy, which frees the GPU memory of
the copied x. With record_stream() the compute stream would not have to wait. But then the allocator could reuse the
memory only after the *host* has seen that the copy is done. The host runs ahead of the GPU, so it would see no finished
copy and allocate new memory for every x. torch's allocator of pinned memory has the same problem. So this module keeps
its pinned buffers, and reuses each one after the compute stream has waited for its copy back.
"""

from collections import deque
from dataclasses import dataclass

import torch

from nanodomino.comm.world import streams_of


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
