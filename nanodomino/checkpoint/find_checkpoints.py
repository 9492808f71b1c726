"""Finds the checkpoints of a run, and deletes old ones.

    runs/nano-001/config.json                           the settings of the latest launch
    runs/nano-001/checkpoints/step-00000100/            a checkpoint; only a complete one gets such a name
    runs/nano-001/checkpoints/.step-00000200.unfinished/    a checkpoint that is being written
    runs/nano-001/checkpoints/.step-00000050.discarded/     a checkpoint that is being deleted

A killed process can leave hidden folders behind; the next launch deletes them. Folders with other names, such as a
user's copy of a checkpoint, are ignored and never deleted.
"""

import os
from contextlib import suppress
from pathlib import Path

from nanodomino.checkpoint.format import read_manifest, step_of, verify
from nanodomino.errors import UserError, require, sentence_and_code
from nanodomino.files import delete, read_json


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, newest first. Raises OSError if the folder can't be read: an unreadable
    folder must not be taken for an empty one."""
    parent = run_dir / "checkpoints"
    found = list(parent.iterdir()) if parent.is_dir() else []
    return sorted((path for path in found if step_of(path) is not None), key=step_of, reverse=True)


def newest_intact_checkpoint(run_dir: Path, report=print) -> Path | None:
    """Return the newest intact checkpoint of a run, or None. Skip damaged checkpoints; report(text) reports each."""
    return next((folder for folder in checkpoints_of(run_dir) if is_intact(folder, report)), None)


def is_intact(folder: Path, report=lambda text: None) -> bool:
    """Check every byte of a checkpoint. report(text): called with a warning if the checkpoint is damaged."""
    try:
        verify(folder)
        return True
    except (UserError, OSError) as error:
        problem = sentence_and_code(error)[0].removesuffix("; use another checkpoint")
        report(f"warning: {problem}; trying the previous checkpoint")
        return False


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that --load names: the newest intact one if `folder` is a run's, else `folder` itself.
    Raises UserError if there is none or it is damaged."""
    problem = f"{folder} is a file, not a folder" if os.path.lexists(folder) else f"there is no folder {folder}"
    require(folder.is_dir(), f"{problem} to load from; give a checkpoint or the folder of a run")
    if not (folder / "checkpoints").is_dir():
        verify(folder)
        return folder
    checkpoint = newest_intact_checkpoint(folder)
    require(checkpoint, f"{folder / 'checkpoints'} holds no intact checkpoint; give another folder")
    return checkpoint


def recorded_settings(folder: Path) -> dict | None:
    """Return the settings of a run's latest launch, or of a checkpoint; None if none can be read.

    If config.json can't be read, return the settings of the newest checkpoint.
    """
    with suppress(UserError):
        return read_json(folder / "config.json")
    with suppress(OSError):                                    # for example, the name is too long
        for checkpoint in [folder, *checkpoints_of(folder)]:
            with suppress(UserError):
                return read_manifest(checkpoint)["config"]
    return None


def delete_checkpoint(folder: Path):
    """Rename a checkpoint, then delete it, so that a half-deleted folder never looks like a checkpoint."""
    hidden = folder.with_name(f".{folder.name}.discarded")
    folder.rename(hidden)
    delete(hidden)


def clear_leftovers(run_dir: Path):
    """Delete the hidden folders that killed processes left; otherwise a full disk would stay full."""
    for suffix in ("unfinished", "discarded"):
        for folder in (run_dir / "checkpoints").glob(f".step-*.{suffix}"):
            delete(folder)
