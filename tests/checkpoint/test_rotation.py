"""A live run deletes old checkpoints while other commands read them."""

import pytest

from nanodomino.checkpoint.find_checkpoints import (checkpoints_of, delete_checkpoint, newest_intact_checkpoint,
                                                    with_checkpoint)
from nanodomino.checkpoint.manifest import verify
from nanodomino.errors import UserError
from support.checkpoints import write_empty_checkpoint


@pytest.fixture
def rotate(tmp_path, monkeypatch):
    """rotate(step): what a run with --keep-last 1 does; returns the new checkpoint, which holds no model."""
    monkeypatch.setattr("nanodomino.checkpoint.find_checkpoints.open_weights", lambda checkpoint: None)

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

    assert '"step": 2' in with_checkpoint(tmp_path, read)
    assert used == [first, first.with_name("step-00000002")]
    assert capsys.readouterr().out == f"the run has meanwhile deleted {first}; taking its newest checkpoint\n"
    with pytest.raises(FileNotFoundError):
        with_checkpoint(used[1], lambda checkpoint: rotate(3) and read(checkpoint))
    with pytest.raises(UserError, match="mine"):
        with_checkpoint(tmp_path, lambda checkpoint: (_ for _ in ()).throw(UserError("mine")))


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_not_called_damaged(tmp_path, rotate, monkeypatch):
    verified = [rotate(1)]

    def verify_while_it_is_deleted(folder):
        if len(verified) == 1:
            verified.append(rotate(2))
        return verify(folder)

    monkeypatch.setattr("nanodomino.checkpoint.find_checkpoints.verify", verify_while_it_is_deleted)
    assert newest_intact_checkpoint(tmp_path, pytest.fail) == verified[1]
