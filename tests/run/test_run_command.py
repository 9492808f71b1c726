"""Command lines: --help, readers that close the pipe, Ctrl-C, a progress line.

Every command is a real process, as a shell starts it; only the many --help are forks (support/fork_server.py).
"""

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from pathlib import Path

import pytest
import torch
from support.jobs import ROOT, TINY, listen_to_interrupts, make_corpus, needs_proc, wait_until
from support.fork_server import LAUNCHER

from bench import QUESTIONS
from benchmarks import common
from nanodomino.checkpoint.find_checkpoints import checkpoints_of
from nanodomino.run import rank_failure

PATIENCE = 120           # seconds for any command here; they take one to five if the machine has no other work
SMALL = ["--num-layers", "2", "--hidden-size", "32"]


def start(folder: Path, command: str, *flags, **options) -> subprocess.Popen:
    """Start `python COMMAND FLAGS` in this folder. command: a script of the repository, or -m and a module."""
    words = command.split()
    words[-1] = words[-1] if "-m" in words else str(ROOT / words[-1])
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, *words, *map(str, flags)], cwd=folder, text=True,
                            env=environment | options.pop("environment", {}), **options)


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory, fork_server):
    """A folder with data/ and run/."""
    folder = tmp_path_factory.mktemp("trained")
    make_corpus(folder).rename(folder / "data")
    ended = fork_server.launch("train.py", [(training_flags("run"), {})], folder, PATIENCE)
    assert ended.code == 0, ended.output
    return folder


def train(folder: Path, run_dir: str, stdout, stderr=subprocess.PIPE, **environment) -> subprocess.Popen:
    return start(folder, "train.py", *training_flags(run_dir), stdout=stdout, stderr=stderr, environment=environment)


def training_flags(run_dir: str) -> list[str]:
    return [*TINY, *(f"--data-path data --run-dir {run_dir} --train-iters 6 --save-interval 2 --log-interval 1 "
                     "--sample-tokens 3").split()]


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# ---- help

@pytest.mark.parametrize("command, flags, says", [
    ("bench.py", "", QUESTIONS), ("bench.py", "--help", QUESTIONS),
    *[("bench.py", f"{question} --help", [f"usage: python bench.py {question} [flags]", "--num-layers INT"])
      for question in QUESTIONS],
    ("nanodomino.checkpoint", "--help", ["usage: python -m nanodomino.checkpoint", "verify", "export", "every byte"]),
    ("nanodomino.huggingface", "--help", ["usage: python -m nanodomino.huggingface", "import", "export",
                                          "folder that Transformers loads"]),
    ("nanodomino.checkpoint", "verify --help", ["verify [-h] DIR", "folder of a run"]),
    ("nanodomino.checkpoint", "export --help", ["export [-h] DIR OUT", "newest intact checkpoint", "file to write"]),
    ("data/prepare.py", "--help", ["usage: python data/prepare.py", "--input TEXT", "end-of-text", "--overwrite"]),
    ("nanodomino.timeline", "--help", ["usage: python -m nanodomino.timeline", "the SVG file to write"]),
    ("nanodomino.generate", "--help", ["usage: python -m nanodomino.generate", "0 always takes the most likely token"]),
    ("train.py", "--help", ["usage: train.py", "--tensor-model-parallel-size INT, --tp INT"])])
def test_every_command_has_help(fork_server, tmp_path, command, flags, says):
    (tmp_path / "empty").mkdir()
    ended = fork_server.launch(command, [(flags.split(), {})], tmp_path / "empty", PATIENCE)
    assert ended.code == 0 and all(part in " ".join(ended.output.split()) for part in says), ended
    assert "error" not in ended.output and "Traceback" not in ended.output, ended
    assert not list((tmp_path / "empty").iterdir()), "who asks for help wants nothing done"


@pytest.mark.parametrize("question, has", [("overlap", True), ("comm", False), ("memory", False)])
def test_only_questions_with_rounds_have_repeats(fork_server, tmp_path, question, has):
    (tmp_path / "empty").mkdir()
    ended = fork_server.launch("bench.py", [([question, "--help"], {})], tmp_path / "empty", PATIENCE)
    assert ("--repeats N" in ended.output) == has


# ---- readers that go away

@pytest.mark.parametrize("command, flags", [
    ("data/prepare.py", "--verify data"),
    *[pytest.param(*command, marks=pytest.mark.exhaustive) for command in (
        ("-m nanodomino.generate", "--load run --max-tokens 3 --seed 1"),
        ("train.py", "--help"), ("bench.py", "--help"), ("bench.py", "overlap --help"), ("bench.py", "plan"),
        ("data/prepare.py", "--help"),
        ("data/prepare.py", "--input data/meta.json --output made --overwrite"), ("-m nanodomino.checkpoint", "--help"),
        ("-m nanodomino.checkpoint", "verify run"), ("-m nanodomino.checkpoint", "export run out.pt"))]])
def test_a_closed_pipe_is_no_error(trained, closed_pipe, command, flags):
    """Neither in a print nor when Python flushes its buffers at exit."""
    code, _, err = end(start(trained, command, *flags.split(), stdout=closed_pipe))
    assert (code, err) == (0, ""), err


@pytest.mark.parametrize("command, flags", [
    ("-m nanodomino.checkpoint", "verify run"),
    *[pytest.param(*command, marks=pytest.mark.exhaustive) for command in (
        ("data/prepare.py", "--input data/meta.json --output full"), ("train.py", "--help"),
        ("-m nanodomino.generate", "--load run --max-tokens 3 --seed 1"))]])
def test_output_that_cannot_be_written_is_one_error(trained, command, flags):
    """The work is done, but its answer is lost. Exit code 2 of `verify` would mean that a checkpoint is damaged."""
    with open("/dev/full", "w") as full:
        code, _, err = end(start(trained, command, *flags.split(), stdout=full))
    assert (code, err) == (1, "error: standard output can't be written (No space left on device); choose another file, "
                              "or free some disk space\n")


@pytest.mark.exhaustive
def test_a_closed_pipe_does_not_hide_an_error(trained, closed_pipe, tmp_path):
    """The exit code still tells how the work went."""
    run_dir = damaged_run(trained, tmp_path)
    code, _, err = end(start(tmp_path, "-m nanodomino.checkpoint", "verify", run_dir, stdout=closed_pipe))
    assert code == 2 and err.count("\n") == 1 and err.startswith("error: "), err


@pytest.mark.exhaustive                     # by default tests/generate/test_generate.py closes a pipe after some output
def test_output_arrives_until_the_pipe_is_closed(trained):
    process = start(trained, "-m nanodomino.checkpoint", "verify", "run")
    first = process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(PATIENCE) == 0 and err == "" and "step-00000006 is intact" in first


@pytest.mark.exhaustive
def test_a_closed_stdout_is_no_error(trained):
    """With `>&-` there is no stdout at all."""
    for command, flags in (("train.py", "--help"), ("-m nanodomino.checkpoint", "verify run")):
        code, out, err = end(start(trained, command, *flags.split(), preexec_fn=lambda: os.close(1)))
        assert (code, out, err) == (0, "", ""), err


@pytest.mark.parametrize("screen", ["closed pipe", *[pytest.param(screen, marks=pytest.mark.exhaustive)
                                                     for screen in ("full disk", "both closed", "both full")]])
def test_a_run_survives_the_loss_of_its_terminal(trained, closed_pipe, screen):
    """It trains, saves, validates and samples to the end, and warns once."""
    stdout, stderr = closed_pipe, subprocess.PIPE
    if screen == "both closed":
        stderr = closed_pipe
    if "full" in screen:
        if not Path("/dev/full").exists():
            pytest.skip("there is no /dev/full here")
        stdout = os.open("/dev/full", os.O_WRONLY)
        stderr = stdout if screen == "both full" else stderr
    run_dir = screen.replace(" ", "-")
    code, _, err = end(train(trained, run_dir, stdout, stderr))
    assert code == 0, err
    assert losses(trained / run_dir) == losses(trained / "run") and len(losses(trained / "run")) == 6
    ours, theirs = (checkpoints_of(trained / name) for name in (run_dir, "run"))
    assert [folder.name for folder in ours] == [folder.name for folder in theirs]
    if stderr == subprocess.PIPE:
        reason = "No space left on device" if screen == "full disk" else "Broken pipe"
        assert err == f"warning: standard output can't be written ({reason}); training continues, and " \
                      f"{run_dir}/metrics.jsonl records it\n"


@pytest.mark.exhaustive
def test_a_run_survives_characters_that_the_terminal_cannot_show(trained):
    """In a container without a locale: a sample or the name of a folder may hold any character."""
    code, out, err = end(train(trained, "läufe", subprocess.PIPE, PYTHONIOENCODING="ascii"))
    assert code == 0 and "everything in l\\xe4ufe" in out, err
    assert losses(trained / "läufe") == losses(trained / "run")


@pytest.mark.exhaustive
def test_a_warning_that_cannot_be_printed_is_no_error(trained, tmp_path):
    """A warning about a damaged checkpoint goes to a log on a full disk; the run's folder can still be written to."""
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    shutil.copytree(trained / "data", tmp_path / "data")
    run_dir, full = damaged_run(trained, tmp_path), os.open("/dev/full", os.O_WRONLY)
    code, _, err = end(train(tmp_path, "run", full, PYTHONUNBUFFERED="1"))
    os.close(full)
    assert code == 0 and err.startswith("warning: standard output can't be written (No space left on device)"), err
    assert losses(run_dir) == losses(trained / "run")


# ---- checkpoints of a run

def damaged_run(trained: Path, folder: Path) -> Path:
    """Copy the run and append a byte to its newest checkpoint."""
    run_dir = Path(shutil.copytree(trained / "run", folder / "run"))
    with open(checkpoints_of(run_dir)[0] / "rank-00000.bin", "ab") as file:
        file.write(b"x")
    return run_dir


def test_verify_checks_every_checkpoint_of_a_run(trained, tmp_path, fork_server):
    ended = fork_server.launch("nanodomino.checkpoint", [(["verify", "run"], {})], trained, PATIENCE)
    assert ended.code == 0
    assert [line.split(",")[0] for line in ended.output.splitlines()] == [
        f"run/checkpoints/step-0000000{step} is intact: step {step}" for step in (6, 4, 2)]
    damaged_run(trained, tmp_path)
    ended = fork_server.launch("nanodomino.checkpoint", [(["verify", "run"], {})], tmp_path, PATIENCE)
    error, *intact = ended.output.splitlines()          # the reports were in a buffer until the end
    assert ended.code == 2 and [line.split(":")[0] for line in intact] == [
        f"run/checkpoints/step-0000000{step} is intact" for step in (4, 2)]
    assert error.startswith("error: run/checkpoints/step-00000006/rank-00000.bin should have")


@pytest.mark.exhaustive
def test_verify_reports_a_run_without_checkpoints(tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    code, out, err = end(start(tmp_path, "-m nanodomino.checkpoint", "verify", "run"))
    assert (code, out) == (2, "") and err == "error: this run has no checkpoint yet; give the folder of another run\n"


@pytest.mark.exhaustive
def test_export_takes_the_newest_intact_checkpoint_and_names_it(trained, tmp_path):
    damaged_run(trained, tmp_path)
    code, out, err = end(start(tmp_path, "-m nanodomino.checkpoint", "export", "run", "run.pt"))
    warning, told = out.splitlines()
    assert (code, err) == (0, "") and "step-00000006" in warning
    assert told.endswith(" from run/checkpoints/step-00000004")
    code, _, err = end(start(tmp_path, "-m nanodomino.checkpoint", "export", "run/checkpoints/step-00000004", "one.pt"))
    assert code == 0, err
    of_run, of_one = (torch.load(tmp_path / name) for name in ("run.pt", "one.pt"))
    assert of_run.keys() == of_one.keys() and all(torch.equal(of_run[name], of_one[name]) for name in of_run)


# ---- a line that moves, and Ctrl-C

class InTerminal:
    """A command whose stderr is a terminal; an environment variable marks its processes."""

    def __init__(self, folder: Path, temporary: Path, *flags):
        self.seen, self.mark, self.temporary = "", uuid.uuid4().hex, temporary
        self.terminal, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))      # rows and columns
        self.process = start(folder, "bench.py", *flags, stderr=slave, preexec_fn=listen_to_interrupts,
                             environment={"MARK": self.mark, "TMPDIR": str(self.temporary)})
        os.close(slave)

    def read(self):
        try:
            self.seen += os.read(self.terminal, 1 << 16).decode(errors="replace")
            return True
        except OSError:                                         # the last one that could write has gone
            return False

    def read_until(self, words: str):
        begin = time.monotonic()
        while words not in self.seen:
            assert self.read() and time.monotonic() - begin < PATIENCE, self.seen

    def alive(self) -> list[int]:
        """Return the ids of its processes and of all that they started."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"MARK={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:                                     # it has just ended
                pass
        return found

    def close(self):
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        os.close(self.terminal)


@pytest.fixture
def watched(tmp_path):
    begun = []

    def watch(*flags) -> InTerminal:
        begun.append(InTerminal(tmp_path, Path(short), *flags))
        return begun[0]

    with tempfile.TemporaryDirectory() as short:                # pytest's is too long a name for a socket
        yield watch
        for command in begun:
            command.close()


@pytest.mark.exhaustive
def test_rank_0_alone_writes_a_progress_line(watched):
    command = watched("overlap", *SMALL, "--seq-length", 16, "--repeats", 2, "--device", "cpu")
    while command.read():
        pass
    assert command.process.wait(PATIENCE) == 0, command.seen
    assert command.seen.startswith("starting 2 processes\r\n")
    assert "0/21 [" in command.seen and "20/21 [" in command.seen
    for name in ("blocking", "megatron", "domino", "apart", "compute", "wires", "dtensor"):
        for number in (1, 2, 3):
            assert command.seen.count(f"round {number} of 3: {name} ") in (1, 2), "drawn as it begins, and as it ends"
    record = json.loads(command.process.stdout.read().splitlines()[-1])
    assert record["question"] == "overlap"


@pytest.mark.exhaustive
def test_without_a_terminal_there_is_no_progress_line(tmp_path):
    """And no file stays in the folder on the measured disk."""
    code, out, err = end(start(tmp_path, "bench.py", "checkpoint", *SMALL, "--num-attention-heads", 2, "--repeats", 1,
                               "--dp", 2, "--folder", tmp_path))
    record = json.loads(out.splitlines()[-1])
    assert code == 0 and record["question"] == "checkpoint" and record["dp"] == 2
    assert 12 * record["parameters"] <= 2 * record["copied_bytes"] < 15 * record["parameters"], "half, and padding"
    assert "round" not in err and "starting" not in err, err
    assert f" in {tmp_path}/bench-" in out and not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@needs_proc
@pytest.mark.parametrize("question, flags, moment", [
    ("checkpoint", ["--num-attention-heads", 2], "round 1 of 10001: save"),
    ("scaling", ["--max-processes", 2, "--device", "cpu"], "world of 1, round 2 of 10001"),
    ("throughput", ["--device", "cpu"], "round 2 of 10001: plain"),
    ("zero", ["--device", "cpu"], "memory: zero-0")])
def test_ctrl_c_ends_all_processes_silently(watched, question, flags, moment):
    """At any time. Its processes and temporary files are gone."""
    command = watched(question, *SMALL, *flags, "--repeats", 10_000)
    command.read_until(moment)
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(PATIENCE) == 128 + signal.SIGINT, command.seen
    wait_until(lambda: not command.alive(), PATIENCE)               # multiprocessing's own helpers end a moment later
    assert not [path.name for path in command.temporary.iterdir() if not path.name.startswith("torchinductor")]
    while command.read():
        pass
    assert "Traceback" not in command.seen and "rror" not in command.seen, command.seen
    assert command.process.stdout.read() == ""


@pytest.mark.exhaustive
@needs_proc
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_bench_that_is_terminated_ends_its_processes(watched, name):
    if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
        pytest.skip(f"these tests were started with {name} ignored, as by nohup, and so would be the bench")
    command = watched("checkpoint", *SMALL, "--num-attention-heads", 2, "--repeats", 10_000)
    command.read_until("round 2 of 10001")
    command.process.send_signal(getattr(signal, name))
    assert command.process.wait(PATIENCE) == 128 + getattr(signal, name), command.seen
    wait_until(lambda: not command.alive(), PATIENCE)


def test_ctrl_c_during_the_start_ends_every_process(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *_, **options):
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            common.start_processes(["overlap"], 2)
        assert [process.poll() for process in started] == [-signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGINT, before)
        for process in started:
            process.kill()


def test_ctrl_c_while_torch_is_imported_is_silent(tmp_path):
    """The import takes seconds, long enough to notice a mistyped flag."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    ended = end(start(tmp_path, "bench.py", "overlap", environment={"PYTHONPATH": str(tmp_path)}))
    assert ended == (128 + signal.SIGINT, "", "")


def test_ctrl_c_before_training_is_silent(monkeypatch):
    """Once training has started, StopSignal handles it."""
    def interrupted(arguments, place):
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_failure, "tolerate_closed_output", lambda: None)
    with pytest.raises(SystemExit) as caught:
        rank_failure.run_rank(interrupted, [])
    assert caught.value.code == 130
