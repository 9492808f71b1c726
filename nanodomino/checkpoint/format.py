"""Defines the files of a checkpoint: boxes of tensors in safetensors files, and the manifest.

Weights, optimizer state and a few counters are enough to resume with the same bits, because the data order, the dropout
masks and the learning rate depend only on the settings and the step.

A safetensors file holds named tensors and no code. Hugging Face's weight files have this format too, and
`safetensors.torch.load_file(path)` opens both.

    8 bytes     N, the length of the header, little-endian
    N bytes     JSON: {"norm.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest    the numbers of each tensor, little-endian; data_offsets count bytes from here

A box is a rectangular part of a tensor, given by its offset and size. Each rank writes the boxes that it holds. A name
ends with the box's offset, unless that is 0. A reader on another layout puts its own boxes together from these.

    rank-00000.safetensors    weight.final_norm.weight    [5]        elements 0 .. 4
    rank-00001.safetensors    weight.final_norm.weight@5  [3]        elements 5 .. 7
    manifest.json             {"sha256": of the rest of this file, "format", "step", "adam_steps", "skipped_in_a_row",
                               "loss_scale", "config", "files": {name: SHA-256}}; written last

The range of a flat buffer that a rank owns need not begin or end where a row of a matrix does. It may hold the end of
one row, some whole rows and the start of another row, which makes at most three boxes:

    elements 4 .. 19 of a matrix         .  .  .  .  4  5        boxes (offset, size):
    of four rows and six columns         6  7  8  9 10 11            (0, 4), 1 x 2
                                        12 13 14 15 16 17            (1, 0), 2 x 6
                                        18 19  .  .  .  .            (3, 0), 1 x 2

With tensor parallelism this matrix is a shard, at some offset in the full tensor. SwiGLU's gate and up are stacked in
one parameter, and each rank holds rows of both. So the full tensor is stored as [2, rows, columns], in which every
shard is one box. Stacked experts have up to four dimensions.
"""

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nanodomino.errors import UserError, require
from nanodomino.files import make_folder, naming, open_regular_file, read_file, sha256, write_file
from nanodomino.model import GPT
from nanodomino.optim.buckets import Bucket

FORMAT, FORMAT_2 = "nanodomino-checkpoint-3", "nanodomino-checkpoint-2"          # format 2 is read, but not written
SUFFIX, LONGEST_HEADER = ".safetensors", 100_000_000                             # bytes, the format's own limit
STORED_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


# ---- safetensors files

class StoredTensor(NamedTuple):
    """Where a file holds a tensor. dtype: a str if it is not a key of STORED_DTYPES. start: its first byte."""
    path: Path
    dtype: torch.dtype | str
    shape: tuple[int, ...]
    start: int


@contextmanager
def reading(path: Path):
    """Raise UserError if the block can't read the file `path`, or raises an error because the file is damaged."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        path, reason = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or str(error)[:200]
        raise UserError(f"{path} is damaged or can't be read ({reason}); use another checkpoint or file") from None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor} of a file. Raises UserError."""
    dtypes = {name: dtype for dtype, name in STORED_DTYPES.items()}
    with reading(path), open_regular_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, LONGEST_HEADER)))
        header.pop("__metadata__", None)
        return {name: StoredTensor(path, dtypes.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]),
                                   8 + length + entry["data_offsets"][0]) for name, entry in header.items()}


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return a tensor that is mapped to its file, so that only what is used of it is read. Raises UserError."""
    with reading(stored.path), open_regular_file(stored.path) as file:
        size = math.prod(stored.shape) * stored.dtype.itemsize
        data = np.memmap(file, np.uint8, "c", stored.start, size)              # c: changes would not go to the file
        return torch.from_numpy(data).view(stored.dtype).view(stored.shape)


def write_tensors(path: Path, types: dict[str, tuple[torch.dtype, tuple]], tensors: Iterable[torch.Tensor]) -> str:
    """Write a file, flush it to the disk, and return its SHA-256. types: the dtype and shape of each tensor. tensors:
    contiguous, on the CPU, in this order. A generator can make them, because only one is needed at a time. Nothing is
    copied. Raises OSError."""
    header, end, digest = {"__metadata__": {"format": "pt"}}, 0, hashlib.sha256()
    for name, (dtype, shape) in types.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=STORED_DTYPES[dtype], shape=shape, data_offsets=(start, end))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                            # so that the first tensor is aligned
    with naming(path), open_regular_file(path, "wb") as file:
        for data in chain([len(text).to_bytes(8, "little"), text], (one.view(torch.uint8).numpy() for one in tensors)):
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


# ---- boxes

class Box(NamedTuple):
    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes_of_range(start: int, end: int, shape) -> list[Box]:
    """Return, in order, the boxes that hold elements start .. end - 1 of a flattened tensor of this shape."""
    strides, boxes = [math.prod(shape[dim + 1:]) for dim in range(len(shape))], []
    while start < end:
        # the first dimension of which a whole slice starts here and ends in the range
        dim = next(dim for dim, stride in enumerate(strides) if start % stride == 0 and start + stride <= end)
        offset = tuple(start // stride % length for stride, length in zip(strides, shape))
        count = min(shape[dim] - offset[dim], (end - start) // strides[dim])
        boxes.append(Box(offset, (*[1] * dim, count, *shape[dim + 1:])))
        start += count * strides[dim]
    return boxes


def local_boxes(model: GPT, bucket: Bucket, state: str, start: int, values: torch.Tensor) -> list[tuple]:
    """Return (name, box, values [box.size]) for each box in a range of a bucket. A name, such as
    exp_avg.layers.7.attention.qkv.weight, contains no rank and no stage, so it is the same on any layout. state:
    "weight" or a moment, as ZeroOptimizer.states_of() gives them. start: the first element of the range, counted in the
    bucket. values: the elements of the range, flat."""
    names, found = {weight: name for name, weight in model.named_parameters()}, []
    for weight in bucket.parameters:
        first = bucket.offsets[weight] - start                 # where the parameter starts in `values`
        part = values[max(first, 0):max(first + weight.numel(), 0)]
        for offset, size in boxes_of_range(max(-first, 0), max(-first, 0) + len(part), weight.spec.size):
            elements, part = part[:math.prod(size)], part[math.prod(size):]
            box = Box(tuple(map(sum, zip(weight.spec.offset, offset))), size)
            found.append((f"{state}.{names[weight]}", box, elements.view(size)))
    return found


def slices(box: Box, start: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices that select the box from a tensor whose first element has the offset `start`."""
    return tuple(slice(offset - first, offset - first + length) for offset, length, first in zip(*box, start))


def stored_name(name: str, offset: tuple[int, ...]) -> str:
    """Return the name of a box in its file, such as weight.final_norm.weight@5."""
    return f"{name}@{','.join(map(str, offset))}" if any(offset) else name


def write_boxes(path: Path, boxes: list[tuple]) -> str:
    """Write boxes, as local_boxes() returns them, to a file, and return its SHA-256. Raises OSError, or UserError if
    the file then holds other bytes than the boxes."""
    types = {stored_name(name, box.offset): (values.dtype, box.size) for name, box, values in boxes}
    make_folder(path.parent)
    digest = write_tensors(path, types, (values for *_, values in boxes))
    for stored, (*_, values) in zip(read_header(path).values(), boxes):
        same = torch.equal(read_tensor(stored).view(torch.uint8), values.view(torch.uint8))       # also for NaN
        require(same, f"{path} holds other bytes than were written to it; use another disk")
    return digest


class Index:
    """The boxes of a checkpoint's tensors, {name: [(box, where it is stored)]}, and its manifest."""

    def __init__(self, folder: Path):
        """Read the manifest and the headers of all files. Raises UserError."""
        self.folder, self.manifest, self.boxes = folder, read_manifest(folder), defaultdict(list)
        with reading(folder):
            stored = [item for file in self.manifest["files"] if file.endswith(SUFFIX)
                      for item in read_header(folder / file).items()]
            if self.manifest["format"] == FORMAT_2:            # its files hold numbers alone, and this one their places
                stored = [(stored_name(name, offset), StoredTensor(folder / file, dtype, tuple(size), start))
                          for name, entry in json.loads(read_file(folder / "index.json")).items()
                          for dtype in [getattr(torch, entry["dtype"])]
                          for file, start, offset, size in entry["boxes"]]
            for name, tensor in stored:
                name, _, offset = name.partition("@")
                offset = tuple(map(int, offset.split(","))) if offset else (0,) * len(tensor.shape)
                self.boxes[name].append((Box(offset, tensor.shape), tensor))

    def read(self, name: str, box: Box, values: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a full tensor into `values` (None: new memory), and return them. Raises UserError."""
        found = 0
        for (start, size), stored in self.boxes[name]:
            offset = tuple(map(max, box.offset, start))        # of the elements that both boxes hold
            both = Box(offset, tuple(min(x + m, y + n) - z for x, m, y, n, z in zip(*box, start, size, offset)))
            if min(both.size) > 0:
                part = read_tensor(stored)[slices(both, start)]
                values = part.new_empty(box.size) if values is None else values
                values[slices(both, box.offset)] = part
                found += math.prod(both.size)
        require(found == math.prod(box.size), f"{self.folder} lacks elements of {name}; use another checkpoint")
        return values


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, such as 12 for step-00000012; None for any other kind of name."""
    found = re.fullmatch("step-([0-9]{8}|[1-9][0-9]{8,})", folder.name)          # as f"step-{step:08d}" gives it
    return int(found[1]) if found else None


def manifest_text(content: dict) -> str:
    """Return the text of a manifest: the checksum of the content, then the content."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest} | body, indent=1) + "\n"


def write_manifest(folder: Path, content: dict, digests: dict[str, str], advice: str):
    """Complete a checkpoint: write its manifest and flush it to the disk. content: the manifest, to which "files" is
    added. digests: what write_boxes() returned, by file. Raises UserError with this advice if a file is missing."""
    content["files"] = {path.name: digests.get(path.name) or sha256(path) for path in sorted(folder.iterdir())}
    missing = digests.keys() - content["files"].keys()
    require(not missing, f"{folder} lacks {', '.join(sorted(missing))}; {advice}")
    write_file(folder / "manifest.json", manifest_text(content).encode(), flush=True)


def read_manifest(folder: Path) -> dict:
    """Return the manifest of a checkpoint. Raises UserError if it is missing, damaged or of another format."""
    path = folder / "manifest.json"
    with reading(path):
        text = read_file(path).decode()
        content = json.loads(text)
        if text != manifest_text(content):
            raise ValueError("its checksum is wrong")
        require(content["format"] in (FORMAT, FORMAT_2), f"{path} has format {str(content['format'])[:80]!r}, but this "
                f"version reads {FORMAT!r}; use the version that wrote it")
    return content


def verify(folder: Path) -> dict:
    """Check every byte of a checkpoint, and return its manifest. Raises UserError, which names the damaged file."""
    files = (content := read_manifest(folder))["files"]
    with reading(folder), ThreadPoolExecutor() as pool:        # hashlib releases the interpreter lock
        for name, digest in zip(files, pool.map(sha256, [folder / name for name in files])):
            expected = files[name]["sha256"] if content["format"] == FORMAT_2 else files[name]
            require(digest == expected, f"{folder / name} is damaged: its SHA-256 differs from the manifest's; use "
                    "another checkpoint")
    return content
