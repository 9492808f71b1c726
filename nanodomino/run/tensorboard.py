"""Copies metrics.jsonl to TensorBoard while a run trains: `--tensorboard-dir DIR`, then `tensorboard --logdir DIR`.

TensorBoard's event files can only be appended to. So each launch starts a new file. If it resumes after step 40, it
sets the file's purge_step to 41, which hides the points of older files from step 41 on. So runs that shared a folder
would hide each other's points.

The flag applies to one launch only. If a run remembered the folder, a run from someone else could make folders here.
"""

from importlib.util import find_spec

from nanodomino.config.config import Config
from nanodomino.errors import require


def check_package(config: Config):
    """Raise UserError if --tensorboard-dir is given but tensorboard is not installed."""
    require(not config.tensorboard_dir or find_spec("tensorboard"), "--tensorboard-dir needs the tensorboard package; "
            "pip install -r requirements-extra.txt, or leave the flag out")


class TensorBoard:
    """The event file of this launch. first_step: the steps done before this launch. say(line): prints a warning."""

    def __init__(self, folder: str, first_step: int, say):
        from torch.utils.tensorboard import SummaryWriter

        self.writer, self.say = SummaryWriter(folder, purge_step=first_step + 1), say

    def add(self, step: int, values: dict):
        """Write the numbers of a line of metrics.jsonl. A failure, such as a full disk, must not end training."""
        try:
            if self.writer:
                for name, value in values.items():
                    if isinstance(value, (int, float)):        # not null, a name or the loads of all experts
                        self.writer.add_scalar(name, value, step)
                self.writer.flush()
        except Exception as error:
            self.writer = None
            self.say(f"warning: --tensorboard-dir can't be written ({error}); training continues, and metrics.jsonl "
                     "records it")
