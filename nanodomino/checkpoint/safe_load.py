import pickle
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from nanodomino.checkpoint.manifest import require_plain_file
from nanodomino.config.presets import DTYPES
from nanodomino.errors import UserError, require


class CarefulReader(dcp.FileSystemReader):
    """torch's reader, with an index that is data and not a program
    (pickle.load would run what a stranger wrote into it)."""

    def read_metadata(self, *args, **kwargs):
        path = Path(self.path) / ".metadata"
        try:
            require_plain_file(path)
            with open(path, "rb") as file:
                metadata = CarefulUnpickler(file).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata
        except UserError:
            raise
        except Exception as error:                           # bytes that are no pickle can raise anything
            raise UserError(f"{path} is no index of tensors ({type(error).__name__}: {error}); use another "
                            "checkpoint") from None


class CarefulUnpickler(pickle._Unpickler):                     # in Python, whose operations can be looked at
    """Knows the record types that an index of tensors is made of; anything else is refused."""
    dispatch = dict(pickle._Unpickler.dispatch)

    records = {"torch.distributed.checkpoint.metadata": ("ChunkStorageMetadata", "Metadata", "MetadataIndex",
                                                         "StorageMeta", "TensorProperties",
                                                         "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
               "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
               "torch.serialization": ("_get_layout",),
               "torch": ("Size", *DTYPES),
               "pathlib": ("PosixPath",), "pathlib._local": ("PosixPath",)}

    def find_class(self, module, name):
        require(name in self.records.get(module, ()),
                f"the checkpoint's index refers to {module}.{name}, which no index of nanodomino's "
                "does; do not use this checkpoint")
        return super().find_class(module, name)

    def load_build(self):
        """Fill a record. A type is none: filled, it would be another one for this whole process."""
        require(not isinstance(self.stack[-2], type) and not callable(self.stack[-2]),
                "the checkpoint's index changes one of torch's own types; do not use this checkpoint")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
