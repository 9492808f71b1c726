"""Finds which boxes of a full tensor a rank holds, if the rank owns a range of a flat buffer.

A box is a rectangular part of a tensor, given by its offset and size. torch.distributed.checkpoint (dcp) stores tensors
as boxes, and can read back any other boxes, whichever rank and layout wrote the stored ones. So a rank only has to name
its boxes. But the range that a rank owns need not begin or end with a row of a matrix. It may hold the end of one row,
some whole rows and the start of another row, which makes at most three boxes:

    elements 4 .. 19 of a matrix         .  .  .  .  4  5        boxes (offset, size):
    of four rows and six columns         6  7  8  9 10 11            (0, 4), 1 x 2
                                        12 13 14 15 16 17            (1, 0), 2 x 6
                                        18 19  .  .  .  .            (3, 0), 1 x 2

With tensor parallelism this matrix is a shard, at some offset in the full tensor. SwiGLU's gate and up are stacked in
one parameter, and each rank holds rows of both. So the full tensor is stored as [2, rows, columns], in which every
shard is one box. A range of a three-dimensional tensor fills at most five boxes.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.optim.buckets import Bucket


class Box(NamedTuple):
    offset: tuple[int, ...]
    size: tuple[int, ...]


class BucketRange(NamedTuple):
    """A contiguous range of a bucket's weights, or of one of the optimizer's moments for these weights."""
    bucket: Bucket
    state: str                  # "weight" or the name of a moment: one of ZeroOptimizer.state_names
    start: int                  # in elements, counted from the start of the bucket
    values: torch.Tensor        # flat


def boxes_of_range(start: int, end: int, shape) -> list[Box]:
    """Return the boxes that elements start .. end - 1 of a flattened tensor of this shape fill, in order."""
    if len(shape) == 1:
        return [Box((start,), (end - start,))] * (start < end)
    row_size, boxes = math.prod(shape[1:]), []
    # cut where the first whole row starts and where the last whole row ends
    rows_start, rows_end = -(-start // row_size) * row_size, end // row_size * row_size
    for first, last in pairwise(sorted({start, min(rows_start, end), max(rows_end, start), end})):
        row, rows = first // row_size, (last - first) // row_size
        if rows:
            boxes.append(Box((row, *[0] * len(shape[1:])), (rows, *shape[1:])))
        else:
            boxes += [Box((row, *offset), (1, *size))
                      for offset, size in boxes_of_range(first - row * row_size, last - row * row_size, shape[1:])]
    return boxes


class LocalBoxes(torch.Tensor):
    """A full tensor of which this rank holds only some boxes: `boxes` is {offset in the full tensor: values}.

    The tensor has the full size, but memory for one element only. dcp gets the boxes from the three methods with
    underscores. A DTensor has these methods too, but can't hold more than one box."""

    @classmethod
    def of(cls, weight, mesh: Mesh) -> "LocalBoxes":
        """Return the full tensor of a parameter, without boxes so far."""
        shape, sharded = list(weight.shape), [dim == weight.shard_dim for dim in range(weight.dim())]
        if weight.partition_stride > 1:
            shape[:1], sharded[:1] = (weight.partition_stride, shape[0] // weight.partition_stride), (False, True)
        full_size = [length * (mesh.tp if cut else 1) for length, cut in zip(shape, sharded)]
        full = torch.empty(()).expand(full_size).as_subclass(cls)
        full.shard_shape, full.boxes = shape, {}
        full.shard_offset = [length * mesh.tp_rank if cut else 0 for length, cut in zip(shape, sharded)]
        return full

    def add(self, values, start: int = 0):
        """Add the boxes of some flat values: elements start, start + 1, ... of this rank's flattened shard."""
        for offset, size in boxes_of_range(start, start + len(values), self.shard_shape):
            box, values = values[:math.prod(size)], values[math.prod(size):]
            self.boxes[torch.Size(map(sum, zip(self.shard_offset, offset)))] = box.view(size)

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(offset, box.shape) for offset, box in self.boxes.items()]

    def __create_write_items__(self, name, _):
        return [WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offset, box.shape), TensorProperties(box.dtype), self.size()))
                for offset, box in self.boxes.items()]

    def __get_tensor_shard__(self, index):
        return self.boxes[index.offset]


def local_boxes(model: GPT, mesh: Mesh, ranges: list[BucketRange]) -> dict[str, LocalBoxes]:
    """Return {"STATE.PARAMETER": boxes} of all parameters in these ranges; a key is, for example,
    "exp_avg.layers.7.attention.qkv.weight". Keys contain no rank and no stage, so they are the same on any layout."""
    names = {weight: name for name, weight in model.named_parameters()}
    found = {}
    for bucket, state, start, values in ranges:
        for weight in bucket.parameters:
            offset = bucket.offsets[weight] - start            # where the parameter starts in `values`
            part = values[max(offset, 0):max(offset + weight.numel(), 0)]
            if len(part):
                boxes = found.setdefault(f"{state}.{names[weight]}", LocalBoxes.of(weight, mesh))
                boxes.add(part, max(-offset, 0))
    return found


def range_to_save(bucket: Bucket, mesh: Mesh) -> tuple[int, int]:
    """Return the range (start, end) of a bucket that this rank saves.

    All ranks that hold the same bucket share the work. These are its replicas and, if the bucket is not sharded, its tp
    ranks. Each replica saves the part that it owns with ZeRO. Only the first stage saves a tied embedding."""
    holders, index = mesh.dp, mesh.dp_rank
    if not bucket.kind.sharded:
        holders, index = holders * mesh.tp, index * mesh.tp + mesh.tp_rank
    size = len(bucket.weights) if mesh.is_first_stage or not bucket.kind.tied else 0
    return size * index // holders, size * (index + 1) // holders
