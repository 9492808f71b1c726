"""Reads format 1 of checkpoints, which torch.distributed.checkpoint wrote until 2026-11-22.

Its index (.metadata) is a pickle, and pickle.load calls whatever function a pickle names. RestrictedUnpickler knows
the record types of the index and refuses everything else. Each box is stored as torch.save writes it.
"""

import io
import pickle

import torch

from nanodomino.config.presets import DTYPES
from nanodomino.errors import require


def parse(data: bytes) -> dict[str, tuple]:
    """Return the tensors of an index, in the form that Format.parse in index.py prescribes."""
    index = RestrictedUnpickler(io.BytesIO(data)).load()
    places = {(key.fqn, key.offset): (place.relative_path, place.offset, place.length)
              for key, place in index.storage_data.items()}
    return {name: (tensor.properties.dtype, tensor.size, [
                (*places[name, chunk.offsets], (chunk.offsets, chunk.sizes)) for chunk in tensor.chunks])
            for name, tensor in index.state_dict_metadata.items()}


def read_rows(file, stored, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
    """Read a stored box from an open file, and return its rows first .. first + count - 1."""
    file.seek(stored.start)
    box = torch.load(io.BytesIO(file.read(stored.length)), map_location="cpu", weights_only=True)
    if (box.shape, box.dtype, box.layout) != (stored.box.size, dtype, torch.strided):
        raise ValueError
    return box[first:first + count]


class RestrictedUnpickler(pickle._Unpickler):                  # pickle.Unpickler is C, without a load_build to override
    """An unpickler that refuses all types except those in an index of torch.distributed.checkpoint."""
    dispatch = dict(pickle._Unpickler.dispatch)

    allowed = {"torch.distributed.checkpoint.metadata": ("ChunkStorageMetadata", "Metadata", "MetadataIndex",
                                                         "StorageMeta", "TensorProperties",
                                                         "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
               "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
               "torch.serialization": ("_get_layout",),
               "torch": ("Size", *DTYPES),
               "pathlib": ("PosixPath",), "pathlib._local": ("PosixPath",)}

    def find_class(self, module, name):
        require(name in self.allowed.get(module, ()),
                f"the checkpoint's index refers to {module}.{name}, which does not belong in an index; do not use this "
                "checkpoint")
        return super().find_class(module, name)

    def load_build(self):
        """Set a record's attributes, but refuse to change a class or function, which the whole process shares."""
        require(not isinstance(self.stack[-2], type) and not callable(self.stack[-2]),
                "the checkpoint's index changes one of torch's own types; do not use this checkpoint")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
