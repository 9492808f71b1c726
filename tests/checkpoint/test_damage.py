"""Damage is always found and named, and an older checkpoint is used instead. No checkpoint can run a program, lead to a
file outside its folder, or leave a value undefined."""

import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
from support.checkpoints import write_empty_checkpoint

from nanodomino.checkpoint.format import file_digest, manifest_text, step_of, verify
from nanodomino.checkpoint.load import (checkpoints_of, full_weights, newest_finite_checkpoint,
                                        newest_intact_checkpoint, open_weights)
from nanodomino.errors import UserError


@pytest.fixture
def run_dir(saved, tmp_path):
    """A copy of the saved run, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "run"))


def test_a_hundred_flipped_bits_are_found(run_dir):
    """Anywhere in any file, including the manifest and the index."""
    folder, generator = checkpoints_of(run_dir)[0], random.Random(0)
    verify(folder)
    files = sorted(folder.iterdir())
    for _ in range(100):
        path = generator.choice(files)
        intact = path.read_bytes()
        damaged = bytearray(intact)
        damaged[generator.randrange(len(intact))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=path.name):
            verify(folder)
        path.write_bytes(intact)


def replace(name, make):
    """A function that replaces a file of a checkpoint by what make(path) makes."""
    def changed(folder):
        (folder / name).unlink()
        make(folder / name)
    return changed


SHARD = "rank-00000.bin"
DAMAGES = {
    "missing": (replace(SHARD, lambda path: None), f"{SHARD} can't be read (No such file or directory)"),
    "truncated": (lambda folder: os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1), f"{SHARD} is dama"),
    "a folder": (replace(SHARD, Path.mkdir), f"{SHARD} is damaged: its size differs"),
    "a pipe": (replace("index.json", os.mkfifo), "index.json is damaged: its size"),
    "a broken link": (replace("index.json", lambda path: path.symlink_to("nowhere")), "index.json can't be read (No"),
    "no manifest": (replace("manifest.json", lambda path: None), "is not a complete checkpoint"),
    "a folder for a manifest": (replace("manifest.json", Path.mkdir), "its manifest.json can't be read"),
    "empty manifest": (lambda folder: (folder / "manifest.json").write_text(""), "its manifest.json can't be read"),
    "name of another step": (lambda folder: folder.rename(folder.with_name("step-00000009")), "rename the folder")}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(run_dir, damage):
    """Opening a pipe would wait for another program."""
    (newest, previous), (change, words) = checkpoints_of(run_dir), DAMAGES[damage]
    change(newest)
    reports, (newest, _) = [], checkpoints_of(run_dir)
    assert newest_intact_checkpoint(run_dir, reports.append) == previous
    assert len(reports) == 1 and newest.name in reports[0] and words in reports[0]
    assert reports[0].endswith("; trying the previous checkpoint") and "use another checkpoint" not in reports[0]


def test_a_checkpoint_whose_weights_are_not_finite_is_not_the_last_good_one(run_dir):
    newest, previous = checkpoints_of(run_dir)
    last = step_of(newest)
    assert [newest_finite_checkpoint(run_dir, step) for step in (last, last - 1)] == [newest, previous]
    forge(newest, SHARD, b"\xff" * (newest / SHARD).stat().st_size)        # as floats, these bytes are NaN
    assert [newest_finite_checkpoint(run_dir, step) for step in (last, 0)] == [previous, None]


def test_a_file_on_a_bad_disk_is_reported_by_name(run_dir, monkeypatch):
    """The error of a read, other than that of an open, does not name the file."""
    class Fails:
        def update(self, data):
            raise OSError(5, "Input/output error")

    sha256 = hashlib.sha256                                    # called with the data for the manifest itself
    monkeypatch.setattr(hashlib, "sha256", lambda *data: sha256(*data) if data else Fails())
    with pytest.raises(UserError, match=r"\S+/step-00000003/\S+ can't be read \(Input/output error\)"):
        verify(checkpoints_of(run_dir)[0])


def test_a_file_cut_off_after_the_check_is_noticed(run_dir):
    """Otherwise the missing values would be those that the memory happens to hold."""
    folder = checkpoints_of(run_dir)[0]
    verify(folder)
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size // 2)
    with pytest.raises(UserError, match=f"{SHARD} is too short for what index.json says"):
        full_weights(folder)


def forge(folder, name, data, **changes):
    """Replace a file of a checkpoint, and settings in its manifest, and correct the checksums."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = file_digest(folder / name)
    manifest["config"] |= changes
    (folder / "manifest.json").write_text(manifest_text(manifest))


class Program:
    """A pickle that makes a file when it is loaded."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["index.json", SHARD])
def test_no_program_in_a_checkpoint_is_run(run_dir, tmp_path, name):
    """Its checksum is right. In a file of raw numbers, a program is read as numbers."""
    folder = checkpoints_of(run_dir)[0]
    forge(folder, name, pickle.dumps(Program(tmp_path / "it-ran")).ljust((folder / name).stat().st_size, b"\0"))
    if name == "index.json":
        with pytest.raises(UserError, match="index.json is not an index of tensors"):
            open_weights(folder)
    else:
        full_weights(folder)
    assert not (tmp_path / "it-ran").exists()


def test_no_file_outside_the_folder_is_read(run_dir):
    """A pipe stands for it: opening it would wait."""
    folder = checkpoints_of(run_dir)[0]
    os.mkfifo(folder.parent / "pipe")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("../pipe", "/dev/zero", "..", ""):
        forged = manifest | dict(files=manifest["files"] | {name: dict(size=0, sha256="")})
        (folder / "manifest.json").write_text(manifest_text(forged))
        with pytest.raises(UserError, match=f"must list files beside it, but has '{name}'"):
            verify(folder)


# ---- what an index may say

BOX = "weight.layers.0.mlp.dense_4h_to_h.weight"


def box_with(*values, which=0):
    """A function that replaces the values of a stored part of BOX, [file, start, offset, size]; None: keep."""
    def changed(index):
        box = index[BOX]["boxes"][which]
        box[:] = [old if new is None else new for old, new in zip(box, values, strict=True)]
    return changed


INDICES = {
    "a file outside": (box_with("../other/rank-00000.bin", None, None, None), f"places a part of {BOX}"),
    "a list for a file": (box_with([], None, None, None), "is not an index of tensors"),
    "a fraction": (box_with(None, 0.5, None, None), f"places a part of {BOX}"),
    "before the start": (box_with(None, -4, None, None), f"places a part of {BOX}"),
    "after the end": (box_with(None, 10**9, None, None, which=-1), "is too short for what index.json says"),
    "a row of a terabyte": (lambda index: index[BOX].update(boxes=[["rank-00000.bin", 0, [0, 0], [16, 10**12]]]),
                            "is too short for what index.json says"),
    "an empty part": (box_with(None, None, None, [0, 0]), f"does not list each element of {BOX} once"),
    "one dimension too few": (box_with(None, None, [0], [16]), f"places a part of {BOX}"),
    "a gap": (lambda index: index[BOX]["boxes"].pop(), f"does not list each element of {BOX} once"),
    "two values": (lambda index: index[BOX]["boxes"].append(index[BOX]["boxes"][0]), "does not list each element"),
    "another shape": (lambda index: index[BOX].update(shape=[16, 65]), f"lacks {BOX} of shape"),
    "a missing tensor": (lambda index: index.pop(BOX), f"lacks {BOX} of shape"),
    "no tensor": (lambda index: index.clear(), "lacks weight.embedding"),
    "a type of another kind": (lambda index: index[BOX].update(dtype="int8"), "is not an index of tensors"),
    "a list for a tensor": (lambda index: index.update({BOX: []}), "is not an index of tensors")}


@pytest.mark.parametrize("change, message", INDICES.values(), ids=INDICES)
def test_an_index_that_breaks_a_rule_is_refused(run_dir, change, message):
    """Its checksum is right, so only a program that means harm has written it. No value is undefined."""
    folder = checkpoints_of(run_dir)[0]
    index = json.loads((folder / "index.json").read_text())
    change(index)
    forge(folder, "index.json", json.dumps(index).encode())
    with pytest.raises(UserError, match=message):
        full_weights(folder)


def test_an_endless_index_is_not_read(run_dir):
    """It would fill the memory of every rank."""
    folder = checkpoints_of(run_dir)[0]
    os.truncate(folder / "index.json", 1 << 40)
    with pytest.raises(OSError, match="bytes, more than"):
        open_weights(folder)


@pytest.mark.parametrize("settings, message", [
    (dict(num_layers=10**9), "at most 4096, but is 1000000000"), (dict(num_layers="4"), "of type int"),
    (dict(hidden_size=10**6), "lacks weight.* of shape"), (dict(num_attention_heads=0), "num-attention-heads"),
    (dict(warp_drive=True), "this version does not know")], ids=str)
def test_settings_that_do_not_belong_to_the_tensors_are_refused(run_dir, settings, message):
    """A billion layers would take hours and gigabytes before their absence is noticed."""
    folder = checkpoints_of(run_dir)[0]
    forge(folder, "index.json", (folder / "index.json").read_bytes(), **settings)
    with pytest.raises(UserError, match=message):
        open_weights(folder)


# ---- names

def test_only_names_that_save_gives_are_found(tmp_path):
    """The newest has the largest number, of any number of digits. Unfinished folders and a user's copies are not found,
    but a copy can be verified under a name of its own."""
    names = ["step-00000007", "step-99999999", "step-100000000"]
    others = ["step-best", "step-00000007-best", "step-00000007.bak", "step-0000000007", "step-7", "step-00000007\n",
              "step-0000000\u0667", ".step-00000008.unfinished"]
    for name in [*names, *others]:
        write_empty_checkpoint(tmp_path / "checkpoints" / name, int(name[5:]) if name in names else 7)
    assert [folder.name for folder in checkpoints_of(tmp_path)] == names[::-1]
    assert newest_intact_checkpoint(tmp_path).name == "step-100000000"
    assert verify(tmp_path / "checkpoints" / "step-best")["step"] == 7


def test_an_unreadable_folder_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    """The run would start again from nothing. (Simulated: root may read any folder.)"""
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    write_empty_checkpoint(tmp_path / "checkpoints" / "step-00000009", 9)
    monkeypatch.setattr(Path, "iterdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        newest_intact_checkpoint(tmp_path)
