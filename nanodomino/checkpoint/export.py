import os
from pathlib import Path

import torch

from nanodomino.checkpoint.load import read_alone
from nanodomino.checkpoint.manifest import verify
from nanodomino.checkpoint.safe_load import CarefulReader
from nanodomino.config.records import from_record
from nanodomino.errors import UserError, require
from nanodomino.model import meta_model


def export(folder: Path, out: Path):
    """Write one plain torch file of whole tensors, {global name: tensor}, beside OUT first, so that OUT is never half a
    file; torch.load(OUT, weights_only=True) reads it."""
    require(not (out.parent / "manifest.json").exists(),
            f"{out} would lie in a checkpoint, among the files that it is made of; choose another folder")
    manifest = verify(folder)
    records = CarefulReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(record.size, dtype=record.properties.dtype)
               for name, record in records.items() if name.startswith("weight.")}
    read_alone(tensors, CarefulReader(folder))
    whole = meta_model(from_record(manifest["config"], folder))
    shapes = {name: weight.shape for name, weight in whole.named_parameters()}
    tensors = {name.removeprefix("weight."): tensor for name, tensor in tensors.items()}
    # several runs of rows are one matrix
    tensors = {name: tensor.view(shapes.get(name, tensor.shape)) for name, tensor in tensors.items()}
    target = beside = out                                    # /dev/stdout: nothing to replace
    if os.path.isfile(out) or not os.path.exists(out):
        target = Path(os.path.realpath(out))
        beside = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        with open(beside, "wb") as file:                     # given a name, torch.save says less clearly what is wrong
            torch.save(tensors, file)
        beside.rename(target)
    except (OSError, RuntimeError) as error:                 # on a full disk torch's error follows the system's
        said = error if isinstance(error, OSError) else error.__context__
        raise UserError(f"{out} can't be written ({getattr(said, 'strerror', error)}); choose another file") from None
    finally:
        if beside != target and os.path.exists(beside):
            beside.unlink()
    return tensors
