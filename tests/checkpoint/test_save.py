"""Saving copies nothing twice, makes no CUDA call, and leaves a complete checkpoint or none, even on a full disk."""

import io
import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from nanodomino.checkpoint import index
from nanodomino.checkpoint.export import export
from nanodomino.checkpoint.find_checkpoints import checkpoints_of, newest_intact_checkpoint
from nanodomino.checkpoint.manifest import read_manifest, verify
from nanodomino.checkpoint.shards import local_boxes
from nanodomino.errors import UserError
from support.checkpoints import LAYOUTS, ONE_RANK, TP2_DP2, config_for, make_saver, save_steps, write_empty_checkpoint


def memory_written(config, folder):
    """Return [(address, bytes)] of the memory that is written, and of the boxes in host memory."""
    (saver, model, save), written = make_saver(config, folder), []

    class Recorder(io.FileIO):
        def write(self, data):
            written.append((data.ctypes.data, data.nbytes))
            return super().write(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "open_regular_file", Recorder)
        assert save() is None
    return written, [(box.values.data_ptr(), box.values.nbytes) for box in local_boxes(model, saver.copies)]


def test_host_copies_are_written_without_another_copy(pool, tmp_path):
    for written, boxes in pool.run(memory_written, config_for(*TP2_DP2), str(tmp_path), world_size=4):
        assert written == boxes and boxes


def save_with_gpus(config, folder):
    """Save on a machine that claims to have GPUs; return the CUDA calls of other threads, and the failure."""
    (_, _, save), training, called = make_saver(config, folder), threading.current_thread(), []

    def checked(name, function):
        def call(*args, **kwargs):
            if threading.current_thread() is not training:
                called.append(name)
                raise AssertionError(f"the writing thread called {name}")
            return function(*args, **kwargs)
        return call

    with pytest.MonkeyPatch.context() as patch:
        functions = [(owner, name) for owner in (torch.cuda, torch.accelerator) for name in vars(owner)
                     if callable(getattr(owner, name))]
        for owner, name in [*functions, *((torch.Tensor, name) for name in ("is_pinned", "pin_memory", "cuda"))]:
            patch.setattr(owner, name, checked(f"{owner.__name__}.{name}", getattr(owner, name)))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return called, save()


def test_the_writing_thread_makes_no_cuda_call(pool, tmp_path):
    """It would wait for training's kernels, and every rank would allocate memory of GPU 0."""
    assert pool.run(save_with_gpus, config_for(*TP2_DP2), str(tmp_path), world_size=4) == [([], None)] * 4
    verify(checkpoints_of(tmp_path)[0])


# ---- complete or absent

def save_with_a_full_disk(config, folder, last):
    """Save steps 1 .. last; while the last is being written, the disk of rank 1 is full. Return the failures."""
    (_, _, save), failures = make_saver(config, folder, keep_last=2), []

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in range(1, last + 1):
        with pytest.MonkeyPatch.context() as patch:
            if step == last and torch.distributed.get_rank() == 1:
                patch.setattr("nanodomino.checkpoint.save.write_boxes", full)
            failures.append(save(step))
    return failures


def test_only_a_complete_checkpoint_replaces_old_ones_and_a_full_disk_is_reported(pool, tmp_path):
    """What was written is deleted at once, or the disk would stay full; a user's own folders are never deleted."""
    copies = ["step-00000000.bak", "step-00000001-best", "step-best"]
    for name in copies:
        write_empty_checkpoint(tmp_path / "checkpoints" / name, 1)
    for failures in pool.run(save_with_a_full_disk, config_for(*LAYOUTS[6]), str(tmp_path), 5, world_size=4):
        assert failures[:4] == [None] * 4 and "rank 1" in failures[4] and "No space left on device" in failures[4]
    assert [verify(folder)["step"] for folder in checkpoints_of(tmp_path)] == [4, 3]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        *copies, "step-00000003", "step-00000004"}


class Disk:
    """A disk with so many free bytes, for files opened below a folder. As on a real disk, a write() stores what still
    fits, and only the next one fails."""

    def __init__(self, folder, free):
        self.folder, self.free, self.real_open = str(folder), free, io.open

    def open(self, path, mode="r", buffering=-1, *args, **kwargs):
        if not str(path).startswith(self.folder) or "r" in mode:
            return self.real_open(path, mode, buffering, *args, **kwargs)
        disk = self

        class File(io.FileIO):
            def write(self, data):
                fits = memoryview(data).cast("B")[:disk.free]
                if len(data) and not len(fits):
                    raise OSError(28, "No space left on device")
                disk.free -= len(fits)
                return super().write(fits)

        file = File(path, mode.strip("bt"))
        buffered = file if buffering == 0 else io.BufferedWriter(file)
        return buffered if "b" in mode else io.TextIOWrapper(buffered)


def save_on_small_disks(config, folder):
    """After a checkpoint of step 1, save step 2 on disks with more and more space, the last one exactly enough.
    Returns [(free bytes, failure, newest intact checkpoint, all checkpoints)]."""
    folder = Path(folder)
    (_, _, save), results = make_saver(config, folder), []
    assert save(1) is None
    data, index, manifest = ((folder / "checkpoints" / "step-00000001" / name).stat().st_size
                             for name in ("rank-00000.bin", "index.json", "manifest.json"))
    both, total = data + index, data + index + manifest
    for free in (0, 1, data // 2, data - 1, data, both - 1, both, total - manifest // 2, total - 1, total):
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(folder, free)
            for module in ("builtins", "io"):
                patch.setattr(f"{module}.open", disk.open)
            failure = save(2)
        results.append((free, failure, newest_intact_checkpoint(folder), checkpoints_of(folder)))
    return results


def test_a_disk_with_too_little_space_keeps_the_previous_checkpoint_and_no_partial_one(pool, tmp_path):
    """Whether it is full in the tensors, the index or the manifest, in the middle or at the last byte."""
    ((*full, enough),) = pool.run(save_on_small_disks, config_for(*ONE_RANK), str(tmp_path), world_size=1)
    first, second = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    for free, failure, newest, checkpoints in full:
        assert failure and "No space left on device" in failure, f"{free} bytes free"
        assert (newest, checkpoints) == (first, [first]), f"{free} bytes free"
    assert enough[1:] == (None, second, [second])


def observe_save(config, folder):
    """Save a checkpoint; return what was true when it was renamed, and afterwards."""
    (_, _, save), flushed, seen = make_saver(config, folder), {}, {}
    rename, fsync = os.rename, os.fsync

    def state(path):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def observed_fsync(descriptor):
        fsync(descriptor)
        inode, *rest = state(descriptor)
        flushed[inode] = rest

    def observed_rename(old, new, *args, **kwargs):
        old, new = Path(old), Path(new)
        if new.name == "step-00000001":
            seen["step"] = verify(old)["step"]
            seen["files"] = {path.name: state(path) for path in old.iterdir()}
            seen["flushed"] = all(flushed.get(inode) == rest for inode, *rest in map(state, [old, *old.iterdir()]))
            flushed.clear()
        rename(old, new, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", observed_fsync)
        patch.setattr(os, "rename", observed_rename)
        failure = save(1)
    final = Path(folder) / "checkpoints" / "step-00000001"
    unchanged = seen.pop("files", None) == {path.name: state(path) for path in final.iterdir()}
    return seen | {"unchanged": unchanged, "name flushed": os.stat(final.parent).st_ino in flushed, "failure": failure}


def test_a_checkpoint_is_renamed_when_all_of_it_is_on_the_disk_and_never_changed_afterwards(pool, tmp_path):
    """Otherwise a power cut could leave the name without the manifest, or the manifest without the data."""
    (seen,) = pool.run(observe_save, config_for(*ONE_RANK), str(tmp_path), world_size=1)
    assert seen == {"step": 1, "flushed": True, "unchanged": True, "name flushed": True, "failure": None}


# ---- which checkpoints are kept

@pytest.mark.parametrize("resumed_from, steps, keep_last, kept", [
    (10, [25], 2, [25, 20, 15, 10]), (10, [25, 30], 2, [30, 25]), (10, [12], 1, [20, 15, 12]),
    (10, [12], 3, [20, 15, 12, 10, 5]), (5, [10, 15, 20], 2, [20, 15]), (10, [15, 25], 3, [25, 20, 15, 10]),
    (10, [20], 2, [20, 15, 10])], ids=str)
def test_damaged_checkpoints_do_not_count_as_kept(pool, tmp_path, resumed_from, steps, keep_last, kept):
    """The run has checkpoints of steps 5 to 20, and those after `resumed_from` are damaged: if they counted, one more
    damaged checkpoint could lose the run. Saving the step of a damaged checkpoint replaces it."""
    for step in (5, 10, 15, 20):
        write_empty_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}", step)
    failures = pool.run(save_steps, config_for(*ONE_RANK), str(tmp_path), [(step, 0) for step in steps], keep_last,
                        resumed_from, world_size=1)
    assert failures == [[None] * len(steps)]
    found = checkpoints_of(tmp_path)
    assert [int(folder.name[5:]) for folder in found] == kept
    assert {verify(folder)["step"] for folder in found if read_manifest(folder)["config"]} == {*steps} & {*kept}


def test_a_checkpoint_after_skipped_steps_deletes_no_older_one(pool, tmp_path):
    """A diverged run skips step after step; the user needs the last good checkpoint to start from."""
    diverged = [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]
    for steps, kept in (diverged, [5, 4, 3, 2, 1]), ([*diverged, (6, 0)], [6, 5]):
        folder = tmp_path / str(len(steps))
        pool.run(save_steps, config_for(*ONE_RANK), str(folder), steps, 2, world_size=1)
        assert [int(checkpoint.name[5:]) for checkpoint in checkpoints_of(folder)] == kept


# ---- export

@pytest.mark.parametrize("large", [0, 100_000])
def test_an_export_on_a_full_disk_leaves_no_file(saved, tmp_path, monkeypatch, large):
    """A limit on file sizes stands in for a full disk. For tensors larger than a buffer, torch raises its own error."""
    folder, limit, save = checkpoints_of(saved[0])[0], resource.getrlimit(resource.RLIMIT_FSIZE), torch.save
    monkeypatch.setattr(torch, "save", lambda tensors, file: save({"x": torch.ones(large)} if large else tensors, file))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        with pytest.raises(UserError, match=r"new.pt can't be written \(File too large\); choose another file"):
            export(folder, tmp_path / "new.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not os.listdir(tmp_path)


def test_an_export_overwrites_nothing(saved, tmp_path):
    """Not even the file that a link leads to. But it can write to a device, such as /dev/stdout."""
    folder = checkpoints_of(saved[0])[0]
    (tmp_path / "metrics.jsonl").write_text("last week's")
    (tmp_path / "link.pt").symlink_to("metrics.jsonl")
    for name in ("metrics.jsonl", "link.pt"):
        with pytest.raises(UserError, match=f"{name} already exists, and nothing is overwritten; choose another name"):
            export(folder, tmp_path / name)
    assert (tmp_path / "metrics.jsonl").read_text() == "last week's" and len(os.listdir(tmp_path)) == 2
    assert export(folder, Path("/dev/null")).keys() == saved[1].keys()
