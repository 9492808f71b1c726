"""Grades many students' files: `python -m exercises grade FOLDER`.

FOLDER holds, under each student's name, a copy of exercises/work or a single Python file. Each answer runs in a process
of its own, which works in a temporary folder with a copy of the file. The table goes to the screen and to
FOLDER/grades.txt; the results also to FOLDER/grades.json.

What is enforced is only LIMIT, the seconds for each answer. The code can read and change what you can, take all memory,
leave a process behind, and forge its result, because it runs in the process that judges it. So grade in a container
what you do not trust, and read the code.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from . import workbook

FOLDER = Path(__file__).resolve().parent
LIMIT = 60.0                                                              # seconds, with the import of torch
SIGNS = {"solved": "+", "wrong": "x", "time limit": "t"}                  # all else: "."


def grade(folder: Path):
    """Print a line for each student, then the table of all, and write it into the folder."""
    files, results = {}, {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and path.name[0] not in "._":
            files[path.name] = [one for one in (path / "minimal.py", path / "beyond.py") if one.is_file()]
        elif path.suffix == ".py":
            files.setdefault(path.stem, []).append(path)
    if not any(files.values()):
        sys.exit(f"{folder} must hold, under each student's name, a copy of exercises/work; name another folder")
    for name, paths in files.items():
        found = results[name] = {number: record for path in paths for number, record in results_of(path).items()}
        print(f"{name}: {sum(record['result'] == 'solved' for record in found.values())} solved", flush=True)
    (folder / "grades.json").write_text(json.dumps(results, indent=1))
    (folder / "grades.txt").write_text(table(results))
    print(table(results), end="")


def table(results):
    """Return the table as text: a line for each student, then the sentences."""
    numbers, width = sorted({number for found in results.values() for number in found}), max(map(len, results))
    lines, sentences = [f"{'':{width}} {' '.join(f'{number:2}' for number in numbers)}"], {}
    for name, found in results.items():
        signs = [SIGNS.get(found.get(number, {}).get("result"), ".") for number in numbers]
        lines.append(f"{name:{width}} {' '.join(f'{sign:>2}' for sign in signs)}   {signs.count('+')} solved")
        if not found:
            sentences[name, "neither minimal.py nor beyond.py is there, nor an exercise's function."] = ["no file"]
        for number, record in sorted(found.items()):
            if record["sentence"]:
                sentences.setdefault((name, record["sentence"]), []).append(str(number))
    lines += ["+ solved   x wrong   t time limit   . not answered", ""]
    lines += [f"{name}, {' '.join(its)}: {sentence}" for (name, sentence), its in sentences.items()]
    return "\n".join(lines) + "\n"


def results_of(path: Path):
    """Return {exercise: {"result": ..., "sentence": ... or None}} for the exercises in a file."""
    numbers = next((workbook.exercises_of(one) for one in workbook.SOURCES if one.name == path.name), workbook.CHECKS)
    try:
        states = {number: workbook.state_of(workbook.read(path), number) for number in numbers}
    except workbook.Wrong as wrong:
        return {number: {"result": "wrong", "sentence": str(wrong)} for number in numbers}
    results = {number: {"result": state, "sentence": None} for number, state in states.items() if state != "missing"}
    answered = [number for number in results if results[number]["result"] == "answered"]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return results | dict(zip(answered, threads.map(lambda number: run(path, number), answered)))


def run(path: Path, number):
    """Check one exercise in a process of its own; return its record."""
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place,
          tempfile.TemporaryFile("w+", errors="replace") as out):
        shutil.copy(path, place)
        child = subprocess.Popen(
            [sys.executable, "-m", "exercises.grade", path.name, str(number)], cwd=place, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(FOLDER.parent), "TMPDIR": place, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(LIMIT)
        ended = child.poll() is not None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)                          # also the processes that the code started
        child.wait()
        out.seek(0)
        lines = out.read(10**6).splitlines()
    try:
        result, sentence = ("wrong", str(json.loads(lines[0]))) if lines[0] != "null" else ("solved", None)
    except (ValueError, IndexError):                                      # no sentence, or the code wrote lines
        result, sentence = "wrong", "The process ended."
    if not ended:
        result, sentence = "time limit", f"It ran for {LIMIT:g} seconds."
    return {"result": result, "sentence": sentence}


if __name__ == "__main__":
    # A child: it prints a sentence or null, as a line of JSON. What the answer prints goes nowhere.
    file, out = Path(sys.argv[1]), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(workbook.check(int(sys.argv[2]), workbook.read(file), file)), file=out)
