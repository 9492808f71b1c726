"""The device of a rank: which one, what it can do, and which kernels may run on it.

Tensors on torch's meta device have shapes but no numbers. A dry run (estimate/) trains on them, and says which device
they stand for. So a machine without GPUs can run the code paths of a GPU.
"""

import os
import re
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nanodomino.comm.world import LaunchInfo, read_launch_environment
from nanodomino.errors import UserError, require

# the wheel for older drivers and GPUs
FOR_OLDER = f"pip install torch=={torch.__version__.split('+')[0]} --index-url https://download.pytorch.org/whl/cu126"


@dataclass(frozen=True)
class StandIn:
    """Describes the device that meta tensors stand for."""
    kind: str = "cpu"
    streams: object = None                   # has Stream, stream and current_stream, like torch.cuda
    capability: tuple[int, int] = (9, 0)     # the compute capability: an H100's


STAND_IN = ContextVar("the device that meta tensors stand for", default=StandIn())      # noqa: B039, it is frozen


@contextmanager
def standing_for(stand_in: StandIn):
    """Let meta tensors stand for the device that stand_in describes."""
    token = STAND_IN.set(stand_in)
    try:
        yield
    finally:
        STAND_IN.reset(token)


def kind_of(device: torch.device) -> str:
    """Return "cpu" or "cuda"."""
    return STAND_IN.get().kind if device.type == "meta" else device.type


def on_gpu(tensor) -> bool:
    """Return whether a tensor is in a GPU's memory, or stands for one that is."""
    return tensor.is_cuda or tensor.is_meta and STAND_IN.get().kind == "cuda"


def streams_of(device: torch.device):
    """Return torch.cuda, or what replaces its streams on the meta device."""
    return STAND_IN.get().streams if device.type == "meta" else torch.cuda


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or of the StandIn for meta tensors and on machines without GPUs. It is
    (8, 0) for AMD's GPUs, which have none of Hopper's kernels, although a gfx942 says 9.4."""
    if device.type == "meta" or not torch.cuda.is_available():
        return STAND_IN.get().capability
    return (8, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def has_flash_attention(device: torch.device) -> bool:
    """Return whether torch's flash attention runs on this device: on GPUs from Ampere on."""
    return (kind_of(device) == "cuda" and capability_of(device) >= (8, 0)
            and (device.type == "meta" or torch.backends.cuda.is_flash_attention_available()))


def nccl_options(timeout: timedelta, thread_blocks=None) -> dict:
    """Return new_group's arguments for an NCCL group. thread_blocks: the most thread blocks that an operation may use.
    Kernels that run at the same time get the rest.

    The group gets a high-priority CUDA stream. Otherwise its operations could wait for matmuls launched after them.
    Megatron-LM sets CUDA_DEVICE_MAX_CONNECTIONS=1 instead. Then kernels start in the order of their launches, and a
    matmul waits for all collectives launched before it to start."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout                                 # otherwise new_group() warns that it replaces a default
    options.config.max_ctas = thread_blocks or options.config.max_ctas
    return dict(backend="nccl", pg_options=options)


def find_device(config, launch: LaunchInfo) -> torch.device:
    """Return this process's own GPU, or the CPU. Raises UserError if there are too few GPUs, or they are too old."""
    gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return torch.device("cpu")
    require(gpus > 0, "--device cuda needs a GPU that torch can see, and there is none; try --device cpu")
    require(not (config.trace and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"), "--trace would slow down what "
            "it measures, because CUDA_DEVICE_MAX_CONNECTIONS is 1; unset the variable")
    sees_only_its_own = gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES")   # as SLURM does with one GPU per task
    require(launch.local_world_size <= gpus or sees_only_its_own, f"{launch.local_world_size} processes on this host "
            f"need as many GPUs, and there are {gpus}; try torchrun --nproc_per_node {gpus}, or --device cpu")
    device = torch.device("cuda", 0 if sees_only_its_own else launch.local_rank)
    require_cuda(device)
    config.check_device(device)
    return device


def require_cuda(device: torch.device):
    """Raise UserError if this torch can't use a GPU that the driver lists: because the driver is older than torch's
    CUDA (a driver for 12.0 runs any 12), or because torch was compiled only for newer GPUs."""
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = re.sub(r"version (\d+)0(\d)0", r"CUDA \1.\2", str(error).partition(". Please")[0])
        raise UserError(f"torch for CUDA {torch.version.cuda} can't use the GPUs ({reason}); update the driver, or "
                        f"with a driver for CUDA 12 {FOR_OLDER}, or try --device cpu") from None
    (major, minor), names = capability_of(device), " ".join(torch.cuda.get_arch_list())
    require(10 * major + minor >= min(map(int, re.findall(r"sm_(\d+)", names)), default=0),
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, but torch for CUDA "
            f"{torch.version.cuda} is compiled for {names}; {FOR_OLDER}, or try --device cpu")


def can_compile(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether inductor, torch.compile's default backend, works on a GPU. If not, each host prints why."""
    reason = "torch.compile needs compute capability 7.0, or for bfloat16 8.0; instead of --bf16 try --fp16"
    try:
        from triton.runtime import driver                      # whose `active` compiles and links a file of C

        if capability_of(device) >= ((8, 0) if dtype == torch.bfloat16 else (7, 0)) and driver.active:
            return True
    except Exception as error:                                 # a broken package can raise anything
        reason = ("Triton needs the packages triton, gcc and python3-dev (Python.h), and libcuda.so.1 in the list of "
                  f"ldconfig -p ({' '.join(str(error).split())[:200]})")
    if read_launch_environment().local_rank == 0:
        print(f"warning: running with --no-compile: {reason}", file=sys.stderr, flush=True)
    return False


def choose_kernels(config, device: torch.device):
    """Tell torch which kernels it may choose. Call this before the first matmul: cuBLAS reads its variable only once.

    A kernel whose thread blocks add to the same number in no fixed order may round differently each time it runs.
    Torch's strict mode replaces such kernels, or raises an error where it has no other. Its warn-only mode would keep
    the backward of fused attention. cuDNN's attention can return NaN in its backward if there is an attention bias
    (github.com/pytorch/pytorch/issues/196678). The compiler may benchmark kernels on each rank separately, but the
    tensor-parallel ranks must not choose different ones."""
    torch.backends.cuda.enable_cudnn_sdp(not (config.deterministic_mode or config.masks_attention))
    if config.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # 8 buffers of 4096 KiB
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False      # else each torch.empty() launches a kernel
    if config.compile and config.tp > 1:
        from torch._inductor import config as inductor                   # imported here: it loads the whole compiler

        inductor.deterministic = True
