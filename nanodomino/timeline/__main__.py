import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from nanodomino.config.terminal import run_command
from nanodomino.errors import UserError, require
from nanodomino.plot.svg import write_output
from nanodomino.timeline.draw import one_step, part, picture
from nanodomino.timeline.recording import Recording, from_chrome_trace


def read(path: Path) -> Recording:
    """What draw_timeline wrote. Raises UserError."""
    fix = "give a trace-STEP.json of train.py --trace"
    try:
        return from_chrome_trace(json.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); {fix}") from None
    except (ValueError, RecursionError, UserError) as error:
        raise UserError(f"{path} is no recording ({error}); {fix}") from None


def first_and_last(milliseconds: str) -> tuple[float, float]:
    """"FIRST:LAST" -> two numbers. Raises UserError."""
    try:
        first, last = map(float, milliseconds.split(":"))
    except ValueError:
        first, last = 0.0, 0.0
    require(0 <= first < last and last * 1e6 < float("inf"),
            f"--milliseconds must be FIRST:LAST, FIRST below LAST, but is {milliseconds}; try 0:10")
    return first, last


def main(arguments: list[str]) -> int:
    """python -m nanodomino.timeline A.json [B.json ...] --output PICTURE.svg"""
    parser = argparse.ArgumentParser("python -m nanodomino.timeline", allow_abbrev=False,
                                     description="Draw recordings of train.py --trace above each other.")
    parser.add_argument("recordings", nargs="+", type=Path, help="trace-STEP.json of a run's folder")
    parser.add_argument("--output", type=Path, required=True, help="the SVG to write")
    parser.add_argument("--caption", nargs="+", help="what to write above each (default: its layout)")
    parser.add_argument("--step", type=int, help="draw this step alone")
    parser.add_argument("--milliseconds", metavar="FIRST:LAST", help="draw this part alone")
    flags = parser.parse_args(arguments)
    recordings = [read(path) for path in flags.recordings]
    if flags.step is not None:
        recordings = [one_step(recording, flags.step) for recording in recordings]
    if flags.milliseconds is not None:
        recordings = [part(recording, *first_and_last(flags.milliseconds)) for recording in recordings]
    captions = flags.caption or [recording.caption for recording in recordings]
    require(len(captions) == len(recordings), f"--caption needs a text for each of the {len(recordings)} "
            f"recordings, but has {len(captions)}; quote each")
    recordings = [replace(recording, caption=caption) for recording, caption in zip(recordings, captions)]
    write_output(flags.output, picture(recordings), flags.recordings)
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
