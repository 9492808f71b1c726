"""Predict, then measure: a student's number against one that bench.py measures on the real system."""

import json
import subprocess
import sys

from .workbook import MINIMAL

# name -> (question, arguments of bench.py, what reads the number from its record, tolerance, reason)
TASKS = {
    "bytes": (
        "How many bytes does each of two tensor-parallel ranks all-reduce in a step? The model has 4 layers of hidden "
        "size 64; 8 microbatches of 2 samples of 32 tokens; fp32; no pipeline, no replicas.",
        "memory --tp 2 --pp 1 --hidden-size 64 --seq-length 32 --micro-batch-size 2",
        lambda record: next(row["bytes"] for row in record["collectives"] if row["group"] == "tp"), 0.01,
        "For each microbatch 18 all-reduces of [b, s, h], 16384 bytes: one for the embedding, two for each layer "
        "forward and two backward, one for the head's gradient. Cross entropy adds three numbers per token."),
    "bubble": (
        "Which share of a 1F1B step is a stage idle, on average? 2 equal stages, 4 microbatches. (From 0 to 1.)",
        "pipeline --pp 2 --microbatches 4 --repeats 3",
        lambda record: next(row["idle"] for row in record["rows"] if row["schedule"] == "1f1b"), 0.15,
        "(p - 1) / (m + p - 1) = 1/5 of the step. The papers' (p - 1) / m divides by the ideal step instead."),
    "exposed": (
        "Megatron's tensor parallelism, one slice: the all-reduces take exactly as long as all computation. How many "
        "times the perfect step, in which either hides the other entirely, does a step take?",
        "overlap --ideal-wire --repeats 3", lambda record: record["bound_ratio"]["one slice"]["1.0"], 0.1,
        "Half of the bytes are forward's, and nothing hides them: 0.5. In backward, only weight gradients, a third of "
        "the work, hide the other half: about 0.17 stays exposed. So 1 + 0.5 + 0.17."),
    "memory": (
        "How many bytes of weights, gradients and moments does each of two ZeRO-1 replicas hold? fp32 with AdamW; 4 "
        "layers of hidden size 128; 64 positions; a tied embedding of 250 words, rounded up to 256.",
        "memory --tp 1 --pp 1 --dp 2 --zero-stage 1", lambda record: sum(
            record["measured"][0][part] for part in ("parameters", "gradients", "optimizer")), 0.02,
        "12 h^2 + 13 h parameters for each layer, (256 + 64) h for the embeddings, 2 h for the last norm: 834304. "
        "A replica holds 4 bytes of weight, 4 of gradient and 8/dp of moments for each."),
}


def predict(name, number):
    """Print a task's question or, given a number, measure and compare."""
    question, command, measured_in, tolerance, reason = TASKS[name]
    if number is None:
        return print(f"{question}\nThen measure: python -m exercises predict {name} NUMBER")
    if not number > 0:
        sys.exit(f"A prediction must be a positive number, but is {number:g}; correct it.")
    print(f"Measuring with: python bench.py {command}", flush=True)
    bench = subprocess.run([sys.executable, "bench.py", *command.split()], cwd=MINIMAL.parents[1], text=True,
                           capture_output=True)
    if bench.returncode:
        sys.exit(f"The measurement failed; run it yourself: python bench.py {command}\n{bench.stderr}")
    measured = measured_in(json.loads(bench.stdout.splitlines()[-1]))
    if measured is None:
        sys.exit("The measurement is too noisy to tell; try again while the machine does nothing else.")
    right = abs(number / measured - 1) <= tolerance
    print(f"You predicted {number:,.7g}; measured: {measured:,.7g}. You are {'' if right else 'not '}right: a "
          f"prediction may differ by {tolerance:.0%}.")
    print(reason if right else f"Think again, or read the reason: python -m exercises predict {name} {measured:.6g}")
