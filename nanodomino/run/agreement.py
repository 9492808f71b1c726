"""Makes all ranks agree on a run: rank 0's values for all, and the same settings everywhere."""

import dataclasses

import torch.distributed as dist

from nanodomino.config.config import Config
from nanodomino.errors import require


def from_rank_0(value):
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def check_agreement(config: Config):
    """Raise UserError if a rank has other settings or data than rank 0, as can happen on several hosts.

    Only the paths may differ.
    """
    mine = dataclasses.asdict(dataclasses.replace(config, data_path=None, run_dir=None, load=None, config=None,
                                                  tensorboard_dir=None))
    theirs = from_rank_0(mine)
    different = [None] * dist.get_world_size()
    dist.all_gather_object(different, [name for name in mine if mine[name] != theirs[name]])
    for rank, names in enumerate(different):
        require(not names, f"rank {rank} was started with another {', '.join(names)} than rank 0; give all hosts the "
                "same flags and data")
