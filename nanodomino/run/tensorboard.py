"""Copies metrics.jsonl to TensorBoard while a run trains: `--tensorboard-dir DIR`, then `tensorboard --logdir DIR`.

TensorBoard's event files can only be appended to. So each launch starts a new file. If it resumes after step 40, it
sets the file's purge_step to 41, which hides the points of older files from step 41 on. So runs that shared a folder
would hide each other's points.

The flag applies to one launch only. If a run remembered the folder, a run from someone else could make folders here.
"""

from nanodomino.config.config import Config
from nanodomino.errors import UserError


def check_package(config: Config):
    """Raise UserError if --tensorboard-dir is given but the tensorboard package cannot be imported."""
    try:
        if config.tensorboard_dir:
            import torch.utils.tensorboard  # noqa: F401
    except Exception as error:                                 # a broken dependency can raise anything
        raise UserError(f"--tensorboard-dir needs a package that can't be imported ({error}); pip install -r "
                        "requirements-extra.txt, or leave the flag out") from None


class TensorBoard:
    """The event file of this launch. first_step: the steps done before this launch. say(line): prints a warning."""

    def __init__(self, folder: str, first_step: int, say):
        self.folder, self.first_step, self.say = folder, first_step, say
        self.writer, self.failed = None, False

    def add(self, step: int, values: dict):
        """Write the numbers of a line of metrics.jsonl. Never raises: a failure, such as a full disk, must not end
        training. After a failure nothing more is written."""
        try:
            if not self.failed:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = self.writer or SummaryWriter(self.folder, purge_step=self.first_step + 1)
                for name, value in values.items():
                    if isinstance(value, (int, float)):        # not null, a name or the loads of all experts
                        self.writer.add_scalar(name, value, step)
                self.writer.flush()
        except Exception as error:
            self.failed = True
            self.say(f"warning: --tensorboard-dir {self.folder} can't be written "
                     f"({getattr(error, 'strerror', None) or error}); training continues, and metrics.jsonl records it")
