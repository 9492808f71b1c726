import fcntl
import itertools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from nanodomino.checkpoint.folders import (SAVED_MARKER, checkpoints_of, clear_leftovers, find_checkpoint,
                                           newest_intact_checkpoint, recorded_settings)
from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.comm.world import LaunchInfo
from nanodomino.config.config import Config
from nanodomino.config.records import check_settings
from nanodomino.config.terminal import tolerate_closed_output
from nanodomino.errors import UserError, require


# ---- the run's folder

@dataclass(frozen=True)
class Run:
    """Where a run lives and what it starts from: a checkpoint or nothing, and of it perhaps the weights alone."""
    folder: Path
    checkpoint: Path | None
    weights_only: bool = False


def open_run(config: Config, launch: LaunchInfo) -> Run:
    """Find or make the folder of this run. Raises UserError. Called by rank 0 alone."""
    run_dir = Path(config.run_dir or "runs")
    # before a folder is made for nothing; a run that has begun no longer needs what it was loaded from
    begun = launch.restarted or (config.run_dir and os.path.exists(run_dir))
    loaded = None if begun else find_checkpoint_to_load(config)
    try:
        require(not run_dir.is_file(), f"--run-dir {run_dir} is a file; choose another name")
        if not begun:
            check_writable(next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir()))
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.run_dir is None:
            run_dir = numbered_folder(run_dir, config.model, again=launch.restarted,
                                  launch=os.environ.get("TORCHELASTIC_RUN_ID", ""))
        known = (run_dir / "config.json").exists()
        require(known or checkpoints_of(run_dir) or not (run_dir / "metrics.jsonl").exists(), f"--run-dir {run_dir} "
                "holds a metrics.jsonl but no config.json, so it is no run to go on with; choose another folder")
        # what a person sees must never end a run
        tolerate_closed_output(OSError, f"training goes on, and {run_dir / 'metrics.jsonl'} tells of it")
        lock_folder(run_dir)
        clear_leftovers(run_dir)
        check_writable(run_dir)
        checkpoint = newest_intact_checkpoint(run_dir)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} can't be written to ({error.strerror}); choose another folder") from None
    if checkpoint:                                             # a run that has begun goes on with its own
        check_settings(read_manifest(checkpoint)["config"], checkpoint, config, "model", "optimizer", "run")
        return Run(run_dir, checkpoint)
    if known and (record := recorded_settings(run_dir)):           # killed before its first checkpoint, it may begin again
        check_settings(record, f"--run-dir {run_dir}", config, "model", "optimizer", "run")
    left = checkpoints_of(run_dir)
    require(not left and not (run_dir / SAVED_MARKER).exists(),
            f"--run-dir {run_dir} has been saved before, but of the {len(left)} checkpoints that are in it now none is "
            "sound, and to begin again would cut its metrics.jsonl; bring one back, or move it all away to begin anew")
    return Run(run_dir, find_checkpoint_to_load(config) if begun else loaded, weights_only=config.finetune)


def find_checkpoint_to_load(config: Config) -> Path | None:
    """The checkpoint that --load means, if it fits. Raises UserError."""
    if not config.load:
        return None
    checkpoint = find_checkpoint(Path(config.load))
    check_settings(read_manifest(checkpoint)["config"], checkpoint, config, "model",
                   *(() if config.finetune else ("optimizer",)))
    return checkpoint


def check_writable(folder: Path):
    """Can files be made there, and filled? Better asked now than at the first write. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))


def check_shared_folder(run_dir: Path):
    """All ranks will write there, so each looks for a file that rank 0 has just made, and makes one of its own. Raises
    UserError on all alike."""
    made = tempfile.NamedTemporaryFile(dir=run_dir, prefix=".shared-") if dist.get_rank() == 0 else None
    name, everyone, failure = [made and os.path.basename(made.name)], [None] * dist.get_world_size(), ""
    dist.broadcast_object_list(name, src=0)
    sees = os.path.exists(run_dir / name[0])
    try:
        if sees:
            check_writable(run_dir)
    except OSError as error:
        failure = error.strerror
    dist.all_gather_object(everyone, (sees, failure))
    del made                                                   # and the file is gone
    blind = ", ".join(str(rank) for rank, (sees, _) in enumerate(everyone) if not sees)
    require(not blind, f"--run-dir {run_dir} is not the same folder on all hosts: what rank 0 writes there, rank "
            f"{blind} can't see; choose one on a disk that all hosts share")
    failed = ", ".join(f"{rank} ({failure})" for rank, (_, failure) in enumerate(everyone) if failure)
    require(not failed, f"--run-dir {run_dir} can't be written to by rank {failed}; choose a folder that all hosts may "
            "write to")


def lock_folder(run_dir: Path, patience=5.0):
    """One run at a time in a folder: two would write over each other's files.

    The system lets go of the lock when this process ends, however it ends. A run whose torchrun was killed with -9 may
    still be alive, and a rank that is being restarted may need a moment to be gone.
    """
    # open as long as this process lives; a link would lead to another file
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
                    "is still training in it; end that one first, or choose another folder")
            time.sleep(0.2)
        except OSError:
            return                                             # a file system that knows no claims


def numbered_folder(parent: Path, name: str, again: bool, launch: str) -> Path:
    """Make parent/NAME-NUMBER with the first number that is free, also where other runs start at the same moment.

    again: torchrun has restarted this run, so the newest folder is meant that this launch has made, if it came so far;
    launch: torchrun's name for it, the same after a restart.
    """
    for folder in (sorted(parent.glob(f"{name}-[0-9]*"), key=lambda folder: (len(folder.name), folder.name),
                          reverse=True) if again else ()):
        if (folder / "launch.txt").exists() and (folder / "launch.txt").read_text() == launch:
            return folder
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        try:
            folder.mkdir()
            (folder / "launch.txt").write_text(launch)
            return folder
        except FileExistsError:
            pass
