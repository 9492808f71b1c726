"""Stores a checkpoint as boxes, which are rectangular parts of its tensors, in files of raw bytes with an index.

Each rank writes its boxes one after another to one file, as little-endian numbers and nothing else. A reader may ask
for boxes of other sizes (shards.py). They are put together from the stored boxes, which the index locates:

    index.json      {"weight.final_norm.weight": {"dtype": "float32", "shape": [8], "boxes": [
                        ["rank-00000.bin", 0, [0], [5]],        file, first byte, offset in the tensor, size
                        ["rank-00001.bin", 0, [5], [3]]]}, ...}

Whatever the files hold, reading them runs no code. The manifest's checksum shows that the index is as it was written.
It could still have been written to do harm. So its size is limited, and each box must lie in a file that the manifest
lists. Memory is allocated only for bytes in that file, and for elements that the reader has asked for.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from nanodomino.checkpoint.format import Box, LocalBox
from nanodomino.errors import UserError, require
from nanodomino.files import make_folder, open_regular_file, read_file
from nanodomino.settings.presets import DTYPES

FORMAT, INDEX = "nanodomino-checkpoint-2", "index.json"


class StoredBox(NamedTuple):
    file: str
    start: int                  # in bytes
    box: Box


class StoredTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[StoredBox]


class Share(NamedTuple):
    """The file that one rank has written, and the boxes in it."""
    file: str
    digest: dict                # {"size", "sha256"} of the file
    entries: list               # (tensor, dtype, shape, box as in index.json) for each box


# ---- write

def write_boxes(path: Path, boxes: Iterable[LocalBox]) -> Share:
    """Write the values of the boxes to a file and flush it to the disk. Each rank computes the checksum of its own
    file, so the ranks share this work. boxes: can be a generator, because only one box is needed at a time."""
    make_folder(path.parent)
    digest, start, entries = hashlib.sha256(), 0, []
    with open_regular_file(path, "wb") as file:
        for name, shape, (offset, size), values in boxes:
            data = values.view(torch.uint8).numpy()
            file.write(data)
            digest.update(data)
            entries.append((name, str(values.dtype).removeprefix("torch."), shape, (path.name, start, offset, size)))
            start += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return Share(path.name, dict(size=start, sha256=digest.hexdigest()), entries)


def index_text(shares: list[Share]) -> str:
    """Return the text of index.json."""
    tensors = {}
    for name, dtype, shape, stored in chain.from_iterable(share.entries for share in shares):
        tensors.setdefault(name, dict(dtype=dtype, shape=shape, boxes=[]))["boxes"].append(stored)
    return json.dumps(tensors)


# ---- read

class Index:
    """The tensors of a checkpoint, {name: StoredTensor}."""

    def __init__(self, folder: Path, manifest: dict):
        """Read the index. Raises UserError or OSError."""
        self.folder, path, self.tensors = folder, folder / INDEX, {}
        try:
            for name, entry in json.loads(read_file(path)).items():
                boxes = [StoredBox(file, start, Box(tuple(offset), tuple(size)))
                         for file, start, offset, size in entry["boxes"]]
                for file, start, (offset, size) in boxes:
                    if not (file in manifest["files"] and len(offset) == len(size) == len(entry["shape"])
                            and all(type(number) is int and number >= 0 for number in (start, *offset, *size))):
                        raise ValueError(f"it places a part of {name} at {file}, {start}, {offset}, {size}")
                self.tensors[name] = StoredTensor(DTYPES[entry["dtype"]], tuple(entry["shape"]), boxes)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not an index of tensors ({type(error).__name__}: {str(error)[:80]}); use "
                            "another checkpoint") from None

    def find(self, name: str, shape) -> StoredTensor:
        """Return a tensor. Raises UserError if the checkpoint has none with this name and shape."""
        tensor = self.tensors.get(name)
        require(tensor and tensor.shape == tuple(shape),
                f"{self.folder} lacks {name} of shape {tuple(shape)}; use another checkpoint")
        return tensor

    def fill(self, boxes: Iterable[LocalBox]):
        """Copy the stored values to `boxes`. Raises UserError."""
        for name, shape, box, values in boxes:
            tensor = self.find(name, shape)
            parts = [(stored, common) for stored in tensor.boxes if (common := intersection(box, stored.box))]
            require(sum(math.prod(common.size) for _, common in parts) == math.prod(box.size),
                    f"{self.folder / INDEX} does not list each element of {name} once; use another checkpoint")
            for stored, common in parts:
                rows = self.read(stored, tensor.dtype, common.offset[0] - stored.box.offset[0], common.size[0])
                rows_start = common.offset[:1] + stored.box.offset[1:]
                values[slices(common, box.offset)] = rows[slices(common, rows_start)]

    def read(self, stored: StoredBox, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
        """Read rows first .. first + count - 1 of a stored box. Raises UserError."""
        path, row_bytes = self.folder / stored.file, math.prod(stored.box.size[1:]) * dtype.itemsize
        start, length = stored.start + first * row_bytes, count * row_bytes
        try:
            with open_regular_file(path) as file:
                require(start + length <= os.fstat(file.fileno()).st_size,
                        f"{path} is too short for what {INDEX} says; use another checkpoint")
                rows = torch.empty(length, dtype=torch.uint8)
                file.seek(start)
                file.readinto(rows.numpy())
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror}); use another checkpoint") from None
        return rows.view(dtype).view(count, *stored.box.size[1:])


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that lie in both boxes, or None if there are none."""
    start = tuple(map(max, a.offset, b.offset))
    size = tuple(min(x + m, y + n) - first for x, m, y, n, first in zip(*a, *b, start))
    return Box(start, size) if min(size) > 0 else None


def slices(box: Box, start: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices that select the box from a tensor whose first element has the offset `start`."""
    return tuple(slice(offset - first, offset - first + length)
                 for offset, length, first in zip(*box, start))
