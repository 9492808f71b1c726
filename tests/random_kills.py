"""Check that a training which is killed at random moments ends with the same weights as an undisturbed one.

    python tests/random_kills.py --kills 50 --minutes 20

Each round trains a small model on two ranks in a folder of its own. A random rank gets SIGKILL (one time in five
SIGTERM) after a random step, two times in three while a checkpoint is being written. After one to three kills the run
is resumed and may finish. Prints a line for each round and a summary; the exit code is 1 if any round differed. Only
the script's own ranks get a signal.
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

STEPS, SAVED = 40, "in a save"


def strike(job: Job, draw: random.Random) -> str:
    """Send a signal to a random rank at a random moment. Return what was done."""
    rank, number = draw.randrange(2), signal.SIGTERM if draw.random() < 0.2 else signal.SIGKILL
    step, in_save = draw.randrange(STEPS), draw.random() < 2 / 3
    wait_until(lambda: job.process.poll() is not None or len(job.ranks()) == 2 and job.steps() >= step and (
        job.saving() or not in_save), pause=0.001)
    time.sleep(draw.random() / 100)
    try:
        saving, step = job.saving(), job.steps()
        job.send(rank, number)
    except (KeyError, ProcessLookupError):
        return "came too late"
    return f"{number.name} to rank {rank} after step {step}" + f", {SAVED}" * saving


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="number of signals to send (default 50)")
    parser.add_argument("--minutes", type=float, default=20.0, help="start no new round after this time (default 20)")
    parser.add_argument("--device", default="cpu", help="cuda: each rank trains on a GPU of its own (default cpu)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments and ranks (default 0)")
    arguments = parser.parse_args()
    draw, end = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    flags = ["--tp", 1 + arguments.seed % 2, "--train-iters", STEPS, "--save-interval", 3, "--no-compile",
             "--deterministic-mode", "--device", arguments.device]
    events, found = [], []                          # what was done; for each round, what differed
    with tempfile.TemporaryDirectory() as name:
        corpus, server = make_corpus(Path(name)), ForkServer(arguments.device)

        def trained(run_dir, kills=0) -> Path:
            """Start a run, kill and resume it `kills` times, and let it end. Return its folder."""
            for last in [False] * kills + [True]:
                job = Job(Path(name), corpus, run_dir, *flags, fork_server=server)
                try:
                    events.extend([] if last else [strike(job, draw)])
                    assert job.end() == 0 or not last, job.output()
                finally:
                    job.close()
            return job.run_dir

        alone = trained("alone")
        while (before := len(events)) < arguments.kills and time.monotonic() < end:
            found.append(differences(trained(f"round-{len(found)}", draw.randint(1, 3)), alone))
            print(f"round {len(found):3d} | {'; '.join(events[before:])} | "
                  f"{'DIFFERS: ' * bool(found[-1])}{', '.join(found[-1]) or 'same weights and metrics'}", flush=True)
        server.close()
    print(f"{found.count([])} of {len(found)} rounds ended with the same weights; {len(events)} kills, "
          f"{sum(SAVED in event for event in events)} during a save")
    sys.exit(1 if any(found) else 0)


if __name__ == "__main__":
    main()
