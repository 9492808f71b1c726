"""TensorBoard shows the points of metrics.jsonl, also after a restart, and never ends a run."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.jobs import make_corpus
from support.train_in_pool import saved_steps, train_in_pool

import train
from nanodomino.checkpoint.find_checkpoints import checkpoints_of, delete_checkpoint
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError
from nanodomino.run.tensorboard import TensorBoard


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
        for name, value in line.items():
            if name not in ("step", "tokenizer", "expert_load") and value is not None:
                # it keeps fp32
                found.setdefault(name, []).append((line["step"], pytest.approx(float(value), rel=1e-6)))
    return found


def test_tensorboard_shows_every_number_of_metrics(pool, tmp_path, shown):
    """A skipped step is a 1; a value that is not finite, null in metrics.jsonl, is a gap."""
    make_corpus(tmp_path)
    experts = ("--num-experts", 4, "--disable-bias-linear", "--ep", 2, "--tp", 1, "--log-interval", 1)
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--tensorboard-dir", tmp_path / "board",
                  "--train-iters", 5, "--eval-interval", 2, *experts, world_size=2, bad_steps=[3])
    assert ended.code == 0 and len(os.listdir(tmp_path / "board")) == 1, "one rank writes"
    expected = recorded(tmp_path / "run" / "metrics.jsonl")
    assert shown(tmp_path / "board") == expected
    assert {"loss", "skipped", "loss_scale", "valid_loss", "valid_bits_per_byte", "test_perplexity",
            "bigram_entropy", "busiest_expert"} < expected.keys()
    assert [step for step, _ in expected["loss"]] == [1, 2, 4, 5] and expected["skipped"][2] == (3, 1.0)


def test_a_resumed_run_hides_the_points_of_steps_that_it_redoes(pool, tmp_path, shown):
    """It does not remember the folder: a run from elsewhere must not make folders here."""
    make_corpus(tmp_path)
    run, board = tmp_path / "run", ("--tensorboard-dir", tmp_path / "board")
    flags = ("--run-dir", run, "--save-interval", 2, "--eval-interval", 2, "--train-iters")
    train_in_pool(pool, tmp_path, *flags, 5, *board)
    delete_checkpoint(checkpoints_of(run)[0])
    train_in_pool(pool, tmp_path, *flags, 8, *board)
    found = shown(tmp_path / "board")
    assert found == recorded(run / "metrics.jsonl") and [step for step, _ in found["loss"]] == list(range(1, 9))
    shutil.rmtree(tmp_path / "board")
    train_in_pool(pool, tmp_path, *flags, 9)
    assert saved_steps(run)[0] == 9 and not (tmp_path / "board").exists()


def test_points_are_on_disk_at_once_and_a_failure_is_one_warning(tmp_path, shown, monkeypatch):
    said, board = [], TensorBoard(str(tmp_path / "board"), 0, lambda line: said.append(line))
    for step in (1, 2, 3, 4):
        board.add(step, dict(loss=step, mfu=None))
        assert shown(tmp_path / "board") == {"loss": [(step, step) for step in range(1, min(step, 2) + 1)]}
        if step == 2:
            monkeypatch.setattr(board.writer, "add_scalar", lambda *_: os.stat("/nowhere"))
    assert said == [f"warning: --tensorboard-dir {tmp_path / 'board'} can't be written (No such file or directory); "
                    "training continues, and metrics.jsonl records it"]


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
