"""Reads a checkpoint without running code that it might contain.

The index of torch.distributed.checkpoint (.metadata) is a pickle, and pickle.load calls whatever function a pickle
names. RestrictedUnpickler knows the record types of the index and refuses everything else. The tensors themselves are
safe already: torch's reader loads them with weights_only=True.
"""

import pickle
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from nanodomino.config.presets import DTYPES
from nanodomino.errors import UserError, require


def require_regular_file(path: Path):
    """Raise UserError if the path is a pipe or a device, because reading it might never end. A folder or a missing file
    passes: opening it raises an error anyway."""
    require(path.is_file() or path.is_dir() or not path.exists(),
            f"{path} is not a regular file; use another checkpoint")


class SafeReader(dcp.FileSystemReader):
    """torch's reader of checkpoints, except that it reads the index with RestrictedUnpickler, and only once."""
    index = None

    def read_metadata(self, *args, **kwargs):
        """Return the index. Raises UserError."""
        if self.index is None:
            path = Path(self.path) / ".metadata"
            try:
                require_regular_file(path)
                with open(path, "rb") as file:
                    index = RestrictedUnpickler(file).load()
                index.storage_meta = index.storage_meta or StorageMeta()
                index.storage_meta.load_id = self.load_id
                self.index = index
            except UserError:
                raise
            except Exception as error:                         # arbitrary bytes can make an unpickler raise anything
                raise UserError(f"{path} is not an index of tensors ({type(error).__name__}: {error}); use another "
                                "checkpoint") from None
        return self.index


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
        """Set attributes of a record. Refuse to set those of a class or function, which the whole process uses."""
        require(not isinstance(self.stack[-2], type) and not callable(self.stack[-2]),
                "the checkpoint's index changes one of torch's own types; do not use this checkpoint")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
