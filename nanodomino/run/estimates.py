"""Estimates the memory of a run before it starts, with a dry run (dry_run/)."""

import dataclasses
import math

from nanodomino.errors import require
from nanodomino.estimate.formulas import memory_of_process, parameter_count, state_bytes_per_parameter
from nanodomino.estimate.stages import fullest_rank_bytes
from nanodomino.settings.config import Config


MARGIN = 0.9             # a run may need this share of its estimate


def least_bytes(config: Config) -> float:
    """Return a lower bound of the bytes of the fullest rank: a rank's mean model state plus one activation. Quick for
    a model of any size."""
    layers = config.layer_period
    one, two = (parameter_count(dataclasses.replace(config, num_layers=count)) for count in (layers, 2 * layers))
    parameters = one + (config.num_layers / layers - 1) * (two - one)
    return (parameters * state_bytes_per_parameter(config) / config.weight_shards
            + math.prod(config.residual_shape) * config.params_dtype.itemsize)


def require_memory(program, config: Config, device, local_world_size: int) -> str:
    """Return in words how much memory the run needs. Raises UserError if it can't fit into the memory of a process.

    Call it before allocating anything, and before the ranks connect, because a process can be in only one world.
    program: has model_builder and train_step, like the module train.py.
    """
    memory, remedy = memory_of_process(device, local_world_size), "--num-layers or --hidden-size"
    needed, words = least_bytes(config), ""
    if needed <= memory:
        try:
            estimate = fullest_rank_bytes(program, dataclasses.replace(config, device=device.type))
            words = f"the fullest rank needs {estimate / 2**20:,.1f} MiB of memory"
            needed, remedy = MARGIN * estimate, "--micro-batch-size or --num-layers"
        except Exception as error:                             # a run must not fail because its estimate does
            words = f"no estimate of its memory ({error})"
    require(needed <= memory,
            f"the fullest of {config.world_size} processes would need at least {needed / 1e9:,.1f} GB of memory, and "
            f"each has {memory / 1e9:,.1f} GB here; lower {remedy}, or give the model more processes (--tp, --pp)")
    return words
