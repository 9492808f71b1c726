"""Starts a process: reads what torchrun says, picks the device and its kernels, joins the process group.

torchrun starts one process per GPU, or any number of processes on CPUs, and sets these environment variables in each:

    RANK, WORLD_SIZE                this process's number among all processes, and how many there are
    LOCAL_RANK, LOCAL_WORLD_SIZE    the same among the processes of this host
    MASTER_ADDR, MASTER_PORT        where all processes meet to exchange addresses

Without these variables the process is a world of size 1. NCCL connects GPUs, gloo connects CPUs.

Tensors on torch's meta device have shapes but no numbers. A dry run (estimate/) trains on them, and says which device
they stand for. So a machine without GPUs can run the code paths of a GPU.
"""

import ctypes
import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nanodomino.errors import UserError, require

TIMEOUT = 600            # seconds; the default of --timeout
LAUNCHER_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")    # copies that srun or mpirun starts


@dataclass(frozen=True)
class LaunchInfo:
    """What torchrun says about this process. The defaults describe a single process that was started without it."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False        # whether torchrun started this process


def read_launch_environment(environment=os.environ) -> LaunchInfo:
    """Read torchrun's variables. Raises UserError if srun or mpirun has started copies that can't train together."""
    hosts = environment.get("GROUP_WORLD_SIZE", "1")           # set by torchrun
    for name in LAUNCHER_SIZES:
        copies = environment.get(name, "1")
        require(copies in ("1", hosts), f"{name} says that {copies} copies were started, which would train separate "
                "models; start one torchrun per host, without --standalone (see docs/running.md for SLURM), or unset "
                f"{name}")
    if not environment.get("RANK"):
        return LaunchInfo()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return LaunchInfo(*(int(environment[name]) for name in names), launched=True)


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
    """Return the compute capability of a GPU, or of the StandIn for meta tensors and on machines without GPUs."""
    stands_in = device.type == "meta" or not torch.cuda.is_available()
    return STAND_IN.get().capability if stands_in else torch.cuda.get_device_capability(device)


def has_flash_attention(device: torch.device) -> bool:
    """Return whether torch's flash attention runs on this device: on GPUs from Ampere on."""
    return (kind_of(device) == "cuda" and capability_of(device) >= (8, 0)
            and (device.type == "meta" or torch.backends.cuda.is_flash_attention_available()))


def find_device(config, launch: LaunchInfo) -> torch.device:
    """Return this process's own GPU, or the CPU. Raises UserError if there are fewer GPUs than processes."""
    gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return torch.device("cpu")
    require(gpus > 0, "--device cuda needs a GPU that torch can see, and there is none; try --device cpu")
    sees_only_its_own = gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES")   # as SLURM does with one GPU per task
    require(launch.local_world_size <= gpus or sees_only_its_own, f"{launch.local_world_size} processes on this host "
            f"need as many GPUs, and there are {gpus}; try torchrun --nproc_per_node {gpus}, or --device cpu")
    device = torch.device("cuda", 0 if sees_only_its_own else launch.local_rank)
    config.check_device(device)
    return device


def keep_freed_memory():
    """Make malloc keep freed memory for the next tensors, as torch's own allocator does on GPUs. glibc returns large
    blocks to the kernel, which must clear each of their pages again in the next step. That took a quarter of a step
    with hidden size 512 and batch 8 x 256 on two cores (0.89 s instead of 0.66 s)."""
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4                      # from malloc.h
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):          # glibc's
        libc.mallopt(M_MMAP_MAX, 0)                            # take large blocks from the heap, too
        libc.mallopt(M_TRIM_THRESHOLD, -1)                     # never shrink the heap


def choose_kernels(config, device: torch.device):
    """Tell torch which kernels it may choose. Call this before the first matmul: cuBLAS reads its variable only once.

    A kernel whose thread blocks add to the same number in no fixed order may round differently each time it runs.
    Torch's strict mode replaces such kernels, or raises an error where it has no other. Its warn-only mode would keep
    the backward of fused attention. cuDNN's attention can return NaN in its backward if there is an attention bias
    (github.com/pytorch/pytorch/issues/196678). The compiler may benchmark kernels on each rank separately, but the
    tensor-parallel ranks must not choose different ones."""
    torch.backends.cuda.enable_cudnn_sdp(not (config.deterministic_mode or config.uses_attention_bias))
    if config.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # 8 buffers of 4096 KiB
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False      # else each torch.empty() launches a kernel
    if config.compile and config.tp > 1:
        from torch._inductor import config as inductor                   # imported here: it loads the whole compiler

        inductor.deterministic = True


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


def start_world(launch: LaunchInfo, device: torch.device, timeout: int = TIMEOUT):
    """Initialize the default process group. Without a launcher it has a single member. Raises UserError if the
    processes cannot connect. timeout: seconds that a collective may take."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # If two ranks started the collectives of several groups in different orders, each could occupy its GPU and wait
        # for the other. With this variable, NCCL starts them in the order of their launches.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    else:
        keep_freed_memory()
    store = dist.HashStore()
    try:
        if launch.launched:
            found = dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(seconds=timeout))
            # after a restart, torchrun's store still has the addresses of the dead processes
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", next(found)[0])
        # on GPU hosts gloo too: checkpoints communicate from the CPU while training continues
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=launch.rank,
                                world_size=launch.world_size, store=store, timeout=timedelta(seconds=timeout),
                                device_id=device if device.type == "cuda" else None)
    except (dist.DistNetworkError, dist.DistStoreError) as error:        # port in use, host unknown, rank missing
        raise UserError(f"the {launch.world_size} processes cannot connect at MASTER_ADDR {address}, MASTER_PORT "
                        f"{port} ({str(error).splitlines()[0]}); choose a free port on a host that every process can "
                        f"reach, and start all {launch.world_size} processes") from None
    except RuntimeError as error:                              # gloo's: the store is reached, but not the other ranks
        require("connectFullMesh" not in str(error) or launch.world_size == launch.local_world_size, "gloo cannot "
                f"connect the hosts ({str(error).splitlines()[0]}); set GLOO_SOCKET_IFNAME on each host to the network "
                "interface that leads to the others, such as eth0")
        raise


def from_rank_0(value):
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
