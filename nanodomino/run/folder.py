"""Finds or makes the folder of a run, and finds the checkpoint that the run starts from.

    --run-dir of an earlier run     resume from its newest intact checkpoint; a --load other than its first is refused
    --run-dir of a new run          start from --load, or from random weights
    no --run-dir                    a new folder runs/MODEL-NUMBER

A full disk or a folder of something else is found here, before the first step, and not hours later.
"""

import dataclasses
import fcntl
import itertools
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanodomino.checkpoint.format import read_manifest
from nanodomino.checkpoint.load import checkpoints_of, find_checkpoint, newest_intact_checkpoint, recorded_settings
from nanodomino.checkpoint.save import clear_leftovers
from nanodomino.errors import UserError, require
from nanodomino.files import make_folder, open_regular_file
from nanodomino.settings.config import Config
from nanodomino.settings.records import check_record, check_settings, news, taken_over


@dataclass(frozen=True)
class Run:
    """The folder of a run and the checkpoint to start from, if any. weights_only: load only the checkpoint's weights.
    sample_offset: see Config. news: what is taken over from the checkpoint, and what changes."""
    folder: Path
    checkpoint: Path | None = None
    weights_only: bool = False
    sample_offset: int = 0
    news: tuple[str, ...] = ()


def open_run(config: Config) -> Run:
    """Find or make this run's folder, lock it, and find the checkpoint to start from, on rank 0. Raises UserError."""
    run_dir = Path(config.run_dir or "runs")
    require(config.run_dir or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0",
            "torchrun's --max-restarts needs --run-dir, or a restart would start a new run; add --run-dir FOLDER")
    begun = config.run_dir and checkpoints_of(run_dir)
    to_load = find_checkpoint_to_load(config) if config.load and not begun else None  # if refused, no folder is made
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1) if config.run_dir is None else ():
            with suppress(FileExistsError):                    # several runs may start at once
                (numbered := run_dir / f"{config.model}-{number:03d}").mkdir()
                run_dir = numbered
                break
        names = sorted(path.name for path in run_dir.iterdir() if not path.name.startswith("."))
        require(not names or "lock" in names or recorded_settings(run_dir) or checkpoints_of(run_dir),
                f"--run-dir {run_dir} holds no run, but other files ({', '.join(names[:3])}"
                f"{' ...' * (len(names) > 3)}); choose a new or an empty folder")
        lock_folder(run_dir)
        make_folder(run_dir / "checkpoints")
        clear_leftovers(run_dir)
        checkpoint = newest_intact_checkpoint(run_dir)
    except OSError as error:
        reason = "it is a file" if run_dir.is_file() else error.strerror
        raise UserError(f"--run-dir {run_dir} can't be written to ({reason}); choose another folder") from None
    record = read_manifest(checkpoint)["config"] if checkpoint else recorded_settings(run_dir)
    if record:                                                 # also of a run that was killed before its first save
        check_settings(record, checkpoint or f"--run-dir {run_dir}", config, "model", "positions", "optimizer", "run")
    if not begun:
        return starts_from(to_load, config, run_dir, loaded=True) if to_load else Run(run_dir)
    require(checkpoint, f"--run-dir {run_dir} holds only damaged checkpoints, so its run can't be resumed; restore a "
            "checkpoint, or move the folder away to start over")
    # The same flags again are fine: torchrun restarts a launch with them, and a job's script repeats them.
    require(not config.load or (config.load, config.finetune) == (record.get("load"), record.get("finetune")),
            f"--run-dir {run_dir} holds a run, which continues only from its own checkpoints; leave --load and "
            "--finetune out to continue it, or give another --run-dir to start a new run")
    return starts_from(checkpoint, config, run_dir)


def starts_from(checkpoint: Path, config: Config, run_dir: Path, loaded=False) -> Run:
    """Return the Run that starts from a checkpoint of its own folder, or from the one that --load names."""
    manifest, weights_only = read_manifest(checkpoint), loaded and config.finetune
    record, step = check_record(manifest["config"], checkpoint), 0 if weights_only else manifest["step"]
    saved = dataclasses.replace(config, **record)              # what the record lacks is as it is now
    samples = step and -(-saved.consumed_train_samples(step) * saved.seq_length // config.seq_length)
    config = dataclasses.replace(config, sample_offset=samples - step * config.global_batch_size)
    why = "" if "lr" in config.given else ", a tenth of the default without --finetune: --lr sets another"
    rate = f", with the peak learning rate {config.lr:g}{why}" * (config.train_iters > 0)
    start = [f"starting from the weights in {checkpoint}, without its optimizer state and step{rate}"
             ] if weights_only else [f"loaded from {checkpoint}"] * loaded
    taken = taken_over(record, config.finetune) if loaded else ()
    return Run(run_dir, checkpoint, weights_only, config.sample_offset, (*start, *news(saved, config, step, taken)))


def find_checkpoint_to_load(config: Config) -> Path:
    """Return the checkpoint that --load names. Raises UserError if there is none, or it does not fit the settings."""
    checkpoint = find_checkpoint(Path(config.load))
    record = read_manifest(checkpoint)["config"]
    frozen = ("positions",) if not config.finetune or config.position_embedding_type == "learned_absolute" else ()
    check_settings(record, checkpoint, config, "model", *frozen, *(() if config.finetune else ("optimizer",)))
    depths = record.get("mtp_num_layers", 0)
    require(config.mtp_num_layers <= depths, f"mtp-num-layers {config.mtp_num_layers} must be at most the {depths} of "
            f"{checkpoint}, because --finetune can drop depths but not add any; try --mtp-num-layers {depths}")
    return checkpoint


def lock_folder(run_dir: Path):
    """Lock a folder until this process ends, so that only one run uses it. Raises UserError if a live run has locked
    it, such as ranks that live on after kill -9 of torchrun. Raises OSError if the disk is full."""
    with open_regular_file(run_dir / "lock", "a+b") as file:
        try:
            fcntl.flock(os.dup(file.fileno()), fcntl.LOCK_EX | fcntl.LOCK_NB)       # held by the copy, never closed
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"--run-dir {run_dir} is in use by process {file.read(20).decode().strip()}, which is "
                            "still training in it; end that process first, or choose another folder") from None
        except OSError:
            pass                                               # a file system without locks
        file.truncate(0)
        file.write(str(os.getpid()).encode().ljust(1 << 16))   # on a full disk, an empty file could be made
