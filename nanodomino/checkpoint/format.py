"""Defines the files of a checkpoint: boxes of tensors as raw bytes, the index that locates them, and the manifest.

Weights, optimizer state and a few counters are enough to resume with the same bits, because the data order, the dropout
masks and the learning rate depend only on the settings and the step.

A box is a rectangular part of a tensor, given by its offset and size. Each rank writes the boxes that it holds, one
after another, as little-endian numbers and nothing else. A reader on another layout asks for other boxes. They are put
together from the stored ones, whichever rank wrote them.

    rank-00000.bin  the numbers that rank 0 wrote; rank-00001.bin ...
    index.json      {"weight.final_norm.weight": {"dtype": "float32", "shape": [8], "boxes": [
                        ["rank-00000.bin", 0, [0], [5]],        file, first byte, offset in the tensor, size
                        ["rank-00001.bin", 0, [5], [3]]]}, ...}
    manifest.json   {"sha256": of the rest of this file, "format", "step", "adam_steps", "skipped_in_a_row",
                     "loss_scale", "config", "files": {name: {"size", "sha256"}}}; written last

The range of a flat buffer that a rank owns need not begin or end where a row of a matrix does. It may hold the end of
one row, some whole rows and the start of another row, which makes at most three boxes:

    elements 4 .. 19 of a matrix         .  .  .  .  4  5        boxes (offset, size):
    of four rows and six columns         6  7  8  9 10 11            (0, 4), 1 x 2
                                        12 13 14 15 16 17            (1, 0), 2 x 6
                                        18 19  .  .  .  .            (3, 0), 1 x 2

With tensor parallelism this matrix is a shard, at some offset in the full tensor. SwiGLU's gate and up are stacked in
one parameter, and each rank holds rows of both. So the full tensor is stored as [2, rows, columns], in which every
shard is one box. The experts of a layer are stacked in one parameter too, with up to four dimensions.

verify() finds any damage: flipped bits, truncated files, missing files. Reading a checkpoint runs no code. Even a file
with the right checksum could have been written to do harm. So the size of the index is limited, each box must lie in a
file that the manifest lists, and memory is allocated only for bytes in that file and for elements that are asked for.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from nanodomino.errors import UserError, require
from nanodomino.files import make_folder, naming, open_regular_file, read_file, sha256, write_file
from nanodomino.model import GPT
from nanodomino.optim.buckets import Bucket
from nanodomino.settings.presets import DTYPES

FORMAT, INDEX = "nanodomino-checkpoint-2", "index.json"
STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")      # matches exactly the names f"step-{step:08d}"
FILE_NAME = re.compile(r"\w[\w.-]{0,99}")                      # with a / it could lead to any file
MEASURES = dict(size=os.path.getsize, sha256=sha256)           # in this order, because large files take long to hash


def check(condition, sentence: str):
    """Raise UserError with `sentence` and the advice to use another checkpoint, unless the condition holds."""
    require(condition, f"{sentence}; use another checkpoint")


# ---- boxes

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
    state: str                  # "weight" or the name of a moment: see ZeroOptimizer.states_of
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


def local_boxes(model: GPT, ranges: list[BucketRange]) -> list[LocalBox]:
    """Return the boxes of all parameters in these ranges. The name of a box contains no rank and no stage, so it is the
    same on any layout."""
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


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box of the elements that lie in both boxes, or None if there are none."""
    start = tuple(map(max, a.offset, b.offset))
    size = tuple(min(x + m, y + n) - first for x, m, y, n, first in zip(*a, *b, start))
    return Box(start, size) if min(size) > 0 else None


def slices(box: Box, start: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices that select the box from a tensor whose first element has the offset `start`."""
    return tuple(slice(offset - first, offset - first + length) for offset, length, first in zip(*box, start))


# ---- the files of the ranks, and their index

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


def write_boxes(path: Path, boxes: Iterable[LocalBox]) -> Share:
    """Write the values of the boxes to a file, flush it to the disk, and compute its checksum. boxes: can be a
    generator, because only one box is needed at a time."""
    make_folder(path.parent)
    digest, start, entries = hashlib.sha256(), 0, []
    with naming(path), open_regular_file(path, "wb") as file:
        for name, shape, (offset, size), values in boxes:
            data = values.view(torch.uint8).numpy()
            file.write(data)
            digest.update(data)
            entries.append((name, str(values.dtype).removeprefix("torch."), shape, (path.name, start, offset, size)))
            start += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    return Share(path.name, dict(size=start, sha256=digest.hexdigest()), entries)


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
        check(tensor and tensor.shape == tuple(shape), f"{self.folder} lacks {name} of shape {tuple(shape)}")
        return tensor

    def fill(self, boxes: Iterable[LocalBox]):
        """Copy the stored values to `boxes`. Raises UserError."""
        for name, shape, box, values in boxes:
            tensor = self.find(name, shape)
            parts = [(stored, common) for stored in tensor.boxes if (common := intersection(box, stored.box))]
            check(sum(math.prod(common.size) for _, common in parts) == math.prod(box.size),
                  f"{self.folder / INDEX} does not list each element of {name} once")
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
                check(start + length <= os.fstat(file.fileno()).st_size, f"{path} is too short for what {INDEX} says")
                rows = torch.empty(length, dtype=torch.uint8)
                file.seek(start)
                file.readinto(rows.numpy())
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror}); use another checkpoint") from None
        return rows.view(dtype).view(count, *stored.box.size[1:])


# ---- the manifest

def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, such as 12 for step-00000012; None for any other kind of name."""
    found = STEP_NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def file_digest(path: Path) -> dict:
    """Return the size and SHA-256 of a file. Raises OSError."""
    return {name: measure(path) for name, measure in MEASURES.items()}


def manifest_text(content: dict) -> str:
    """Return the text of a manifest: the checksum of the content, then the content."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest} | body, indent=1) + "\n"


def write_manifest(folder: Path, content: dict, shares: list[Share], advice: str):
    """Write the index and the manifest of a checkpoint and flush them to the disk. content: the manifest, to which
    "files" is added. Raises UserError with this advice if a file is missing."""
    tensors = {}
    for name, dtype, shape, stored in (entry for share in shares for entry in share.entries):
        tensors.setdefault(name, dict(dtype=dtype, shape=shape, boxes=[]))["boxes"].append(stored)
    write_file(folder / INDEX, json.dumps(tensors).encode(), flush=True)
    files = {share.file: share.digest for share in shares}
    missing = [name for name in files if not (folder / name).is_file()]
    require(not missing, f"{folder} lacks {', '.join(missing)}; {advice}")
    content["files"] = files | {path.name: file_digest(path) for path in sorted(folder.iterdir())
                                if path.name not in files}
    write_file(folder / "manifest.json", manifest_text(content).encode(), flush=True)
    flush_folder(folder)


def flush_folder(folder: Path):
    """Flush a folder's own entries to the disk, so that new and renamed files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a checkpoint. Raises UserError if it is missing, damaged or of another format."""
    path = folder / "manifest.json"
    try:
        text = read_file(path).decode()
        content = json.loads(text)
        intact = isinstance(content, dict) and text == manifest_text(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder} is not a complete checkpoint: its manifest.json can't be read ({error}); "
                        "use another checkpoint") from None
    check(intact, f"{path} is damaged: its checksum is wrong")
    require(content.get("format") == FORMAT, f"{path} has format {str(content.get('format'))[:80]!r}, but this version "
            f"reads {FORMAT!r}; use the version that wrote it")
    kinds = dict(step=int, adam_steps=int, config=dict, files=dict)
    wrong = [name for name, kind in kinds.items() if type(content.get(name)) is not kind]
    check(not wrong, f"{path} lacks {', '.join(wrong)}")
    for name in content["files"]:
        check(FILE_NAME.fullmatch(name), f"{path} must list files beside it, but has {name[:80]!r}")
    return content


def verify(folder: Path) -> dict:
    """Check every byte of a checkpoint, and return its manifest. Raises UserError, which names the damaged file."""
    content = read_manifest(folder)
    require(step_of(folder) in (None, content["step"]), f"{folder} holds the checkpoint of step {content['step']}, but "
            "its name says another step; rename the folder")
    files = content["files"]
    try:
        for measure, function in MEASURES.items():
            with ThreadPoolExecutor() as pool:                 # hashlib releases the interpreter lock
                for name, value in zip(files, pool.map(function, [folder / name for name in files])):
                    check(isinstance(files[name], dict) and files[name].get(measure) == value,
                          f"{folder / name} is damaged: its {measure} differs from the manifest's")
    except OSError as error:
        raise UserError(f"{error.filename} can't be read ({error.strerror}); use another checkpoint") from None
    return content
