"""The grid of ranks: rank <-> (pp_rank, dp_rank, cp_rank, tp_rank), with a process group for each axis.

The world is all processes of a run; a rank is the number of a process in it. Each axis of the grid splits the work in
its own way:

    tp    tensor parallel      each matrix is cut over tp ranks
    dp    data parallel        each of dp replicas holds the whole model (see ep) and trains on its own samples
    pp    pipeline parallel    each of pp stages holds some of the layers
    cp    context parallel     cp neighbours share each sample: they hold the same weights and different tokens
    ep    expert parallel      ep neighbours share the experts of a layer; each holds 1/ep of them

Ranks are numbered with tp fastest, then cp, dp and pp (Megatron-LM's pipeline paper, 2104.04473, section 3):

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank                  in the picture, cp is 1

                     dp 0        dp 1            tp_group: the ranks in one bracket. They all-reduce four times per
      stage 0       [0  1]      [2  3]           layer and microbatch, so they should share the fastest link.
      stage 1       [4  5]      [6  7]           dp_group: 0 and 2, 1 and 3, ... hold the same shard of different
                     tp 0 1      tp 0 1          replicas. They sum their gradients (zero.py).
                                                 pp_group: 0 and 4, 1 and 5, ... pass activations to the next stage
                                                 and gradients to the previous one.

The ranks that share a sample hold the same weights, so they belong to one dp_group: it has dp x cp ranks. `dp` and
`dp_rank` count replicas, each of which reads its own samples; axis("dp") counts the ranks of the dp_group.

A collective over the wrong axis raises no error: it just sums the wrong tensors. So only this file builds the grid, and
everything else receives it as a `Mesh`.

A single process is a world of size 1. It runs the same code, with groups of one member.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.world import TIMEOUT, collective_timeout
from nanodomino.errors import UserError, counted

# The channels of NCCL for messages between stages, a thread block each; NVLink has up to 32. NCCL occupies the thread
# blocks from when a receive is posted until the message arrives, so more channels would take more from the matmuls.
PIPELINE_THREAD_BLOCKS = 16


@dataclass(frozen=True)
class Mesh:
    """This process's coordinates, device and process groups. make_mesh() builds it."""
    pp: int
    dp: int
    tp: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    device: torch.device
    tp_group: dist.ProcessGroup                   # all groups are None in a meta_mesh()
    dp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup                   # the stages of one replica, first to last
    embedding_group: dist.ProcessGroup | None     # first and last stage, which each hold a copy of a tied
                                                  # embedding; never used on middle stages; None if pp = 1
    ep: int = 1
    ep_group: dist.ProcessGroup | None = None     # ep ranks, each with different experts; None if ep = 1
    ep_counts_group: dist.ProcessGroup | None = None    # the same ranks; counts need not queue behind rows
    expert_dp_group: dist.ProcessGroup = None     # the ranks of the dp_group that hold the same experts
    cp: int = 1
    cp_rank: int = 0
    cp_group: dist.ProcessGroup | None = None     # cp ranks that share the same samples; None if cp = 1

    def axis(self, name: str) -> tuple[int, int]:
        """Return (number of ranks, this rank's index) in the group `name`: tp, cp, dp, pp, ep, expert_dp, embedding."""
        dp, dp_rank = self.dp * self.cp, self.dp_rank * self.cp + self.cp_rank
        return {"tp": (self.tp, self.tp_rank), "cp": (self.cp, self.cp_rank), "dp": (dp, dp_rank),
                "pp": (self.pp, self.pp_rank), "ep": (self.ep, dp_rank % self.ep),
                "expert_dp": (dp // self.ep, dp_rank // self.ep),
                "embedding": (min(self.pp, 2), 0 if self.is_first_stage else 1)}[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the group of one of axis()'s names."""
        return getattr(self, f"{name}_group")

    def rank_of(self, pp_rank: int, dp_rank: int, tp_rank: int, cp_rank: int = 0) -> int:
        """Return the world rank of the process at these coordinates."""
        return ((pp_rank * self.dp + dp_rank) * self.cp + cp_rank) * self.tp + tp_rank

    def stage_rank(self, pp_rank: int) -> int:
        """Return the world rank of stage pp_rank in this process's own pipeline (same other coordinates)."""
        return self.rank_of(pp_rank, self.dp_rank, self.tp_rank, self.cp_rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage holds the embedding. Which stage holds the head depends on the schedule's placement."""
        return self.pp_rank == 0

    def picture(self, stages: list[str]) -> str:
        """Return the grid as text. stages[i]: what stage i holds, for example "layers 0 to 3"."""
        width = len(str(self.pp * self.dp * self.cp * self.tp - 1))
        shared, columns = ("", "column") if self.cp == 1 else (f" x {self.cp} cp", f"{self.cp} columns")
        lines = [f"rank grid: {self.pp} pp x {self.dp} dp{shared} x {self.tp} tp; each bracket is a tensor-parallel "
                 f"group, every {columns} of brackets a replica"]
        for stage in range(self.pp):
            brackets = ("[" + " ".join(f"{self.rank_of(stage, d, t, c):{width}d}" for t in range(self.tp)) + "]"
                        for d in range(self.dp) for c in range(self.cp))
            lines.append(f"  stage {stage}   {'  '.join(brackets)}   {stages[stage]}")
        return "\n".join(lines)


def make_mesh(pp: int, dp: int, tp: int, device: torch.device, timeout: int = TIMEOUT, ep: int = 1,
              cp: int = 1) -> Mesh:
    """Arrange the world as a pp x dp x cp x tp grid. Every rank must call this with the same sizes. ep must divide
    dp x cp.

    timeout: seconds that a collective may take; new groups do not inherit the world's timeout.
    Raises UserError if pp x dp x cp x tp is not the world size.
    """
    world_size, needed = dist.get_world_size(), pp * dp * cp * tp
    if needed != world_size:
        raise UserError(f"world size {world_size} must equal pp x dp x cp x tp = {pp} x {dp} x {cp} x {tp} = {needed}; "
                        f"start {counted(needed, 'process')}, or choose other sizes")
    grid = torch.arange(world_size).view(pp, dp, cp, tp)           # grid[pp_rank, dp_rank, cp_rank, tp_rank] = rank

    def new_group(rows: list[list[int]], **nccl) -> dist.ProcessGroup:
        """Create the process group of the row that holds this rank. Each rank of the world is in exactly one of `rows`.

        NCCL splits a communicator in one collective call, in which each rank names its row. So an axis costs one
        split, however many rows it has. If every row has a single rank, the group uses gloo: no split, no GPU memory.
        """
        row = next(row for row in rows if dist.get_rank() in row)
        options = {}
        if device.type == "cuda":
            options = nccl_options(**nccl) if max(map(len, rows)) > 1 else dict(backend="gloo")
        return dist.new_group(row, timeout=collective_timeout(timeout, device), use_local_synchronization=True,
                              **options)

    pipelines = grid.reshape(pp, -1).t()                                       # a row: the ranks of one pipeline
    pp_rank, dp_rank, cp_rank, tp_rank = (grid == dist.get_rank()).nonzero()[0].tolist()
    tp_group = new_group(grid.reshape(-1, tp).tolist())
    dp_group = expert_dp_group = new_group(grid.flatten(1, 2).transpose(1, 2).reshape(-1, dp * cp).tolist())
    cp_group = new_group(grid.transpose(2, 3).reshape(-1, cp).tolist()) if cp > 1 else None
    ep_group = ep_counts_group = None
    if ep > 1:
        experts = grid.view(pp, -1, ep, tp)
        ep_group, ep_counts_group = (new_group(experts.transpose(2, 3).reshape(-1, ep).tolist()) for _ in range(2))
        expert_dp_group = new_group(experts.permute(0, 2, 3, 1).reshape(-1, dp * cp // ep).tolist())
    return Mesh(pp, dp, tp, pp_rank, dp_rank, tp_rank, device, tp_group, dp_group,
                pp_group=new_group(pipelines.tolist(), thread_blocks=PIPELINE_THREAD_BLOCKS),
                # the middle stages take part because NCCL's split needs every rank
                embedding_group=new_group([*pipelines[:, [0, -1]].tolist(), *pipelines[:, 1:-1].tolist()])
                if pp > 1 else None,
                ep=ep, ep_group=ep_group, ep_counts_group=ep_counts_group, expert_dp_group=expert_dp_group,
                cp=cp, cp_rank=cp_rank, cp_group=cp_group)


def nccl_options(thread_blocks=None) -> dict:
    """Return new_group's arguments for an NCCL group.

    The group gets a high-priority CUDA stream. Otherwise its operations could wait for matmuls launched after them.
    Megatron-LM sets CUDA_DEVICE_MAX_CONNECTIONS=1 instead: with one hardware queue, kernels start in the order of their
    launches. But then a matmul waits for all collectives launched before it to start, and of two collectives in a row,
    the second starts only when the first has ended.

    thread_blocks: the most thread blocks that an operation may use. Kernels that run at the same time get the rest.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if thread_blocks:
        options.config.max_ctas = thread_blocks
    return dict(backend="nccl", pg_options=options)


def meta_mesh(pp: int, dp: int, tp: int, pp_rank=0, dp_rank=0, tp_rank=0, ep=1, cp=1, cp_rank=0) -> Mesh:
    """Return the mesh of the rank with these coordinates, without processes or groups.

    Its device is torch's `meta`, where tensors have shapes but no memory. The estimates of memory and traffic build a
    model on it to get the shapes of that rank's parameters.
    """
    return Mesh(pp, dp, tp, pp_rank, dp_rank, tp_rank, torch.device("meta"), None, None, None, None, ep,
                cp=cp, cp_rank=cp_rank)
