"""Every claim a number from one command: python bench.py QUESTION [flags].

    overlap      how much of tensor parallelism's communication does Domino hide?
    throughput   is the model as fast as the same model in plain torch.nn?
    host         how long does the host take before a layer's work is on its way?
    pipeline     is a stage idle for as long as its schedule says, and a schedule as fast as torch's?
    zero         is ZeRO as fast and as small as torch's sharded optimizers?
    comm         do collectives and bytes of a real step match the formulas?
    checkpoint   what does a save cost, and how long does going on take?
    memory       does the memory of a rank match the formulas?
    recompute    what does it cost to compute activations again, and what does it save?
    plan         would this model fit on those GPUs, and how fast would it be? (trains nothing)
    scaling      what do 2, 4, 8 processes gain over one?

Each prints a short table and, as its last line, one JSON object. Whatever is compared is compared within one run, in
turn, several times: the figures are medians with their spread, the claims are ratios, since machines differ. A question
that needs several processes starts them by itself, each on cores (or a GPU) of its own; a line on the terminal says how
far they are. A figure that noise has made impossible is not printed: "too noisy to tell", null in the JSON.

`python bench.py QUESTION --help` explains a question's figures and lists its flags. The answers are in benchmarks/, a
file each.
"""

import sys

from nanodomino.config.terminal import run_command

QUESTIONS = ("overlap", "throughput", "host", "pipeline", "zero", "comm", "checkpoint", "memory", "recompute", "plan",
             "scaling")


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    from benchmarks import common              # takes seconds, in which Ctrl-C is no error either
    return common.main(QUESTIONS, __doc__, arguments)


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
