"""Which rectangles of a whole tensor does a rank have, when it has a range of a flat buffer?

A flat buffer forgets where rows end, so a range of it cuts through a matrix like a page through a text: the end of a
row, whole rows, the begin of a row. At most three rectangles; of a vector, one.

    numbers 4 .. 20 of a matrix of      . . . . 4 5        rectangles, each (where, how large):
    four rows of six                    6 7 8 . . .            (0, 4), 1 x 2
                                        . . . . . .            (1, 0), 2 x 6
                                        18 19 . . . .          (3, 0), 1 x 2

With tensor parallelism that matrix is a shard, which begins somewhere else in the whole one.
torch.distributed.checkpoint stores and reads rectangles at places in whole tensors, whatever rank and layout they come
from; so that is all that has to be said.
"""

import math
from itertools import pairwise

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nanodomino.mesh import Mesh


def rectangles(begin: int, end: int, shape) -> list[tuple[tuple, tuple]]:
    """The rectangles that the numbers begin .. end of a flattened vector or matrix fill, in order: of each (where it
    begins, how large it is)."""
    columns = shape[-1]
    cuts = {begin, min(-(-begin // columns) * columns, end), max(end // columns * columns, begin), end}
    return [((first // columns, first % columns)[-len(shape):],
             (-(-(last - first) // columns), min(last - first, columns))[-len(shape):])
            for first, last in pairwise(sorted(cuts))]


class Pieces(torch.Tensor):
    """A whole tensor's size, and what this rank has of it: {where: rectangle}. torch.distributed.checkpoint asks for
    that through the three methods with underscores, as it asks a DTensor, which can't be more than one rectangle."""

    @classmethod
    def of(cls, weight, mesh: Mesh) -> "Pieces":
        """None yet, of a parameter."""
        cut = [dim == weight.shard_dim for dim in range(weight.dim())]
        size = [length * (mesh.tp if here else 1) for length, here in zip(weight.shape, cut)]
        whole = torch.empty(()).expand(size).as_subclass(cls)            # one number, whatever the size
        whole.shard, whole.pieces = weight.shape, {}
        whole.corner = [length * mesh.tp_rank if here else 0 for length, here in zip(weight.shape, cut)]
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
