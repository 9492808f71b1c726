"""Measures a real training step on every rank, and runs the same step dry: for collectives, memory and recompute.

The same `Accounts` (estimate/accounts.py) count both. A dry run must come before the process groups, because a process
can be in only one world. So rank 0 runs all ranks dry first, while the others wait for it to connect.
"""

import dataclasses
import math
from unittest import mock

import torch

import train
from benchmarks.runner import RandomTokens, config_here, join
from nanodomino.comm import scatter_and_gather
from nanodomino.comm.collectives import TAGS
from nanodomino.comm.world import find_device
from nanodomino.domino import Domino
from nanodomino.estimate.accounts import Accounts, storage
from nanodomino.estimate.rank import RankRun, dry_run, groups_of, measured_step
from nanodomino.settings.config import Config
from nanodomino.zero import ZeroOptimizer


def processes(flags) -> int:
    """Return tp x pp x cp x dp. Raises UserError for wrong flags, so that they are found before processes start."""
    world_size = max(1, math.prod((flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size,
                                   getattr(flags, "context_parallel_size", 1), flags.data_parallel_size)))
    config_here(flags, world_size)
    return world_size


def config_for(flags, launch) -> Config:
    """Return the Config with its device, and without torch.compile."""
    config = config_here(flags, launch.world_size)
    return dataclasses.replace(config, device=find_device(config, launch).type, compile=False)


def dry_runs(config: Config, launch) -> list[RankRun]:
    """Run every rank dry. Returns [] except on rank 0. Call it before build()."""
    return [dry_run(train, config, rank) for rank in range(config.world_size)] if launch.rank == 0 else []


def build(config: Config, launch):
    """Join the process groups and return (optimizer, stage, dataset) of this process, built as in train.py."""
    config, mesh = join(config, launch)
    model = train.model_builder(config, mesh)
    return (ZeroOptimizer(model, config, mesh), Domino(model, config.slices, config.columns),
            RandomTokens(config, mesh.device))


class RealAccounts(Accounts):
    """Keeps account of a real step. On CPUs the messages of an all-to-all differ in size, and empty ones are not sent.
    So an all-to-all is counted where it launches them."""

    def __enter__(self):
        self.exchange, self.exchanging = scatter_and_gather.exchange, False
        self.patch = mock.patch.object(scatter_and_gather, "exchange", self.count_exchange)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def count_exchange(self, sends, receives, group, tag):
        self.exchanging = tag == TAGS["all_to_all"]
        if self.exchanging:
            found = self.traffic[self.names[group.group_name], "all_to_all"]
            found[0], found[1] = found[0] + 1, found[1] + sum(tensor.nbytes for tensor in sends)
        try:
            return self.exchange(sends, receives, group, tag)
        finally:
            self.exchanging = False

    def without_numbers(self, name, given, tensors):
        if name != "empty" or not given.get("pin_memory"):
            return None
        result = torch.empty(given["size"], dtype=given.get("dtype"), pin_memory=True)
        self.pinned.add(storage(result))
        self.allocate(result)
        return result

    def collective(self, function, name, args):
        return function(*args) if self.exchanging else super().collective(function, name, args)


def first_update(optimizer, stage, dataset, config: Config):
    """Train until the optimizer has its moments. In fp16 the first steps are skipped, until the loss scale is small
    enough."""
    while not optimizer.updates:
        train.train_step(1, stage, optimizer, dataset, config, stage.mesh)


def measure(optimizer, stage, dataset, config: Config, program=train) -> RankRun:
    """Train one step and return what this rank did, without the events, which a real run has no use for. On CUDA the
    peak is the allocator's."""
    mesh, cuda = stage.mesh, stage.mesh.device.type == "cuda"
    with RealAccounts(groups_of(mesh), host_counts=not cuda) as accounts:
        accounts.allocate(dataset.tokens)                      # so that they do not count
        if cuda:
            torch.cuda.reset_peak_memory_stats(mesh.device)
        run = measured_step(program, stage, optimizer, dataset, config, accounts)
    peak = torch.cuda.max_memory_allocated(mesh.device) if cuda else run.peak
    return dataclasses.replace(run, events=[], peak=peak)


# ---- for tables

def alike(found: list) -> list[list[int]]:
    """Group the ranks whose findings are equal, for example [[0, 1], [2, 3]]. found: one finding per rank."""
    groups = {}
    for rank, finding in enumerate(found):
        groups.setdefault(str(finding), []).append(rank)
    return list(groups.values())


def text_of(ranks: list[int]) -> str:
    return " ".join(map(str, ranks))
