"""A live run deletes old checkpoints while other commands read them."""

import contextlib
import io
from unittest import mock

import pytest
import torch.distributed as dist
from support.runs import TINY, main_on_rank, make_corpus, metric_points, train_in_pool

import nanodomino.generate.__main__ as generate
from nanodomino.checkpoint.find_checkpoints import (checkpoints_of, delete_checkpoint, newest_intact_checkpoint,
                                                    with_checkpoint)
from nanodomino.checkpoint.manifest import verify
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError
from nanodomino.run import session
from support.checkpoints import write_empty_checkpoint


@pytest.fixture
def rotate(tmp_path):
    """rotate(step): what a run with --keep-last 1 does; returns the new checkpoint, which holds no model."""
    def rotate(step):
        write_empty_checkpoint(new := tmp_path / "checkpoints" / f"step-{step:08d}", step)
        for old in checkpoints_of(tmp_path)[1:]:
            delete_checkpoint(old)
        return new

    return rotate


def test_a_reader_whose_checkpoint_is_deleted_takes_the_newest(tmp_path, rotate, capsys):
    """But not if it was asked for this checkpoint, and not because of another error."""
    first, used = rotate(1), []

    def read(checkpoint):
        used.append(checkpoint)
        if len(used) == 1:
            rotate(2)
        return (checkpoint / "manifest.json").read_text()

    second, text = with_checkpoint(tmp_path, read)
    assert used == [first, second] and second.name == "step-00000002" and '"step": 2' in text
    assert capsys.readouterr().out == f"the run has meanwhile deleted {first}; taking its newest checkpoint\n"
    with pytest.raises(FileNotFoundError):
        with_checkpoint(used[1], lambda checkpoint: rotate(3) and read(checkpoint))
    with pytest.raises(UserError, match="mine"):
        with_checkpoint(tmp_path, lambda checkpoint: (_ for _ in ()).throw(UserError("mine")))


def main_while_its_checkpoint_is_deleted(command: str, flags: list[str]) -> tuple[int, str]:
    """Return (exit code, stdout) of main() on this rank of the pool. Step 3 is deleted before the ranks read it."""
    module, name = (session, "restore") if command == "train" else (generate, "load_weights")
    load, screen = getattr(module, name), io.TextIOWrapper(io.BytesIO())

    def load_later(folder, *others, **more):
        if dist.get_rank() == 0 and folder.name == "step-00000003":
            delete_checkpoint(folder)
        return load(folder, *others, **more)

    with mock.patch.object(module, name, load_later):
        if command == "train":
            ended = main_on_rank(flags, ())
            return ended.code, ended.output
        place = LaunchInfo(dist.get_rank(), 2, dist.get_rank(), 2, launched=True)
        with (mock.patch.object(generate, "start_world", lambda *_: None), contextlib.redirect_stdout(screen),
              mock.patch.object(generate.signal, "signal", lambda *_: None)):
            code = generate.main(flags, place)
        screen.seek(0)
        return code, screen.read()


@pytest.mark.parametrize("command", ["train", "generate"])
def test_both_ranks_load_the_newest_checkpoint_if_theirs_is_deleted(pool, tmp_path, command):
    """Even if one of them has already read its part of the deleted one."""
    make_corpus(tmp_path)
    assert train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--train-iters", 3, "--save-interval", 1,
                         world_size=2).code == 0
    flags = dict(train=[*TINY, *"--seq-length 12 --data-path tokens --run-dir next --train-iters 4".split()],
                 generate="--max-tokens 3 --temperature 0 --device cpu".split())[command]
    flags = [str(tmp_path / flag) if flag in ("tokens", "next") else flag for flag in flags]
    for code, output in pool.run(main_while_its_checkpoint_is_deleted, command,
                                 [*flags, "--load", str(tmp_path / "run")], world_size=2):
        assert code == 0 and f"has meanwhile deleted {tmp_path}/run/checkpoints/step-00000003; taking" in output
    if command == "train":
        assert [step for step, _ in metric_points(tmp_path / "next", "loss")] == [3, 4]


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_not_called_damaged(tmp_path, rotate, monkeypatch):
    verified = [rotate(1)]

    def verify_while_it_is_deleted(folder):
        if len(verified) == 1:
            verified.append(rotate(2))
        return verify(folder)

    monkeypatch.setattr("nanodomino.checkpoint.find_checkpoints.verify", verify_while_it_is_deleted)
    assert newest_intact_checkpoint(tmp_path, pytest.fail) == verified[1]
