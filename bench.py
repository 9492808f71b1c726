"""Measures each claim with one command: python bench.py QUESTION [flags].

    overlap      How much of tensor parallelism's communication does Domino hide?
    throughput   Is the model as fast as the same model in plain torch.nn?
    host         How long do Python and torch's dispatcher take to launch a layer's work?
    pipeline     Is a stage idle as long as its schedule predicts, and is a schedule as fast as torch's?
    zero         Is ZeRO as fast and as small as torch's sharded optimizers?
    comm         Do the collectives and bytes of a real step match the formulas?
    checkpoint   What does a checkpoint cost, and how long does resuming take?
    memory       Does the memory of a rank match the formulas?
    recompute    What does recomputation cost, and what does it save?
    plan         Would this model fit on those GPUs, and how fast would it be? (trains nothing)
    scaling      What do 2, 4, 8 processes gain over one?

Each question prints a short table and, as its last line, one JSON object. Alternatives are timed in turn within one
run, for several rounds. Figures are medians with their spread; claims are ratios, since machines differ. A question
that needs several processes starts them itself, each on its own cores (or GPU). If noise makes a figure meaningless,
"too noisy to tell" is printed, and the JSON has null.

`python bench.py QUESTION --help` explains a question's figures and lists its flags. Each question is a file of
benchmarks/.
"""

import sys

from nanodomino.config.command_exit import run_command

QUESTIONS = ("overlap", "throughput", "host", "pipeline", "zero", "comm", "checkpoint", "memory", "recompute", "plan",
             "scaling")


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    from benchmarks import common              # takes seconds; here, Ctrl-C meanwhile ends without a traceback
    return common.main(QUESTIONS, __doc__, arguments)


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
