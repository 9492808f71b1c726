"""The grid of ranks: rank <-> (pp_rank, dp_rank, tp_rank), with a process group for each axis.

The world is all processes of a run; a rank is the number of a process in it. Each axis of the grid splits the work in
its own way:

    tp    tensor parallel      each matrix is cut over tp ranks
    dp    data parallel        each of dp replicas holds the whole model and trains on its own samples
    pp    pipeline parallel    each of pp stages holds some of the layers

Ranks are numbered with tp fastest, then dp and pp (Megatron-LM's pipeline paper, 2104.04473, section 3):

    rank = (pp_rank * dp + dp_rank) * tp + tp_rank

                     dp 0        dp 1            tp_group: the ranks in one bracket. They all-reduce four times per
      stage 0       [0  1]      [2  3]           layer and microbatch, so they should share the fastest link.
      stage 1       [4  5]      [6  7]           dp_group: 0 and 2, 1 and 3, ... hold the same shard of different
                     tp 0 1      tp 0 1          replicas. They sum their gradients (zero.py).
                                                 pp_group: 0 and 4, 1 and 5, ... pass activations to the next stage
                                                 and gradients to the previous one.

Options may add *inner axes* between dp and tp. The ranks along an inner axis share a replica's samples and hold the
same weights. They are all in one dp_group: axis("dp") counts its ranks, `dp` and `dp_rank` count replicas. Options may
also add groups of ranks along these axes.

A collective over the wrong axis raises no error: it just sums the wrong tensors. So only this file builds the grid, and
everything else receives it as a `Mesh`.

A single process is a world of size 1. It runs the same code, with groups of one member.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nanodomino.comm.device import nccl_options
from nanodomino.comm.world import TIMEOUT
from nanodomino.errors import UserError, counted


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid, with its device and process groups. make_mesh() builds it."""
    rank: int
    sizes: dict[str, int]                         # the axes, slowest first: pp, dp, inner axes, tp
    coordinates: dict[str, int]                   # this process's index on each axis
    rows: dict[str, list[int]]                    # the ranks of each of this process's groups
    device: torch.device
    groups: dict[str, dist.ProcessGroup]          # empty in a meta_mesh()

    pp, pp_rank = property(lambda self: self.sizes["pp"]), property(lambda self: self.coordinates["pp"])
    dp, dp_rank = property(lambda self: self.sizes["dp"]), property(lambda self: self.coordinates["dp"])
    tp, tp_rank = property(lambda self: self.sizes["tp"]), property(lambda self: self.coordinates["tp"])
    tp_group = property(lambda self: self.groups.get("tp"))
    dp_group = property(lambda self: self.groups.get("dp"))
    pp_group = property(lambda self: self.groups.get("pp"))       # the stages of one replica, first to last

    def axis(self, name: str) -> tuple[int, int]:
        """Return (number of ranks, this rank's index) in the group `name`; (1, 0) if the mesh has no such group. Names
        are tp, dp, pp, embedding (the first and the last stage) and those of the options' groups."""
        row = self.rows.get(name, [self.rank])
        return len(row), row.index(self.rank)

    def rank_of(self, **moved: int) -> int:
        """Return the world rank of the process at this process's coordinates, except for those that are given. For
        example, rank_of(pp=1) is stage 1 of this process's own pipeline."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + moved.get(axis, self.coordinates[axis])
        return rank

    def picture(self, stages: list[str]) -> str:
        """Return the grid as text. stages[i]: what stage i holds, for example "layers 0 to 3"."""
        (_, pp), *others, (_, tp) = self.sizes.items()
        width, brackets = len(str(math.prod(self.sizes.values()) - 1)), math.prod(size for _, size in others)
        columns = "column" if brackets == self.dp else f"{brackets // self.dp} columns"
        lines = [f"rank grid: {' x '.join(f'{size} {axis}' for axis, size in self.sizes.items())}; each bracket is a "
                 f"tensor-parallel group, every {columns} of brackets a replica"]
        for stage in range(pp):
            first = range(stage * brackets * tp, (stage + 1) * brackets * tp, tp)          # ranks of each bracket
            row = ("[" + " ".join(f"{rank:{width}d}" for rank in range(start, start + tp)) + "]" for start in first)
            lines.append(f"  stage {stage}   {'  '.join(row)}   {stages[stage]}")
        return "\n".join(lines)


def group_rows(sizes: dict[str, int], more_groups) -> dict[str, list[list[int]]]:
    """Return {group name: rows}. A row lists the ranks of one process group; each rank is in one row of each name."""
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    axes = list(sizes)

    def along(*names):
        """Return the rows of ranks that differ only in their coordinates on these axes."""
        others = [axis for axis in axes if axis not in names]
        return grid.permute([axes.index(axis) for axis in (*others, *names)]).reshape(
            -1, math.prod(sizes[name] for name in names)).tolist()

    pipelines = along("pp")
    rows = {"tp": along("tp"), "dp": along(*axes[1:-1]), "pp": pipelines}
    rows |= {axis: along(axis) for axis in axes[2:-1]}
    if sizes["pp"] > 1:              # the middle stages take part because NCCL's split needs every rank
        rows["embedding"] = [[row[0], row[-1]] for row in pipelines] + [row[1:-1] for row in pipelines if row[1:-1]]
    return rows | more_groups(rows)


def lay_out(rank: int, sizes: dict[str, int], device, more_groups) -> tuple[Mesh, dict]:
    """Return the Mesh of a rank, without process groups, and the rows of all groups."""
    rows = group_rows(sizes, more_groups)
    rest, coordinates = rank, {}
    for axis, size in reversed(sizes.items()):
        rest, coordinates[axis] = divmod(rest, size)
    own = {name: next(row for row in of_name if rank in row) for name, of_name in rows.items()}
    return Mesh(rank, sizes, coordinates, own, device, {}), rows


def make_mesh(pp: int, dp: int, tp: int, device: torch.device, timeout: int = TIMEOUT, inner_axes=None,
              more_groups=lambda rows: {}, thread_blocks=None) -> Mesh:
    """Arrange the world as a grid and create its process groups. Every rank must call this with the same arguments.

    timeout: seconds that a collective may take; new groups do not inherit the world's timeout.
    inner_axes: {name: size} of the axes that options add.
    more_groups: rows of the axes' groups -> {name: rows} of the groups that options add; each rank is in one row.
    thread_blocks: {name: the most thread blocks of a group's collectives}; see nccl_options().
    Raises UserError if the product of all sizes is not the world size."""
    sizes, world_size = {"pp": pp, "dp": dp, **(inner_axes or {}), "tp": tp}, dist.get_world_size()
    needed = math.prod(sizes.values())
    if needed != world_size:
        raise UserError(f"world size {world_size} must equal {' x '.join(sizes)} = "
                        f"{' x '.join(map(str, sizes.values()))} = {needed}; start {counted(needed, 'process')}, or "
                        "choose other sizes")
    mesh, rows = lay_out(dist.get_rank(), sizes, device, more_groups)
    timeout = timedelta(seconds=timeout)
    for name, of_name in rows.items():
        # NCCL splits a communicator in one collective call, in which each rank names its row. So a group's name costs
        # one split, however many rows it has. If every row has a single rank, the group uses gloo: no split, no memory.
        options = {}
        if device.type == "cuda":
            sends = max(map(len, of_name)) > 1
            options = nccl_options(timeout, (thread_blocks or {}).get(name)) if sends else dict(backend="gloo")
        mesh.groups[name] = dist.new_group(mesh.rows[name], timeout=timeout, use_local_synchronization=True, **options)
    return mesh


def meta_mesh(pp: int, dp: int, tp: int, pp_rank=0, dp_rank=0, tp_rank=0, inner_axes=None, more_groups=lambda rows: {},
              **inner_ranks: int) -> Mesh:
    """Return the mesh of the rank with these coordinates, without processes or groups.

    inner_axes, more_groups: see make_mesh(). inner_ranks: the coordinates on the inner axes, 0 if not given.
    Its device is torch's `meta`, where tensors have shapes but no memory. The estimates of memory and traffic build a
    model on it to get the shapes of that rank's parameters."""
    sizes = {"pp": pp, "dp": dp, **(inner_axes or {}), "tp": tp}
    first, _ = lay_out(0, sizes, torch.device("meta"), more_groups)
    rank = first.rank_of(pp=pp_rank, dp=dp_rank, tp=tp_rank, **inner_ranks)
    return lay_out(rank, sizes, torch.device("meta"), more_groups)[0]
