"""Damage is always found and named, and an older checkpoint is used instead. No checkpoint can run a program or leave a
value undefined."""

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
from support.checkpoints import write_empty_checkpoint

from nanodomino.checkpoint.format import manifest_text, read_header, verify
from nanodomino.checkpoint.load import checkpoints_of, full_weights, newest_intact_checkpoint
from nanodomino.errors import UserError
from nanodomino.files import sha256


@pytest.fixture
def run_dir(saved, tmp_path):
    """A copy of the saved run, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "run"))


def test_a_hundred_flipped_bits_are_found(run_dir):
    """Anywhere in any file: in numbers, headers and the manifest."""
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


SHARD, MANIFEST = "rank-00000.safetensors", "manifest.json"
DAMAGES = {
    "missing": (replace(SHARD, lambda path: None), f"{SHARD} is damaged or can't be read (No such file or directory)"),
    "truncated": (lambda folder: os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1), f"{SHARD} is dama"),
    "a pipe": (replace(SHARD, os.mkfifo), f"{SHARD} is damaged or can't be read (not a regular file)"),
    "no manifest": (replace(MANIFEST, lambda path: None), f"{MANIFEST} is damaged or can't be read (No such file"),
    "empty manifest": (lambda folder: (folder / MANIFEST).write_text(""), f"{MANIFEST} is damaged or can't be read")}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(run_dir, damage):
    """Opening a pipe would wait for another program."""
    (newest, previous), (change, words) = checkpoints_of(run_dir), DAMAGES[damage]
    change(newest)
    reports = []
    assert newest_intact_checkpoint(run_dir, reports.append) == previous
    assert len(reports) == 1 and newest.name in reports[0] and words in reports[0]
    assert reports[0].endswith("; trying the previous checkpoint") and "use another checkpoint" not in reports[0]


def forge(folder, data=None, **changes):
    """Replace the file of rank 0 in a checkpoint, and settings in its manifest, and correct the checksums."""
    if data is not None:
        (folder / SHARD).write_bytes(data)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][SHARD] = sha256(folder / SHARD)
    manifest["config"] |= changes
    (folder / MANIFEST).write_text(manifest_text(manifest))


class Program:
    """A pickle that makes a file when it is loaded."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_program_in_a_checkpoint_is_run(run_dir, tmp_path):
    """Its checksum is right."""
    folder = checkpoints_of(run_dir)[0]
    forge(folder, pickle.dumps(Program(tmp_path / "it-ran")))
    with pytest.raises(UserError, match=f"{SHARD} is damaged or can't be read"):
        full_weights(folder)
    assert not (tmp_path / "it-ran").exists()


# ---- what the header of a file may say

BOX = "weight.layers.1.mlp.dense_4h_to_h.weight"               # rank 0 holds its first half, 16 x 32 in float64
HEADERS = {
    "a fraction": (dict(data_offsets=[0.5, 64.5]), "is damaged or can't be read"),
    "after the end": (dict(data_offsets=[10**9, 10**9 + 4096]), "is damaged or can't be read"),
    "a row of a terabyte": (dict(shape=[1, 10**12]), "is damaged or can't be read"),
    "an empty part": (dict(shape=[0, 0], data_offsets=[0, 0]), f"lacks elements of {BOX}"),
    "numbers of another kind": (dict(dtype="I64"), "is damaged or can't be read"),
    "no tensor": (None, f"lacks elements of {BOX}"),
    "a list for a tensor": ([], "is damaged or can't be read")}


@pytest.mark.parametrize("entry, message", HEADERS.values(), ids=HEADERS)
def test_a_header_that_breaks_a_rule_is_refused(run_dir, entry, message):
    """Its checksum is right, so only a program that means harm has written it. No value is undefined."""
    folder = checkpoints_of(run_dir)[0]
    data = (folder / SHARD).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    old = header.pop(BOX)
    text = json.dumps(header if entry is None else header | {BOX: old | entry if entry else entry}).encode()
    forge(folder, len(text).to_bytes(8, "little") + text + data[start:])
    with pytest.raises(UserError, match=message):
        full_weights(folder)


def test_an_endless_header_is_not_read(run_dir):
    """It would fill the memory of every rank."""
    folder = checkpoints_of(run_dir)[0]
    path = folder / SHARD
    path.write_bytes((1 << 39).to_bytes(8, "little"))
    os.truncate(path, 1 << 40)
    with pytest.raises(UserError, match=f"{SHARD} is damaged or can't be read"):
        read_header(path)


@pytest.mark.parametrize("settings, message", [
    (dict(num_layers=10**9), "at most 4096, but is 1000000000"), (dict(hidden_size=64), "lacks elements of weight")])
def test_settings_that_do_not_belong_to_the_tensors_are_refused(run_dir, settings, message):
    """A billion layers would take hours and gigabytes before their absence is noticed."""
    folder = checkpoints_of(run_dir)[0]
    forge(folder, **settings)
    with pytest.raises(UserError, match=message):
        full_weights(folder)


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
    assert newest_intact_checkpoint(tmp_path, last_step=10**8 - 1).name == "step-99999999"
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
