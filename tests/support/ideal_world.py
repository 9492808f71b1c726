"""Run one rank on an ideal wire, with a clock that counts multiplications: the same times on every machine."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ideal_wire import start_ideal_world

MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}      # name -> which argument the left matrix is


class MatmulClock(TorchDispatchMode):
    """A clock on which a matmul takes a nanosecond per multiplication, and everything else takes no time."""

    def __init__(self):
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        if name in MATMULS:
            self.multiplications += result.numel() * args[MATMULS[name]].size(-1)
        return result

    def __call__(self) -> float:
        return self.multiplications * 1e-9


@contextmanager
def ideal_world(start=start_ideal_world, **arguments):
    """Yield what start(clock=..., **arguments) returns, and count the multiplications of the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with MatmulClock() as clock:
            yield start(clock=clock, **arguments)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
