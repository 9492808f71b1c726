"""The folder of a run: found, made, locked and cleaned by rank 0, and the same folder for all ranks.

test_bad_input.py has the folders that are refused.
"""

import dataclasses
import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from support.jobs import TINY, make_corpus, needs_proc, wait_until
from support.train_in_pool import main_on_rank, metric_points, saved_steps, train_in_pool

import train
from nanodomino.comm.world import LaunchInfo
from nanodomino.config.config import Config
from nanodomino.errors import UserError
from nanodomino.run.command_line import from_command_line
from nanodomino.run.run_folder import check_shared_folder, lock_folder, numbered_folder, open_run


@pytest.fixture
def open_folder(tmp_path, monkeypatch):
    """open_folder(run_dir, ...): open_run() on rank 0, in tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nanodomino.run.run_folder.tolerate_closed_output", lambda *_: None)
    return lambda run_dir=None, **settings: open_run(Config(run_dir=run_dir, **settings).resolve(1), LaunchInfo())


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
def test_a_new_run_on_a_full_disk_is_refused_and_leaves_nothing_behind(open_folder, tmp_path):
    """An empty file can still be made there."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        (tmp_path / "ballast").write_bytes(bytes(60_000))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            for run_dir in (None, "mine/run"):
                with pytest.raises(UserError, match=r"can't be written to \(No space left on device\); choose another"):
                    open_folder(run_dir)
        assert [path.name for path in tmp_path.iterdir()] == ["ballast"]
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_what_a_killed_run_left_behind_is_deleted_at_the_next_start(open_folder, tmp_path):
    """Unfinished checkpoints may be large, and the next save may never come."""
    run = tmp_path / "run"
    for name in ("checkpoints/.step-00000005.unfinished", "checkpoints/.step-00000003.discarded"):
        (run / name).mkdir(parents=True)
        (run / name / "rank-00000.bin").write_text("half")
    (run / "lock").touch()
    (run / ".shared-abc").touch()
    (run / ".mine").touch()
    open_folder("run")
    assert sorted(path.name for path in run.iterdir()) == [".mine", "checkpoints", "lock"]
    assert not list((run / "checkpoints").iterdir())


def test_without_run_dir_the_next_free_number_is_taken(open_folder, tmp_path):
    """A link `runs` into nowhere (a disk that is not mounted) once made the search for a free number endless."""
    assert [open_folder().folder.as_posix() for _ in range(2)] == ["runs/nano-001", "runs/nano-002"]
    (tmp_path / "runs").rename(tmp_path / "old")
    (tmp_path / "runs").symlink_to(tmp_path / "not mounted")
    with pytest.raises(UserError, match="--run-dir runs can't be written to"):
        open_folder()
    (tmp_path / "runs").unlink()
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match="--run-dir runs is a file"):
        open_folder()


def test_a_restart_returns_to_the_folder_of_its_own_launch(tmp_path):
    """A launch that was killed before it made a folder must not continue the run of an earlier launch."""
    monday = numbered_folder(tmp_path, "nano", restarted=False, launch_id="monday")
    assert numbered_folder(tmp_path, "nano", restarted=True, launch_id="monday") == monday
    assert numbered_folder(tmp_path, "nano", restarted=True, launch_id="tuesday").name == "nano-002"


@pytest.mark.parametrize("given", ["none", "my-job"])
def test_two_launches_without_an_id_of_their_own_are_told_apart(monkeypatch, tmp_path, given):
    """torchrun names every launch "none" unless --rdzv-id names it, and one torchrun starts a launch and its restarts.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", given)
    folders = []
    for torchrun, restarted in ((100, False), (200, False), (100, True), (200, True), (300, True)):
        monkeypatch.setattr(os, "getppid", lambda: torchrun)
        run = open_run(Config().resolve(1), LaunchInfo(restarted=restarted))
        folders.append(run.folder.name[-1])
        os.close(run.lock)
    assert "".join(folders) == ("12123" if given == "none" else "12222")


def test_a_live_run_is_named_before_a_mistake_in_the_flags(tmp_path):
    """The layout that it remembers does not fit one process, but that is not what the user has to correct first."""
    record = Config(tensor_model_parallel_size=2, given=("tensor_model_parallel_size",)).resolve(2)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(record)))
    flags = ["--run-dir", str(tmp_path)]
    with pytest.raises(UserError, match="^world size 1 must equal") as free:
        from_command_line(flags, 1)
    (tmp_path / "lock").write_text("1234567890123456")         # the longer process id of an earlier launch
    lock = lock_folder(tmp_path)
    with pytest.raises(UserError) as used:
        from_command_line(flags, 1)
    os.close(lock)
    assert str(used.value) == (f"--run-dir {tmp_path} is in use by process {os.getpid()}, which is still training in "
                               f"it; end that process first, or choose another folder (another mistake: {free.value})")


def train_and_move(flags, moves):
    """Runs on each rank. moves: {step: (old name, new name)}; rank 0 renames the folder just before the step, once the
    last save is complete."""
    train_step = train.train_step

    def step(number, *args, **kwargs):
        if number in moves and dist.get_rank() == 0:
            wait_until(lambda: saved_steps(Path(moves[number][0])))
            os.rename(*moves[number])
        return train_step(number, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", step)
        return main_on_rank(flags, ())


def test_a_run_whose_folder_is_renamed_ends_before_it_saves_in_a_second_folder(pool, tmp_path):
    """All ranks end alike, and the renamed run continues. A folder that has its name back is no mistake."""
    make_corpus(tmp_path)
    old, new = str(tmp_path / "run"), str(tmp_path / "renamed")
    flags = [*TINY, "--seq-length", "12", "--data-path", str(tmp_path / "tokens"), "--train-iters", "6",
             "--save-interval", "2", "--run-dir"]
    sentence = f"--run-dir {old} was renamed, deleted or replaced while the run was training in it"
    for ended in pool.run(train_and_move, [*flags, old], {3: (old, new)}, world_size=2):
        assert ended.code is None and ended.error.startswith(sentence), ended
    assert not os.path.exists(old) and saved_steps(Path(new)) == [2]
    assert [step for step, _ in metric_points(Path(new), "loss")] == [1, 2, 3, 4]
    for ended in pool.run(train_and_move, [*flags, new], {3: (new, old), 4: (old, new)}, world_size=2):
        assert ended.code == 0, ended
    assert saved_steps(Path(new)) == [6, 4, 2] and len(metric_points(Path(new), "loss")) == 6


def test_a_begun_run_refuses_other_weights_to_start_from(pool, tmp_path):
    """It would ignore them, and would rotate the checkpoints away that the user wanted to start from. Repeating its own
    first flags is no mistake: a job's script does so."""
    make_corpus(tmp_path)
    old, new = tmp_path / "old", tmp_path / "new"
    train_in_pool(pool, tmp_path, "--run-dir", old, "--train-iters", 2, "--save-interval", 1)
    for load in (old, old / "checkpoints" / "step-00000001"):
        ended = train_in_pool(pool, tmp_path, "--run-dir", old, "--load", load, "--finetune", "--train-iters", 3)
        assert ended.error == (
            f"--run-dir {old} holds a run that has done 2 steps and continues only from its own checkpoints, not from "
            f"--load {load}; leave --load and --finetune out to continue it, or give another --run-dir to start a new "
            "run"), ended
    assert saved_steps(old) == [2, 1]
    for steps in (1, 2):
        ended = train_in_pool(pool, tmp_path, "--run-dir", new, "--load", old, "--finetune", "--train-iters", steps)
        assert ended.code == 0 and f"{steps} of {steps} steps done" in ended.output, ended
    ended = train_in_pool(pool, tmp_path, "--run-dir", new, "--no-finetune", "--train-iters", 3)
    assert "holds a run that has done 2 steps" in ended.error, ended


# ---- several hosts

def check_on_hosts(run_dir, full, elsewhere):
    """Runs on each rank. Ranks in `full` can make files but not fill them; for ranks in `elsewhere` the folder is on
    another disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() in full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        check_shared_folder(Path(run_dir) / "of another host" if dist.get_rank() in elsewhere else Path(run_dir))
        return ""
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("full, elsewhere, says", [
    ((), (), ""),
    ((1, 2), (), "the same folder on all hosts, but rank 1 (File too large), 2 (File too large) can't see a file that"),
    ((), (1,), "but rank 1 (No such file or directory) can't see a file that rank 0 wrote there, or can't write to")])
def test_a_folder_that_some_host_cannot_see_or_write_to_is_refused_by_all_ranks(pool, tmp_path, full, elsewhere, says):
    """At the start, not at the first checkpoint hours later; and no file stays there."""
    sentences = pool.run(check_on_hosts, str(tmp_path), full, elsewhere, world_size=3)
    assert all(says in sentence and bool(sentence) == bool(says) for sentence in sentences), sentences
    assert not list(tmp_path.iterdir())
