"""How a command ends: its exit code, errors in one sentence, readers that close the pipe, Ctrl-C, --help.

A stop signal is confirmed at once, and a rank whose GPU waits forever ends in time. The GPU is simulated.
"""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from support.fork_server import LAUNCHER

from bench import QUESTIONS
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError, attempt
from nanodomino.run import failures
from nanodomino.run.failures import Watchdog

PATIENCE = 300           # seconds until a command counts as stuck; it takes one to five on an idle machine
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


def end(folder, *words, environment=(), stdout=subprocess.PIPE) -> tuple[int, str, str]:
    """Run `python WORDS` in this folder. Return (exit code, stdout, stderr)."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **dict(environment)}
    ended = subprocess.run([sys.executable, *map(str, words)], cwd=folder, text=True, env=kept, stdout=stdout,
                           stderr=subprocess.PIPE, timeout=PATIENCE)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def closed_pipe():
    """The writing end of a pipe whose reader is closed, as `| head -1` closes it after a line."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


MISTAKE = "error: 2 must divide 3; try 1\n"
NOWHERE = "error: nowhere/file: No such file or directory; fix that, or choose another file or folder\n"


@pytest.mark.parametrize("ending, stdout, code, error", [
    ("0", "pipe", 0, ""), ("3", "pipe", 3, ""), ("mistake", "pipe", 2, MISTAKE), ("disk", "pipe", 1, NOWHERE),
    ("help", "pipe", 0, ""), ("interrupt", "pipe", 128 + signal.SIGINT, ""),
    ("0", "closed", 0, ""), ("help", "closed", 0, ""), ("mistake", "full", 2, MISTAKE)])
def test_a_command_ends_with_its_exit_code_and_at_most_one_sentence(tmp_path, closed_pipe, ending, stdout, code, error):
    """Whether its output can be written or not: neither a print fails, nor Python when it flushes buffers at exit."""
    with open("/dev/full", "w") as full:
        ended = end(tmp_path, "-c", SCRIPT, ending, environment={"PYTHONIOENCODING": "ascii"},
                    stdout={"closed": closed_pipe, "full": full}.get(stdout, subprocess.PIPE))
    assert (ended[0], ended[2]) == (code, error)
    if stdout == "pipe":                                       # what the terminal cannot show is escaped
        assert ended[1].splitlines()[-1] == "l\\xe4ufe 19999"


@pytest.mark.parametrize("words, code, error", [
    ((ROOT / "train.py", "--slices", "0"), 2, "error: --slices must be at least 1 and at most 256, but is 0\n"),
    ((ROOT / "bench.py", "no"), 2, f"error: there is no question 'no'; try one of {', '.join(QUESTIONS)}\n")], ids=str)
def test_commands_run_with_a_safe_path_and_a_reader_that_has_gone(tmp_path, closed_pipe, words, code, error):
    """Python then leaves the script's folder out of its path."""
    safe = {"PYTHONSAFEPATH": "1", "PYTHONPATH": ""}
    ended = end(tmp_path, *words, environment=safe, stdout=closed_pipe)
    assert (ended[0], ended[2]) == (code, error)


@pytest.mark.parametrize("rank, error, waits, says", [
    (0, UserError("heads 3; try 4"), False, "error: heads 3; try 4\n"),
    (0, OSError(5, "bad disk", "data"), False, "error: data: bad disk; fix that, or choose another file or folder\n"),
    (3, UserError("heads 3; try 4"), True, "error: heads 3; try 4\n"),
    (2, ValueError("mine"), False, "rank 2 failed: ValueError: mine\n"),
    (2, RuntimeError("Connection closed by peer"), True, "rank 2 lost its peers (dead or hanging: rank 0, 1, 3): "
     "Connection closed by peer\n")])
def test_a_rank_whose_error_is_probably_an_echo_waits_before_it_prints(monkeypatch, capsys, rank, error, waits, says):
    """But it does print: a token id outside the vocabulary is found by one replica, which may not hold rank 0."""
    slept = []
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(failures.dist, "TCPStore", lambda *_, **__: failures.dist.HashStore())
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        failures.report_and_exit(LaunchInfo(rank, 4, rank, 4, launched=True), error)
    assert caught.value.code != 0 and (sum(slept) >= 3) == waits and sum(slept) <= 13
    assert capsys.readouterr().err.endswith(says)              # after a traceback, if there is one


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


@pytest.fixture
def watchdog(monkeypatch):
    """A Watchdog on a GPU that always has work, without its thread. `codes` are those of os._exit()."""
    guard = Watchdog(LaunchInfo(), torch.device("cuda", 3), 60.0)
    guard.said, guard.codes, guard.to_save, guard.say = [], [], True, lambda line: guard.said.append(line)
    monkeypatch.setattr(os, "_exit", guard.codes.append)
    return guard


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_is_confirmed_at_once_and_the_second_ends_the_rank(watchdog, number):
    """With the first one's code. torchrun's copy comes at once and ends nothing. If all is saved, the first does."""
    watchdog.handle(number)
    watchdog.handle(number)
    assert watchdog.said == [
        "stopping after this step with a checkpoint; a second signal, after two seconds, stops at once"]
    assert watchdog.signal == number and not watchdog.codes
    watchdog.signalled_at -= 2.1
    watchdog.handle(signal.SIGHUP)
    watchdog.signal, watchdog.signalled_at, watchdog.to_save = 0, 0.0, False
    watchdog.handle(number)
    assert watchdog.codes == 2 * [128 + number]


def test_nohup_keeps_its_meaning(watchdog, monkeypatch):
    """It starts a process with SIGHUP ignored."""
    handled = []
    monkeypatch.setattr(Watchdog, "watch", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda writer: None)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if number == signal.SIGHUP else None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(number))
    watchdog.__enter__()
    assert handled == [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("idle, busy, ends", [(0.0, True, False), (60.0, True, True), (60.0, False, False)])
def test_a_gpu_with_work_and_without_progress_ends_its_rank(watchdog, monkeypatch, idle, busy, ends):
    """A GPU without work waits for its own host, which may be reading, compiling or saving."""
    devices, reported = [], []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: not busy))
    monkeypatch.setattr(failures, "POLL_INTERVAL", 0.0)
    monkeypatch.setattr(failures, "report_and_exit", lambda launch, error: reported.append(str(error)) or sys.exit())
    watchdog.watching, watchdog.last_progress, polls = True, time.monotonic() - idle, iter(range(3))
    monkeypatch.setattr(failures.select, "select", lambda *_: ([] if next(polls, None) is not None else sys.exit(),))
    with pytest.raises(SystemExit):
        watchdog.watch(0)
    assert devices == [watchdog.device] and reported == ["timed out waiting for the device"] * ends


@pytest.mark.parametrize("problem, reason", [
    ("the model can't be loaded", "[Errno 2] No such file or directory: 'gone'"),
    ("gone can't be read", "No such file or directory")])
def test_the_reason_names_the_file_unless_the_problem_does(problem, reason):
    with pytest.raises(UserError) as raised:
        attempt(problem, open, "gone", advice="give another")
    assert str(raised.value) == f"{problem} ({reason}); give another"
