"""Saving copies nothing twice, makes no CUDA call, and leaves a complete checkpoint or none, even on a full disk. The
files are safetensors files, which the package of that name reads and writes too. The previous format is still read."""

import io
import json
import os
import shutil
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support import needs
from support.checkpoints import (DP2, ONE_RANK, TP2, TP2_DP2, config_for, make_saver, save_steps, train_from,
                                 write_empty_checkpoint)
from support.harness import build

from nanodomino.checkpoint import format as format_module, save as save_module
from nanodomino.checkpoint.format import (FORMAT_2, STORED_DTYPES, local_boxes, manifest_text, read_header,
                                          read_manifest, read_tensor, step_of, verify, write_tensors)
from nanodomino.checkpoint.load import checkpoints_of, full_weights
from nanodomino.checkpoint.save import range_to_save
from nanodomino.files import sha256


def memory_written(config, folder):
    """Return [(address, bytes)] of the memory that is written, and of the boxes in host memory."""
    (saver, model, save), written = make_saver(config, folder), []

    class Recorder(io.FileIO):
        def write(self, data):
            if not isinstance(data, bytes):                    # the header
                written.append((data.ctypes.data, data.nbytes))
            return super().write(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_module, "open_regular_file", Recorder)
        assert save() is None
    boxes = [box for (bucket, state), values in saver.copies.items()
             for box in local_boxes(model, bucket, state, range_to_save(bucket, saver.mesh)[0], values)]
    return written, [(values.data_ptr(), values.nbytes) for *_, values in boxes]


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

def save_with_a_full_disk(config, folder):
    """Save steps 1 to 5. The disk is full when rank 0 writes the last manifest. Return the failures."""
    (_, _, save), failures = make_saver(config, folder, keep_last=2), []

    def fail(path, *_, **__):
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    for step in range(1, 6):
        with pytest.MonkeyPatch.context() as patch:
            if step == 5 and torch.distributed.get_rank() == 0:
                patch.setattr("nanodomino.checkpoint.format.write_file", fail)
            failures.append(save(step))
    return failures


def test_only_a_complete_checkpoint_replaces_old_ones_and_a_full_disk_is_reported(pool, tmp_path):
    """What was written is deleted at once, or the disk would stay full; a user's own folders are never deleted.
    run/test_interrupted_runs.py has the disk of rank 1."""
    copies = ["step-00000000.bak", "step-00000001-best", "step-best"]
    for name in copies:
        write_empty_checkpoint(tmp_path / "checkpoints" / name, 1)
    for failures in pool.run(save_with_a_full_disk, config_for(*TP2), str(tmp_path), world_size=2):
        assert failures[:4] == [None] * 4
        assert "step 5 could not be written: rank 0: OSError: [Errno 28] No space left on device" in failures[4]
    assert [verify(folder)["step"] for folder in checkpoints_of(tmp_path)] == [4, 3]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        *copies, "step-00000003", "step-00000004"}


def observe_save(config, folder):
    """Save a checkpoint; return whether all of it was flushed and intact when it was renamed, and the failure."""
    (_, _, save), flushed, seen, rename, fsync = make_saver(config, folder), {}, [], os.rename, os.fsync

    def observed_fsync(descriptor):
        fsync(descriptor)
        flushed[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def observed_rename(old, new, *args, **kwargs):
        if Path(new).name == "step-00000001":
            seen.append(verify(Path(old))["step"])
            seen.append(all(flushed.get(path.stat().st_ino) == path.stat().st_size for path in Path(old).iterdir()))
        rename(old, new, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", observed_fsync)
        patch.setattr(os, "rename", observed_rename)
        return [save(1), *seen]


def test_a_checkpoint_is_renamed_when_all_of_it_is_on_the_disk(pool, tmp_path):
    """Otherwise a power cut could leave the name without the data."""
    assert pool.run(observe_save, config_for(*ONE_RANK), str(tmp_path), world_size=1) == [[None, 1, True]]


def save_on_a_bad_disk(config, folder):
    """Save step 1, then step 2, of which the disk changes a byte. Return the failures."""
    (_, _, save), write = make_saver(config, folder, keep_last=1), format_module.write_tensors

    def write_wrong(path, *arguments):
        digest = write(path, *arguments)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return digest

    failures = [save(1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format_module, "write_tensors", write_wrong)
        return [*failures, save(2)]


def test_the_only_checkpoint_is_not_deleted_for_one_that_holds_other_bytes(pool, tmp_path):
    """With --keep-last 1, the new checkpoint is read back before the old one is deleted."""
    ((first, second),) = pool.run(save_on_a_bad_disk, config_for(*ONE_RANK), str(tmp_path), world_size=1)
    assert first is None and "holds other bytes than were written to it" in second
    assert [verify(folder)["step"] for folder in checkpoints_of(tmp_path)] == [1]


# ---- in the background

def test_all_copies_of_a_gpu_are_one_pinned_buffer_that_is_not_rounded_up(monkeypatch):
    """torch's allocator of pinned memory would round each of the four up to a power of two."""
    pinned, buckets = [], [Mock(size=1027, own_grad=torch.zeros(1)),
                           Mock(size=5, own_grad=torch.zeros(1, dtype=torch.float64))]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Mock(cudaHostRegister=lambda *given: pinned.append(given)))
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(save_module, "range_to_save", lambda bucket, mesh: (0, bucket.size))
    copies = save_module.allocate_copies(
        Mock(buckets=buckets, states_of=lambda bucket: ("weight", "exp_avg")), Mock(device=torch.device("cuda")))
    ((start, size, _),) = pinned
    assert size == 2 * (1027 * 4 + 4) + 2 * 5 * 8 and len(copies) == 4
    for number, values in enumerate(copies.values()):
        values.fill_(number)
        assert start <= values.data_ptr() and values.data_ptr() + values.nbytes <= start + size
    assert [(len(values), *values.unique()) for values in copies.values()] == [(1027, 0), (1027, 1), (5, 2), (5, 3)]


def save_twice_on_a_slow_disk(config, folder):
    """Save weights that are all 1 as step 1, which is written only after a second, then weights that are all 2. Return
    the failure."""
    mesh, model, optimizer, _ = build(config)
    saver, write = save_module.Saver(Path(folder), mesh, keep_last=2), save_module.write_boxes

    def slow_write(path, boxes):
        time.sleep(1.0 if "step-00000001" in str(path) else 0.0)
        return write(path, boxes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "write_boxes", slow_write)
        for step in (1, 2):
            for bucket in optimizer.buckets:
                optimizer.own_state(bucket, "weight").fill_(step)
            saver.save(step, model, optimizer, config)
        saver.wait()
    return saver.failure()


def test_a_save_waits_until_the_previous_one_is_written(pool, tmp_path):
    """Otherwise step 2 would overwrite the host memory from which step 1 is still being written."""
    assert pool.run(save_twice_on_a_slow_disk, config_for(*ONE_RANK), str(tmp_path), world_size=1) == [None]
    held = {step_of(folder): {value for weight in full_weights(folder).values() for value in weight.unique().tolist()}
            for folder in checkpoints_of(tmp_path)}
    assert held == {1: {1.0}, 2: {2.0}}


# ---- which checkpoints are kept

@pytest.mark.parametrize("steps, keep_last, kept", [
    ([(25, 0)], 2, [25, 20]), ([(12, 0)], 1, [20, 15, 12]), ([(15, 0), (25, 0)], 3, [25, 20, 15]),
    ([(25, 0), (30, 1), (35, 2)], 2, [35, 30, 25, 20]), ([(30, 1), (35, 2), (40, 0)], 1, [40])], ids=str)
def test_old_checkpoints_are_deleted_in_order(pool, tmp_path, steps, keep_last, kept):
    """The run has checkpoints of steps 5 to 20. It may have gone back, because the latest were damaged; then the new
    one is not the first to go, and replaces the damaged one of its step. After skipped steps (the second numbers) none
    is deleted: the run may have diverged, and the user needs the last good checkpoint to start from."""
    for step in (5, 10, 15, 20):
        write_empty_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}", step)
    assert pool.run(save_steps, config_for(*ONE_RANK), str(tmp_path), steps, keep_last,
                    world_size=1) == [[None] * len(steps)]
    found = checkpoints_of(tmp_path)
    assert [step_of(folder) for folder in found] == kept
    assert {verify(folder)["step"] for folder in found if read_manifest(folder)["config"]} == {
        step for step, _ in steps if step in kept}


# ---- the format of the files

TENSORS = {f"{name} {i}": torch.randn(3, 5, generator=torch.Generator().manual_seed(i)).to(dtype)
           for i, (dtype, name) in enumerate(STORED_DTYPES.items())} | {"\u03c9": torch.tensor([float("nan"), -0.0])}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_package_reads_what_is_written_and_the_other_way_round(tmp_path):
    package = needs("safetensors.torch")
    digest = write_tensors(tmp_path / "ours", {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()},
                           iter(TENSORS.values()))
    assert digest == sha256(tmp_path / "ours")
    assert_same_bits(package.load_file(tmp_path / "ours"), TENSORS)
    package.save_file(TENSORS | {"mask": torch.ones(3, dtype=torch.bool)}, tmp_path / "theirs", {"format": "pt"})
    header = read_header(tmp_path / "theirs")
    assert header.pop("mask").dtype == "BOOL", "it is known to be there, but can't be read"
    assert_same_bits({name: read_tensor(stored) for name, stored in header.items()}, TENSORS)


def test_the_package_reads_the_file_of_each_rank(saved):
    """A name ends with the offset of the box in the full tensor, unless all of it is 0."""
    package = needs("safetensors.torch")
    (run_dir, weights, _), found = saved, {}
    files = sorted(checkpoints_of(run_dir)[0].glob("rank-*"))
    assert len(files) == 8
    for name, part in (item for path in files for item in package.load_file(path).items()):
        name, _, offset = name.partition("@")
        if name.startswith("weight."):
            whole = found.setdefault(name.removeprefix("weight."), torch.full_like(weights[name[7:]], torch.nan))
            starts = map(int, offset.split(",")) if offset else [0] * part.dim()
            whole[tuple(slice(start, start + size) for start, size in zip(starts, part.shape))] = part
    assert_same_bits(found, weights)


def as_format_2(folder: Path):
    """Give a checkpoint the previous format: the same numbers without headers, whose places are in index.json."""
    manifest, index = read_manifest(folder), {}
    for path in sorted(folder.glob("rank-*")):
        data_start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        raw = path.with_suffix(".bin")
        for stored_name, (_, dtype, size, start) in read_header(path).items():
            name, _, offset = stored_name.partition("@")
            offset = list(map(int, offset.split(","))) if offset else [0] * len(size)
            entry = index.setdefault(name, dict(dtype=str(dtype).removeprefix("torch."), shape=[], boxes=[]))
            entry["boxes"].append([raw.name, start - data_start, offset, size])
            entry["shape"] = [max(pair) for pair in zip(map(sum, zip(offset, size)), entry["shape"] or size)]
        raw.write_bytes(path.read_bytes()[data_start:])
        path.unlink()
    (folder / "index.json").write_text(json.dumps(index))
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
             for path in folder.iterdir() if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(manifest_text(manifest | dict(format=FORMAT_2, files=files)))


def test_a_checkpoint_of_the_previous_format_is_read_by_any_layout(pool, saved, tmp_path):
    """Its weights have the same bits, and another layout resumes from it as from the new one."""
    new = checkpoints_of(saved[0])[0]
    old = Path(shutil.copytree(new, tmp_path / new.name))
    as_format_2(old)
    verify(old)
    assert_same_bits(full_weights(old), full_weights(new))
    config, data = config_for(*DP2), saved[2]
    losses = [pool.run(train_from, config, None, data, 3, 4, str(folder), world_size=2)[0].losses
              for folder in (old, new)]
    assert losses[0] == losses[1]
