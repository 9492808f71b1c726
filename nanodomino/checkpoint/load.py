"""Fills a model and an optimizer of any layout from a checkpoint.

Each rank reads only the values that it owns, directly into its flat buffers. With ZeRO it owns 1/dp of the parameters
that it holds. Then the replicas all-gather the weights, exactly as after each step.
"""

import dataclasses
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from nanodomino.checkpoint.format import (Box, BucketRange, Index, LocalBox, full_shapes, local_boxes, read_manifest,
                                          verify)
from nanodomino.checkpoint.load import checkpoints_of
from nanodomino.errors import UserError, sentence_and_code
from nanodomino.mesh import Mesh
from nanodomino.model import GPT, meta_model
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_settings
from nanodomino.settings.records import from_record
from nanodomino.zero import ZeroOptimizer


def restore(folder: Path, model: GPT, optimizer: ZeroOptimizer, mesh: Mesh, weights_only=False) -> int:
    """Fill the model and the optimizer, and return the checkpoint's step. All ranks must call this together.
    weights_only: load no optimizer state and no counters, and return step 0. Raises UserError."""
    manifest = together(lambda: read_manifest(folder))
    if not weights_only:
        optimizer.updates = manifest["adam_steps"]
        optimizer.skipped_in_a_row = manifest.get("skipped_in_a_row", 0)
        optimizer.loss_scale.restore(manifest.get("loss_scale"))
    own = [BucketRange(bucket, state, bucket.own_offset, optimizer.allocate_own_state(bucket, state))
           for bucket in optimizer.buckets
           for state in (optimizer.states_of(bucket) if optimizer.updates else ("weight",))]
    read_boxes(folder, manifest, local_boxes(model, own))
    optimizer.gather_weights()
    return 0 if weights_only else manifest["step"]


def load_weights(folder: Path, model: GPT):
    """Fill a model of any layout, without an optimizer. All ranks must call this together. Raises UserError."""
    boxes = []
    for name, weight in model.named_parameters():
        spec, values = weight.spec, weight.detach().view(weight.spec.size)
        boxes.append(LocalBox(f"weight.{name}", spec.shape, Box(spec.offset, spec.size), values))
    read_boxes(folder, together(lambda: read_manifest(folder)), boxes)


def read_boxes(folder: Path, manifest: dict, boxes: list[LocalBox]):
    """Fill the boxes of each rank from a checkpoint. All ranks must call this together. Raises UserError."""
    together(lambda: Index(folder, manifest).fill(boxes))


def together(function):
    """Return function(). If it raises a UserError or an OSError on any rank, all ranks raise a UserError."""
    result, error, errors = None, None, [None] * dist.get_world_size()
    try:
        result = function()
    except (UserError, OSError) as caught:
        error = sentence_and_code(caught)[0]
    dist.all_gather_object(errors, error)
    for error in filter(None, errors):
        raise UserError(error)
    return result


def config_of(folder: Path, manifest: dict, world_size=1, **layout) -> Config:
    """Return the settings of a checkpoint, but with another layout (default: one process). Raises UserError."""
    default = {setting.name: setting.default for setting in flag_settings(Config, "The layout")}
    saved = dataclasses.replace(from_record(manifest["config"], folder), **default | dict(micro_batch_size=1) | layout)
    return saved.resolve(world_size).with_vocabulary(saved.vocab_size)


def open_weights(folder: Path) -> tuple[Index, GPT]:
    """Return the index of a checkpoint, and the unsharded model that its manifest describes, without values. Raises
    UserError if the checkpoint does not hold the weights of this model."""
    manifest = read_manifest(folder)
    index = Index(folder, manifest)
    model = meta_model(config_of(folder, manifest))
    for name, shape in full_shapes(model).items():
        index.find(f"weight.{name}", shape)
    return index, model


def newest_finite_checkpoint(run_dir: Path, last_step: int) -> Path | None:
    """Return the newest intact checkpoint of a run, up to `last_step`, whose weights are finite; None if there is none.
    """
    for folder in checkpoints_of(run_dir):
        with suppress(UserError, OSError):
            if verify(folder)["step"] <= last_step:
                index, model = open_weights(folder)
                if all(read_box(f"weight.{name}", shape, index).isfinite().all()
                       for name, shape in full_shapes(model).items()):
                    return folder
    return None


def full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return {name: full weight} of a checkpoint. Raises UserError."""
    index, model = open_weights(folder)
    shapes = full_shapes(model)
    return {name: read_box(f"weight.{name}", shapes[name], index).view(weight.shape)
            for name, weight in model.named_parameters()}


def read_box(name: str, shape, index: Index, box: Box | None = None) -> torch.Tensor:
    """Read a box of a full tensor of this shape (None: all of it), in its stored dtype. Raises UserError."""
    box = box or Box((0,) * len(shape), tuple(shape))
    values = torch.empty(box.size, dtype=index.find(name, shape).dtype)
    index.fill([LocalBox(name, shape, box, values)])
    return values
