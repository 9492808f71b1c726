"""The command line: `python -m exercises start N | hint N | check N | show N | status | play`,
`predict NAME NUMBER` and `grade FOLDER`."""

import argparse
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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
    text, all_names = work.read_text(), workbook.exercises_of(workbook.source_of(number))
    try:
        missing = [other for other in all_names if workbook.state_of(text, other) == "missing"]
    except SyntaxError as error:
        sys.exit(f"Python cannot read {shown(work)}: {error.msg}, in line {error.lineno} or just above: "
                 "correct it, or move the file away and start again.")
    if missing:
        names = [name for other in missing for name in all_names[other]]
        sys.exit(f"{shown(work)} must contain {', '.join(names)} at its top level: restore it, or move the file away "
                 "and start again.")
    return text


def start(number):
    """Replace exercise `number` with a blank, and answers that do not pass with the reference."""
    old, source, work = read_work(number), workbook.source_of(number), workbook.work_of(number)
    text, lost = old or source.read_text(), []
    if old is not None and workbook.state_of(old, number) == "blank":
        return print(f"Exercise {number} is already blank in {shown(work)}, line {line_of(old, number)}.")
    for other in workbook.exercises_of(source):
        state = workbook.state_of(text, other)
        if state == "answered" and (other == number or workbook.check(other, text, work)):
            lost.append(other)
        if other == number:
            text = workbook.replace_answer(text, other, marked(workbook.blanks(other), other, yours=True))
        elif state == "blank" or other in lost:
            if state == "blank":
                print(f"Exercise {other} was still blank; the reference is back in its place.")
            text = workbook.replace_answer(text, other, marked(workbook.reference(other), other, yours=False))
    work.parent.mkdir(exist_ok=True)
    if lost:
        copy = next(path for path in (work.with_suffix(f".{i}.py") for i in range(1, 10**6)) if not path.exists())
        copy.write_text(old)
        print(f"Your earlier file is now {shown(copy)}, because start replaces {' and '.join(why(number, lost))}. "
              f"To go back, copy it over {shown(work)}.")
    work.write_text(text)
    print(f"Exercise {number}: fill the blank in {shown(work)}, line {line_of(text, number)}. "
          f"Then run: python -m exercises check {number}")


def why(number, lost):
    """Name the answers that start replaces."""
    others = [str(other) for other in lost if other != number]
    return [f"your answer to exercise {number} with a blank"] * (number in lost) + [
        f"your answer to exercise {', '.join(others)}, which does not pass, with the reference"] * bool(others)


def marked(sources, number, yours):
    return [workbook.marked(source, number, yours) for source in sources]


def line_of(text, number):
    return workbook.parts(text)[workbook.names_in(number)[0]][0] + 1


def hint(number):
    """Print the next hint. The file hints.json beside the work file counts them."""
    seen_file, hints = workbook.WORK / "hints.json", workbook.check_of(number).HINTS
    seen = json.loads(seen_file.read_text()) if seen_file.exists() else {}
    count = seen[str(number)] = seen.get(str(number), 0) % len(hints) + 1
    seen_file.parent.mkdir(exist_ok=True)
    seen_file.write_text(json.dumps(seen))
    last = f"\nThis was the last hint. The reference: python -m exercises show {number}" * (count == len(hints))
    print(f"Hint {count} of {len(hints)}: {hints[count - 1]}{last}")


def check(number):
    text = read_work(number)
    if text is None or workbook.state_of(text, number) == "given":
        sys.exit(f"Exercise {number} has not been started. Run: python -m exercises start {number}")
    if wrong := workbook.check(number, text, workbook.work_of(number)):
        sys.exit(f"Exercise {number}: {wrong}")
    print(f"Exercise {number} is solved. Now read: {row_of(number)[-1]}")


def show(number):
    """Print the reference."""
    source = workbook.source_of(number)
    print(f"# {shown(source)}, line {line_of(source.read_text(), number)}\n")
    print("\n\n".join(workbook.reference(number)))


def status():
    for number in workbook.CHECKS:
        text = read_work(number)
        state = "given" if text is None else workbook.state_of(text, number)
        if state == "answered":
            state = "your answer does not pass" if workbook.check(number, text, workbook.work_of(number)) else "solved"
        title, minutes = row_of(number)[:2]
        print(f"{number:2}  {title:<62} {minutes:>3} min   {state.replace('given', '')}".rstrip())


def play():
    """Start the playground."""
    if find_spec("marimo") is None:
        sys.exit("The playground needs marimo, which is not installed; run: pip install -r requirements-extra.txt")
    sys.exit(subprocess.call([sys.executable, "-m", "marimo", "run", FOLDER / "playground.py"]))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m exercises", description="Sixteen blanks.")
    commands = parser.add_subparsers(dest="command", required=True)
    for function, text in ((start, "write a work file with a blank"), (hint, "print the next hint"),
                           (check, "say what is wrong with the answer"), (show, "print the reference"),
                           (status, "list all exercises"), (play, "open the playground in a browser"),
                           (predict, "measure what you have predicted"), (grade, "check the files of many students")):
        command = commands.add_parser(function.__name__, help=text)
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
    main()
