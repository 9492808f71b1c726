"""Draws the loss curve of one run, or of several runs in one picture: python -m nanodomino.pictures RUN [RUN ...]"""

import argparse
from pathlib import Path

from nanodomino.errors import run_command
from nanodomino.files import write_file
from nanodomino.pictures.drawing import loss_curve, svg


def main():
    parser = argparse.ArgumentParser("python -m nanodomino.pictures", description=__doc__.partition(":")[0] + ".")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, such as runs/nano-001")
    parser.add_argument("--output", type=Path, metavar="PICTURE.svg",
                        help="the file (default: loss.svg in the run's folder or, for several runs, in this folder)")
    flags = parser.parse_args()
    output = flags.output or (Path() if flags.runs[1:] else flags.runs[0]) / "loss.svg"
    write_file(output, svg(loss_curve, flags.runs).encode())
    print(f"drawn in {output}")


if __name__ == "__main__":
    run_command(main)
