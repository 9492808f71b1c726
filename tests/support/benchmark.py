"""Run bench.py as a user would, and check what it prints."""

import json
import subprocess
import sys

from support import ROOT


def ask(*arguments) -> dict:
    """Run `python bench.py ARGUMENTS` and return the JSON of its last line."""
    done = subprocess.run([sys.executable, "bench.py", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def within(value, spread) -> bool:
    """Whether a figure lies in its own spread [least, most]. The figure is None where the spread is too wide."""
    return spread[0] <= spread[1] and (value is None or spread[0] <= value <= spread[1])
