"""Allocates host memory for a checkpoint's copies, in blocks whose lengths are powers of two.

torch rounds each block of pinned memory up to the next power of two, which can almost double it. Several blocks avoid
that: 5 elements are allocated as 4 + 1, and nothing is rounded up.
"""

import torch


def allocate(lengths: list[int], dtype: torch.dtype, pin_memory: bool) -> list[list[torch.Tensor]]:
    """Return for each length a list of flat tensors, each within one block, with that many elements in total."""
    total = sum(lengths)
    blocks = [torch.empty(1 << bit, dtype=dtype, pin_memory=pin_memory)
              for bit in range(total.bit_length()) if total >> bit & 1]
    tensors, free = [], torch.empty(0, dtype=dtype)
    for length in lengths:
        tensors.append([])
        while length:
            free = free if len(free) else blocks.pop()
            tensors[-1].append(free[:length])
            length, free = length - len(tensors[-1][-1]), free[length:]
    return tensors
