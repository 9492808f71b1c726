"""Reads and writes files in the safetensors format, which holds named tensors and no code.

    8 bytes     N, the length of the header, little-endian
    N bytes     JSON: {"norm.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
                       "__metadata__": {"format": "pt"}}
    the rest    the numbers of the tensors, little-endian, one tensor after another; data_offsets count its bytes

Checkpoints and the weight files of Hugging Face have this format, so other programs can open both:

    from safetensors.torch import load_file
    tensors = load_file("runs/mine/checkpoints/step-00000100/rank-00000.safetensors")

A file may come from someone who means harm. So the size of the header is limited, and memory is allocated only for
bytes that the file has.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from nanodomino.errors import UserError
from nanodomino.files import naming, open_regular_file

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LONGEST_HEADER = 100_000_000                                   # bytes, the limit of the safetensors package too


class StoredTensor(NamedTuple):
    """Where a file holds a tensor. start: the first byte, counted from the start of the file."""
    path: Path
    dtype: torch.dtype | str    # a str if it is none of DTYPES, so that the tensor can't be read
    shape: tuple[int, ...]
    start: int


@contextmanager
def reading(path: Path):
    """Raise UserError if the block can't read the file `path`, or finds that it is damaged and raises ValueError."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)[:200]
        raise UserError(f"{path} is damaged or can't be read ({reason}); use another checkpoint or file") from None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor} of a file. Raises UserError."""
    found = {}
    with reading(path), open_regular_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        data_start = 8 + length
        data_bytes = os.fstat(file.fileno()).st_size - data_start
        if length > LONGEST_HEADER or data_bytes < 0:
            raise ValueError("it has no safetensors header")
        for name, entry in json.loads(file.read(length)).items():
            if name != "__metadata__":
                dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
                dtype = DTYPES.get(dtype, dtype)
                size = end - start if isinstance(dtype, str) else math.prod(shape) * dtype.itemsize
                if not (all(type(number) is int and number >= 0 for number in (start, *shape))
                        and start + size == end <= data_bytes):
                    raise ValueError(f"bytes {start} to {end} cannot be {name} of shape {shape}")
                found[name] = StoredTensor(path, dtype, tuple(shape), data_start + start)
    return found


def read_rows(stored: StoredTensor, first=0, count: int | None = None) -> torch.Tensor:
    """Read rows first .. first + count - 1 of a tensor (None: all that follow). Raises UserError."""
    with reading(stored.path), open_regular_file(stored.path) as file:
        count = stored.shape[0] - first if count is None else count
        row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        data = torch.empty(count * row_bytes, dtype=torch.uint8)
        file.seek(stored.start + first * row_bytes)
        if file.readinto(data.numpy()) < len(data):
            raise ValueError("it is too short")
    return data.view(stored.dtype).view(count, *stored.shape[1:])


def write_tensors(path: Path, types: dict[str, tuple[torch.dtype, tuple]], tensors: Iterable[torch.Tensor]) -> dict:
    """Write a file and flush it to the disk. Return its {"size" in bytes, "sha256"}. types: the dtype and shape of each
    tensor by its name. tensors: contiguous, on the CPU, in the order of `types`; maybe from a generator, because only
    one is needed at a time. Nothing is copied. Raises OSError."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, (dtype, shape) in types.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=names[dtype], shape=shape, data_offsets=(start, end))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                            # so that the tensors are aligned
    with naming(path), open_regular_file(path, "wb") as file:
        digest = hashlib.sha256(start := len(text).to_bytes(8, "little") + text)
        file.write(start)
        for tensor in tensors:
            data = tensor.view(torch.uint8).numpy()
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
        return dict(size=file.tell(), sha256=digest.hexdigest())
