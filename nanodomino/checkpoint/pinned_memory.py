"""Host memory for a checkpoint's copies, in blocks whose lengths are powers of two.

torch rounds a block of pinned memory up to the next power of two, which can almost double it. So allocate n elements in
the powers of two that add up to n, such as 5 = 4 + 1: nothing is rounded up.
"""

import torch


def allocate(lengths: list[int], dtype: torch.dtype, pin_memory: bool) -> list[list[torch.Tensor]]:
    """For each length, return flat tensors with that many elements in total, several if a block ends in between."""
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
