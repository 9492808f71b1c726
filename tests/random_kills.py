"""A training that is killed again and again ends with the same weights as one that is left alone.

    python tests/random_kills.py --kills 50 --minutes 20

prints a line a round, then the count; exit code 1 if a round differed.

A round is one small training in a folder of its own. torchrun is started; a rank, any, gets kill -9 (or SIGTERM, one
time in five) at a random moment or, two times in three, as soon as the hidden folder of an unfinished checkpoint is
seen; after one to three kills it is let go to its end. Only processes of our own torchrun are ever sent a signal.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.jobs import Job, differences, make_corpus, wait_until


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
    """Kill and start again until the training is through -> (what was done, kills, kills in a save, the run's
    folder)."""
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
    parser = argparse.ArgumentParser(description="Kill a small training at random moments, start it again, compare the "
                                                 "weights at its end.")
    parser.add_argument("--kills", type=int, default=50, help="signals to send in all (default 50)")
    parser.add_argument("--minutes", type=float, default=20.0, help="no new round is begun after so many (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments and ranks (default 0)")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    arguments = parser.parse_args()
    draw, end = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    flags = ["--tp", 1 + arguments.seed % 2, "--train-iters", 40, "--save-interval", 3,
             *(["--bf16"] if arguments.bf16 else [])]
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
            print(f"round {rounds:3d} | {'; '.join(told)} | "
                  f"{'same weights and metrics' if not found else 'DIFFERS: ' + ', '.join(found)}", flush=True)
    print(f"{same} of {rounds} rounds ended with the same weights; {kills} kills, {inside} inside a save")
    sys.exit(0 if same == rounds else 1)


if __name__ == "__main__":
    main()
