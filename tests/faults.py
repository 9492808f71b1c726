"""A training that is killed again and again ends with the same weights as one that is left alone.

    python tests/faults.py --kills 50 --minutes 20        a line a round, then the count; exit code 1 if a round differed

A round is one small training in a folder of its own. torchrun is started; a rank, any, gets kill -9 (or SIGTERM, one time in five) at a random
moment or, two times in three, as soon as the hidden folder of an unfinished checkpoint is seen; after one to three kills it is let
go to its end. Only processes of our own torchrun are ever sent a signal.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from forks import LAUNCHER, Running, launcher_environments  # noqa: E402

from data.prepare import prepare  # noqa: E402
from nanodomino.checkpoint.export import export  # noqa: E402
from nanodomino.checkpoint.folders import checkpoints_of  # noqa: E402

PATIENCE = 90           # seconds until a launch counts as stuck
TINY = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0.1 --attention-dropout 0.1 "
        "--eval-iters 1 --eval-interval 7 --sample-tokens 0 --device cpu").split()


def make_corpus(folder: Path) -> Path:
    """A prepared folder of about 13,000 tokens."""
    (folder / "text.txt").write_text("".join(f"line {i} of a text that says {i * 7919 % 101}\n" for i in range(400)))
    prepare(folder / "text.txt", folder / "tokens", progress=False)
    return folder / "tokens"


def wait_until(condition, seconds=PATIENCE, pause=0.02):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds")
        time.sleep(pause)


class Job:
    """A torchrun of our own, or with `forks` what starts as many ranks sooner. run_dir None: the default one, under
    `folder`; word: goes before train.py's flags, for a test's script."""

    def __init__(self, folder: Path, corpus: Path, run_dir, *flags, processes=2, restarts=0, script=ROOT / "train.py", word=None, forks=None):
        self.run_dir = folder / (run_dir or "runs/nano-001")
        place = ["--run-dir", str(self.run_dir)] if run_dir else []
        words = [*([word] if word else []), *TINY, "--data-path", str(corpus), *place, *map(str, flags)]
        self.log = folder / f"output-{time.monotonic_ns()}.txt"
        if forks:
            self.log.touch()
            self.process = forks.start(str(script), [(words, place) for place in launcher_environments(processes)], folder, self.log)
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
                   "--max-restarts", str(restarts), "--monitor-interval", "0.1", str(script), *words]
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment = {"GLOO_SOCKET_IFNAME": "lo", **environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    def ranks(self) -> dict[int, int]:
        """{rank: pid} of our launcher's children that are alive."""
        if isinstance(self.process, Running):
            return self.process.ranks()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    environment = dict(one.split(b"=", 1) for one in (folder / "environ").read_bytes().split(b"\0") if b"=" in one)
                    if b"RANK" in environment:
                        found[int(environment[b"RANK"])] = int(folder.name)
            except OSError:         # it has just ended
                pass
        return found

    def send(self, rank: int, number: int) -> int:
        """A signal to a rank, which must be there; returns its pid."""
        pid = self.ranks()[rank]
        os.kill(pid, number)
        return pid

    def metrics(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []

    def steps(self) -> int:
        return max((line["step"] for line in self.metrics()), default=0)

    def wait_for(self, condition, seconds=PATIENCE):
        """Until the condition holds, while the job is alive."""
        wait_until(lambda: condition() or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.output()

    def saving(self) -> bool:
        """A checkpoint is being written, or was when its rank died."""
        return any((self.run_dir / "checkpoints").glob(".step-*.unfinished"))

    def end(self, seconds=PATIENCE) -> int:
        """Wait for torchrun; its exit code."""
        return self.process.wait(seconds)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self):
        for pid in [*self.ranks().values(), *([self.process.pid] if self.process.poll() is None else [])]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def numbers(run_dir: Path) -> list:
    """What metrics.jsonl says of the training, without the times; at full precision."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("step_ms", "tokens_per_second", "mfu")} for line in lines]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, whole."""
    out = run_dir / "exported.pt"
    out.unlink(missing_ok=True)
    export(checkpoints_of(run_dir)[0], out)
    return torch.load(out, weights_only=True)


def differences(run_dir: Path, other: Path) -> list[str]:
    """What is not bit for bit the same in two runs; empty if nothing is."""
    ours, theirs = weights(run_dir), weights(other)
    found = [] if ours.keys() == theirs.keys() else ["names of the weights"]
    found += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    found += [] if numbers(run_dir) == numbers(other) else ["metrics.jsonl"]
    return found + ([] if checkpoints_of(run_dir)[0].name == checkpoints_of(other)[0].name else ["last step"])


def strike(job: Job, draw: random.Random, in_save: bool, last_moment: float) -> tuple[str, int]:
    """Send one signal; returns what was done and whether it hit a save: 1 or 0."""
    rank = draw.randrange(2)
    number = signal.SIGTERM if draw.random() < 0.2 else signal.SIGKILL
    if in_save:
        wait_for_save(job, draw.randrange(1, 5))
        time.sleep(draw.random() * 0.01)
    else:
        wait_until(lambda: len(job.ranks()) == 2 or job.process.poll() is not None)
        time.sleep(draw.random() * last_moment)
    try:
        saving, step = job.saving(), job.steps()
        job.send(rank, number)
    except (KeyError, ProcessLookupError, ValueError):
        return "came too late", 0
    hit = saving and (number == signal.SIGTERM or (job.end(), job.saving())[1])
    return f"{signal.Signals(number).name} to rank {rank} after step {step}{', in a save' if hit else ''}", int(hit)


def wait_for_save(job: Job, count: int):
    """Until the count-th unfinished checkpoint of this launch is seen, or the job is over."""
    for _ in range(count):
        wait_until(lambda: not job.saving() or job.process.poll() is not None, pause=0.001)
        wait_until(lambda: job.saving() or job.process.poll() is not None, pause=0.001)


def a_round(folder: Path, corpus: Path, flags, draw: random.Random, left: int) -> tuple[list[str], int, int, Path]:
    """Kill and start again until the training is through -> (what was done, kills, kills in a save, the run's folder)."""
    told, kills, inside = [], 0, 0
    for _ in range(min(draw.randint(1, 3), left)):
        job = Job(folder, corpus, "run", *flags)
        try:
            text, hit = strike(job, draw, draw.random() < 2 / 3, last_moment=8.0)
            job.end()
            told, kills, inside = told + [text], kills + (text != "came too late"), inside + hit
        finally:
            job.close()
    job = Job(folder, corpus, "run", *flags)
    try:
        assert job.end() == 0, job.output()
    finally:
        job.close()
    return told, kills, inside, job.run_dir


def main():
    parser = argparse.ArgumentParser(description="Kill a small training at random moments, start it again, compare the weights at its end.")
    parser.add_argument("--kills", type=int, default=50, help="signals to send in all (default 50)")
    parser.add_argument("--minutes", type=float, default=20.0, help="no new round is begun after so many (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments and ranks (default 0)")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    arguments = parser.parse_args()
    draw, end = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    flags = ["--tp", 1 + arguments.seed % 2, "--train-iters", 40, "--save-interval", 3, *(["--bf16"] if arguments.bf16 else [])]
    rounds = same = kills = inside = 0
    with tempfile.TemporaryDirectory() as name:
        corpus = make_corpus(Path(name))
        alone = Job(Path(name), corpus, "alone", *flags)
        assert alone.end() == 0, alone.output()
        while kills < arguments.kills and time.monotonic() < end:
            rounds += 1
            folder = Path(name) / f"round-{rounds}"
            folder.mkdir()
            told, new, hits, run_dir = a_round(folder, corpus, flags, draw, arguments.kills - kills)
            found = differences(run_dir, alone.run_dir)
            same, kills, inside = same + (not found), kills + new, inside + hits
            print(f"round {rounds:3d} | {'; '.join(told)} | {'same weights and metrics' if not found else 'DIFFERS: ' + ', '.join(found)}", flush=True)
    print(f"{same} of {rounds} rounds ended with the same weights; {kills} kills, {inside} inside a save")
    sys.exit(0 if same == rounds else 1)


if __name__ == "__main__":
    main()
