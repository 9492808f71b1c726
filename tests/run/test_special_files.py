"""A named pipe, a device or a huge file in place of a small file ends in one sentence; it never hangs."""

import os
import signal
from pathlib import Path

import pytest

from nanodomino.checkpoint.find_checkpoints import recorded_settings
from nanodomino.comm.world import LaunchInfo
from nanodomino.config.config import Config
from nanodomino.corpus.tokenizer import read_gpt2_files
from nanodomino.errors import UserError
from nanodomino.files import LIMIT
from nanodomino.generate.__main__ import command_line as generate
from nanodomino.huggingface.safetensors_files import read_json
from nanodomino.plot.__main__ import main as plot
from nanodomino.run.command_line import from_command_line
from nanodomino.run.run_folder import open_run
from nanodomino.timeline.__main__ import main as timeline

READERS = {"--config": lambda path: from_command_line(["--config", path], 1),
           "a prompt": lambda path: generate(["--load", "x", "--prompt", f"FILE:{path}"]),
           "--prompts": lambda path: generate(["--load", "x", "--prompts", path]),
           "plot": lambda path: plot([path, "--output", "out.svg"]),
           "timeline": lambda path: timeline([path, "--output", "out.svg"]),
           "a model's config.json": lambda path: read_json(Path(path)),
           "--vocab-file": lambda path: read_gpt2_files(path, path)}


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
        if (path, read) != ("huge", READERS["plot"]):          # it reads a metrics.jsonl line by line
            with pytest.raises(UserError, match=words) as error:
                read(path)
            assert "Errno" not in str(error.value) and path in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_pipe_in_the_folder_of_a_run_is_refused(name, tmp_path):
    for kept in {"config.json", "metrics.jsonl"} - {name}:
        (tmp_path / kept).write_text("{}")
    os.mkfifo(tmp_path / name)
    assert recorded_settings(tmp_path) in (None, {})
    with pytest.raises(UserError, match=f"holds a {name} that is not a regular file; remove it"):
        open_run(Config(run_dir=str(tmp_path)).resolve(1), LaunchInfo())
