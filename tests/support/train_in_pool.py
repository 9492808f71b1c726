"""Run all of train.py in the pool's workers, from its flags to its exit code, in a fraction of a second.

    train_in_pool(pool, folder, *flags, world_size=2) -> Ended of rank 0

The run uses the worker's process group and sets its own time-out on it. The file `lock` is made but not locked, and
the signal handlers are replaced, because they would last as long as the worker. tests/run/test_interrupted_runs.py
tests both in processes of their own.
"""

import contextlib
import dataclasses
import io
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from support.jobs import TINY
from support.pool import Pool
from torch.distributed.distributed_c10d import _set_pg_timeout

import train
from nanodomino.checkpoint.find_checkpoints import checkpoints_of
from nanodomino.checkpoint.manifest import step_of
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError
from nanodomino.run import run_folder


@dataclass
class Ended:
    """The end of a run on one rank. After a UserError code is None and error is its message. output: stdout."""
    code: int | None
    error: str
    output: str


def train_in_pool(pool: Pool, folder: Path, *flags, world_size=1, bad_steps=()) -> Ended:
    """Run `train.py FLAGS` on the corpus that make_corpus(folder) prepared. The loss of each of bad_steps is NaN."""
    # 12 tokens a sample: even the test split of this corpus has some
    given = [*TINY, "--seq-length", "12", "--data-path", str(folder / "tokens"), *map(str, flags)]
    ranks = pool.run(main_on_rank, given, bad_steps, world_size=world_size)
    assert len({(rank.code, rank.error) for rank in ranks}) == 1, "ranks disagree"
    return ranks[0]


def main_on_rank(flags: list[str], bad_steps) -> Ended:
    """Run train.py's main() on this rank of the pool."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    get_batch, screen = train.get_batch, io.StringIO()

    def poisoned(dataset, config, mesh, step, shuffle, microbatch, chunk):
        batch = get_batch(dataset, config, mesh, step, shuffle, microbatch, chunk)
        bad = shuffle and step + 1 in bad_steps and batch.loss_mask is not None
        return dataclasses.replace(batch, loss_mask=batch.loss_mask * float("nan")) if bad else batch

    def start_world(place, device, timeout):
        _set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)

    with (mock.patch.multiple(train, get_batch=poisoned, start_world=start_world,
                              StopSignal=lambda say: SimpleNamespace(number=0, received_at=0.0)),
          mock.patch.object(run_folder, "lock_folder", lambda run_dir: (run_dir / "lock").touch()),
          contextlib.redirect_stdout(screen)):
        try:
            place = LaunchInfo(rank, world_size, rank, world_size, launched=True)
            return Ended(train.main(flags, place), "", screen.getvalue())
        except UserError as error:
            return Ended(None, str(error), screen.getvalue())


def metric_points(run_dir: Path, name: str) -> list[tuple]:
    """Return (step, value) for each line of metrics.jsonl that has this metric."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, newest first."""
    return [step_of(folder) for folder in checkpoints_of(run_dir)]
