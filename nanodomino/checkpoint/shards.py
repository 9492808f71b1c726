"""Finds which boxes of a full tensor a rank holds, if the rank owns a range of a flat buffer.

A box is a rectangular part of a tensor, given by its offset and size. A checkpoint stores boxes, and tensor_index.py
reads any other boxes from them, whichever rank and layout wrote them. So a rank only has to name its boxes. But the
range that a rank owns need not begin or end where a row of a matrix does. It may hold the end of one row, some whole
rows and the start of another row, which makes at most three boxes:

    elements 4 .. 19 of a matrix         .  .  .  .  4  5        boxes (offset, size):
    of four rows and six columns         6  7  8  9 10 11            (0, 4), 1 x 2
                                        12 13 14 15 16 17            (1, 0), 2 x 6
                                        18 19  .  .  .  .            (3, 0), 1 x 2

With tensor parallelism this matrix is a shard, at some offset in the full tensor. SwiGLU's gate and up are stacked in
one parameter, and each rank holds rows of both. So the full tensor is stored as [2, rows, columns], in which every
shard is one box. A range of a three-dimensional tensor fills at most five boxes. The experts of a layer are stacked in
one parameter too, with up to four dimensions.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.optim.buckets import Bucket


class Box(NamedTuple):
    offset: tuple[int, ...]
    size: tuple[int, ...]


class LocalBox(NamedTuple):
    """A box of a full tensor, and the memory of this rank that holds its values."""
    name: str                   # "STATE.PARAMETER", such as "exp_avg.layers.7.attention.qkv.weight"
    shape: tuple[int, ...]      # the full tensor's
    box: Box
    values: torch.Tensor        # a tensor of shape box.size


class BucketRange(NamedTuple):
    """A contiguous range of a bucket's weights, or of one of the optimizer's moments for these weights."""
    bucket: Bucket
    state: str                  # "weight" or the name of a moment: one of ZeroOptimizer.states_of()
    start: int                  # in elements, counted from the start of the bucket
    values: torch.Tensor        # flat


def boxes_of_range(start: int, end: int, shape) -> list[Box]:
    """Return, in order, the boxes that hold elements start .. end - 1 of a flattened tensor of this shape."""
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


def full_shapes(model: GPT) -> dict[str, tuple[int, ...]]:
    """Return {parameter: shape of its full tensor} of the parameters of a model."""
    return {name: weight.spec.shape for name, weight in model.named_parameters()}


def local_boxes(model: GPT, ranges: list[BucketRange]) -> list[LocalBox]:
    """Return the boxes of all parameters in these ranges. A box is named without a rank or a stage, so its name is
    the same on any layout."""
    names, found = {weight: name for name, weight in model.named_parameters()}, []
    for bucket, state, start, values in ranges:
        for weight in bucket.parameters:
            first = bucket.offsets[weight] - start             # where the parameter starts in `values`
            part = values[max(first, 0):max(first + weight.numel(), 0)]
            shard = Box(weight.spec.offset, weight.spec.size)
            for offset, size in boxes_of_range(max(-first, 0), max(-first, 0) + len(part), shard.size):
                elements, part = part[:math.prod(size)], part[math.prod(size):]
                box = Box(tuple(map(sum, zip(shard.offset, offset))), size)
                found.append(LocalBox(f"{state}.{names[weight]}", weight.spec.shape, box, elements.view(size)))
    return found


def range_to_save(bucket: Bucket, mesh: Mesh) -> tuple[int, int]:
    """Return the range (start, end) of a bucket that this rank saves.

    All ranks that hold the same bucket share the work. These are the replicas and, if the bucket is not cut over tp,
    also the tp ranks. Each replica saves the part that it owns with ZeRO. Only the first stage saves a tied embedding.
    """
    holders, index = mesh.axis(bucket.kind.replicas)
    if "tp" not in bucket.kind.shards:
        holders, index = holders * mesh.tp, index * mesh.tp + mesh.tp_rank
    size = len(bucket.weights) if mesh.pp_rank == 0 or "embedding" not in bucket.kind.addends else 0
    return size * index // holders, size * (index + 1) // holders
