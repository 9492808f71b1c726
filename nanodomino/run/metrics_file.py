"""Keeps metrics.jsonl: one JSON object a line. No line of a run's history is lost.

    a resumed run                 removes the lines of steps that it will redo
    lines that can't be read      the whole file is copied to metrics-NNN.jsonl, and the other lines stay
    a run that starts over        the old file becomes metrics-NNN.jsonl
    a full disk                   the lines wait in memory and are written later
    deleted or replaced           written again: the open file still has its lines
"""

import itertools
import json
import os
from pathlib import Path

from nanodomino.files import open_regular_file, write_file


class MetricsFile:
    """Appends lines to metrics.jsonl. say(line): prints a warning."""

    def __init__(self, path: Path, say):
        self.path, self.say, self.unwritten, self.warned = path, say, b"", False
        self.file = open_regular_file(path, "a+b", 0)
        self.empty = not os.fstat(self.file.fileno()).st_size

    def add(self, values: dict):
        """Append a line, or keep it for the next call if that fails."""
        self.unwritten += json.dumps(values).encode() + b"\n"
        self.write()

    def write(self):
        """Append the lines that are not yet written."""
        try:
            if not (os.path.exists(self.path) and os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))):
                self.write_again()
            while self.unwritten:                              # write() can store a part and return its size
                self.unwritten = self.unwritten[self.file.write(self.unwritten):]
            self.warned = False
        except OSError as error:
            if not self.warned:
                self.say(f"warning: metrics.jsonl can't be written: {error}; training continues")
            self.warned = True

    def write_again(self):
        """Write all lines of the file, which was deleted or replaced, to a new one."""
        self.file.seek(0)
        write_file(self.path, self.file.read())
        self.file = open_regular_file(self.path, "a+b", 0)
        self.say(f"warning: {self.path} was deleted or replaced; it is written again, with all its lines")


def unused_name(path: Path) -> Path:
    """Return the first of metrics-001.jsonl, metrics-002.jsonl ... that does not exist."""
    return next(name for number in itertools.count(1)
                if not os.path.lexists(name := path.with_name(f"metrics-{number:03d}.jsonl")))


def remove_outdated(path: Path, first_step: int, say=print):
    """Leave only the lines in metrics.jsonl that a run with `first_step` steps done continues.

    A killed run may have written lines of steps after its last checkpoint, and half a line at the end. The test loss of
    a finished run is outdated if the run is continued. If anything else is removed, metrics-NNN.jsonl gets a copy.
    """
    with open_regular_file(path, "a+b") as file:               # makes the file if there is none
        file.seek(0)
        lines = file.readlines()
    kinds = [kind_of(line, first_step) for line in lines]
    kept = [line for line, kind in zip(lines, kinds) if kind == "valid"]
    unread = first_step and lines and ("damaged" in kinds or not kept)
    if unread or not first_step and len(lines) > 1:            # the run was killed before its first step
        copy = unused_name(path)
        write_file(copy, b"".join(lines))
        say(f"warning: {path} has lines that can't be read, which are removed; all its lines are in {copy}" if unread
            else f"this run starts over from step 0; the metrics of its previous start are in {copy}")
    if kept != lines:
        write_file(path, b"".join(kept))


def kind_of(line: bytes, first_step: int) -> str:
    """Return "valid", "outdated" or "damaged" for a line of metrics.jsonl. Half a line is outdated."""
    try:
        values = json.loads(line)
        outdated = not first_step or values["step"] > first_step or "test_loss" in values
        return "outdated" if outdated or not line.endswith(b"\n") else "valid"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "damaged" if line.endswith(b"\n") else "outdated"
