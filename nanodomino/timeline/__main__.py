"""Draws recordings that train.py --trace has written, one above the other.

    python -m nanodomino.timeline A.json [B.json ...] --output PICTURE.svg
"""

import json
import sys
from pathlib import Path

from nanodomino.config.flags import Parser
from nanodomino.errors import UserError, run_command
from nanodomino.files import read_file
from nanodomino.plot.svg import write_output
from nanodomino.timeline.draw import picture
from nanodomino.timeline.merged_trace import Recording, from_chrome_trace


def read(path: Path) -> Recording:
    """Read a trace-STEP.json and put its folder's name into its title. Raises UserError if it can't be drawn."""
    try:
        recording = from_chrome_trace(json.loads(read_file(path)))
        recording.caption = f"{path.resolve().parent.name}: {recording.caption}"
        picture([recording])
        return recording
    except Exception as error:                                 # the file may be any JSON
        raise UserError(f"{path} can't be read as a recording ({getattr(error, 'strerror', None) or repr(error)}); "
                        "give a trace-STEP.json that train.py --trace has written") from None


def main(arguments: list[str]) -> int:
    parser = Parser("python -m nanodomino.timeline", allow_abbrev=False,
                    description="Draw recordings of train.py --trace, one above the other.")
    parser.add_argument("recordings", nargs="+", type=Path, help="a trace-STEP.json from a run's folder")
    parser.add_argument("--output", type=Path, required=True, help="the SVG file to write")
    flags = parser.parse_args(arguments)
    write_output(flags.output, picture(list(map(read, flags.recordings))))
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
