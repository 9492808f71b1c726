import ctypes
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nanodomino.comm.network_interface import choose_interface
from nanodomino.errors import UserError, require

TIMEOUT = 600       # seconds; --timeout's default
LATER = 60          # seconds by which NCCL's own time-out, which aborts the process, comes after ours (watch.py)


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher told this process: its number in the world and on its host."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False        # by torchrun, which also says where the others are
    restarted: bool = False       # by torchrun --max-restarts, after a rank had died


def read_launch_environment(environment=os.environ) -> LaunchInfo:
    """Read torchrun's variables; with none of them, one process. Raises UserError if only some are there."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [name for name in names if environment.get(name)]
    if not found:
        return LaunchInfo()
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    require(not missing, f"the environment has {', '.join(found)} but not {', '.join(missing)}; "
            "start with torchrun, which sets them all, or unset them for one process")
    for name in (*names, "MASTER_PORT"):
        require(environment[name].isdecimal(),
                f"{name} must be a whole number, but the environment has '{environment[name]}'; "
                "start with torchrun, which sets it, or unset it for one process")
    require(0 < int(environment["MASTER_PORT"]) < 65536,
            f"MASTER_PORT must be from 1 to 65535, but the environment has {environment['MASTER_PORT']}; "
            "start with torchrun, which sets it, or unset it for one process")
    launch = LaunchInfo(*(int(environment[name]) for name in names), launched=True,
                  restarted=environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    require(launch.rank < launch.world_size and launch.local_rank < launch.local_world_size,
            f"RANK {launch.rank} must be below WORLD_SIZE {launch.world_size} and LOCAL_RANK {launch.local_rank} below "
            f"LOCAL_WORLD_SIZE {launch.local_world_size}; start with torchrun, which sets them")
    return launch


def find_device(config, launch: LaunchInfo) -> torch.device:
    """This process's device: its own GPU, or the CPU. Raises UserError if there are too few GPUs."""
    # One queue into the device: kernels start in the order of their launches, so that a sum put on the wires before a
    # product does not wait behind it. CUDA reads this once, when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return torch.device("cpu")
    require(gpus > 0, "--device cuda needs a GPU that torch can see, and there is none; try --device cpu")
    shown_its_own = gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES")       # as SLURM does: a GPU for each task
    require(launch.local_world_size <= gpus or shown_its_own,
            f"{launch.local_world_size} processes on this host need as many GPUs, and there "
            f"are {gpus}; start torchrun --nproc_per_node {gpus}, or try --device cpu")
    return torch.device("cuda", 0 if shown_its_own else launch.local_rank)


def keep_freed_memory():
    """Let this process keep what it frees for its next tensors, as torch itself does on GPUs.

    glibc gives large blocks back to the kernel, and at the next step each of their pages is faulted in and cleared
    again: a quarter of a step, at hidden 512 and batch 8 x 256 (0.89 against 0.66 s, on two cores).
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4                                     # of malloc.h
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)                                            # nothing mapped on its own
        libc.mallopt(M_TRIM_THRESHOLD, -1)                                     # the heap never shrinks


def check_own_gpu(gpu: str, launch: LaunchInfo, store: dist.Store):
    """NCCL knows no two ranks on one GPU. gpu: its number in all the world. Raises UserError on every rank alike."""
    store.set(f"gpu of rank {launch.rank}", gpu)
    gpus = [store.get(f"gpu of rank {rank}").decode() for rank in range(launch.world_size)]
    for gpu in gpus:
        ranks = [str(rank) for rank, other in enumerate(gpus) if other == gpu]
        require(len(ranks) == 1, f"each process needs a GPU of its own, but ranks {' and '.join(ranks)} see the same "
                "one; start as many processes as there are GPUs, or give each its own CUDA_VISIBLE_DEVICES")


def collective_timeout(timeout: int, device: torch.device) -> timedelta:
    """What a group is given. On CPUs its collectives raise then; on GPUs the process has ended by then (watch.py)."""
    return timedelta(seconds=timeout + (LATER if device.type == "cuda" else 0))


def start_world(launch: LaunchInfo, device: torch.device, timeout: int = TIMEOUT):
    """Bring up the default process group: NCCL between GPUs, gloo between CPUs, a world of one without a launcher.

    timeout: seconds that a collective may take before it is an error.
    Raises UserError if there is no way to the others.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if launch.world_size > launch.local_world_size:              # on several hosts
        choose_interface(os.environ.get("MASTER_ADDR", ""))
    # checkpoints talk on the CPU, behind training
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, patience = dist.HashStore(), timedelta(seconds=timeout)
    try:
        if launch.launched:
            store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=patience))
            # torchrun --max-restarts keeps its store, and in it the addresses of the dead: each start has its names
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        if device.type == "cuda":
            check_own_gpu(str(torch.cuda.get_device_properties(device).uuid), launch, store)
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, store=store,
                                timeout=collective_timeout(timeout, device),
                                device_id=device if device.type == "cuda" else None)
    except (dist.DistNetworkError, dist.DistStoreError) as error:     # a port in use, a host or rank that is not there
        raise UserError(f"the {launch.world_size} processes can't meet at MASTER_ADDR {os.environ.get('MASTER_ADDR')}, "
                        f"MASTER_PORT {os.environ.get('MASTER_PORT')} ({str(error).splitlines()[0]}); choose a free "
                        f"port of a host that all can reach, and start all {launch.world_size}") from None
