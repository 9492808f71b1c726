"""Stores a checkpoint as boxes, which are rectangular parts of its tensors, in files of raw bytes with an index.

Each rank writes its boxes one after another to one file, as little-endian numbers and nothing else. A reader may ask
for boxes of other sizes (shards.py). They are put together from the stored boxes, which the index locates:

    index.json      {"weight.final_norm.weight": {"dtype": "float32", "shape": [8], "boxes": [
                        ["rank-00000.bin", 0, [0], [5]],        file, first byte, offset in the tensor, size
                        ["rank-00001.bin", 0, [5], [3]]]}, ...}

Whatever the files hold, reading them runs no code. The index could still be wrong, by a bug or on purpose. So it is
checked before any tensor is read: the manifest lists every file, so no box lies outside the checkpoint's folder; each
box lies inside its file; and the boxes of each tensor tile it, so no value is missing and none is stored twice.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import torch

from nanodomino.checkpoint.shards import Box, LocalBox
from nanodomino.config.presets import DTYPES
from nanodomino.errors import UserError, require
from nanodomino.files import open_regular_file

FORMAT, INDEX = "nanodomino-checkpoint-2", "index.json"
MARGIN = 1 << 20            # bytes by which an index may exceed its tensors; it takes under a second to check


class StoredBox(NamedTuple):
    file: str
    start: int                  # in bytes
    length: int                 # in bytes
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
    """The tensors of a checkpoint, {name: StoredTensor}. Every index obeys the rules above."""

    def __init__(self, folder: Path, manifest: dict):
        """Read the index and check it. Raises UserError."""
        self.folder, path, self.tensors = folder, folder / INDEX, {}
        most = MARGIN + sum(entry["size"] for name, entry in manifest["files"].items() if name != INDEX)
        try:
            with open_regular_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                require(size <= most, f"{path} has {size} bytes, but must have at most {most}, because it describes "
                        f"{most - MARGIN} bytes of tensors; use another checkpoint")
                content = json.loads(file.read())
            for name, entry in content.items():
                dtype = DTYPES[entry["dtype"]]
                self.tensors[name] = StoredTensor(dtype, tuple(entry["shape"]), [
                    StoredBox(file, start, math.prod(size) * dtype.itemsize, Box(tuple(offset), tuple(size)))
                    for file, start, offset, size in entry["boxes"]])
                check_tensor(name, self.tensors[name], manifest["files"], path)
            layers = {name.split(".")[2] for name in self.tensors if name.startswith("weight.layers.")}
        except UserError:
            raise
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror}); fix that, or use another checkpoint") from None
        except Exception as error:                             # arbitrary bytes can raise anything
            raise UserError(f"{path} is not an index of tensors ({type(error).__name__}: {str(error)[:80]}); use "
                            "another checkpoint") from None
        expected = manifest["config"].get("num_layers", 0)     # a billion would take hours to compare one by one
        require(len(layers) == expected, f"{folder} holds {len(layers)} layers, but its manifest says num_layers "
                f"{str(expected)[:80]}; use another checkpoint")

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
            for stored in tensor.boxes:
                common = intersection(box, stored.box)
                if common:
                    rows = self.read(stored, tensor.dtype, common.offset[0] - stored.box.offset[0], common.size[0])
                    rows_start = common.offset[:1] + stored.box.offset[1:]
                    values[slices(common, box.offset)] = rows[slices(common, rows_start)]

    def read(self, stored: StoredBox, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
        """Read rows first .. first + count - 1 of a stored box. Raises UserError."""
        path = self.folder / stored.file
        try:
            with open_regular_file(path) as file:
                row_bytes = stored.length // stored.box.size[0]
                rows = torch.empty(count * row_bytes, dtype=torch.uint8)
                file.seek(stored.start + first * row_bytes)
                rows = rows[:file.readinto(rows.numpy())]      # too few if the file was truncated
                return rows.view(dtype).view(count, *stored.box.size[1:])
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror}); fix that, or use another checkpoint") from None
        except Exception:                                      # the rows do not have this shape
            raise UserError(f"{path} does not hold what its index says; use another checkpoint") from None


def check_tensor(name: str, tensor: StoredTensor, files: dict, path: Path):
    """Raise UserError unless the stored boxes tile the tensor and lie in files that the manifest lists."""
    for file, start, length, (offset, size) in tensor.boxes:
        numbers = (start, length, *tensor.shape, *offset, *size)
        require(all(type(number) is int and number >= 0 for number in numbers) and 0 not in size
                and 0 < len(tensor.shape) == len(offset) == len(size) <= 4,
                f"{path} gives {name[:80]} an impossible shape, offset or size; use another checkpoint")
        require(file in files, f"{path} refers to {str(file)[:80]}, which the manifest does not list; use another "
                "checkpoint")
        require(start + length <= files[file]["size"], f"{path} places a part of {name[:80]} after the end of {file}; "
                "use another checkpoint")
    require(tile([stored.box for stored in tensor.boxes], tensor.shape),
            f"{path} lists parts of {name[:80]} that do not cover each element exactly once; use another checkpoint")


def tile(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Return whether the boxes cover each element of a tensor of this shape exactly once.

    A box is determined by its corners with alternating signs: in one dimension, [a, b) is +1 at a and -1 at b, and the
    running sum gives back a row of ones. Signed corners of several boxes add up to the signed corners of the whole
    tensor if and only if the boxes tile it. The time grows linearly with the number of boxes.
    """
    corners = Counter()
    for (offset, size), factor in [*((box, 1) for box in boxes), (Box((0,) * len(shape), shape), -1)]:
        for far in product((0, 1), repeat=len(shape)):
            corner = tuple(start + length * at_end for start, length, at_end in zip(offset, size, far))
            corners[corner] += factor * (-1) ** sum(far)
    return not any(corners.values())


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that lie in both boxes, or None if there are none."""
    start = tuple(map(max, a.offset, b.offset))
    size = tuple(min(x + m, y + n) - first for x, m, y, n, first in zip(*a, *b, start))
    return Box(start, size) if min(size) > 0 else None


def slices(box: Box, start: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices that select the box from a tensor whose first element has the offset `start`."""
    return tuple(slice(offset - first, offset - first + length)
                 for offset, length, first in zip(*box, start))
