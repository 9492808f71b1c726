"""Plant bugs that a person would write, one at a time, and list those that no test finds.

    python tests/mutants.py                     all entries of mutants.txt, with the tests beside their files
    python tests/mutants.py mesh zero           only the entries of these files
    python tests/mutants.py --all               survivors then meet the whole default half, many of them in one tree

mutants.txt holds the entries. A line `== mesh.py: test_mesh.py` names files of nanodomino/ (or train.py) and the paths
under tests/ that run for their mutants, nearest first. The lines below it are mutants:

    old => new ## note                         old occurs once in the files; the note says why no test can find it

Two workers each own a copy of the tree. This process imports torch and pytest once, and each mutant runs in a fork of
it, which saves seconds. The pool's ranks are forks of that fork. The first red test ends a mutant. A mutant with a note
survives without a run. With `--all`, each worker's tree holds half of the survivors, and the worker walks once through
the tests. At a red test, halving tells which mutant it finds. The mutant is removed, and the walk goes on from there.
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
WORKERS, LIMIT = 2, 1800           # LIMIT: seconds for one run of pytest; a mutant that hangs is red


class Mutant(NamedTuple):
    file: str                       # relative to the repository
    tests: list[str]
    old: str
    new: str
    note: str


def read_mutants(text: str) -> list[Mutant]:
    """Return the entries of mutants.txt. Raises ValueError if an entry's old text does not occur once in its files, or
    if a path of its tests does not exist: pytest would end with an error, as if a test were red."""
    mutants, files, tests = [], [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("== "):
            names, _, paths = line[3:].partition(":")
            files = [name if name == "train.py" else f"nanodomino/{name}" for name in names.split()]
            tests = [f"tests/{path}" for path in paths.split()]
            if missing := [path for path in tests if not (ROOT / path).exists()]:
                raise ValueError(f"mutants.txt names {', '.join(missing)}, which must exist; correct the path")
            continue
        edit, _, note = line.partition(" ## ")
        old, _, new = edit.partition(" => ")
        found = [file for file in files for _ in range((ROOT / file).read_text().count(old))]
        if len(found) != 1:
            raise ValueError(f"{', '.join(files)} must contain the old text once, but contain it {found}: {old!r}")
        mutants.append(Mutant(found[0], tests, old, new.strip(), note.strip()))
    return mutants


FORKS = set()                       # the sessions of pytest that run now


class Judge:
    """Ends a fork at the first red test or after the last green one. Fixtures are not torn down: it takes seconds, and
    processes that inherited each other's pipes would wait for each other."""

    def __init__(self, screen: int, start: str, left_out: set[str]):
        self.screen, self.start, self.left_out = screen, start, left_out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        names = [item.nodeid for item in items]                # `start` may be a file that pytest could not read
        del items[:names.index(self.start) if self.start in names else 0]
        items[:] = [item for item in items if item.nodeid not in self.left_out]

    def pytest_runtest_logstart(self, nodeid):
        os.write(self.screen, f"\nRUNS {nodeid}\n".encode())

    def pytest_runtest_logreport(self, report):
        if report.failed:
            os._exit(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, nextitem):
        if nextitem is None:
            os._exit(0)


def end_forks(*_):
    for pid in list(FORKS):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(1)


def run_tests(copy: Path, tests: list[str], log: Path, start: str, left_out: set[str]) -> int:
    """Run pytest in a fork of this process, in a copy of the tree, from the test `start` on. Returns its exit code; 1
    after LIMIT seconds."""
    if not (pid := os.fork()):
        try:
            os.setsid()
            FORKS.clear()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            screen = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), screen, screen)):
                os.dup2(descriptor, stream)
            os.chdir(copy)
            sys.path[:0] = [str(copy), str(copy / "tests")]
            sys.dont_write_bytecode = True
            from support import fork_server
            fork_server.context_with_imports = lambda: multiprocessing.get_context("fork")
            judge = Judge(screen, start, left_out)
            os._exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests], plugins=[judge]))
        finally:
            os._exit(3)
    FORKS.add(pid)
    end, status = time.monotonic() + LIMIT, None
    while status is None and time.monotonic() < end:
        done, raw = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if done else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)                  # the fork's session: also ranks that were left behind
    FORKS.remove(pid)
    if status is None:
        os.waitpid(pid, 0)
    return 1 if status is None else status


def last_test(log: Path) -> str:
    """Return the test that ran last, or the file that pytest could not read."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("RUNS", "ERROR"))]
    return lines[-1].partition(" ")[2].split(" - ")[0] if lines else "tests"


def plant(mutants: list[Mutant], tests: list[str], copies: SimpleQueue, start="", left_out=()) -> str | None:
    """Plant mutants in a copy of the tree, run tests, and restore the files. Returns the red test, or None."""
    copy, begin = copies.get(), time.monotonic()
    log, right = copy.with_suffix(".log"), {mutant.file: (copy / mutant.file).read_text() for mutant in mutants}
    for mutant in mutants:
        (copy / mutant.file).write_text((copy / mutant.file).read_text().replace(mutant.old, mutant.new))
    red = last_test(log) if run_tests(copy, tests, log, start, left_out) else None
    for file, text in right.items():
        (copy / file).write_text(text)
    copies.put(copy)
    edits = "{0.file}: {0.old} => {0.new}".format(*mutants) if len(mutants) == 1 else f"{len(mutants)} mutants"
    print(f"{time.monotonic() - begin:5.0f} s  {edits}\n         {red or 'SURVIVED'}", flush=True)
    return red


def culprit(suspects: list[Mutant], test: str, copies: SimpleQueue) -> Mutant | None:
    """Return a mutant that turns a test red by itself, found by halving; or None."""
    if not suspects or not plant(suspects, [test], copies):
        return None
    if len(suspects) == 1:
        return suspects[0]
    middle = len(suspects) // 2
    return culprit(suspects[:middle], test, copies) or culprit(suspects[middle:], test, copies)


def survivors_of_all(mutants: list[Mutant], copies: SimpleQueue) -> list[Mutant]:
    """Return the mutants that no test of the default half finds, in one walk through the tests. A test that is red
    without mutants, or only by several of them together, is left out."""
    red, left_out = "", set()
    while mutants and (red := plant(mutants, ["tests"], copies, red, left_out)):
        found = None if plant([], [red], copies) else culprit(mutants, red, copies)
        mutants = [mutant for mutant in mutants if mutant is not found]
        left_out |= set() if found else {red}
    return mutants


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="names of files or folders, such as mesh or layers; all by default")
    parser.add_argument("--all", action="store_true", help="run the default half for what survives the nearest tests")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, end_forks)
    signal.signal(signal.SIGINT, end_forks)
    mutants = [mutant for mutant in read_mutants((ROOT / "tests" / "mutants.txt").read_text())
               if not flags.files or any(name in Path(mutant.file).with_suffix("").parts for name in flags.files)]
    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copies = SimpleQueue()
        for worker in range(WORKERS):
            copies.put(Path(shutil.copytree(ROOT, Path(folder, str(worker)),
                                            ignore=shutil.ignore_patterns(".git", "__pycache__", "runs"))))
        with ThreadPoolExecutor(WORKERS) as threads:
            reds = list(threads.map(lambda each: None if each.note else plant([each], each.tests, copies), mutants))
            survivors = [mutant for mutant, red in zip(mutants, reds) if not red]
            if any(reds) and (broken := plant([], sorted({*filter(None, reds)}), copies)):
                print(f"{broken} is red without a mutant, too; mend it, because what it has found here does not count")
            if flags.all:
                halves = survivors[::2], survivors[1::2]
                survivors = sum(threads.map(lambda half: survivors_of_all(half, copies), halves), [])
    print(f"\n{len(mutants)} mutants in {(time.monotonic() - start) / 60:.0f} minutes, {len(mutants) - len(survivors)} "
          "red; survivors:")
    for mutant in survivors:
        print(f"  {mutant.file}: {mutant.old} => {mutant.new}   {mutant.note}")


if __name__ == "__main__":
    main()
