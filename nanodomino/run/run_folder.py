"""Finds or makes the folder of a run, and finds the checkpoint that the run starts from.

    --run-dir of an earlier run     resume from its newest intact checkpoint; --load and --finetune no longer matter
    --run-dir of a new run          start from --load, or from random weights
    no --run-dir                    a new folder runs/MODEL-NUMBER, which a restart by torchrun finds again

Problems with a folder are found here, before the first step, and not hours later at the first checkpoint.
"""

import fcntl
import itertools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from nanodomino.checkpoint.find_checkpoints import (SAVED_MARKER, checkpoints_of, clear_leftovers, find_checkpoint,
                                                    newest_intact_checkpoint, recorded_settings)
from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.comm.world import LaunchInfo
from nanodomino.config.command_exit import tolerate_closed_output
from nanodomino.config.config import Config
from nanodomino.config.saved_settings import check_settings
from nanodomino.errors import UserError, require


@dataclass(frozen=True)
class Run:
    """The folder of a run and the checkpoint to start from, if any; weights_only: load only its weights."""
    folder: Path
    checkpoint: Path | None
    weights_only: bool = False


def open_run(config: Config, launch: LaunchInfo) -> Run:
    """Find or make the folder of this run, lock it, and find the checkpoint to start from. Called by rank 0 only.

    Raises UserError if the folder cannot be used, or if the settings do not fit the run or the checkpoint.
    """
    run_dir = Path(config.run_dir or "runs")
    # Check --load before making a folder; an earlier run no longer needs the checkpoint that it started from.
    exists = launch.restarted or (config.run_dir and os.path.exists(run_dir))
    loaded = None if exists else find_checkpoint_to_load(config)
    try:
        require(not run_dir.is_file(), f"--run-dir {run_dir} is a file; choose another name")
        if not exists:
            check_writable(next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir()))
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.run_dir is None:
            run_dir = numbered_folder(run_dir, config.model, launch.restarted,
                                      os.environ.get("TORCHELASTIC_RUN_ID", ""))
        has_settings = (run_dir / "config.json").exists()
        require(has_settings or checkpoints_of(run_dir) or not (run_dir / "metrics.jsonl").exists(),
                f"--run-dir {run_dir} holds a metrics.jsonl but no config.json, so it can't be resumed; choose another "
                "folder")
        for name in ("config.json", "metrics.jsonl"):
            require(not (run_dir / name).exists() or (run_dir / name).is_file(), f"--run-dir {run_dir} holds a {name} "
                    "that is not a regular file; remove it, or choose another folder")
        # A full disk or a closed terminal must not end a run.
        tolerate_closed_output(OSError, f"training continues, and {run_dir / 'metrics.jsonl'} records it")
        lock_folder(run_dir)
        clear_leftovers(run_dir)
        check_writable(run_dir)
        checkpoint = newest_intact_checkpoint(run_dir)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} can't be written to ({error.strerror}); choose another folder") from None
    if checkpoint:
        check_settings(read_manifest(checkpoint)["config"], checkpoint, config, "model", "optimizer", "run")
        return Run(run_dir, checkpoint)
    if has_settings and (record := recorded_settings(run_dir)):     # killed before its first checkpoint
        check_settings(record, f"--run-dir {run_dir}", config, "model", "optimizer", "run")
    damaged = checkpoints_of(run_dir)
    require(not damaged and not (run_dir / SAVED_MARKER).exists(),
            f"--run-dir {run_dir} has saved checkpoints, but none of the {len(damaged)} in it is intact, and starting "
            "over would erase its metrics.jsonl; restore a checkpoint, or move the folder away to start over")
    return Run(run_dir, find_checkpoint_to_load(config) if exists else loaded, weights_only=config.finetune)


def find_checkpoint_to_load(config: Config) -> Path | None:
    """Return the checkpoint that --load names, or None. Raises UserError if it does not fit the settings."""
    if not config.load:
        return None
    checkpoint = find_checkpoint(Path(config.load))
    check_settings(read_manifest(checkpoint)["config"], checkpoint, config, "model",
                   *(() if config.finetune else ("optimizer",)))
    return checkpoint


def check_writable(folder: Path):
    """Raise OSError unless this process can write 64 KiB to a new file in the folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))


def check_shared_folder(run_dir: Path):
    """Raise the same UserError on all ranks unless every rank sees the same folder and can write to it."""
    made = tempfile.NamedTemporaryFile(dir=run_dir, prefix=".shared-") if dist.get_rank() == 0 else None
    name, results, failure = [made and os.path.basename(made.name)], [None] * dist.get_world_size(), ""
    dist.broadcast_object_list(name, src=0)
    visible = os.path.exists(run_dir / name[0])
    try:
        if visible:
            check_writable(run_dir)
    except OSError as error:
        failure = error.strerror
    dist.all_gather_object(results, (visible, failure))
    del made                                                   # deletes the file
    blind = ", ".join(str(rank) for rank, (visible, _) in enumerate(results) if not visible)
    require(not blind, f"--run-dir {run_dir} is not the same folder on all hosts: rank {blind} can't see a file that "
            "rank 0 wrote there; choose a folder on a disk that all hosts share")
    failed = ", ".join(f"{rank} ({failure})" for rank, (_, failure) in enumerate(results) if failure)
    require(not failed, f"--run-dir {run_dir} can't be written to by rank {failed}; choose a folder that all hosts can "
            "write to")


def lock_folder(run_dir: Path, patience=5.0):
    """Lock a folder, so that only one run uses it at a time. Raises UserError if that fails for `patience` seconds.

    The system releases the lock when this process ends, even if it is killed. The lock may be held by ranks that live
    on after torchrun was killed with -9. Patience helps when torchrun restarts a run: the old rank 0 may need a moment
    to end.
    """
    # Never closed, since closing would release the lock. O_NOFOLLOW: a symbolic link could point to another file.
    descriptor = os.open(run_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            return
        except BlockingIOError:
            require(time.monotonic() < end,
                    f"--run-dir {run_dir} is in use by process {os.pread(descriptor, 20, 0).decode() or '?'}, which "
                    "is still training in it; end this process first, or choose another folder")
            time.sleep(0.2)
        except OSError:
            return                                             # a file system without locks


def numbered_folder(parent: Path, name: str, restarted: bool, launch_id: str) -> Path:
    """Make and return the folder parent/NAME-NUMBER with the first free number. Safe if several runs do so at once.

    restarted: torchrun has restarted this run. Then return the newest folder with this launch_id, if there is one.
    launch_id: torchrun's id of the launch; a restart keeps it.
    """
    for folder in (sorted(parent.glob(f"{name}-[0-9]*"), key=lambda folder: (len(folder.name), folder.name),
                          reverse=True) if restarted else ()):
        if (folder / "launch.txt").exists() and (folder / "launch.txt").read_text() == launch_id:
            return folder
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        try:
            folder.mkdir()
            (folder / "launch.txt").write_text(launch_id)
            return folder
        except FileExistsError:
            pass
