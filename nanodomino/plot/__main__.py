"""Draws the loss curves of runs: python -m nanodomino.plot RUN [RUN ...] [--output PICTURE.svg]"""

import sys
from pathlib import Path

from nanodomino.config.flags import Parser
from nanodomino.errors import require, run_command
from nanodomino.plot.curves import COLOURS, picture, read
from nanodomino.plot.svg import write_output


def main(arguments: list[str]) -> int:
    parser = Parser("python -m nanodomino.plot", allow_abbrev=False,
                    description="Draw the loss curves of runs, finished or still training.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or its metrics.jsonl")
    parser.add_argument("--output", type=Path, metavar="PICTURE.svg",
                        help="the SVG file to write (default: loss.svg in the folder of a single run, compared.svg in "
                             "the current folder for several runs)")
    flags = parser.parse_args(arguments)
    require(len(flags.runs) <= len(COLOURS), f"there are colours for {len(COLOURS)} runs, but {len(flags.runs)} are "
            "given; give fewer")
    curves = list(map(read, flags.runs))
    output = flags.output or (curves[0].path.parent / "loss.svg" if len(curves) == 1 else Path("compared.svg"))
    write_output(output, picture(curves))
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
