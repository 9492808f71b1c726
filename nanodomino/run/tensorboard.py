"""metrics.jsonl, shown by TensorBoard while a run trains: `--tensorboard-dir DIR`, then `tensorboard --logdir DIR`.

TensorBoard reads files of its own kind, to which a writer only ever adds. So nothing in them can be cut back when a run
goes on from a checkpoint behind its last step; instead a new file begins with a step from which on all that older files
hold is void. metrics.jsonl is cut back at that moment, and is the truth. Hence

    metrics.jsonl   | 0 | 1 | 2 | ... | 40 | 41 | 42              each line, as soon as it is there, and flushed
    first file      | 0 | 1 | 2 | ... | 40 | 41 | 42 x killed
    metrics.jsonl   | 0 | 1 | 2 | ... | 40 | 41'| 42'| ...        goes on after the checkpoint of step 40
    second file                  void from 40 on | 40 | 41'| 42'| ...

and step 40 is said again, for what was its end then, such as a test loss, has been cut too. What can't be written now,
since the disk is full or may only be read, is read again in metrics.jsonl and written when it can.
"""

import json
import os
from pathlib import Path

from nanodomino.config.config import Config
from nanodomino.errors import UserError
from nanodomino.run.folder import check_writable


def check_package(config: Config):
    """On every rank, before they meet. Raises UserError if --tensorboard-dir asks for a package that is not there."""
    try:
        if config.tensorboard_dir:
            import torch.utils.tensorboard  # noqa: F401
    except Exception as error:                                 # what it imports in turn can raise anything
        raise UserError(f"--tensorboard-dir needs a package that can't be imported ({error}); pip install -r "
                        "requirements-extra.txt, or leave the flag out; a run that remembers it forgets it by --config "
                        'FILE with {"tensorboard_dir": null}') from None


class TensorBoardWriter:
    """Writes what a metrics.jsonl holds from a step on. say(line): where a warning goes."""

    def __init__(self, folder: Path, metrics: Path, first_step: int, say):
        self.folder, self.metrics, self.say = folder, metrics, say
        self.since, self.offset = first_step, 0                # a new writer begins with that step
        self.writer, self.warned = None, False

    def read_on(self):
        """Write what has come since. Training is worth more than what is shown of it: nothing here may end it."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            check_writable(self.folder)                            # else the writer's thread dies of it, with a traceback
            self.write()
            self.warned = False
        except Exception as error:
            if not self.warned:
                said = getattr(error, "strerror", None) or error
                self.say(f"warning: --tensorboard-dir {self.folder} can't be written ({said}); training goes on")
            self.warned = True

    def write(self):
        from torch.utils.tensorboard import SummaryWriter

        offset, step = self.offset if self.writer else 0, self.since
        writer, self.writer = self.writer or SummaryWriter(self.folder, purge_step=self.since), None
        with open(self.metrics, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):                   # the rest comes when there is room
                    break
                offset += len(line)
                values = numbers(line)
                if values.get("step", -1) >= self.since:
                    step = values.pop("step")
                    for name, value in values.items():
                        writer.add_scalar(name, value, step)
        writer.flush()
        self.writer, self.offset, self.since = writer, offset, step      # one that has failed is not used again


def numbers(line: bytes) -> dict:
    """Of a line of metrics.jsonl; none of one that is damaged."""
    try:
        return {name: value for name, value in json.loads(line).items() if isinstance(value, (int, float))}
    except (ValueError, AttributeError, RecursionError):
        return {}
