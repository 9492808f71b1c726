"""Starts a process: reads what torchrun says, and joins the process group.

torchrun starts one process per GPU, or any number of processes on CPUs, and sets these environment variables in each:

    RANK, WORLD_SIZE                this process's number among all processes, and how many there are
    LOCAL_RANK, LOCAL_WORLD_SIZE    the same among the processes of this host
    MASTER_ADDR, MASTER_PORT        where all processes meet to exchange addresses

Without these variables the process is a world of size 1. NCCL connects GPUs, gloo connects CPUs.
"""

import ctypes
import fcntl
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nanodomino.errors import UserError, require

TIMEOUT = 600            # seconds; the default of --timeout


@dataclass(frozen=True)
class LaunchInfo:
    """What torchrun says about this process. The defaults describe a single process that was started without it."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False        # whether torchrun started this process


def read_launch_environment(environment=os.environ) -> LaunchInfo:
    """Read torchrun's variables. Raises UserError if some are missing, or if srun or mpirun started several copies."""
    hosts = environment.get("GROUP_WORLD_SIZE", "1")           # set by torchrun
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):    # how many srun or mpirun has started
        copies = environment.get(name, "1")
        require(copies in ("1", hosts), f"{name} says that {copies} copies were started, which would train separate "
                "models; start one torchrun per host, without --standalone (see docs/running.md for SLURM), or unset "
                f"{name}")
    if not environment.get("RANK") and environment.get("WORLD_SIZE") in (None, "", "1"):
        return LaunchInfo()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    missing = [name for name in names if not environment.get(name)]
    require(not missing, f"of the variables that torchrun sets, {', '.join(missing)} must be set, too; start with "
            "torchrun, or unset RANK and WORLD_SIZE")
    return LaunchInfo(*(int(environment[name]) for name in names), launched=True)


def tune_host():
    """Tune malloc and the scheduler for ranks on CPUs (docs/log.md says what it gains). malloc keeps freed memory, or
    the kernel would clear each page of it again. This thread and those that it starts become batch threads, which do
    not preempt others when they wake up, or gloo's event loop would spin while a thread with its lock is preempted."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):          # glibc's
        libc.mallopt(-4, 0)                                    # M_MMAP_MAX: take large blocks from the heap, too
        libc.mallopt(-1, -1)                                   # M_TRIM_THRESHOLD: never shrink the heap
    with suppress(OSError, AttributeError):                    # a container may forbid it, and only Linux has it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:         # keeps a policy that the user has chosen
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def choose_interface(master_addr: str):
    """Set GLOO_SOCKET_IFNAME to the interface that leads to MASTER_ADDR, unless the user has set it. By default gloo
    announces the address of the host's own name: on many systems 127.0.0.1, where each host reaches only itself."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master_addr, 9))                        # UDP sends nothing; an unknown host is gloo's to report
        if probe.getsockname()[0].startswith("127."):          # this host is MASTER_ADDR itself
            probe.connect(("192.0.2.1", 9))                    # no host has this address (RFC 5737)
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):                            # raised for an interface that has no address
                if fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))[20:24] == own:        # SIOCGIFADDR
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def start_world(launch: LaunchInfo, device: torch.device, timeout: int = TIMEOUT):
    """Initialize the default process group. Without a launcher it has a single member. Raises UserError if the
    processes cannot connect. timeout: seconds that a collective may take."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # If two ranks started the collectives of several groups in different orders, each could occupy its GPU and wait
        # for the other. With this variable, NCCL starts them in the order of their launches.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        # else each rank would print a warning when generation sends between stages, which is rare and need not be fast
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    else:
        tune_host()
    if launch.world_size > launch.local_world_size:            # there are several hosts
        choose_interface(os.environ.get("MASTER_ADDR", ""))
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
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:     # port in use, host unknown or unset
        place = ", ".join(f"{name} {os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(f"the {launch.world_size} processes cannot connect at {place} ({str(error).splitlines()[0]}); "
                        "choose a free port on a host that every process can reach, and start all "
                        f"{launch.world_size} processes") from None


def from_rank_0(value):
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
