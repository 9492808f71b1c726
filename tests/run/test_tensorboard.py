"""TensorBoard shows each point of metrics.jsonl once, also after a restart, and never ends a run."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import fill_disk, make_corpus
from support.train_in_pool import metric_points, saved_steps, train_in_pool

import nanodomino.run.tensorboard
import train
from nanodomino.checkpoint.find_checkpoints import checkpoints_of, delete_checkpoint
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError
from nanodomino.run.command_line import from_command_line
from nanodomino.run.tensorboard import TensorBoardWriter


@pytest.fixture
def shown():
    """shown(folder) -> {name: [(step, value)]}, read by TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                 reason="needs tensorboard: pip install -r requirements-extra.txt")

    def shown(folder):
        accumulator = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0}).Reload()
        return {name: [(event.step, event.value) for event in accumulator.Scalars(name)]
                for name in accumulator.Tags()["scalars"]}

    return shown


def recorded(path: Path) -> dict:
    """{name: [(step, value)]} of a metrics.jsonl."""
    found = {}
    for line in map(json.loads, path.read_text().splitlines()):
        loads = {f"expert_load/{layer}/{expert}": load for layer, loads in line.pop("expert_load", {}).items()
                 for expert, load in enumerate(loads)}
        for name, value in (line | loads).items():
            if name not in ("step", "tokenizer") and value is not None:
                # it keeps fp32
                found.setdefault(name, []).append((line["step"], pytest.approx(float(value), rel=1e-6)))
    return found


def test_tensorboard_shows_every_number_of_metrics(pool, tmp_path, shown):
    """A skipped step is a 1; a value that is not finite, null in metrics.jsonl, is a gap. Each expert has a curve."""
    make_corpus(tmp_path)
    experts = ("--num-experts", 4, "--disable-bias-linear", "--ep", 2, "--tp", 1, "--log-interval", 1)
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--tensorboard-dir", tmp_path / "board",
                  "--train-iters", 5, "--eval-interval", 2, *experts, world_size=2, bad_steps=[3])
    assert ended.code == 0 and len(os.listdir(tmp_path / "board")) == 1, "one rank writes"
    expected = recorded(tmp_path / "run" / "metrics.jsonl")
    assert shown(tmp_path / "board") == expected
    assert {"loss", "skipped", "loss_scale", "valid_loss", "valid_bits_per_byte", "test_perplexity",
            "bigram_entropy", "busiest_expert", "expert_load/layers.1/3"} < expected.keys()
    assert [step for step, _ in expected["loss"]] == [1, 2, 4, 5] and expected["skipped"][2] == (3, 1.0)


def test_a_resumed_run_leaves_no_stale_and_no_double_points(pool, tmp_path, shown):
    """Resumed before steps already shown; then at its end, whose test loss becomes stale; then with nothing left to do.
    It remembers the folder, also when launched from elsewhere."""
    make_corpus(tmp_path)
    run, length = tmp_path / "run", ("--save-interval", 2, "--eval-interval", 2)
    train_in_pool(pool, tmp_path, "--run-dir", run, "--train-iters", 5, *length, "--tensorboard-dir",
          os.path.relpath(tmp_path / "board"))
    delete_checkpoint(checkpoints_of(run)[0])
    assert saved_steps(run) == [4, 2] and shown(tmp_path / "board")["test_loss"][0][0] == 5
    for iterations, test in ((8, 8), (10, 10), (10, 10)):
        train_in_pool(pool, tmp_path, "--run-dir", run, "--train-iters", iterations, "--lr", 0.001 * iterations)
        found = shown(tmp_path / "board")
        assert found == recorded(run / "metrics.jsonl")
        assert [step for step, _ in found["loss"]] == list(range(1, iterations + 1))
        assert [step for step, _ in found["test_loss"]] == [test]
    assert len(os.listdir(tmp_path / "board")) == 4


def test_points_are_on_disk_at_once(tmp_path, shown):
    """A kill a moment later loses nothing. An incomplete line waits for its rest; a damaged line is skipped."""
    path, said = tmp_path / "metrics.jsonl", []
    writer = TensorBoardWriter(tmp_path / "board", path, 0, said.append)
    with open(path, "ab", buffering=0) as metrics:
        for text, steps in ((b'{"step": 1, "loss": 1.0}\n', [1]), (b'{"step": 2, "lo', [1]),
                            (b'ss": 2.0}\nnothing\n', [1, 2]), (b'{"step": 3, "loss": 3.0}\n', [1, 2, 3])):
            metrics.write(text)
            writer.update()
            assert [step for step, _ in shown(tmp_path / "board").get("loss", [])] == steps
    assert not said


def test_points_that_could_not_be_written_are_written_later(tmp_path, shown, monkeypatch):
    """With one warning per failure. Also if SummaryWriter itself failed, perhaps after writing a part."""
    from torch.utils import tensorboard

    path, said, flush = tmp_path / "metrics.jsonl", [], tensorboard.SummaryWriter.flush
    writer = TensorBoardWriter(tmp_path / "board", path, 0, said.append)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    faults = {3: [(nanodomino.run.tensorboard, "check_writable", full)],
              4: [(nanodomino.run.tensorboard, "check_writable", full)],
              6: [(tensorboard.SummaryWriter, "flush", lambda writer: flush(writer) or full())],
              7: [(tensorboard, "SummaryWriter", full)]}
    with open(path, "ab", buffering=0) as metrics:
        for step in range(1, 10):
            metrics.write(b'{"step": %d, "loss": %d.0}\n' % (step, step))
            with monkeypatch.context() as patch:
                for fault in faults.get(step, ()):
                    patch.setattr(*fault)
                writer.update()
            assert len(said) == (step > 2) + (step > 5)
    assert shown(tmp_path / "board") == {"loss": [(step, step) for step in range(1, 10)]}
    assert "can't be written (No space left on device); training continues" in said[0]


def test_two_runs_that_share_a_folder_say_so_once(tmp_path):
    """The second at its start; the first at its next step. Starting a run again is no second run."""
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install -r requirements-extra.txt")
    said = {"first": [], "second": []}

    def writer(name):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
        return TensorBoardWriter(tmp_path / "board", tmp_path / name / "metrics.jsonl", 0, said[name].append)

    for _ in range(2):
        first = writer("first")
        first.update()
    assert not said["first"]
    second = writer("second")
    for each in (second, first, second, first):
        each.update()
    for name, lines in said.items():
        assert len(lines) == 1 and "also holds events.out" in lines[0]
        assert f", which {tmp_path / name} did not write" in lines[0]


@pytest.mark.parametrize("folder", ["file", "file/board", "/proc/board"])
def test_an_unwritable_folder_is_a_warning_and_training_is_unchanged(pool, tmp_path, shown, folder):
    make_corpus(tmp_path)
    (tmp_path / "file").touch()
    for name, flags in (("with", ("--tensorboard-dir", tmp_path / folder)), ("without", ())):
        ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / name, "--train-iters", 3, *flags)
        assert ended.code == 0 and ended.output.count("can't be written") == (name == "with"), ended.output
    assert metric_points(tmp_path / "with", "loss") == metric_points(tmp_path / "without", "loss")


@pytest.mark.exhaustive
def test_a_full_disk_loses_no_point(tmp_path, shown):
    disk, said = tmp_path / "disk", []
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        writer = TensorBoardWriter(disk / "board", tmp_path / "metrics.jsonl", 0, said.append)
        with open(tmp_path / "metrics.jsonl", "ab", buffering=0) as metrics:
            for step in range(1, 31):
                if step == 10:
                    fill_disk(disk / "ballast")
                if step == 20:
                    (disk / "ballast").unlink()
                metrics.write(b'{"step": %d, "loss": %d.0}\n' % (step, step))
                writer.update()
        assert len(said) == 1 and shown(disk / "board") == {"loss": [(step, step) for step in range(1, 31)]}
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_missing_package_is_found_on_every_rank_before_they_communicate(tmp_path, monkeypatch, rank):
    for name in [name for name in sys.modules if name.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.chdir(tmp_path)
    flags = ["--data-path", str(make_corpus(tmp_path)), "--device", "cpu"]
    monkeypatch.setattr(train, "start_world", lambda *_: pytest.fail("reached the group"))
    with pytest.raises(UserError,
                       match="--tensorboard-dir needs a package that can't be imported .*tensorboard.*; pip install -r "
                             "requirements-extra.txt"):
        train.main([*flags, "--tensorboard-dir", "board"], LaunchInfo(rank, 4, rank, 4, launched=True))
    assert not (tmp_path / "board").exists() and not (tmp_path / "runs").exists()


def test_the_folder_is_remembered_as_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert from_command_line(["--tensorboard-dir", "board"], 1).tensorboard_dir == str(tmp_path / "board")
