"""A pipe, a device, a link or a huge file in place of a file of ours ends in one sentence or is replaced. Nothing
hangs, and nothing is written through a link."""

import os
import signal
from pathlib import Path

import pytest
from support.runs import make_corpus, saved_steps, train_in_pool

from nanodomino.errors import UserError, sentence_and_code
from nanodomino.files import LIMIT, read_json
from nanodomino.generate.__main__ import command_line as generate
from nanodomino.run.session import from_command_line
from nanodomino.run.report import remove_outdated
from nanodomino.run.folder import open_run
from nanodomino.settings.config import Config

READERS = {"--config": lambda path: from_command_line(["--config", path], 1),
           "--prompts": lambda path: generate(["--load", "x", "--prompts", path]),
           "a model's config.json": lambda path: read_json(Path(path))}


@pytest.fixture(autouse=True)
def alarm():
    """Ends a test that hangs."""
    def end(*_):
        raise TimeoutError
    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_only_regular_files_of_a_limited_size_are_read(read, tmp_path, monkeypatch):
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

def link_to_precious(path: Path):
    (path.parent / "precious").write_text("precious")
    path.symlink_to("precious")


def link_to_nowhere(path: Path):
    path.symlink_to("nowhere")


def link_to_a_folder(path: Path):
    (path.parent / "theirs").mkdir(exist_ok=True)
    (path.parent / "theirs" / "precious").touch()
    path.symlink_to("theirs")


def unharmed(folder: Path):
    """What the links in the folder point to is as it was."""
    assert not (folder / "nowhere").exists()
    assert not (folder / "precious").exists() or (folder / "precious").read_text() == "precious"
    assert not (folder / "theirs").exists() or [path.name for path in (folder / "theirs").iterdir()] == ["precious"]


@pytest.mark.parametrize("plant", [os.mkfifo, link_to_precious, link_to_nowhere])
def test_files_that_a_run_extends_are_refused_if_they_are_pipes_or_links(tmp_path, plant):
    for name in ("lock", "metrics.jsonl"):
        plant(tmp_path / name)
    with pytest.raises(UserError, match=r"can't be written to \(.*not a regular file\)"):
        open_run(Config(run_dir=str(tmp_path)).resolve(1))
    with pytest.raises(OSError, match="not a regular file"):
        remove_outdated(tmp_path / "metrics.jsonl", 0, 9)
    unharmed(tmp_path)


def test_checkpoints_that_are_a_link_to_those_of_another_run_are_refused(tmp_path):
    """--keep-last would delete them."""
    left = tmp_path / "other" / ".step-00000001.unfinished"
    left.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match=r"run can't be written to \(checkpoints is a symbolic link\); choose another"):
        open_run(Config(run_dir=str(tmp_path / "run")).resolve(1))
    assert left.exists()


@pytest.mark.parametrize("plant", [os.mkfifo, link_to_precious, link_to_nowhere, link_to_a_folder])
def test_a_run_replaces_pipes_and_links_and_never_writes_through_them(pool, tmp_path, plant):
    make_corpus(tmp_path)
    names = ["loss.svg", "trace-00000002.svg", "trace-00000002.json", "config.json", ".config.json",
             "checkpoints/.step-00000002.unfinished", "checkpoints/.step-00000001.discarded"]
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "lock").touch()
    for name in names:
        plant(tmp_path / "run" / name)
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--train-iters", 2, "--trace", "2:2")
    assert ended.code == 0 and "warning" not in ended.output, ended.output
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        unharmed(folder)
    assert saved_steps(tmp_path / "run") == [2] and all((tmp_path / "run" / name).is_file() for name in names[:4])
