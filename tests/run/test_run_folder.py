"""The folder of a run: found, made, locked and cleaned by rank 0, and the same folder for all ranks.

test_bad_input.py has the folders that are refused.
"""

import resource
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from support.jobs import needs_proc

from nanodomino.comm.world import LaunchInfo
from nanodomino.config.config import Config
from nanodomino.errors import UserError
from nanodomino.run.run_folder import check_shared_folder, numbered_folder, open_run


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


def test_a_lock_that_is_a_symbolic_link_is_not_written_through(open_folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"--run-dir run can't be written to \(Too many levels of symbolic links\)"):
        open_folder("run")
    assert (tmp_path / "precious").read_text() == "precious"


def test_what_a_killed_run_left_behind_is_deleted_at_the_next_start(open_folder, tmp_path):
    """Unfinished checkpoints may be large, and the next save may never come."""
    run = tmp_path / "run"
    for name in ("checkpoints/.step-00000005.unfinished", "checkpoints/.step-00000003.discarded"):
        (run / name).mkdir(parents=True)
        (run / name / "__0_0.distcp").write_text("half")
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
    ((1, 2), (), "can't be written to by rank 1 (File too large), 2 (File too large); choose a folder that all hosts"),
    ((), (1, 2), "is not the same folder on all hosts: rank 1, 2 can't see a file that rank 0 wrote there; choose")])
def test_a_folder_that_some_host_cannot_see_or_write_to_is_refused_by_all_ranks(pool, tmp_path, full, elsewhere, says):
    """At the start, not at the first checkpoint hours later; and no file stays there."""
    sentences = pool.run(check_on_hosts, str(tmp_path), full, elsewhere, world_size=3)
    assert all(says in sentence and bool(sentence) == bool(says) for sentence in sentences), sentences
    assert not list(tmp_path.iterdir())
