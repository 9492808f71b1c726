"""Check that a training which is killed at random moments ends with the same weights as an undisturbed one.

    python tests/random_kills.py --kills 50 --minutes 20

Each round trains a small model on two ranks in a folder of its own. A random rank gets SIGKILL (one time in five
SIGTERM), two times in three while a checkpoint is being written and otherwise at a random moment. After one to three
kills the run is resumed and may finish. Prints a line for each round and a summary; the exit code is 1 if any round
differed. Only the script's own ranks get a signal.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.fork_server import ForkServer
from support.runs import Job, differences, make_corpus, wait_until


def strike(job: Job, draw: random.Random, in_save: bool, last_moment: float) -> tuple[str, int]:
    """Send a signal to a random rank. Return what was done, and 1 if a checkpoint was being written, else 0."""
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
    """Wait until this launch starts its count-th checkpoint, or ends."""
    for _ in range(count):
        wait_until(lambda: not job.saving() or job.process.poll() is not None, pause=0.001)
        wait_until(lambda: job.saving() or job.process.poll() is not None, pause=0.001)


def run_round(start, folder: Path, draw: random.Random, left: int) -> tuple[list[str], int, int, Path]:
    """Kill and resume a training until it finishes. start(folder, run_dir) starts or resumes it. Returns (what was
    done, number of kills, number of kills during a save, the run's folder)."""
    events, kills, in_saves = [], 0, 0
    for _ in range(min(draw.randint(1, 3), left)):
        job = start(folder, "run")
        try:
            text, hit = strike(job, draw, draw.random() < 2 / 3, last_moment=8.0)
            job.end()
            events, kills, in_saves = events + [text], kills + (text != "came too late"), in_saves + hit
        finally:
            job.close()
    job = start(folder, "run")
    try:
        assert job.end() == 0, job.output()
    finally:
        job.close()
    return events, kills, in_saves, job.run_dir


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="number of signals to send (default 50)")
    parser.add_argument("--minutes", type=float, default=20.0, help="start no new round after this time (default 20)")
    parser.add_argument("--device", default="cpu", help="cuda: each rank trains on a GPU of its own (default cpu)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments and ranks (default 0)")
    arguments = parser.parse_args()
    draw, end = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    flags = ["--tp", 1 + arguments.seed % 2, "--train-iters", 40, "--save-interval", 3, "--no-compile",
             "--deterministic-mode", "--device", arguments.device]
    rounds = same = kills = in_saves = 0
    with tempfile.TemporaryDirectory() as name:
        corpus, server = make_corpus(Path(name)), ForkServer(arguments.device)
        start = lambda folder, run_dir: Job(folder, corpus, run_dir, *flags, fork_server=server)  # noqa: E731
        alone = start(Path(name), "alone")
        assert alone.end() == 0, alone.output()
        while kills < arguments.kills and time.monotonic() < end:
            rounds += 1
            folder = Path(name) / f"round-{rounds}"
            folder.mkdir()
            events, new, hits, run_dir = run_round(start, folder, draw, arguments.kills - kills)
            found = differences(run_dir, alone.run_dir)
            same, kills, in_saves = same + (not found), kills + new, in_saves + hits
            print(f"round {rounds:3d} | {'; '.join(events)} | "
                  f"{'same weights and metrics' if not found else 'DIFFERS: ' + ', '.join(found)}", flush=True)
        server.close()
    print(f"{same} of {rounds} rounds ended with the same weights; {kills} kills, {in_saves} during a save")
    sys.exit(0 if same == rounds else 1)


if __name__ == "__main__":
    main()
