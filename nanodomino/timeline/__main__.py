"""Draws recordings of train.py --trace: python -m nanodomino.timeline A.json [B.json ...] --output PICTURE.svg"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from nanodomino.config.command_exit import run_command
from nanodomino.errors import UserError, require
from nanodomino.plot.svg import write_output
from nanodomino.timeline.draw import picture, select_step, select_time
from nanodomino.timeline.merged_trace import Recording, from_chrome_trace


def read(path: Path) -> Recording:
    """Read a file of draw_timeline(). Raises UserError."""
    fix = "give a trace-STEP.json of train.py --trace"
    try:
        return from_chrome_trace(json.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); {fix}") from None
    except (ValueError, RecursionError, UserError) as error:
        raise UserError(f"{path} is not a recording ({error}); {fix}") from None


def first_and_last(milliseconds: str) -> tuple[float, float]:
    """Convert "FIRST:LAST" to two numbers. Raises UserError."""
    try:
        first, last = map(float, milliseconds.split(":"))
    except ValueError:
        first, last = 0.0, 0.0
    require(0 <= first < last and last * 1e6 < float("inf"),
            f"--milliseconds must be FIRST:LAST, FIRST below LAST, but is {milliseconds}; try 0:10")
    return first, last


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m nanodomino.timeline", allow_abbrev=False,
                                     description="Draw recordings of train.py --trace above each other.")
    parser.add_argument("recordings", nargs="+", type=Path, help="trace-STEP.json of a run's folder")
    parser.add_argument("--output", type=Path, required=True, help="the SVG to write")
    parser.add_argument("--caption", nargs="+", help="titles of the recordings (default: their layouts)")
    parser.add_argument("--step", type=int, help="draw only this step")
    parser.add_argument("--milliseconds", metavar="FIRST:LAST", help="draw only this time, counted from the start")
    flags = parser.parse_args(arguments)
    recordings = [read(path) for path in flags.recordings]
    if flags.step is not None:
        recordings = [select_step(recording, flags.step) for recording in recordings]
    if flags.milliseconds is not None:
        recordings = [select_time(recording, *first_and_last(flags.milliseconds)) for recording in recordings]
    captions = flags.caption or [recording.caption for recording in recordings]
    require(len(captions) == len(recordings), f"--caption needs one title for each of the "
            f"{len(recordings)} recordings, but has {len(captions)}; put each title in quotes")
    recordings = [replace(recording, caption=caption) for recording, caption in zip(recordings, captions)]
    write_output(flags.output, picture(recordings), flags.recordings)
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
