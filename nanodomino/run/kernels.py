"""Chooses kernels, and names the one that attention runs.

**Deterministic kernels.** A kernel whose thread blocks add to the same number in no fixed order may round differently
each time it runs. Torch's strict mode replaces such kernels, or raises an error where it has no other kernel. With
warn_only=True, torch would only warn about the backward of flash and of memory-efficient attention, and would still
choose cuDNN's attention.

**Attention.** On an H100 torch prefers cuDNN's attention to flash attention. With an attention bias, the backward of
cuDNN's attention can return NaN if the sequence length modulo 128 is 64 (github.com/pytorch/pytorch/issues/196678).
"""

import os

import torch
from torch.nn.attention import SDPBackend

from nanodomino.config.config import Config
from nanodomino.layers.attention import fused_arguments
from nanodomino.layers.varlen import uses_varlen


def choose_kernels(config: Config):
    """Tell torch which kernels it may choose. Call this before the first matmul, because cuBLAS reads its variable only
    once."""
    torch.backends.cuda.enable_cudnn_sdp(not (config.deterministic_mode or config.reset_attention_mask))
    if config.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # 8 buffers of 4096 KiB
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False      # or each torch.empty() launches a kernel


def attention_kernel(config: Config, device: torch.device) -> str:
    """Return the name of the kernel that attention runs in training, for example "cudnn attention"."""
    if config.attention_dropout:
        return "attention by matmuls and softmax"              # see layers/attention.py
    if config.reset_attention_mask and uses_varlen(config, device):
        return "flash attention by document"
    q, k = (torch.empty(1, heads // config.tp, config.seq_length, config.kv_channels, dtype=config.params_dtype,
                        device=device, requires_grad=True)
            for heads in (config.num_attention_heads, config.num_query_groups))
    bias = q.new_empty(config.seq_length).expand(1, 1, config.seq_length, -1) if config.reset_attention_mask else None
    return SDPBackend(torch._fused_sdp_choice(**fused_arguments(q, k, k, bias))).name.replace("_", " ").lower()


def in_words(config: Config, device: torch.device) -> str:
    """Return, for example, ', flash attention'; '' on the CPU, which has only one fused kernel. Also say if the matrix
    units of the GPU stay idle, because training is in fp32 and torch does not round to TF32 by default."""
    if device.type != "cuda":
        return ""
    fp32 = config.params_dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return f", {attention_kernel(config, device)}" + ", fp32 matmuls without TF32 (--bf16 is many times as fast)" * fp32
