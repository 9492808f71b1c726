"""Run all of train.py, with a tiny model, and read what the run has left in its folder.

    train_in_pool(pool, folder, *flags)    in the pool's workers, in a fraction of a second, from flags to exit code
    Job(folder, corpus, run_dir, *flags)   in processes of its own, which a test may signal and kill

In the pool, the run uses the worker's process group and sets its own time-out on it. The file `lock` is made but not
locked, and no signal handlers are set, because they would last as long as the worker.
"""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.fork_server import (Ended, ForkServer, default_signals, environment_without_launcher, is_alive,
                                 launcher_environments)
from support.pool import Pool
from torch.distributed.distributed_c10d import _set_pg_timeout

import train
from data.prepare import prepare
from nanodomino.checkpoint.format import step_of
from nanodomino.checkpoint.load import checkpoints_of, full_weights
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError, sentence_and_code
from nanodomino.run import folder as run_folder, session


PATIENCE = 300          # seconds until a launch counts as stuck, also on a machine with other work
TINY = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 8 "
        "--hidden-dropout 0.1 --attention-dropout 0.1 --eval-iters 1 --eval-interval 7 --sample-tokens 0 "
        "--device cpu").split()

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def make_corpus(folder: Path) -> Path:
    """Prepare a data folder of about 13,000 tokens in folder / "tokens" and return it."""
    (folder / "text.txt").write_text("".join(f"line {i} of a text that says {i * 7919 % 101}\n" for i in range(400)))
    prepare(folder / "text.txt", folder / "tokens")
    return folder / "tokens"


# ---- in the pool

def train_in_pool(pool: Pool, folder: Path, *flags, world_size=1, bad_steps=()) -> Ended:
    """Run `train.py FLAGS` on the corpus that make_corpus(folder) prepared. The loss of each of bad_steps is NaN."""
    # 12 tokens a sample: even the test split of this corpus has some
    given = [*TINY, "--seq-length", "12", "--data-path", str(folder / "tokens"), *map(str, flags)]
    ranks = pool.run(main_on_rank, given, bad_steps, world_size=world_size)
    assert len({(rank.code, rank.output.partition("error: ")[2]) for rank in ranks}) == 1, "ranks disagree"
    return ranks[0]


def main_on_rank(flags: list[str], bad_steps=()) -> Ended:
    """Run train.py's main() on this rank of the pool. A UserError is the last line of the output."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    get_batch, screen = train.get_batch, io.StringIO()

    def poisoned(dataset, config, mesh, first_sample, shuffle, microbatch, chunk):
        batch = get_batch(dataset, config, mesh, first_sample, shuffle, microbatch, chunk)
        bad = shuffle and first_sample // config.global_batch_size + 1 in bad_steps and batch.loss_mask is not None
        return dataclasses.replace(batch, loss_mask=batch.loss_mask * float("nan")) if bad else batch

    def start_world(place, device, timeout):
        _set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)

    with (mock.patch.object(train, "get_batch", poisoned),
          mock.patch.object(session, "start_world", start_world),
          mock.patch.object(session.Watchdog, "__enter__", lambda watchdog: watchdog),
          mock.patch.object(run_folder, "lock_folder", lambda run_dir: (run_dir / "lock").touch()),
          contextlib.redirect_stdout(screen)):
        try:
            code = train.main(flags, LaunchInfo(rank, world_size, rank, world_size, launched=True))
        except UserError as error:
            sentence, code = sentence_and_code(error)
            print(f"error: {sentence}")
    return Ended(code, screen.getvalue())


# ---- in processes

def torchrun(folder: Path, log: Path, processes: int, *words, restarts=0) -> subprocess.Popen:
    """Start torchrun in `folder` with a script and its arguments (words). log: gets its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes,
               "--max-restarts", restarts, "--monitor-interval", 0.1, *words]
    places = log.with_suffix(".ranks")
    places.touch()
    environment = environment_without_launcher() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                                                    "PLACES": str(places)}
    with open(log, "w") as file:
        return subprocess.Popen([*map(str, command)], env=environment, cwd=folder, stdout=file,
                                stderr=subprocess.STDOUT, preexec_fn=default_signals)


def wait_until(condition, seconds=PATIENCE, pause=0.02):
    """Poll until condition() is true. Raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds")
        time.sleep(pause)


class Job:
    """A training under a ForkServer, or without one under torchrun. run_dir: below folder.
    script, word: a test's own script, and an argument in front of train.py's flags. Under torchrun, only a script that
    writes its (rank, pid) to $PLACES can be signalled by rank."""

    def __init__(self, folder: Path, corpus: Path, run_dir, *flags, processes=2, restarts=0, script=ROOT / "train.py",
                 word=None, fork_server: ForkServer | None = None):
        self.run_dir, self.log = folder / run_dir, folder / f"output-{time.monotonic_ns()}.txt"
        words = [*([word] if word else []), *TINY, *(fork_server.flags if fork_server else []), "--data-path",
                 str(corpus), "--run-dir", str(self.run_dir), *map(str, flags)]
        if fork_server:
            ranks = [(words, environment) for environment in launcher_environments(processes)]
            self.process = fork_server.start(str(script), ranks, folder, self.log)
            self.ranks, self.codes = self.process.ranks, self.process.codes
        else:
            self.process = torchrun(folder, self.log, processes, script, *words, restarts=restarts)

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the ranks that are alive under torchrun."""
        lines = self.log.with_suffix(".ranks").read_text().splitlines()
        return {rank: pid for rank, pid in map(json.loads, lines) if is_alive(pid)}

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, rank: int, number: int) -> int:
        """Send signal `number` to a rank and return its pid. Raises KeyError if the rank is not alive."""
        pid = self.ranks()[rank]
        os.kill(pid, number)
        return pid

    def steps(self) -> int:
        """Return the last step in metrics.jsonl."""
        return max((line["step"] for line in metrics(self.run_dir)), default=0)

    def wait_for(self, condition, seconds=PATIENCE):
        """Wait until the condition holds. Raises AssertionError if the job ends first."""
        wait_until(lambda: condition() or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.output()

    def saving(self) -> bool:
        """Return whether a checkpoint is being written, or was when its rank died."""
        return any((self.run_dir / "checkpoints").glob(".step-*.unfinished"))

    def end(self, seconds=PATIENCE) -> int:
        """Wait for the launcher and return its exit code."""
        return self.process.wait(seconds)

    def close(self):
        """Kill what is still alive."""
        self.process.kill()
        for pid in self.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.end()


# ---- what a run has left

def metrics(run_dir: Path) -> list[dict]:
    """Return the complete lines of metrics.jsonl; the last line of a live run may be half written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def metric_points(run_dir: Path, name: str) -> list[tuple]:
    """Return (step, value) for each line of metrics.jsonl that has this metric."""
    return [(line["step"], line[name]) for line in metrics(run_dir) if name in line]


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, newest first."""
    return [step_of(folder) for folder in checkpoints_of(run_dir)]


def differences(run_dir: Path, other: Path) -> list[str]:
    """Name what differs in any bit between two runs: weights, metrics, last step. An empty list: they are equal."""
    ours, theirs = (full_weights(checkpoints_of(folder)[0]) for folder in (run_dir, other))
    found = [] if ours.keys() == theirs.keys() else ["names of the weights"]
    found += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    times = dict(step_ms=0, tokens_per_second=0, mfu=0)
    lines = [[line | times for line in metrics(folder)] for folder in (run_dir, other)]
    found += [] if lines[0] == lines[1] else ["metrics.jsonl"]
    return found + ([] if saved_steps(run_dir)[0] == saved_steps(other)[0] else ["last step"])
