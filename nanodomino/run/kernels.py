"""Chooses deterministic kernels for --deterministic-mode.

A kernel whose thread blocks add to the same number in no fixed order may round differently each time it runs. Torch's
strict mode replaces such kernels, or raises an error where it has no other kernel. With warn_only=True, torch would
only warn about the backward of flash and of memory-efficient attention, and would still choose cuDNN's attention.
"""

import os

import torch


def use_deterministic_kernels():
    """Make torch use only deterministic CUDA kernels. Call this before the first matmul, because cuBLAS reads its
    variable only once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # 8 buffers of 4096 KiB, as torch has on an H100
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.utils.deterministic.fill_uninitialized_memory = False      # or each torch.empty() launches a kernel
