"""The folder of a run: found, made, locked and cleaned by rank 0. test_bad_input.py has the folders it refuses.

A pipe, a device, a link or a huge file in place of a file of ours ends in one sentence or is replaced. Nothing
hangs, and nothing is written through a link.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import needs
from support.runs import make_corpus, needs_proc, saved_steps, train_in_pool

from nanodomino.errors import UserError, sentence_and_code
from nanodomino.files import LIMIT
from nanodomino.generate.__main__ import command_line as generate
from nanodomino.run.folder import open_run
from nanodomino.run.session import from_command_line
from nanodomino.settings.config import Config


@pytest.fixture
def open_folder(tmp_path, monkeypatch):
    """open_folder(run_dir, ...): open_run() on rank 0, in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return lambda run_dir=None, **settings: open_run(Config(run_dir=run_dir, **settings).resolve(1))


def test_a_refused_start_leaves_nothing_behind(open_folder, tmp_path):
    """Neither a folder of its own nor a lock in a folder that belongs to something else."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("precious")
    for run_dir, load in (("old", None), (None, "nowhere"), (None, "old"), ("new/run", "old")):
        with pytest.raises(UserError):
            open_folder(run_dir, load=load)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["old", "old/metrics.jsonl"]
    assert (tmp_path / "old" / "metrics.jsonl").read_text() == "precious"


@needs_proc
def test_a_new_run_on_a_full_disk_is_refused(open_folder, tmp_path):
    """An empty file can still be made there."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        (tmp_path / "ballast").write_bytes(bytes(60_000))
        os.chdir(tmp_path)                                     # from the folder below into the one that is mounted
        for run_dir in (None, "mine/run"):
            with pytest.raises(UserError, match=r"can't be written to \(No space left on device\); choose another"):
                open_folder(run_dir)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_what_a_killed_run_left_behind_is_deleted_at_the_next_start(open_folder, tmp_path):
    """Unfinished checkpoints may be large, and the next save may never come. Hidden files make no folder another
    program's."""
    run = tmp_path / "run"
    (run / ".mine").mkdir(parents=True)
    open_folder("run")
    for name in ("checkpoints/.step-00000005.unfinished", "checkpoints/.step-00000003.discarded"):
        (run / name).mkdir()
        (run / name / "rank-00000.bin").write_text("half")
    (run / "lock").unlink()                                    # this process holds the lock
    (run / "lock").touch()
    open_folder("run")
    assert sorted(path.name for path in run.iterdir()) == [".mine", "checkpoints", "lock"]
    assert not list((run / "checkpoints").iterdir())


def test_without_run_dir_the_next_free_number_is_taken_and_torchrun_may_not_restart(open_folder, tmp_path, monkeypatch):
    """A restart could not find its folder."""
    assert [open_folder().folder.as_posix() for _ in range(2)] == ["runs/nano-001", "runs/nano-002"]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(UserError, match="--max-restarts needs --run-dir, or .*; add --run-dir FOLDER"):
        open_folder()
    assert open_folder("mine").folder.as_posix() == "mine"
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    (tmp_path / "runs").rename(tmp_path / "old")
    (tmp_path / "runs").symlink_to(tmp_path / "not mounted")
    with pytest.raises(UserError, match="--run-dir runs can't be written to"):
        open_folder()


def test_a_folder_in_use_is_refused_and_names_the_process(open_folder, tmp_path):
    """The lock belongs to a process; here the two runs have a file description each in the same process."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("1234567890123456")         # the longer process id of an earlier launch
    open_folder("run")
    with pytest.raises(UserError) as used:
        open_folder("run")
    assert str(used.value) == (f"--run-dir run is in use by process {os.getpid()}, which is still training in it; end "
                               "that process first, or choose another folder")


def test_a_begun_run_refuses_other_weights_to_start_from(pool, tmp_path):
    """It would ignore them, and would rotate the checkpoints away that the user wanted to start from."""
    make_corpus(tmp_path)
    old, new = tmp_path / "old", tmp_path / "new"
    train_in_pool(pool, tmp_path, "--run-dir", old, "--train-iters", 2)
    load = ("--load", old, "--finetune")
    assert train_in_pool(pool, tmp_path, "--run-dir", new, *load, "--train-iters", 1).code == 0
    for flags in (("--run-dir", old, *load), ("--run-dir", new, "--no-finetune")):
        ended = train_in_pool(pool, tmp_path, *flags, "--train-iters", 3)
        assert (f"error: {' '.join(map(str, flags[:2]))} holds a run, which continues only from its own checkpoints; "
                "leave --load and --finetune out to continue it, or give another --run-dir to start") in ended.output


@pytest.fixture(autouse=True)
def alarm():
    """Ends the process, and pytest-xdist calls the test red, if a test hangs."""
    signal.alarm(600)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("read", [
    lambda path: from_command_line(["--config", path], 1), lambda path: generate(["--load", "x", "--prompts", path])])
def test_only_regular_files_of_a_limited_size_are_read(read, tmp_path, monkeypatch):
    """A file of settings and one of prompts stand for all, which the same function opens."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "huge").touch()
    os.truncate("huge", LIMIT + 1)                             # a hole: takes no space on the disk
    for path, words in (("pipe", "not a regular file"), ("/dev/zero", "not a regular file"),
                        ("huge", "more than 268,435,456"), ("nowhere", "No such file")):
        with pytest.raises((UserError, OSError), match=words) as error:
            read(path)
        sentence, _ = sentence_and_code(error.value)
        assert "Errno" not in sentence and path in sentence


# ---- written

def plant(what: str, path: Path):
    """Put a pipe there, or a link: to nowhere, or to a file or a folder that is precious."""
    if what == "pipe":
        os.mkfifo(path)
    else:
        theirs = path.parent / "folder"
        theirs.mkdir(exist_ok=True)
        (theirs / "file").write_text("precious")
        path.symlink_to(theirs / {"folder": "."}.get(what, what))


def unharmed(folder: Path) -> bool:
    """Return whether what the links in this folder lead to is as it was."""
    theirs = folder / "folder"
    return not theirs.exists() or {path.name: path.read_text() for path in theirs.iterdir()} == {"file": "precious"}


@pytest.mark.parametrize("what, name, says", [
    ("pipe", "lock", "not a regular file"), ("file", "lock", "Too many levels of symbolic links"),
    ("nowhere", "lock", "Too many levels of symbolic links"),
    ("folder", "checkpoints", "checkpoints is a symbolic link")])
def test_a_lock_or_checkpoints_elsewhere_are_refused(tmp_path, what, name, says):
    """--keep-last would delete the checkpoints of another run."""
    plant(what, tmp_path / name)
    if name != "lock":
        (tmp_path / "lock").touch()
    with pytest.raises(UserError, match=rf"can't be written to \({says}\); choose another"):
        open_run(Config(run_dir=str(tmp_path)).resolve(1))
    assert unharmed(tmp_path)


@pytest.mark.parametrize("what", ["pipe", "file", "nowhere", "folder"])
def test_a_run_replaces_pipes_and_links_and_never_writes_through_them(pool, tmp_path, what):
    needs("matplotlib")
    make_corpus(tmp_path)
    names = ["loss.svg", "trace-00000002.svg", "trace-00000002.json", "config.json", ".config.json",
             *["metrics.jsonl"] * (what in ("file", "nowhere")),
             "checkpoints/.step-00000002.unfinished", "checkpoints/.step-00000001.discarded"]
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "lock").touch()
    for name in names:
        plant(what, tmp_path / "run" / name)
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--train-iters", 2, "--trace", "2:2")
    assert ended.code == 0 and "warning" not in ended.output, ended.output
    assert unharmed(tmp_path / "run") and unharmed(tmp_path / "run" / "checkpoints")
    assert saved_steps(tmp_path / "run") == [2] and all((tmp_path / "run" / name).is_file() for name in names[:4])
