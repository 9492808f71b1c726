"""Chooses kernels.

**Deterministic kernels.** A kernel whose thread blocks add to the same number in no fixed order may round differently
each time it runs. Torch's strict mode replaces such kernels, or raises an error where it has no other kernel. With
warn_only=True, torch would only warn about the backward of flash and of memory-efficient attention, and would still
choose cuDNN's attention.

**Compiled kernels.** torch.compile may benchmark kernels on each rank separately. The ranks of a tensor-parallel group
must choose the same, or their copies of a parameter would drift apart (check_copies.py).

**Attention.** On an H100 torch prefers cuDNN's attention to flash attention. With an attention bias, the backward of
cuDNN's attention can return NaN if the sequence length modulo 128 is 64 (github.com/pytorch/pytorch/issues/196678).
Even there, attention within documents (varlen.py) and generation use flash attention: torch's own, which is version
2, or version 3 if its package is installed. Deterministic mode stays with version 2, because the gradients of
version 3 may not always have the same bits (github.com/Dao-AILab/flash-attention/issues/2244).
"""

import os
from importlib.util import find_spec

import torch

from nanodomino.comm.world import capability_of
from nanodomino.settings.config import Config


def choose_kernels(config: Config, device: torch.device):
    """Tell torch which kernels it may choose. Call this before the first matmul, because cuBLAS reads its variable only
    once."""
    torch.backends.cuda.enable_cudnn_sdp(not (config.deterministic_mode or config.uses_attention_bias))
    if can_use_flash_attention_3(config, device):
        torch.nn.attention.activate_flash_attention_impl("FA3")
    if config.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # 8 buffers of 4096 KiB
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False      # else each torch.empty() launches a kernel
    if config.compile and config.tp > 1:
        from torch._inductor import config as inductor                   # imported here: it loads the whole compiler

        if hasattr(inductor, "deterministic"):                           # older versions of torch lack the option
            inductor.deterministic = True


def can_use_flash_attention_3(config: Config, device: torch.device) -> bool:
    """Return whether this run uses FlashAttention 3: its package is installed, and torch can call it on this GPU."""
    return (device.type == "cuda" and capability_of(device)[0] == 9 and not config.deterministic_mode
            and hasattr(torch.nn.attention, "activate_flash_attention_impl")         # older versions of torch lack it
            and find_spec("flash_attn_interface") is not None)


def in_words(config: Config, device: torch.device) -> str:
    """Say if the matrix units of the GPU stay idle, because training is in fp32 and torch does not round to TF32 by
    default. Otherwise return ''."""
    idle = (device.type == "cuda" and config.params_dtype == torch.float32
            and torch.get_float32_matmul_precision() == "highest")
    return ", fp32 matmuls without TF32 (--bf16 is many times as fast)" * idle
