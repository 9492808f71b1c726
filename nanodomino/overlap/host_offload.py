from collections import deque
from dataclasses import dataclass

import torch


@dataclass
class Away:
    """An x that has left for the host."""
    host: torch.Tensor                   # pinned
    x: torch.Tensor | None               # on the GPU: until it has gone, and again once it is on its way back
    back: torch.cuda.Event | None = None               # when it is there again


class HostMemory:
    """The host's memory behind a GPU, with a stream for each way.

    Memory of the GPU is given up where training's stream has waited for the copy, so that whoever is given it next
    comes later. record_stream() would not hold that stream up; but then the memory is free only when the host sees that
    the copy is over, and a host that runs ahead of its GPU would find no x gone, and take new memory for each. The same
    holds for torch's pinned memory, so that is kept here: who is given it again waits for the copy out of it.
    """

    def __init__(self, device, most: int):
        self.device, self.most = device, most                  # x's that may be leaving at once
        self.there, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.leaving = deque()
        self.free = {}                                         # shape and type -> [(pinned memory, when it is free)]

    def leave(self, x) -> Away:
        """Begin to copy it to the host."""
        free = self.free.setdefault((x.shape, x.dtype), [])
        host, emptied = free.pop(0) if free else (torch.empty(x.shape, dtype=x.dtype, pin_memory=True), None)
        away = Away(host, x)
        if emptied:
            self.there.wait_event(emptied)
        self.there.wait_stream(torch.cuda.current_stream())    # which computes x
        with torch.cuda.stream(self.there):
            away.host.copy_(x, non_blocking=True)
        self.leaving.append((away, self.there.record_event()))
        if len(self.leaving) > self.most:
            gone, copied = self.leaving.popleft()
            torch.cuda.current_stream().wait_event(copied)
            gone.x = None
        return away

    def fetch(self, away: Away):
        """Begin to copy it back, if it has gone."""
        if away.x is None:
            away.x = torch.empty(away.host.shape, dtype=away.host.dtype, device=self.device)
            self.back.wait_stream(torch.cuda.current_stream())  # which may still use this memory for something else
            with torch.cuda.stream(self.back):
                away.x.copy_(away.host, non_blocking=True)
            away.back = self.back.record_event()

    def take(self, away: Away):
        """x, for whoever computes in the current stream."""
        self.fetch(away)
        if away.back:
            torch.cuda.current_stream().wait_event(away.back)
            self.free[away.host.shape, away.host.dtype].append((away.host, away.back))
        return away.x
