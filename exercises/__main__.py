"""The command line: `python -m exercises --help` lists the commands."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from nanodomino.errors import import_optional, run_command

from . import workbook
from .grade import grade
from .predict import TASKS, predict
from .workbook import FOLDER, shown


def row_of(number):
    """Return an exercise's row of the table in README.md: [title, minutes, paper, what to read afterwards]."""
    row = re.search(rf"^\| {number} \| (.*) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    return row[1].split(" | ")


def read_work(number):
    """Return the text of the work file that has exercise `number`, or None if there is no file."""
    work = workbook.work_of(number)
    if not work.exists():
        return None
    try:
        return workbook.read(work)
    except workbook.Wrong as wrong:
        sys.exit(f"{wrong}: correct it, or move the file away and start again.")


def start(number):
    """Replace exercise `number` with a blank. The file's other exercises stay as they are."""
    source, work = workbook.source_of(number), workbook.work_of(number)
    text = read_work(number) or source.read_text()
    state = workbook.state_of(text, number)
    if state == "missing":
        sys.exit(f"{shown(work)} must contain {' and '.join(workbook.names_in(number))} at its top level: restore it, "
                 "or move the file away and start again.")
    if state == "answered":
        copy = next(path for path in (work.with_suffix(f".{i}.py") for i in range(1, 10**6)) if not path.exists())
        copy.write_text(text, "utf-8")
        print(f"Your answer is now in {shown(copy)}. To go back, copy it over {shown(work)}.")
    if state != "blank":
        text = workbook.replace_answer(text, number, workbook.blanks(number))
        work.parent.mkdir(exist_ok=True)
        work.write_text(text, "utf-8")
    line, _ = workbook.parts(text)[workbook.names_in(number)[0]]
    print(f"Exercise {number}: fill the blank in {shown(work)}, line {line + 1}. "
          f"Then run: python -m exercises check {number}")


def hint(number):
    """Print the next hint. The file hints.json beside the work file counts them."""
    seen_file, hints = workbook.WORK / "hints.json", workbook.check_of(number).HINTS
    seen = json.loads(seen_file.read_text()) if seen_file.exists() else {}
    count = seen[str(number)] = seen.get(str(number), 0) % len(hints) + 1
    seen_file.parent.mkdir(exist_ok=True)
    seen_file.write_text(json.dumps(seen))
    last = f"\nThis was the last hint. The reference: {shown(workbook.source_of(number))}" * (count == len(hints))
    print(f"Hint {count} of {len(hints)}: {hints[count - 1]}{last}")


def check(number):
    """Say what is wrong with the answer."""
    text = read_work(number)
    if text is None or workbook.state_of(text, number) == "given":
        sys.exit(f"Exercise {number} has not been started. Run: python -m exercises start {number}")
    if wrong := workbook.check(number, text, workbook.work_of(number)):
        sys.exit(f"Exercise {number}: {wrong}")
    print(f"Exercise {number} is solved. Now read: {row_of(number)[-1]}")


def status():
    """List all exercises."""
    for number in workbook.CHECKS:
        text = read_work(number)
        state = "given" if text is None else workbook.state_of(text, number)
        if state == "answered":
            state = "your answer does not pass" if workbook.check(number, text, workbook.work_of(number)) else "solved"
        title, minutes = row_of(number)[:2]
        print(f"{number:2}  {title:<62} {minutes:>3} min   {state.replace('given', '')}".rstrip())


def play():
    """Open the playground in a browser."""
    import_optional("marimo", "the playground")
    sys.exit(subprocess.call([sys.executable, "-m", "marimo", "run", FOLDER / "playground.py"]))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m exercises", description="Sixteen blanks.")
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (start, hint, check, status, play, predict, grade):
        command = commands.add_parser(function.__name__, help=function.__doc__.split("\n")[0])
        if function is grade:
            command.add_argument("folder", type=Path, help="holds, under each student's name, a copy of exercises/work")
        elif function is predict:
            command.add_argument("name", choices=TASKS)
            command.add_argument("number", type=float, nargs="?", help="without it: print the question")
        elif function not in (status, play):
            command.add_argument("number", type=int, choices=workbook.CHECKS, metavar="N", help="1 to 16")
    flags = vars(parser.parse_args(arguments))
    globals()[flags.pop("command")](**flags)


if __name__ == "__main__":
    run_command(main)
