"""How a command ends: its exit code, errors in one sentence, readers that close the pipe, Ctrl-C, --help.

A rank whose GPU waits forever ends in time with a message, and no other rank does. GPU and clock are simulated.
"""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from support.fork_server import LAUNCHER

from bench import QUESTIONS
from nanodomino.comm.world import LaunchInfo, collective_timeout
from nanodomino.mesh import meta_mesh
from nanodomino.run import failures
from nanodomino.run.failures import POLL_INTERVAL, STOP_GRACE, Watchdog

PATIENCE = 120           # seconds for any command here; they take one to five if the machine has no other work
# A command that prints more than a pipe or a buffer holds, and then ends as its argument says.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from nanodomino.errors import UserError, run_command

def main(end):
    for number in range(20_000):
        print("läufe", number)
    if end == "mistake":
        raise UserError("2 must divide 3; try 1")
    if end == "disk":
        open("nowhere/file")
    if end == "interrupt":
        raise KeyboardInterrupt
    if end == "help":
        sys.exit(0)
    return int(end)

run_command(main, sys.argv[1])
"""


def start(folder, *words, environment=(), **options) -> subprocess.Popen:
    """Start `python WORDS` in this folder."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **dict(environment)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, *map(str, words)], cwd=folder, text=True, env=kept, **options)


def end(process: subprocess.Popen) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out or "", err or ""


@pytest.fixture
def closed_pipe():
    """The writing end of a pipe whose reader is closed, as `| head -1` closes it after a line."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


MISTAKE = "error: 2 must divide 3; try 1\n"
NOWHERE = "error: nowhere/file: No such file or directory; fix that, or choose another file or folder\n"
FULL = "error: standard output: No space left on device; fix that, or choose another file or folder\n"


@pytest.mark.parametrize("ending, stdout, code, error", [
    ("0", "pipe", 0, ""), ("3", "pipe", 3, ""), ("mistake", "pipe", 2, MISTAKE), ("disk", "pipe", 1, NOWHERE),
    ("help", "pipe", 0, ""), ("interrupt", "pipe", 128 + signal.SIGINT, ""),
    ("0", "closed", 0, ""), ("mistake", "closed", 2, MISTAKE), ("help", "closed", 0, ""), ("0", "none", 0, ""),
    ("0", "full", 1, FULL), ("3", "full", 1, FULL), ("mistake", "full", 2, MISTAKE)])
def test_a_command_ends_with_its_exit_code_and_at_most_one_sentence(tmp_path, closed_pipe, ending, stdout, code, error):
    """Whether its output can be written or not: neither a print fails, nor Python when it flushes buffers at exit. Exit
    code 2 of `verify` would mean that a checkpoint is damaged."""
    with open("/dev/full", "w") as full:
        process = start(tmp_path, "-c", SCRIPT, ending, environment={"PYTHONIOENCODING": "ascii"},
                        stdout={"closed": closed_pipe, "full": full}.get(stdout, subprocess.PIPE),
                        preexec_fn=(lambda: os.close(1)) if stdout == "none" else None)
        ended = end(process)
    assert (ended[0], ended[2]) == (code, error)
    if stdout == "pipe":                                       # what the terminal cannot show is escaped
        assert ended[1].splitlines()[-1] == "l\\xe4ufe 19999"


@pytest.mark.parametrize("words, code, error", [
    ((ROOT / "train.py", "--slices", "0"), 2, "error: --slices must be at least 1 and at most 256, but is 0\n"),
    ((ROOT / "bench.py", "no"), 2, f"error: there is no question 'no'; try one of {', '.join(QUESTIONS)}\n"),
    (("-m", "nanodomino.settings.config"), 0, "")], ids=str)
def test_commands_run_with_a_safe_path_and_a_reader_that_has_gone(tmp_path, closed_pipe, words, code, error):
    """Python then leaves the script's folder out of its path. Only `python -m` needs PYTHONPATH."""
    safe = {} if "-m" in words else {"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}
    ended = end(start(tmp_path, *words, environment=safe, stdout=closed_pipe))
    assert (ended[0], ended[2]) == (code, error)


def test_ctrl_c_while_torch_is_imported_is_silent(tmp_path):
    """The import takes seconds, long enough to notice a mistyped flag."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    process = start(tmp_path, ROOT / "bench.py", "overlap", environment={"PYTHONPATH": str(tmp_path)})
    assert end(process) == (128 + signal.SIGINT, "", "")


def test_ctrl_c_before_training_is_silent(monkeypatch):
    """Once training has started, StopSignal handles it."""
    def interrupted(arguments, place):
        raise KeyboardInterrupt

    monkeypatch.setattr(failures, "tolerate_lost_output", lambda: None)
    with pytest.raises(SystemExit) as caught:
        failures.run_rank(interrupted, [])
    assert caught.value.code == 130


@pytest.mark.parametrize("rank, printed", [(0, "hello\n"), (1, "")])
def test_only_rank_0_writes_to_standard_output(monkeypatch, capsys, rank, printed):
    """Rank 1 may be the first rank of another host."""
    monkeypatch.setattr(failures, "tolerate_lost_output", lambda: None)
    monkeypatch.setattr(failures, "read_launch_environment", lambda: LaunchInfo(rank, 2, 0, 1, launched=True))
    monkeypatch.setattr(sys, "stdout", sys.stdout)             # restored at the end
    with pytest.raises(SystemExit):
        failures.run_rank(lambda arguments, launch: print("hello"), [])
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("command, flags, says", [
    ("bench.py", "", QUESTIONS), ("bench.py", "--help", QUESTIONS),
    *[("bench.py", f"{question} --help", [f"usage: python bench.py {question} [flags]", {
        "timeline": "--wire RATE", "gpu": "--report DIR", "calls": "--write"}.get(question, "--num-layers INT")])
      for question in QUESTIONS],
    ("nanodomino.huggingface", "--help", ["usage: python -m nanodomino.huggingface", "import", "export"]),
    ("data/prepare.py", "--help", ["usage: python data/prepare.py", "--input TEXT", "end-of-text", "--split"]),
    ("nanodomino.generate", "--help", ["usage: python -m nanodomino.generate", "0 always takes the most likely token"]),
    ("train.py", "--help", ["usage: train.py", "--tensor-model-parallel-size INT, --tp INT", "--bf16"])])
def test_every_command_has_help(fork_server, tmp_path, command, flags, says):
    (tmp_path / "empty").mkdir()
    ended = fork_server.launch(command, [(flags.split(), {})], tmp_path / "empty", PATIENCE)
    assert ended.code == 0 and all(part in " ".join(ended.output.split()) for part in says), ended
    assert "error" not in ended.output and "Traceback" not in ended.output, ended
    assert not list((tmp_path / "empty").iterdir()), "who asks for help wants nothing done"


NEVER = float("inf")


@pytest.fixture
def hang(monkeypatch):
    """hang(timeout, ...) -> (second, message) of the first hang that a Watchdog finds within 1000 s, else (None, "").
    The queue is busy until `busy_until`; the device reaches the recorded events at the seconds `marks`."""
    def hang(timeout, busy_until=NEVER, marks=(), signals=None):
        clock = [0.0]
        reached = lambda moment: SimpleNamespace(query=lambda: clock[0] >= moment)  # noqa: E731
        monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        guard = Watchdog(LaunchInfo(), meta_mesh(1, 1, 1), timeout)
        marks = list(marks)
        guard.queue, guard.context = reached(busy_until), dict(signals=signals)
        guard.queue.record_event = lambda: reached(marks.pop(0))
        for number in range(len(marks)):
            guard.mark(number, 2)
        while clock[0] < 1000:
            if text := guard.find_hang():
                return clock[0], text
            clock[0] += POLL_INTERVAL
        return None, ""

    return hang


def test_a_device_without_progress_ends_its_rank_at_the_timeout(hang):
    """The host may have enqueued a long step at once. The timeout counts from the last event that was reached. A device
    with an empty queue waits for its own host, which may be reading, compiling or saving."""
    not_yet = SimpleNamespace(number=0, received_at=0.0)
    assert hang(60, signals=not_yet) == (
        60.5, "timed out waiting for the device, which has made no progress for 60 seconds")
    assert hang(60, marks=[50, 100, 150, 200])[0] == 260.5
    assert hang(60, busy_until=0.0)[0] is None


def test_after_a_stop_signal_the_timeout_is_short(hang):
    """torchrun signals the other ranks when one has died. A step that still makes progress may finish."""
    assert hang(600, signals=SimpleNamespace(number=15, received_at=7.0))[0] == 7.0 + STOP_GRACE + POLL_INTERVAL
    signals = SimpleNamespace(number=15, received_at=0.0)
    assert hang(600, busy_until=70, marks=[15, 30, 45, 60], signals=signals)[0] is None


def test_the_thread_queries_its_own_gpu_and_ends_the_rank(monkeypatch):
    """A thread starts on GPU 0, where each rank's query would take hundreds of MB for a CUDA context."""
    calls, queue = [], SimpleNamespace(query=lambda: calls.append("query"))
    monkeypatch.setattr(failures, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: calls.append((threading.current_thread().name, device)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    mesh = replace(meta_mesh(1, 1, 1), device=torch.device("cuda", 3))
    with Watchdog(LaunchInfo(), mesh, 0.0) as guard:
        guard.context.update(step=7)
        monkeypatch.setattr(failures, "report_and_exit", lambda launch, error: (calls.append(error.step),
                                                                                guard.finished.set()))
        guard.thread.join()
    assert calls == [("watchdog", mesh.device), "query", 7]
    with Watchdog(LaunchInfo(), meta_mesh(1, 1, 1), 0.0) as guard:
        guard.mark()
        assert not guard.thread.is_alive(), "a CPU has no queue"


def test_nccls_own_timeout_comes_after_ours():
    """It aborts the process without a message."""
    assert collective_timeout(600, torch.device("cuda", 0)).total_seconds() >= 630
    assert collective_timeout(600, torch.device("cpu")).total_seconds() == 600
