"""Finds the checkpoints of a run, and fills a model and an optimizer of any layout from one.

    runs/nano-001/config.json                               the settings of the latest launch
    runs/nano-001/checkpoints/step-00000100/                a checkpoint; only a complete one gets such a name
    runs/nano-001/checkpoints/.step-00000200.unfinished/    a checkpoint that is being written
    runs/nano-001/checkpoints/.step-00000050.discarded/     a checkpoint that is being deleted

Each rank reads only the values that it owns, directly into its flat buffers. With ZeRO it owns 1/dp of the parameters
that it holds. Then the replicas all-gather the weights, exactly as after each step.
"""

import dataclasses
import math
from contextlib import suppress
from itertools import starmap
from pathlib import Path

import torch
import torch.distributed as dist

from nanodomino.checkpoint.format import Box, Index, local_boxes, read_manifest, step_of, verify
from nanodomino.errors import UserError, require
from nanodomino.files import read_json
from nanodomino.mesh import Mesh
from nanodomino.model import GPT, meta_model
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_settings
from nanodomino.settings.records import from_record
from nanodomino.zero import ZeroOptimizer


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, newest first. Raises OSError if the folder can't be read: an unreadable
    folder must not be taken for an empty one."""
    parent = run_dir / "checkpoints"
    found = list(parent.iterdir()) if parent.is_dir() else []
    return sorted((path for path in found if step_of(path) is not None), key=step_of, reverse=True)


def newest_intact_checkpoint(run_dir: Path, report=print, last_step=math.inf) -> Path | None:
    """Return the newest intact checkpoint of a run up to last_step, or None. report(text) reports damaged ones."""
    for folder in checkpoints_of(run_dir):
        try:
            if step_of(folder) <= last_step and verify(folder):
                return folder
        except UserError as error:
            report(f"warning: {str(error).rpartition(';')[0]}; trying the previous checkpoint")
    return None


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that --load names: the newest intact one if `folder` is a run's, else `folder` itself.
    Raises UserError if there is none or it is damaged."""
    require(folder.is_dir(), f"{folder} is no folder to load from; give a checkpoint or the folder of a run")
    if (folder / "checkpoints").is_dir():
        checkpoint = newest_intact_checkpoint(folder)
        none = " (a run saves its first after --save-interval steps, an evaluation none)" * (not checkpoints_of(folder))
        require(checkpoint, f"{folder / 'checkpoints'} holds no intact checkpoint{none}; give another folder")
        return checkpoint
    require((folder / "manifest.json").exists(), f"{folder} is neither a checkpoint nor a run's folder; give either")
    verify(folder)
    return folder


def recorded_settings(folder: Path) -> dict | None:
    """Return the settings in a run's config.json, else in the checkpoint `folder` or the run's newest, or None."""
    with suppress(UserError):
        return read_json(folder / "config.json")
    for checkpoint in [folder, *checkpoints_of(folder)]:
        with suppress(UserError):
            return read_manifest(checkpoint)["config"]
    return None


def restore(folder: Path, model: GPT, optimizer: ZeroOptimizer, mesh: Mesh, weights_only=False) -> int:
    """Fill the model and the optimizer, and return the checkpoint's step. All ranks must call this together.
    weights_only: load no optimizer state and no counters, and return step 0. Raises UserError."""
    index = together(lambda: Index(folder))
    if not weights_only:
        optimizer.updates = index.manifest["adam_steps"]
        optimizer.skipped_in_a_row = index.manifest.get("skipped_in_a_row", 0)
        optimizer.loss_scale.restore(index.manifest.get("loss_scale"))
    boxes = [box for bucket in optimizer.buckets
             for state in (optimizer.states_of(bucket) if optimizer.updates else ("weight",))
             for box in local_boxes(model, bucket, state, bucket.own_offset,
                                    optimizer.allocate_own_state(bucket, state))]
    together(lambda: list(starmap(index.read, boxes)))
    optimizer.gather_weights()
    return 0 if weights_only else index.manifest["step"]


def load_weights(folder: Path, model: GPT):
    """Read the weights of a checkpoint into a model of any layout, one parameter at a time. Raises UserError."""
    index = Index(folder)
    for name, weight in model.named_parameters():
        index.read(f"weight.{name}", Box(weight.spec.offset, weight.spec.size), weight.detach().view(weight.spec.size))


def together(function, group=None):
    """Return function(). If it raises an error on any rank, all ranks of the group raise a UserError, so that none
    waits for that rank in the next collective."""
    result, text, texts = None, None, [None] * dist.get_world_size()
    try:
        result = function()
    except Exception as error:
        text = f"{'' if isinstance(error, UserError) else f'rank {dist.get_rank()}: {type(error).__name__}: '}{error}"
    dist.all_gather_object(texts, text, group=group)
    for text in filter(None, texts):
        raise UserError(text)
    return result


def config_of(folder: Path, manifest: dict, world_size=1, **layout) -> Config:
    """Return the settings of a checkpoint, but with another layout (default: one process). Raises UserError."""
    default = {setting.name: setting.default for setting in flag_settings(Config, "The layout")}
    saved = dataclasses.replace(from_record(manifest["config"], folder), **default | dict(micro_batch_size=1) | layout)
    return saved.resolve(world_size).with_vocabulary(saved.vocab_size)


def open_weights(folder: Path) -> tuple[Index, GPT]:
    """Return the Index of a checkpoint, and its unsharded model without values. Raises UserError."""
    index = Index(folder)
    return index, meta_model(config_of(folder, index.manifest))


def full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return {name: full weight} of a checkpoint. Raises UserError."""
    index, model = open_weights(folder)
    return {name: index.read(f"weight.{name}", Box((0,) * len(weight.spec.shape), weight.spec.shape)).view(weight.shape)
            for name, weight in model.named_parameters()}
