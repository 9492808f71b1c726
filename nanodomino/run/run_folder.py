"""Finds or makes the folder of a run, and finds the checkpoint that the run starts from.

    --run-dir of an earlier run     resume from its newest intact checkpoint; a --load other than its first is refused
    --run-dir of a new run          start from --load, or from random weights
    no --run-dir                    a new folder runs/MODEL-NUMBER, which a restart by torchrun finds again

Problems with a folder are found here, before the first step, and not hours later at the first checkpoint.
"""

import fcntl
import itertools
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from nanodomino.checkpoint.find_checkpoints import (SAVED_MARKER, checkpoints_of, clear_leftovers,
                                                    newest_intact_checkpoint, recorded_settings, with_checkpoint)
from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.comm.world import LaunchInfo
from nanodomino.config.command_exit import tolerate_closed_output
from nanodomino.config.config import Config
from nanodomino.config.saved_settings import check_settings
from nanodomino.errors import UserError, counted, require
from nanodomino.files import is_same, make_folder, open_descriptor, write_file
from nanodomino.run.agreement import from_rank_0


@dataclass(frozen=True)
class Run:
    """The folder of a run and the checkpoint to start from, if any.

    source: where the checkpoint was found: `folder` or --load. weights_only: load only the checkpoint's weights.
    lock: rank 0's descriptor of the file that lock_folder() locked.
    """
    folder: Path
    checkpoint: Path | None
    source: Path | None = None
    weights_only: bool = False
    lock: int | None = None


def open_run(config: Config, launch: LaunchInfo) -> Run:
    """Find or make the folder of this run, lock it, and find the checkpoint to start from. Called by rank 0 only.

    Raises UserError if the folder cannot be used, or if the settings do not fit the run or the checkpoint.
    """
    run_dir = Path(config.run_dir or "runs")
    # Check --load before making a folder; an earlier run no longer needs the checkpoint that it started from.
    exists = launch.restarted or (config.run_dir and os.path.exists(run_dir))
    loaded = None if exists else find_checkpoint_to_load(config)
    if config.tensorboard_dir:
        check_can_be_made("--tensorboard-dir", Path(config.tensorboard_dir))
    try:
        require(not run_dir.is_file(), f"--run-dir {run_dir} is a file; choose another name")
        if not exists:
            check_can_be_made("--run-dir", run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        if config.run_dir is None:
            run_dir = numbered_folder(run_dir, config.model, launch.restarted, launch_id())
        check_is_run(run_dir)
        # A full disk or a closed terminal must not end a run.
        tolerate_closed_output(f"training continues, and {run_dir / 'metrics.jsonl'} records it")
        lock = lock_folder(run_dir)
        make_folder(run_dir / "checkpoints")
        clear_leftovers(run_dir)
        check_writable(run_dir)
        checkpoint = newest_intact_checkpoint(run_dir)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} can't be written to ({error.strerror}); choose another folder") from None
    if checkpoint:
        manifest = read_manifest(checkpoint)
        record = manifest["config"]
        # The same flags again are fine: torchrun restarts a launch with them, and a job's script repeats them.
        require(not config.load or (config.load, config.finetune) == (record.get("load"), record.get("finetune")),
                f"--run-dir {run_dir} holds a run that has done {counted(manifest['step'], 'step')} and continues "
                f"only from its own checkpoints, not from --load {config.load}; leave --load and --finetune out to "
                "continue it, or give another --run-dir to start a new run")
        check_settings(record, checkpoint, config, "model", "optimizer", "run")
        return Run(run_dir, checkpoint, run_dir, lock=lock)
    if record := recorded_settings(run_dir):                   # killed before its first checkpoint
        check_settings(record, f"--run-dir {run_dir}", config, "model", "optimizer", "run")
    damaged = checkpoints_of(run_dir)
    require(not damaged and not (run_dir / SAVED_MARKER).exists(),
            f"the run in --run-dir {run_dir} has saved checkpoints, but the folder holds no intact one now "
            f"({len(damaged)} damaged), so it can't be resumed; restore a checkpoint, or move the folder away to start "
            "over")
    checkpoint = find_checkpoint_to_load(config) if exists else loaded
    return Run(run_dir, checkpoint, checkpoint and Path(config.load), config.finetune, lock)


def check_is_run(run_dir: Path):
    """Raise UserError unless the folder is empty or holds a run whose files can be read. Hidden files do not count."""
    for path in (run_dir / name for name in ("config.json", "metrics.jsonl", "lock", SAVED_MARKER)):
        require(not os.path.lexists(path) or path.is_file() and not path.is_symlink(), f"--run-dir {run_dir} holds a "
                f"{path.name} that is not a regular file; remove it, or choose another folder")
    names = sorted(path.name for path in run_dir.iterdir() if not path.name.startswith("."))
    is_run = {"lock", "launch.txt", SAVED_MARKER}.intersection(names) or recorded_settings(run_dir)
    require(is_run or checkpoints_of(run_dir) or not names, f"--run-dir {run_dir} holds no run, but other files "
            f"({', '.join(names[:3])}{' ...' * (len(names) > 3)}); choose a new or an empty folder")


def find_checkpoint_to_load(config: Config) -> Path | None:
    """Return the checkpoint that --load names, or None. Raises UserError if it does not fit the settings."""
    if not config.load:
        return None
    checkpoint, record = with_checkpoint(Path(config.load), lambda checkpoint: read_manifest(checkpoint)["config"])
    check_settings(record, checkpoint, config, "model", *(() if config.finetune else ("optimizer",)))
    depths = record.get("mtp_num_layers", 0)
    require(config.mtp_num_layers <= depths, f"mtp-num-layers {config.mtp_num_layers} must be at most the {depths} of "
            f"{checkpoint}, because --finetune can drop depths but not add any; try --mtp-num-layers {depths}")
    return checkpoint


def check_can_be_made(flag: str, folder: Path):
    """Raise UserError unless the folder, or else the nearest one above it that exists, can be written to."""
    try:
        check_writable(next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)))
    except OSError as error:
        raise UserError(f"{flag} {folder} can't be written to ({error.strerror}); choose another folder") from None


def check_writable(folder: Path):
    """Raise OSError unless this process can write 64 KiB to a new file in the folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 16))


def check_shared_folder(run_dir: Path):
    """Raise the same UserError on all ranks unless every rank sees the same folder and can write to it."""
    made = tempfile.NamedTemporaryFile(dir=run_dir, prefix=".shared-") if dist.get_rank() == 0 else None
    name, failures, failure = from_rank_0(made and os.path.basename(made.name)), [None] * dist.get_world_size(), None
    try:
        os.stat(run_dir / name)
        check_writable(run_dir)
    except OSError as error:
        failure = error.strerror
    dist.all_gather_object(failures, failure)
    del made                                                   # deletes the file
    failed = ", ".join(f"{rank} ({failure})" for rank, failure in enumerate(failures) if failure)
    require(not failed, f"--run-dir {run_dir} must be the same folder on all hosts, but rank {failed} can't see a file "
            "that rank 0 wrote there, or can't write to it; choose a folder on a disk that all hosts share")


def lock_folder(run_dir: Path, patience=5.0) -> int:
    """Lock a folder, so that only one run uses it at a time. Raises UserError if that fails for `patience` seconds.

    Returns the descriptor of the file `lock`. Never close it, since that would release the lock. The system releases
    the lock when this process ends, even if it is killed. After kill -9 of torchrun, its ranks may live on and hold the
    lock. When torchrun restarts a run, the old rank 0 may need a moment to end; hence the patience.
    """
    descriptor = open_descriptor(run_dir / "lock", os.O_CREAT | os.O_RDWR)
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        except BlockingIOError:
            require(time.monotonic() < end, f"--run-dir {run_dir} is in use by process "
                    f"{os.pread(descriptor, 20, 0).decode() or '?'}, which is still training in it; end that process "
                    "first, or choose another folder")
            time.sleep(0.2)
        except OSError:
            return descriptor                                  # a file system without locks


def check_not_in_use(run_dir: Path, note: str):
    """Raise UserError if a live run has locked the folder. The message ends with the note."""
    try:
        if os.path.exists(run_dir / "lock"):
            os.close(lock_folder(run_dir, patience=0.0))
    except OSError:
        pass
    except UserError as error:
        raise UserError(f"{error} ({note})") from None


def check_in_place(run: Run):
    """Raise the same UserError on all ranks if the run's folder was renamed, deleted or replaced during the run.

    Compares the lock file in this folder with the file that rank 0 has locked. Without this check, the next checkpoints
    would go to a second folder.
    """
    in_place = dist.get_rank() > 0 or run.lock is None or is_same(run.folder / "lock", os.fstat(run.lock))
    require(from_rank_0(in_place), f"--run-dir {run.folder} was renamed, deleted or replaced while the run was "
            "training in it (the file that the run has locked is no longer there); start again with the folder's new "
            "name to continue after its last checkpoint")


def launch_id() -> str:
    """Return an id that a launch and its restarts share: torchrun's --rdzv-id or, if it was not given, the host
    and the process id of the torchrun that started rank 0."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"{socket.gethostname()} {os.getppid()}" if given == "none" else given


def numbered_folder(parent: Path, name: str, restarted: bool, launch_id: str) -> Path:
    """Make and return the folder parent/NAME-NUMBER with the first free number. Safe if several runs do so at once.

    restarted: whether torchrun has restarted this run; if so, return the newest folder with this launch_id, if any.
    launch_id: the id of the launch; a restart keeps it.
    """
    for folder in (sorted(parent.glob(f"{name}-[0-9]*"), key=lambda folder: (len(folder.name), folder.name),
                          reverse=True) if restarted else ()):
        if (folder / "launch.txt").exists() and (folder / "launch.txt").read_text() == launch_id:
            return folder
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        try:
            folder.mkdir()
            write_file(folder / "launch.txt", launch_id.encode())
            return folder
        except FileExistsError:
            pass
