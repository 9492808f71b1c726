"""Describes a machine by a few rates, from a data sheet; computes seconds of operations and collectives.

    operation     takes the longer of FLOPs / rate and bytes / rate
    collective    latency + bytes sent / the rate of the slowest link between its ranks

**Matmuls.** A GPU computes the result [m, n] in tiles, one tile on a multiprocessor at a time. So a matmul takes whole
waves of as many tiles as the GPU has multiprocessors, and the last wave may be nearly empty. Each element of a tile is
a sum of k products; starting a tile takes as long as 160 more products. Small tiles load each number more often for the
same FLOPs, so they reach less of the peak. With few tiles, kernels also cut k and add up the parts. The fastest counts.

TILES, START, KERNEL and ATTENTION are assumptions, not measurements. They resemble what cuBLAS and cuDNN are reported
to reach on an H100.
"""

import math
import os
from dataclasses import dataclass
from functools import lru_cache

import torch

from nanodomino.estimate.formulas import FP8_SPEEDUP, bytes_sent


# (rows, columns, FLOP/s relative to the largest tile)
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.89), (64, 256, 0.83), (128, 64, 0.64), (64, 128, 0.64))
START = 160                      # the products per element that the start of a tile costs
KERNEL = 2e-6                    # seconds between the start of a GPU's kernel and its first full use of the GPU
# The share of the 16-bit peak that fused attention reaches: (forward, backward) by head size.
ATTENTION = {64: (0.40, 0.32), 128: (0.61, 0.47)}


@dataclass(frozen=True)
class Machine:
    """The rates that one process reaches."""
    matmul_rate: float           # FLOP/s of a large matmul in 16 bits
    intra_host_rate: float       # bytes/s sent to processes on the same host
    inter_host_rate: float       # bytes/s sent to other hosts
    latency: float               # seconds that each collective takes in addition to sending its bytes
    ranks_per_host: int
    memory_rate: float           # bytes/s of reads and writes
    host_copy_rate: float = math.inf         # bytes/s between a GPU and its host
    overlap_slowdown: float = 0.0            # share of the GPU that a collective in flight takes from compute
    peak: float = 0.0                        # FLOP/s of a GPU's data sheet in 16 bits; 0: not a GPU
    multiprocessors: int = 0                 # the GPU's; 0: matmuls of all shapes reach matmul_rate

    def operation_seconds(self, operation) -> float:
        """Return the seconds of a dry_run.accounts.Operation."""
        computing = operation.flops / self.matmul_rate
        if operation.kind == "matmul" and self.multiprocessors:
            rate = self.matmul_rate * (FP8_SPEEDUP if operation.element_size == 1 else 1.0)
            computing = matmul_seconds(*operation.shape, rate, self.multiprocessors, self.memory_rate)
        elif operation.kind.startswith("attention") and self.peak:
            shares = ATTENTION[128 if operation.shape[0] >= 128 else 64]
            computing = operation.flops / (self.peak * shares[operation.kind == "attention backward"])
        return max(computing, operation.bytes / self.memory_rate) + (KERNEL if self.multiprocessors else 0.0)

    def collective_seconds(self, kind: str, bytes_: float, ranks: tuple) -> float:
        """Return the seconds of a collective. If its ranks are on several hosts, it runs at the rate between hosts,
        because a ring is as slow as its slowest link."""
        if len(ranks) == 1:
            return 0.0
        near = len({rank // self.ranks_per_host for rank in ranks}) == 1
        sent = bytes_sent(kind, bytes_, len(ranks))
        return self.latency + sent / (self.intra_host_rate if near else self.inter_host_rate)


@lru_cache(maxsize=65536)
def matmul_seconds(count, rows, columns, summed, rate, multiprocessors, memory_rate) -> float:
    """Return the seconds of `count` matmuls [rows, summed] x [summed, columns] on a GPU; see the module's docstring.
    rate: FLOP/s of the largest tile."""
    best = math.inf
    for tile_rows, tile_columns, efficiency in TILES:
        tiles = count * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        for parts in (1, 2, 3, 4):
            waves = math.ceil(tiles * parts / multiprocessors)
            flops = 2 * tile_rows * tile_columns * (math.ceil(summed / parts) + START)
            adding = (parts > 1) * (KERNEL + 2 * parts * count * rows * columns * 4 / memory_rate)
            best = min(best, waves * flops * multiprocessors / (rate * efficiency) + adding)
    return best


# ---- this machine

def memory_of_process(device, local_world_size: int) -> int:
    """Return the bytes of a process's GPU, or its part of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size
