"""Exports a checkpoint as one plain torch file: {name: full weight}, with the names of the unsharded model."""

import os
from pathlib import Path

import torch

from nanodomino.checkpoint.load import open_weights, read_full_tensor
from nanodomino.checkpoint.manifest import verify
from nanodomino.checkpoint.shards import full_shapes
from nanodomino.errors import UserError, require
from nanodomino.files import check_outside_ours, new_file


def export(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Write the weights of a checkpoint to a file that torch.load(out, weights_only=True) reads, and return the
    weights. Raises UserError if the checkpoint is damaged, or if the file exists or can't be written."""
    check_outside_ours(out)
    require(not os.path.isfile(out), f"{out} already exists, and nothing is overwritten; choose another name, or move "
            "it away")
    verify(folder)
    tensors = full_weights(folder)
    try:
        with new_file(out) as file:                            # torch.save(tensors, path) would hide the system's error
            torch.save(tensors, file)
    except (OSError, RuntimeError) as error:                   # on a full disk torch's own error hides the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        raise UserError(f"{out} can't be written ({getattr(cause, 'strerror', error)}); choose another file") from None
    return tensors


def full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return {name: full weight} of a checkpoint. Raises UserError."""
    index, model = open_weights(folder)
    shapes = full_shapes(model)
    return {name: read_full_tensor(f"weight.{name}", shapes[name], index).view(weight.shape)
            for name, weight in model.named_parameters()}
