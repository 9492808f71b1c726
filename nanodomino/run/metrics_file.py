"""Keeps metrics.jsonl: one JSON object a line.

    a resumed run                 removes the lines of steps that it will redo, and lines that can't be read
    a run that starts over        the old file becomes metrics-NNN.jsonl
    a full disk                   the lines wait in memory and are written later
"""

import itertools
import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from nanodomino.files import open_regular_file, write_file

LONGEST = 1 << 24        # bytes of a line; a longer one is cut into pieces, none of which can be read


class MetricsFile:
    """Appends lines to metrics.jsonl. say(line): prints a warning."""

    def __init__(self, path: Path, say):
        self.say, self.unwritten, self.warned = say, b"", False
        self.file = open_regular_file(path, "ab", 0)
        self.empty = not os.fstat(self.file.fileno()).st_size

    def add(self, values: dict):
        """Append a line, or keep it for the next call if that fails."""
        self.unwritten += json.dumps(values).encode() + b"\n"
        try:
            while self.unwritten:                              # write() can store a part and return its size
                self.unwritten = self.unwritten[self.file.write(self.unwritten):]
            self.warned = False
        except OSError as error:
            if not self.warned:
                self.say(f"warning: metrics.jsonl can't be written: {error}; training continues")
            self.warned = True


def remove_outdated(path: Path, first_step: int, train_iters: int, say=print, add=lambda values: None):
    """Leave only the lines in metrics.jsonl that a run with `first_step` steps done continues, and call add(values) for
    each. The file is read line by line, at most LONGEST bytes at a time, because it may be of any size.

    A killed run may have written lines of steps after its last checkpoint, and half a line at the end. The test loss of
    a finished run is outdated if the run is continued, and its last validation loss if it is only evaluated again.
    """
    with open_regular_file(path, "a+b") as file:               # makes the file if there is none
        file.seek(0)
        lines = iter(partial(file.readline, LONGEST), b"")
        if not first_step and next(lines, b"") and next(lines, b""):       # the run was killed before its first step
            copy = next(name for number in itertools.count(1)
                        if not os.path.lexists(name := path.with_name(f"metrics-{number:03d}.jsonl")))
            path.rename(copy)
            say(f"this run starts over from step 0; the metrics of its previous start are in {copy}")

        def current_lines():
            for line in lines if first_step else ():
                values = current_values(line, first_step)
                if values and not ("valid_loss" in values and values["step"] == first_step >= train_iters):
                    add(values)
                    yield line
        write_file(path, current_lines())


def current_values(line: bytes, first_step: int) -> dict | None:
    """Return the values of a complete line of a step up to first_step; None for other lines and for the test loss."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        values = json.loads(line, parse_int=float)             # an int of 400 digits would not become a float later
        return values if line.endswith(b"\n") and values["step"] <= first_step and "test_loss" not in values else None
