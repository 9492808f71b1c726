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

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.world import TIMEOUT, collective_timeout
from nanodomino.errors import UserError

MESSAGE_BLOCKS = 4  # thread blocks of a GPU that messages between stages may hold


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


def meta_mesh(pp: int, dp: int, tp: int, pp_rank=0, dp_rank=0, tp_rank=0) -> Mesh:
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
