"""Grades many students' files: `python -m exercises grade FOLDER`.

FOLDER holds, under each student's name, a copy of exercises/work or a single Python file. Each answer runs in a process
of its own, which works in a temporary folder with a copy of the file. Only the first process imports torch; the others
are its forks. The table goes to the screen and to FOLDER/grades.txt; the results also to FOLDER/grades.json.

What is enforced is only LIMIT, the seconds for each answer. The code can read and change what you can, take all memory,
leave a process behind, and forge its result, because it runs in the process that judges it. So grade in a container
what you do not trust, and read the code.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from . import workbook

LIMIT = 60.0                                                              # seconds
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
            sentences[name, "there is no minimal.py or beyond.py with the function of an exercise."] = ["no file"]
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
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([f"{__package__}.judge"])
    reader, writer = processes.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        child = processes.Process(target=answer, args=(Path(shutil.copy(path, place)), number, writer), daemon=True)
        child.start()
        writer.close()
        ended = reader.poll(LIMIT)
        try:
            sentence = reader.recv() if ended else f"It ran for {LIMIT:g} seconds."
        except EOFError:
            sentence = "The process ended."
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)                          # also the processes that the code started
        child.join()
    return {"result": "time limit" if not ended else "wrong" if sentence else "solved", "sentence": sentence}


def answer(file, number, writer):
    """Send what is wrong, or None. The child of run(): what the answer prints goes nowhere."""
    os.setsid()
    os.chdir(file.parent)
    tempfile.tempdir = str(file.parent)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    writer.send(workbook.check(number, workbook.read(file), file))
