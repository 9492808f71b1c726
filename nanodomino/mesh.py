"""Who am I among the processes: rank <-> (pp, dp, tp), and a process group for each direction of talk.

A rank is a process's number in the world, which is all processes of the run. They share the model in two ways, tensor
parallel (tp: each matrix is cut) and pipeline parallel (pp: each stage has some layers), and the samples in a third,
data parallel (dp: each replica is a whole model). A group is the ranks that do something together: a collective, such
as an all-reduce, which gives everybody the sum of what each has brought. The wires are whatever carries it.

The ranks are the numbers of a box, counted with tp fastest, then dp, then pp (Megatron-LM's pipeline paper,
2104.04473, section 3):

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

                     dp 0        dp 1            tp_group: the ranks of one bracket. They share every matrix and
      stage 0       [0  1]      [2  3]           talk four times a layer: neighbours on the fastest wires.
      stage 1       [4  5]      [6  7]           dp_group: 0 and 2, 1 and 3, ... hold the same shard of different
                     tp 0 1      tp 0 1          replicas and sum their gradients once a step.
                                                 pp: 0 and 4, 1 and 5, ... pass activations down, gradients up.

Build a group along the wrong axis and the sums are still sums, of the wrong things: nothing crashes. So the grid is
made in this one place and handed to everyone as one `Mesh`.

A single process is a world of one: the same code, groups of one member, no wires.
"""

import ctypes
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nanodomino.config import Config
from nanodomino.network import choose_interface
from nanodomino.settings import UserError, require

TIMEOUT = 600       # seconds; --timeout's default
MESSAGE_BLOCKS = 4  # thread blocks of a GPU that messages between stages may hold
LATER = 60          # seconds by which NCCL's own time-out, which aborts the process, comes after ours (watch.py)


@dataclass(frozen=True)
class Place:
    """What the launcher told this process: its number in the world and on its host."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False        # by torchrun, which also says where the others are
    restarted: bool = False       # by torchrun --max-restarts, after a rank had died


def find_place(environment=os.environ) -> Place:
    """Read torchrun's variables; with none of them, one process. Raises UserError if only some are there."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [name for name in names if environment.get(name)]
    if not found:
        return Place()
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
    place = Place(*(int(environment[name]) for name in names), launched=True,
                  restarted=environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
    require(place.rank < place.world_size and place.local_rank < place.local_world_size,
            f"RANK {place.rank} must be below WORLD_SIZE {place.world_size} and LOCAL_RANK {place.local_rank} below "
            f"LOCAL_WORLD_SIZE {place.local_world_size}; start with torchrun, which sets them")
    return place


def find_device(config: Config, place: Place) -> torch.device:
    """This process's device: its own GPU, or the CPU. Raises UserError if there are too few GPUs."""
    # One queue into the device: kernels start in the order of their launches, so that a sum put on the wires before a
    # product does not wait behind it. CUDA reads this once, when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return torch.device("cpu")
    require(gpus > 0, "--device cuda needs a GPU that torch can see, and there is none; try --device cpu")
    shown_its_own = gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES")       # as SLURM does: a GPU for each task
    require(place.local_world_size <= gpus or shown_its_own,
            f"{place.local_world_size} processes on this host need as many GPUs, and there "
            f"are {gpus}; start torchrun --nproc_per_node {gpus}, or try --device cpu")
    return torch.device("cuda", 0 if shown_its_own else place.local_rank)


def keep_freed_memory():
    """Let this process keep what it frees for its next tensors, as torch itself does on GPUs.

    glibc gives large blocks back to the kernel, and at the next step each of their pages is faulted in and cleared
    again: a quarter of a step, at hidden 512 and batch 8 x 256 (0.89 against 0.66 s, on two cores).
    """
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4                                     # of malloc.h
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)                                            # nothing mapped on its own
        libc.mallopt(M_TRIM_THRESHOLD, -1)                                     # the heap never shrinks


def check_own_gpu(gpu: str, place: Place, store: dist.Store):
    """NCCL knows no two ranks on one GPU. gpu: its number in all the world. Raises UserError on every rank alike."""
    store.set(f"gpu of rank {place.rank}", gpu)
    gpus = [store.get(f"gpu of rank {rank}").decode() for rank in range(place.world_size)]
    for gpu in gpus:
        ranks = [str(rank) for rank, other in enumerate(gpus) if other == gpu]
        require(len(ranks) == 1, f"each process needs a GPU of its own, but ranks {' and '.join(ranks)} see the same "
                "one; start as many processes as there are GPUs, or give each its own CUDA_VISIBLE_DEVICES")


def collective_timeout(timeout: int, device: torch.device) -> timedelta:
    """What a group is given. On CPUs its collectives raise then; on GPUs the process has ended by then (watch.py)."""
    return timedelta(seconds=timeout + (LATER if device.type == "cuda" else 0))


def start_world(place: Place, device: torch.device, timeout: int = TIMEOUT):
    """Bring up the default process group: NCCL between GPUs, gloo between CPUs, a world of one without a launcher.

    timeout: seconds that a collective may take before it is an error.
    Raises UserError if there is no way to the others.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if place.world_size > place.local_world_size:              # on several hosts
        choose_interface(os.environ.get("MASTER_ADDR", ""))
    # checkpoints talk on the CPU, behind training
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, patience = dist.HashStore(), timedelta(seconds=timeout)
    try:
        if place.launched:
            store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=patience))
            # torchrun --max-restarts keeps its store, and in it the addresses of the dead: each start has its names
            store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        if device.type == "cuda":
            check_own_gpu(str(torch.cuda.get_device_properties(device).uuid), place, store)
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, store=store,
                                timeout=collective_timeout(timeout, device),
                                device_id=device if device.type == "cuda" else None)
    except (dist.DistNetworkError, dist.DistStoreError) as error:     # a port in use, a host or rank that is not there
        raise UserError(f"the {place.world_size} processes can't meet at MASTER_ADDR {os.environ.get('MASTER_ADDR')}, "
                        f"MASTER_PORT {os.environ.get('MASTER_PORT')} ({str(error).splitlines()[0]}); choose a free "
                        f"port of a host that all can reach, and start all {place.world_size}") from None


@dataclass(frozen=True)
class Mesh:
    """This process's coordinates, its device, and its groups. Made by make_mesh()."""
    pp: int
    dp: int
    tp: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    device: torch.device
    tp_group: dist.ProcessGroup                   # all None in a mesh on paper
    dp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup                   # the stages of a replica: activations travel down, gradients up
    embedding_group: dist.ProcessGroup | None     # first and last stage, which both hold a tied embedding; the others
                                                  # have one without a use; None if there is one stage

    def rank_of(self, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        """Coordinates -> rank in the world."""
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def stage_rank(self, pp_rank: int) -> int:
        """World rank of the process at stage pp_rank that shares this one's dp_rank and tp_rank."""
        return self.rank_of(pp_rank, self.dp_rank, self.tp_rank)

    @property
    def is_first_stage(self) -> bool:
        """It holds the model's beginning, whatever the schedule; where the end lies is the placement's to say."""
        return self.pp_rank == 0

    def picture(self, stages: list[str]) -> str:
        """The box as text; stages[i] says what stage i holds."""
        width = len(str(self.pp * self.dp * self.tp - 1))
        lines = [f"rank grid: {self.pp} pp x {self.dp} dp x {self.tp} tp; a bracket is a tensor-parallel group, a "
                 "column of brackets a replica"]
        for stage in range(self.pp):
            brackets = ("[" + " ".join(f"{self.rank_of(stage, d, t):{width}d}" for t in range(self.tp)) + "]"
                        for d in range(self.dp))
            lines.append(f"  stage {stage}   {'  '.join(brackets)}   {stages[stage]}")
        return "\n".join(lines)


def mesh_on_paper(pp: int, dp: int, tp: int, pp_rank=0, dp_rank=0, tp_rank=0) -> Mesh:
    """Any place of any grid, without processes: it has no groups, and its device is torch's `meta`, where tensors have
    shapes and no memory. A model that is built on it tells what a rank would hold."""
    return Mesh(pp, dp, tp, pp_rank, dp_rank, tp_rank, torch.device("meta"), None, None, None, None)


def nccl(urgent=False, most_blocks=None) -> dict:
    """How NCCL is to run a group's collectives. urgent: in a stream that the device serves first, or a sum would queue
    behind products that were launched after it; most_blocks: thread blocks that it may take from the products beside
    it: a message that waits for its sender holds them all the time."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    if most_blocks:
        options.config.max_ctas = most_blocks
    return dict(backend="nccl", pg_options=options)


def make_mesh(pp: int, dp: int, tp: int, device: torch.device, timeout: int = TIMEOUT) -> Mesh:
    """Cut the world into pp x dp x tp. Every rank of the world must call this, with the same numbers.

    timeout: as in start_world; a group does not inherit it. Raises UserError if the world has another size.
    """
    world = dist.get_world_size()
    if pp * dp * tp != world:
        raise UserError(f"world size {world} must equal pp x dp x tp = {pp} x {dp} x {tp}; change one of them")
    box = torch.arange(world).view(pp, dp, tp)                                 # box[pp_rank, dp_rank, tp_rank] = rank

    def group(rows: list[list[int]], **about) -> dist.ProcessGroup:
        """The process group of this rank's row. Every rank of the world is in one row, and makes the group of that.

        NCCL splits a communicator in one act of all of its ranks, in which each says which part it wants. So an axis
        costs one split, not one for each row; where all rows are of one rank it costs none, and no memory of a GPU.
        """
        row = next(row for row in rows if dist.get_rank() in row)
        on_gpu, alone = device.type == "cuda", max(map(len, rows)) == 1
        how = {} if not on_gpu else dict(backend="gloo") if alone else nccl(**about)
        return dist.new_group(row, timeout=collective_timeout(timeout, device), use_local_synchronization=True, **how)

    pipelines = box.reshape(pp, -1).t()                                        # a row: the stages' ranks, first to last
    pp_rank, dp_rank, tp_rank = (box == dist.get_rank()).nonzero()[0].tolist()
    return Mesh(pp, dp, tp, pp_rank, dp_rank, tp_rank, device,
                tp_group=group(box.reshape(-1, tp).tolist(), urgent=True),
                dp_group=group(box.transpose(1, 2).reshape(-1, dp).tolist(), urgent=True),
                pp_group=group(pipelines.tolist(), most_blocks=MESSAGE_BLOCKS),
                # the stages between are a row too, of no use but to the split
                embedding_group=group([*pipelines[:, [0, -1]].tolist(), *pipelines[:, 1:-1].tolist()])
                if pp > 1 else None)
