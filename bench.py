"""Answers a question about speed, memory or traffic with one command: python bench.py QUESTION [flags].

    overlap      How much of tensor parallelism's communication does Domino hide?
    throughput   Is the model as fast as the same model in plain torch.nn?
    pipeline     Are stages idle for as long as the schedule predicts, and are the schedules as fast as torch's?
    zero         Is ZeRO as fast as torch's sharded optimizers, and does it need as little memory?
    checkpoint   How long does training wait for a checkpoint, and how long does resuming take?
    memory       Does a rank need the memory, and launch the collectives, that the dry run says?
    recompute    How much time does recomputation cost, and how much memory does it save?
    timeline     What does every rank do during a step? (draws the pictures in docs/)
    calls        Which functions run a slice through one layer, and what does the other slice do meanwhile?
    gpu          Does everything work on this machine's GPUs? Checks all, and writes a report to send.
    plan         Would a model fit on given GPUs, how fast would it train, and which layout is fastest? (an estimate)

Each question prints a short table, then one JSON object as the last line. A question that compares alternatives times
all of them in every round. It prints the median of the rounds with the smallest and the largest. Compare ratios rather
than seconds, because machines differ. If noise makes a ratio meaningless, the table says "too noisy to tell" and the
JSON has null.

A question that needs several processes starts them itself, each on its own cores (or GPU). `python bench.py QUESTION
--help` explains the question's figures and lists its flags. The code of each question is a file in benchmarks/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))       # `python -I` and PYTHONSAFEPATH leave it out

from nanodomino.errors import run_command

QUESTIONS = ("overlap", "throughput", "pipeline", "zero", "checkpoint", "memory", "recompute",
             "timeline", "calls", "gpu", "plan")


def main(arguments: list[str]) -> int:
    """Answer the question that the command line asks, and return the exit code."""
    # This import takes seconds. Here, inside run_command, Ctrl-C during the import ends without a traceback.
    from benchmarks import runner
    return runner.main(QUESTIONS, __doc__, arguments)


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
