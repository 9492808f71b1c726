"""The processes that share the tests lose none: not a failure, not a test, not a process that dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = """
import os, sys, pytest
name = __file__[-4]

@pytest.mark.parametrize("number", range(20))
def test_prints(number, capfd):
    print(name, number)
    assert capfd.readouterr().out == f"{name} {number}\\n"

def test_fails():
    os.system(f"echo from a child of {name}")
    assert name not in os.environ["BAD"]

@pytest.mark.skip(reason="of no reason")
def test_is_skipped():
    pass

def test_dies():
    if name in os.environ["DEADLY"]:
        os._exit(7)
"""


@pytest.fixture
def tests(tmp_path):
    """tests(flags, BAD=..., DEADLY=...): the outcome of four files of 23 tests in so many processes."""
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(FILE)

    def run(*flags, **environment):
        command = [sys.executable, "-m", "pytest", "-p", "shares", "-q", "-p", "no:cacheprovider", *flags]
        return subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=60, env={
            **os.environ, "PYTHONPATH": str(Path(__file__).parent), "BAD": "", "DEADLY": "", **environment})
    return run


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 9])
def test_all_is_seen_whoever_has_run_it(tests, processes):
    done = tests("--processes", str(processes), BAD="ad")
    assert done.returncode == 1 and "2 failed, 86 passed, 4 skipped" in done.stdout, done.stdout + done.stderr
    for name in "ad":
        assert f"FAILED test_{name}.py::test_fails" in done.stdout and f"from a child of {name}" in done.stdout
    assert "from a child of b" not in done.stdout, "what a test prints is shown where it fails"


def test_after_the_first_failure_all_may_stop(tests):
    done = tests("--processes", "4", "-x", BAD="abcd")
    assert done.returncode == 1 and "stopping after" in done.stdout and not done.stderr, done.stdout + done.stderr


def test_a_process_that_dies_is_named_with_its_test(tests):
    """The four begin with a file each, so some fork has the deadly one, or pytest itself."""
    done = tests("--processes", "4", DEADLY="abcd")
    assert done.returncode == 7 or done.returncode == 2 and "exit code 7 at test_" in done.stdout, done.stdout + done.stderr


def test_names_and_reasons_survive_the_way(tests):
    done = tests("--processes", "2", "-vv", "-rs")
    assert done.returncode == 0 and "of no reason" in done.stdout and "test_d.py::test_prints[19] PASSED" in done.stdout
