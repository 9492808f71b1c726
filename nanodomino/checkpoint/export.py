"""Exports a checkpoint as one plain torch file: {name: full weight}, with the names of the unsharded model."""

import os
from pathlib import Path

import torch

from nanodomino.checkpoint.load import read_full_tensor
from nanodomino.checkpoint.manifest import verify
from nanodomino.checkpoint.safe_load import SafeReader
from nanodomino.checkpoint.shards import LocalBoxes
from nanodomino.config.saved_settings import from_record
from nanodomino.errors import UserError, require
from nanodomino.model import meta_model


def export(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Write the weights of a checkpoint to a file that torch.load(out, weights_only=True) reads, and return the
    weights. Raises UserError if the checkpoint is damaged or the file can't be written."""
    require(not (out.parent / "manifest.json").exists(),
            f"{out} would lie in a checkpoint, whose folder must not change; choose another folder")
    tensors = full_weights(folder, verify(folder)["config"])
    target = temporary = out                                   # such as /dev/stdout: write to it directly
    if os.path.isfile(out) or not os.path.exists(out):         # write a new file, then rename it: never half a file
        target = Path(os.path.realpath(out))
        temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:                    # torch.save(tensors, path) would hide the system's error
            torch.save(tensors, file)
        temporary.rename(target)
    except (OSError, RuntimeError) as error:                   # on a full disk torch's own error hides the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        raise UserError(f"{out} can't be written ({getattr(cause, 'strerror', error)}); choose another file") from None
    finally:
        if temporary != target and os.path.exists(temporary):
            temporary.unlink()
    return tensors


def full_weights(folder: Path, settings: dict) -> dict[str, torch.Tensor]:
    """Return {name: full weight} of a checkpoint. settings: the config in its manifest. Raises UserError."""
    reader, model = SafeReader(folder), meta_model(from_record(settings, folder))
    shapes = {name: LocalBoxes.of(weight, model.mesh).size() for name, weight in model.named_parameters()}
    return {name: read_full_tensor(f"weight.{name}", shapes[name], reader).view(weight.shape)
            for name, weight in model.named_parameters()}
