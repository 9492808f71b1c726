"""Damage is always found and named, an older checkpoint is used instead, and no checkpoint can run a program."""

import io
import math
import os
import pickle
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from nanodomino.checkpoint.find_checkpoints import checkpoints_of, newest_intact_checkpoint
from nanodomino.checkpoint.manifest import file_digest, manifest_text, read_manifest, verify
from nanodomino.checkpoint.safe_load import SafeReader
from nanodomino.errors import UserError
from support.checkpoints import write_empty_checkpoint


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


DAMAGES = {
    "missing": lambda folder: (folder / "__0_0.distcp").unlink(),
    "truncated": lambda folder: os.truncate(folder / "__0_0.distcp", (folder / "__0_0.distcp").stat().st_size - 1),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "name of another step": lambda folder: folder.rename(folder.with_name("step-00000009"))}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(run_dir, damage):
    newest, previous = checkpoints_of(run_dir)
    DAMAGES[damage](newest)
    reports, (newest, _) = [], checkpoints_of(run_dir)
    assert newest_intact_checkpoint(run_dir, reports.append) == previous
    assert len(reports) == 1 and newest.name in reports[0] and "trying the previous checkpoint" in reports[0]
    assert "use another checkpoint" not in reports[0], "what to do is said once"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("problem, reason", [
    ("folder", "Is a directory"), ("link", "No such file or directory"), ("secret", "Permission denied"),
    ("bad disk", "Input/output error")])
def test_a_file_that_cannot_be_read_is_reported_and_the_previous_checkpoint_used(run_dir, monkeypatch, name, problem,
                                                                                 reason):
    """The last two problems are simulated: root may read any file, and this disk works."""
    newest, previous = checkpoints_of(run_dir)
    path, real_open = newest / name, open

    class BadDisk(io.FileIO):
        def read(self, *_):
            raise OSError(5, "Input/output error")

    def simulate(file, *args, **kwargs):
        if file != path:
            return real_open(file, *args, **kwargs)
        if problem == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return BadDisk(path, "r")

    if problem in ("folder", "link"):
        path.unlink()
        path.mkdir() if problem == "folder" else path.symlink_to("nowhere")
    else:
        monkeypatch.setattr("builtins.open", simulate)
        monkeypatch.setattr(io, "open", simulate)
    reports = []
    assert newest_intact_checkpoint(run_dir, reports.append) == previous
    (report,) = reports
    if path.is_file() or name == "manifest.json":
        assert name in report and "can't be read" in report and reason in report
    else:
        assert f"{path} is a folder, a device or a broken link, not a file" in report


WITNESS = Path(tempfile.gettempdir()) / f"nanodomino-{os.getpid()}-was-here"


class Evil:
    def __reduce__(self):
        return Path.touch, (WITNESS,)


@pytest.mark.parametrize("index", [pickle.dumps(Evil()), b"cos\nsystem\n(S'true'\ntR."], ids=["method", "os.system"])
def test_no_program_in_a_checkpoint_is_run(run_dir, index):
    """The index calls a function, and its checksum is right."""
    folder = checkpoints_of(run_dir)[0]
    (folder / ".metadata").write_bytes(index)
    manifest = read_manifest(folder)
    manifest["files"][".metadata"] = file_digest(folder / ".metadata")
    (folder / "manifest.json").write_text(manifest_text(manifest))
    verify(folder)
    with pytest.raises(UserError, match="index refers to"):
        SafeReader(folder).read_metadata()
    assert not WITNESS.exists()


# ---- what a manifest may say

@pytest.mark.parametrize("changes", [
    dict(value=0.0), dict(value=-1.0), dict(value=math.nan), dict(value=math.inf), dict(value=10**400), dict(value="8"),
    dict(good_steps=-1), dict(good_steps=1.5), dict(good_steps=True), dict(patience=None), dict(more=1)], ids=str)
def test_an_impossible_loss_scale_is_refused(tmp_path, changes):
    """Checkpoints of older versions, and of other dtypes than fp16, have none."""
    folder, valid = write_empty_checkpoint(tmp_path / "step-00000003", 3), dict(value=8.0, good_steps=3, patience=1)
    content = read_manifest(folder)
    assert content["loss_scale"] is None
    (folder / "manifest.json").write_text(manifest_text(content | dict(loss_scale=valid)))
    assert verify(folder)["loss_scale"] == valid
    (folder / "manifest.json").write_text(manifest_text(content | dict(loss_scale=valid | changes)))
    with pytest.raises(UserError, match="must give value, good_steps and patience of a loss scale, but has .*; use"):
        verify(folder)


@pytest.mark.parametrize("name", ["step", "adam_steps", "skipped_in_a_row"])
def test_impossible_counters_are_refused(tmp_path, name):
    """Checkpoints of older versions have no skipped_in_a_row, which means 0."""
    folder = write_empty_checkpoint(tmp_path / "step-00000003", 3)
    content = verify(folder)
    assert (content["step"], content["skipped_in_a_row"]) == (3, 0)
    for count, message in ((-1, "must be from 0 to"), (10**30, "must be from 0 to"), (True, "must be from 0 to"),
                           ("two", f"lacks {name}"), (1.5, f"lacks {name}")):
        (folder / "manifest.json").write_text(manifest_text(content | {name: count}))
        with pytest.raises(UserError, match=message):
            verify(folder)


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
    with pytest.raises(UserError, match="checkpoints can't be read .Permission denied.; fix that"):
        newest_intact_checkpoint(tmp_path)
