"""Reads and writes files in the safetensors format, which holds named tensors and no code.

    8 bytes     N, the length of the header, little-endian
    N bytes     {"norm.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
                 "__metadata__": {"format": "pt"}}                                        JSON
    the rest    the numbers of each tensor, little-endian; data_offsets count the bytes of this part

Checkpoints and Hugging Face's weight files have this format. `safetensors.torch.load_file(path)` opens both.

A file may come from someone who means harm. So the length of its header is limited, and memory is allocated only for
bytes that the file has.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nanodomino.errors import UserError
from nanodomino.files import naming, open_regular_file

STORED_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
LONGEST_HEADER = 100_000_000                                   # bytes, the limit of the safetensors package too


class StoredTensor(NamedTuple):
    """Where a file holds a tensor. dtype: a str if it is none of STORED_DTYPES. start: its first byte in the file."""
    path: Path
    dtype: torch.dtype | str
    shape: tuple[int, ...]
    start: int


@contextmanager
def reading(path: Path):
    """Raise UserError if the block can't read the file `path`, or raises ValueError because the file is damaged."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        path, reason = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or str(error)[:200]
        raise UserError(f"{path} is damaged or can't be read ({reason}); use another checkpoint or file") from None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor} of a file. Raises UserError."""
    found, dtypes = {}, {name: dtype for dtype, name in STORED_DTYPES.items()}
    with reading(path), open_regular_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        data_start, file_end = 8 + length, os.fstat(file.fileno()).st_size
        header = json.loads(file.read(min(length, LONGEST_HEADER)))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            dtype = dtypes.get(dtype, dtype)
            size = end - start if isinstance(dtype, str) else math.prod(shape) * dtype.itemsize
            if (any(type(number) is not int or number < 0 for number in (start, *shape))
                    or not start + size == end <= file_end - data_start):
                raise ValueError(f"bytes {start} to {end} can't hold {name} of shape {shape}")
            found[name] = StoredTensor(path, dtype, tuple(shape), data_start + start)
    return found


def read_rows(stored: StoredTensor, first=0, count: int | None = None) -> torch.Tensor:
    """Read rows first .. first + count - 1 of a tensor (None: all rows from the first on). Raises UserError."""
    count, row = stored.shape[0] - first if count is None else count, stored.shape[1:]
    with reading(stored.path), open_regular_file(stored.path) as file:
        row_bytes = math.prod(row) * stored.dtype.itemsize
        data = np.fromfile(file, np.uint8, count * row_bytes, offset=stored.start + first * row_bytes)
        if len(data) < count * row_bytes:
            raise ValueError("it is too short")
    return torch.from_numpy(data).view(stored.dtype).view(count, *row)


def write_tensors(path: Path, types: dict[str, tuple[torch.dtype, tuple]], tensors: Iterable[torch.Tensor]) -> dict:
    """Write a file and flush it to the disk. Return its {"size", "sha256"}. types: the dtype and shape of each tensor.
    tensors: contiguous, on the CPU, in this order. A generator can make them, because only one is needed at a time.
    Nothing is copied. Raises OSError."""
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
        return dict(size=file.tell(), sha256=digest.hexdigest())
