"""Start a tiny training as a job of its own, signal its ranks, wait for its end, and compare what two runs saved."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from data.prepare import prepare
from nanodomino.checkpoint.export import export
from nanodomino.checkpoint.find_checkpoints import checkpoints_of
from support import ROOT
from support.fork_server import LAUNCHER, Running, launcher_environments

PATIENCE = 90           # seconds until a launch counts as stuck
TINY = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 8 "
        "--hidden-dropout 0.1 --attention-dropout 0.1 --eval-iters 1 --eval-interval 7 --sample-tokens 0 "
        "--device cpu").split()

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


def make_corpus(folder: Path) -> Path:
    """Prepare a data folder of about 13,000 tokens in folder / "tokens" and return it."""
    (folder / "text.txt").write_text("".join(f"line {i} of a text that says {i * 7919 % 101}\n" for i in range(400)))
    prepare(folder / "text.txt", folder / "tokens", progress=False)
    return folder / "tokens"


def wait_until(condition, seconds=PATIENCE, pause=0.02):
    """Poll until condition() is true. Raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds")
        time.sleep(pause)


class Job:
    """A training under torchrun, or under a ForkServer, which starts the ranks faster.

    run_dir: below folder; None is train.py's default. word: an argument in front of train.py's flags, for a test's own
    script. restarts: torchrun's --max-restarts.
    """

    def __init__(self, folder: Path, corpus: Path, run_dir, *flags, processes=2, restarts=0, script=ROOT / "train.py",
                 word=None, fork_server=None):
        self.run_dir = folder / (run_dir or "runs/nano-001")
        where = ["--run-dir", str(self.run_dir)] if run_dir else []
        words = [*([word] if word else []), *TINY, "--data-path", str(corpus), *where, *map(str, flags)]
        self.log = folder / f"output-{time.monotonic_ns()}.txt"
        if fork_server:
            self.log.touch()
            ranks = [(words, environment) for environment in launcher_environments(processes)]
            self.process = fork_server.start(str(script), ranks, folder, self.log)
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
                   "--max-restarts", str(restarts), "--monitor-interval", "0.1", str(script), *words]
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment = {"GLOO_SOCKET_IFNAME": "lo", **environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of the launcher's children that are alive."""
        if isinstance(self.process, Running):
            return self.process.ranks()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    environment = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
                    if b"RANK" in environment:
                        found[int(environment[b"RANK"])] = int(folder.name)
            except OSError:         # the process has just ended
                pass
        return found

    def send(self, rank: int, number: int) -> int:
        """Send signal `number` to a rank and return its pid. Raises KeyError if the rank is not alive."""
        pid = self.ranks()[rank]
        os.kill(pid, number)
        return pid

    def metrics(self) -> list[dict]:
        """Return the complete lines of metrics.jsonl; the last line may be half written."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self) -> int:
        return max((line["step"] for line in self.metrics()), default=0)

    def wait_for(self, condition, seconds=PATIENCE):
        """Wait until the condition holds. Raises AssertionError if the job ends first."""
        wait_until(lambda: condition() or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.output()

    def saving(self) -> bool:
        """Whether a checkpoint is being written, or was when its rank died."""
        return any((self.run_dir / "checkpoints").glob(".step-*.unfinished"))

    def end(self, seconds=PATIENCE) -> int:
        """Wait for the launcher and return its exit code."""
        return self.process.wait(seconds)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self):
        """Kill what is still alive."""
        for pid in [*self.ranks().values(), *([self.process.pid] if self.process.poll() is None else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def numbers(run_dir: Path) -> list:
    """Return the lines of metrics.jsonl without times, at full precision."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("step_ms", "tokens_per_second", "mfu")}
            for line in lines]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the full weights of a run's newest checkpoint by name."""
    out = run_dir / "exported.pt"
    out.unlink(missing_ok=True)
    export(checkpoints_of(run_dir)[0], out)
    return torch.load(out, weights_only=True)


def differences(run_dir: Path, other: Path) -> list[str]:
    """Name what differs in any bit between two runs: weights, metrics, last step. An empty list: they are equal."""
    ours, theirs = weights(run_dir), weights(other)
    found = [] if ours.keys() == theirs.keys() else ["names of the weights"]
    found += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    found += [] if numbers(run_dir) == numbers(other) else ["metrics.jsonl"]
    return found + ([] if checkpoints_of(run_dir)[0].name == checkpoints_of(other)[0].name else ["last step"])


def fill_disk(path: Path):
    """Write to `path` until the disk is full to the last byte."""
    with open(path, "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(size * b"x"):
                    pass
            except OSError:
                pass


def listen_to_interrupts():
    """Restore Ctrl-C in a child process: background jobs of a shell ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
