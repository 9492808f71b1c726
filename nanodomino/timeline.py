"""Draws what every rank did. (To be written.)"""
from pathlib import Path

import torch.distributed as dist

from nanodomino.mesh import Mesh
from nanodomino.trace import Trace, clock_offset


def draw_timeline(trace: Trace, mesh: Mesh, path: Path) -> str:
    events = trace.take(clock_offset())
    everything = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(events, everything)
    if everything is None:
        return ""
    import pickle
    path.with_suffix(".pickle").write_bytes(pickle.dumps(everything))
    return f"timeline: {sum(map(len, everything))} events"
