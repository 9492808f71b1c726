"""Copies metrics.jsonl to TensorBoard while a run trains: `--tensorboard-dir DIR`, then `tensorboard --logdir DIR`.

TensorBoard's event files can only be appended to. So each launch starts a new file. If it resumes from step 40, it sets
the file's purge_step to 40, which hides all points of older files from step 40 on. metrics.jsonl itself is truncated
(report.py):

    metrics.jsonl   | 0 | 1 | ... | 40 | 41 | 42
    first file      | 0 | 1 | ... | 40 | 41 | 42  killed; resumes after the checkpoint of step 40
    metrics.jsonl   | 0 | 1 | ... | 40 | 41'| 42'| ...
    second file           purge_step=40 | 40 | 41'| 42'| ...

Runs that share a folder would hide each other's points in this way. So the name of an event file ends with a checksum
of its run's path, and a run that finds other files says so.

Points are read back from metrics.jsonl for two reasons. purge_step also hides the points of step 40, so the new file
must repeat them. And points that a full disk has rejected can be written later.
"""

import json
import os
import zlib
from pathlib import Path

from nanodomino.config.config import Config
from nanodomino.errors import UserError
from nanodomino.run.run_folder import check_writable


def check_package(config: Config):
    """Raise UserError if --tensorboard-dir is given but the tensorboard package cannot be imported."""
    try:
        if config.tensorboard_dir:
            import torch.utils.tensorboard  # noqa: F401
    except Exception as error:                                 # a broken dependency can raise anything
        raise UserError(f"--tensorboard-dir needs a package that can't be imported ({error}); pip install -r "
                        "requirements-extra.txt, or leave the flag out (if the run remembers it, turn it off with "
                        'a --config file that holds {"tensorboard_dir": null})') from None


class TensorBoardWriter:
    """Copies the lines of metrics.jsonl from step `first_step` on. say(line): prints a warning."""

    def __init__(self, folder: Path, metrics: Path, first_step: int, say):
        self.folder, self.metrics, self.say = folder, metrics, say
        self.last_step, self.offset = first_step, 0            # the last step and the bytes already copied
        self.writer, self.warned = None, False
        self.suffix, self.seen_others = f".{zlib.crc32(bytes(metrics.resolve())):08x}", False

    def update(self):
        """Copy the lines added since the last call. Never raises: a failure must not end training."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            check_writable(self.folder)                        # on a full disk SummaryWriter's thread would die
            self.write_new_lines()
            self.warned = False
        except Exception as error:
            if not self.warned:
                reason = getattr(error, "strerror", None) or error
                self.say(f"warning: --tensorboard-dir {self.folder} can't be written ({reason}); training continues")
            self.warned = True

    def write_new_lines(self):
        from torch.utils.tensorboard import SummaryWriter

        step, offset = self.last_step, self.offset if self.writer else 0
        self.name_other_runs()
        writer = self.writer or SummaryWriter(self.folder, purge_step=self.last_step, filename_suffix=self.suffix)
        self.writer = None                                     # after an error the next call starts a new file
        with open(self.metrics, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):                   # half a line: the disk was full
                    break
                offset += len(line)
                values = numbers_in(line)
                if values.get("step", -1) >= self.last_step:
                    step = values.pop("step")
                    for name, value in values.items():
                        writer.add_scalar(name, value, step)
        writer.flush()
        self.writer, self.offset, self.last_step = writer, offset, step

    def name_other_runs(self):
        """Warn once if another run writes to the same folder, even if that run starts later."""
        others = [] if self.seen_others else [path.name for path in self.folder.glob("*tfevents*")
                                              if not path.name.endswith(self.suffix)]
        if others:
            self.seen_others = True
            self.say(f"warning: --tensorboard-dir {self.folder} also holds {others[0]}, which {self.metrics.parent} "
                     "did not write, and TensorBoard mixes the points of both; give each run its own folder")


def numbers_in(line: bytes) -> dict:
    """Return the numbers in a line of metrics.jsonl as {name: number}; {} if the line is damaged. A number in an object
    or a list gets a name such as "expert_load/layers.0/3"."""
    try:
        return dict(flat(json.loads(line).items()))
    except (ValueError, AttributeError, RecursionError):
        return {}


def flat(items, prefix=""):
    """Yield (name, number) for all numbers in nested objects and lists."""
    for name, value in items:
        if isinstance(value, (int, float)):
            yield f"{prefix}{name}", value
        elif isinstance(value, (dict, list)):
            yield from flat(value.items() if isinstance(value, dict) else enumerate(value), f"{prefix}{name}/")
