"""Looks up figures from GPUs' data sheets, and reads the peak memory that a process has used."""

import re
import resource
import sys
from dataclasses import dataclass

import torch

# Dense 16-bit peak FLOP/s of one GPU, from the vendors' data sheets.
PEAK_FLOPS = {"A10": 125e12, "A30": 165e12, "A40": 150e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12,
              "GH200": 989e12, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12,
              "H200 NVL": 835e12, "H800": 989e12, "L4": 121e12, "L40": 181e12, "L40S": 362e12,
              "RTX 3090": 71e12, "RTX 4090": 165e12}

# The dense fp8 peak of Ada, Hopper and Blackwell is twice the 16-bit peak; for an RTX 4090 both are with fp32 sums.
FP8_SPEEDUP, WITHOUT_FP8 = 2.0, {"A10", "A30", "A40", "A100", "A800", "RTX 3090"}


@dataclass(frozen=True)
class Gpu:
    """Figures from a GPU's data sheet."""
    memory: float                # bytes
    memory_rate: float           # bytes/s
    link: str                    # the link to the other GPUs of the host: NVLink or PCIe
    link_rate: float             # bytes/s over it, each way
    host_rate: float             # bytes/s to the host over PCIe, each way
    multiprocessors: int


# GPUs with bfloat16. NVLink each way is half of the data sheet's figure; PCIe x16 is 32 GB/s each way in generation 4,
# 64 GB/s in generation 5.
GPUS = {"A100": Gpu(80e9, 2.039e12, "NVLink", 300e9, 32e9, 108),
        "H100": Gpu(80e9, 3.35e12, "NVLink", 450e9, 64e9, 132),
        "H100 PCIe": Gpu(80e9, 2.0e12, "PCIe", 64e9, 64e9, 114),
        "H200": Gpu(141e9, 4.8e12, "NVLink", 450e9, 64e9, 132),
        "B200": Gpu(180e9, 8e12, "NVLink", 900e9, 64e9, 148),
        "A10": Gpu(24e9, 0.6e12, "PCIe", 32e9, 32e9, 72), "L40S": Gpu(48e9, 0.864e12, "PCIe", 32e9, 32e9, 142),
        "RTX 4090": Gpu(24e9, 1.008e12, "PCIe", 32e9, 32e9, 128)}


def find_peak_flops(config, device) -> float | None:
    """Return the peak FLOP/s of the run, summed over its GPUs.

    Returns None if it is unknown: on a CPU, for a GPU that is not in PEAK_FLOPS, and for weights that are not 16-bit.
    """
    if device.type != "cuda" or config.params_dtype.itemsize != 2:
        return None
    device_name = torch.cuda.get_device_name(device)
    matches = [name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)]       # an A10G is not an A10
    return PEAK_FLOPS[max(matches, key=len)] * config.world_size if matches else None


def peak_memory(device) -> int:
    """Return the peak memory in bytes: of torch's CUDA allocator or, on a CPU, of this whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
