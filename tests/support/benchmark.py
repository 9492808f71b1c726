"""Run bench.py as a user would, or in this process, and read what it prints."""

import json
import os
import subprocess
import sys

import torch
from support import ROOT

from bench import QUESTIONS
from benchmarks.runner import main


def ask(*arguments) -> dict:
    """Run `python bench.py ARGUMENTS` and return the JSON of its last line."""
    done = subprocess.run([sys.executable, "bench.py", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def here(capsys, *arguments) -> tuple[int, str, dict, str]:
    """Run bench.py in this process. Return (exit code, text before the last line, the last line's JSON, stderr)."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    code = main(QUESTIONS, "", [*map(str, arguments)])
    torch.set_num_threads(threads)
    if cores:
        os.sched_setaffinity(0, cores)
    printed, error = capsys.readouterr()
    *text, last = printed.splitlines() or [""]
    return code, "\n".join(text), json.loads(last or "{}"), error


def within(value, spread) -> bool:
    """Whether a figure lies in its own spread [least, most]. The figure is None where the spread is too wide."""
    return spread[0] <= spread[1] and (value is None or spread[0] <= value <= spread[1])
