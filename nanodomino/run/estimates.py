"""Estimates the memory and the time of a run before it starts, with a dry run (dry_run/).

Rank 0 runs the step dry before the ranks connect, because a process can be in only one world. After they connect, all
ranks measure the rates of the machine, and rank 0 computes the step time from both.
"""

import dataclasses
import math

from nanodomino.analysis.formulas import parameter_count, state_bytes_per_parameter
from nanodomino.analysis.machine import Machine, measure_machine, memory_of_process
from nanodomino.config.config import Config
from nanodomino.dry_run.stages import fullest_rank_bytes, step_seconds
from nanodomino.errors import require
from nanodomino.mesh import Mesh

MARGIN = 0.9             # defaults fill at most this share of the memory; a run may need this share of its estimate
ANY_MACHINE = Machine(1e12, 1e10, 1e10, 0.0, 8, 1e11)


class Estimate:
    """Estimates a run. program: has model_builder and train_step, like the module train.py.

    bytes: the peak of the fullest rank, or None if the dry run has failed, with the exception `failure`
    """

    def __init__(self, program, config: Config, device):
        self.program, self.config = program, dataclasses.replace(config, device=device.type)
        self.bytes = self.failure = None
        try:
            self.bytes = fullest_rank_bytes(program, self.config)
            step_seconds(program, self.config, ANY_MACHINE)    # caches the dry runs of all stages for seconds()
        except Exception as error:                             # a run must not fail because its estimate does
            self.failure = error

    def seconds(self, machine: Machine) -> float | None:
        """Return the seconds of a step, or None if the dry run has failed."""
        return None if self.failure else sum(step_seconds(self.program, self.config, machine).values())


def least_bytes(config: Config) -> float:
    """Return a lower bound of the bytes of the fullest rank: a rank's mean model state plus one activation. Quick for
    a model of any size."""
    layers = config.layer_period
    one, two = (parameter_count(dataclasses.replace(config, num_layers=count)) for count in (layers, 2 * layers))
    parameters = one + (config.num_layers / layers - 1) * (two - one)
    return (parameters * state_bytes_per_parameter(config) / config.weight_shards
            + math.prod(config.residual_shape) * config.params_dtype.itemsize)


def require_memory(program, config: Config, device, local_world_size: int) -> Estimate:
    """Raise UserError if the run can't fit into the memory of a process. Call it before allocating anything."""
    memory, remedy = memory_of_process(device, local_world_size), "--num-layers or --hidden-size"
    needed, estimate = least_bytes(config), None
    if needed <= memory:
        estimate = Estimate(program, config, device)
        needed, remedy = MARGIN * (estimate.bytes or 0), "--micro-batch-size or --num-layers"
    require(needed <= memory,
            f"the fullest of {config.world_size} processes would need at least {needed / 1e9:,.1f} GB of memory, and "
            f"each has {memory / 1e9:,.1f} GB here; lower {remedy}, or give the model more processes (--tp, --pp)")
    return estimate


def with_two_slices(program, config: Config, device, local_world_size: int) -> Config:
    """Return the Config with two samples per microbatch, so that each slice's all-reduce is hidden by the other slice.

    Only a default of one sample changes: --micro-batch-size, --slices and --columns are kept as given. The run must fit
    into memory, and there must be enough microbatches to keep the pipeline's bubble small.
    """
    two = dataclasses.replace(config, micro_batch_size=2, slices=2, columns=1)
    if (config.tp == 1 or config.micro_batch_size > 1 or {"micro_batch_size", "slices", "columns"} & {*config.given}
            or config.global_batch_size % (2 * config.dp) or config.pp > 1 and two.microbatches < 4 * config.pp):
        return config
    most = MARGIN * memory_of_process(device, local_world_size)
    fits = least_bytes(two) <= most and (Estimate(program, two, device).bytes or most + 1) <= most
    return two if fits else config


def estimated_seconds(estimate: Estimate | None, config: Config, mesh: Mesh) -> float | None:
    """Return the seconds of a step on rank 0, which has the Estimate. Every rank must call it."""
    machine = measure_machine(config, mesh)
    return estimate and estimate.seconds(machine)
