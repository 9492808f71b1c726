"""Ask bench.py a question, as a person would."""

import json
import subprocess
import sys

from support import ROOT


def ask(*arguments) -> dict:
    """The last line of what bench.py prints."""
    done = subprocess.run([sys.executable, "bench.py", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def within(value, spread) -> bool:
    """A figure and its [least, most]; None is too noisy to tell."""
    return spread[0] <= spread[1] and (value is None or spread[0] <= value <= spread[1])
