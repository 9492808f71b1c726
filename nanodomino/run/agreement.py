"""Gives all ranks rank 0's values, and checks that all ranks have the same settings."""

import dataclasses
import socket

import torch.distributed as dist

from nanodomino.settings.config import Config
from nanodomino.errors import require


def from_rank_0(value):
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def check_agreement(config: Config) -> list[str]:
    """Return the name of each rank's host. Raise UserError if settings or data of a rank differ from rank 0's.

    They can differ if each host starts its ranks with its own command. Only paths may differ.
    """
    mine = dataclasses.asdict(dataclasses.replace(config, data_path=None, run_dir=None, load=None, config=None,
                                                  tensorboard_dir=None))
    theirs = from_rank_0(mine)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (socket.gethostname(), [name for name in mine if mine[name] != theirs[name]]))
    for rank, (_, names) in enumerate(ranks):
        require(not names, f"rank {rank} has a different {', '.join(names)} than rank 0; give all hosts the "
                "same flags and data")
    return [host for host, _ in ranks]
