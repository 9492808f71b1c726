"""Which rectangles of a whole tensor does a rank have, when it has a range of a flat buffer?

A flat buffer forgets where rows end, so a range of it cuts through a matrix like a page through a text: the end of a
row, whole rows, the begin of a row. At most three rectangles; of a vector, one.

    numbers 4 .. 20 of a matrix of      . . . . 4 5        rectangles, each (where, how large):
    four rows of six                    6 7 8 . . .            (0, 4), 1 x 2
                                        . . . . . .            (1, 0), 2 x 6
                                        18 19 . . . .          (3, 0), 1 x 2

With tensor parallelism that matrix is a shard, which begins somewhere else in the whole one. Where a rank has a part of
each of several runs of rows (gate and up of a SwiGLU), the whole is stored as [runs, rows, columns], so that a shard is
one box in it; of three dimensions a range fills at most five boxes.
torch.distributed.checkpoint stores and reads rectangles at places in whole tensors, whatever rank and layout they come
from; so that is all that has to be said.
"""

import math
from itertools import pairwise

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.optim.buckets import Bucket


def rectangles(begin: int, end: int, shape) -> list[tuple[tuple, tuple]]:
    """The rectangles, or boxes, that the numbers begin .. end of a flattened tensor of this shape fill, in order: of
    each (where it begins, how large it is)."""
    if len(shape) == 1:
        return [((begin,), (end - begin,))] * (begin < end)
    inner, found = math.prod(shape[1:]), []
    cuts = {begin, min(-(-begin // inner) * inner, end), max(end // inner * inner, begin), end}
    for first, last in pairwise(sorted(cuts)):
        rows, row = (last - first) // inner, first // inner
        found += ([((row, *[0] * len(shape[1:])), (rows, *shape[1:]))] if rows else
                  [((row, *where), (1, *size)) for where, size in
                   rectangles(first - row * inner, last - row * inner, shape[1:])])
    return found


class Pieces(torch.Tensor):
    """A whole tensor's size, and what this rank has of it: {where: rectangle}. torch.distributed.checkpoint asks for
    that through the three methods with underscores, as it asks a DTensor, which can't be more than one rectangle."""

    @classmethod
    def of(cls, weight, mesh: Mesh) -> "Pieces":
        """None yet, of a parameter."""
        shard, cut = list(weight.shape), [dim == weight.shard_dim for dim in range(weight.dim())]
        if weight.partition_stride > 1:
            shard[:1], cut[:1] = (weight.partition_stride, shard[0] // weight.partition_stride), (False, True)
        size = [length * (mesh.tp if here else 1) for length, here in zip(shard, cut)]
        whole = torch.empty(()).expand(size).as_subclass(cls)            # one number, whatever the size
        whole.shard, whole.pieces = shard, {}
        whole.corner = [length * mesh.tp_rank if here else 0 for length, here in zip(shard, cut)]
        return whole

    def add(self, flat, begin: int = 0):
        """The numbers from `begin` on of this rank's shard are `flat`."""
        for where, sizes in rectangles(begin, begin + len(flat), self.shard):
            piece, flat = flat[:math.prod(sizes)], flat[math.prod(sizes):]
            self.pieces[torch.Size(map(sum, zip(self.corner, where)))] = piece.view(sizes)

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(where, piece.shape) for where, piece in self.pieces.items()]

    def __create_write_items__(self, name, _):
        return [WriteItem(MetadataIndex(name, where), WriteItemType.SHARD, tensor_data=TensorWriteData(
                    ChunkStorageMetadata(where, piece.shape), TensorProperties(piece.dtype), self.size()))
                for where, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index):
        return self.pieces[index.offset]


# ---- tensors under global names

def named_pieces(model: GPT, mesh: Mesh, ranges) -> dict[str, Pieces]:
    """{'<part>.<global name>': what is there of it}; ranges: (bucket, part, begin, the numbers of it from there on)."""
    names = {weight: name for name, weight in model.named_parameters()}
    found = {}
    for bucket, part, begin, flat in ranges:
        for weight in bucket.parameters:
            first = bucket.offsets[weight]
            here = flat[max(first - begin, 0):max(first - begin + weight.numel(), 0)]
            if len(here):
                pieces = found.setdefault(f"{part}.{names[weight]}", Pieces.of(weight, mesh))
                pieces.add(here, max(begin - first, 0))
    return found


def to_save(bucket: Bucket, mesh: Mesh) -> tuple[int, int]:
    """Begin and end of what this rank saves of a bucket. It is dealt out over all ranks that hold the same: the
    replicas, each of which gets what it owns in ZeRO-1, and tp ranks where they are copies. A tied matrix is saved by
    the first stage."""
    holders, mine = mesh.dp, mesh.dp_rank
    if not bucket.kind.sharded:
        holders, mine = holders * mesh.tp, mine * mesh.tp + mesh.tp_rank
    size = len(bucket.weights) if mesh.is_first_stage or not bucket.kind.tied else 0
    return size * mine // holders, size * (mine + 1) // holders
