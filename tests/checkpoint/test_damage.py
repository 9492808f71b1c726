"""Damage is always found and named, and an older checkpoint is used instead. No checkpoint can run a program, lead to a
file outside its folder, or leave a value undefined."""

import io
import json
import math
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from nanodomino.checkpoint.export import export
from nanodomino.checkpoint.find_checkpoints import (checkpoints_of, find_checkpoint, newest_intact_checkpoint,
                                                    recorded_settings)
from nanodomino.checkpoint.index import tile
from nanodomino.checkpoint.load import open_weights, read_full_tensor
from nanodomino.checkpoint.manifest import file_digest, manifest_text, read_manifest, verify
from nanodomino.checkpoint.shards import Box, full_shapes
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
    "missing": lambda folder: (folder / "rank-00000.bin").unlink(),
    "truncated": lambda folder: os.truncate(folder / "rank-00000.bin", (folder / "rank-00000.bin").stat().st_size - 1),
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


@pytest.mark.parametrize("name", ["rank-00000.bin", "index.json", "manifest.json"])
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


@pytest.mark.parametrize("size", [0, 8, 10])
def test_a_file_cut_off_after_the_check_is_noticed(run_dir, size):
    """Otherwise the missing values would be those that the memory happens to hold."""
    folder = checkpoints_of(run_dir)[0]
    index, model = open_weights(folder)
    os.truncate(folder / "rank-00000.bin", size)
    with pytest.raises(UserError, match="rank-00000.bin does not hold what its index says"):
        for name, shape in full_shapes(model).items():
            read_full_tensor(f"weight.{name}", shape, index)


def forge(folder, name, data, **changes):
    """Replace a file of a checkpoint, and entries of its manifest, and correct the checksums."""
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


@pytest.mark.parametrize("name", ["index.json", "rank-00000.bin"])
def test_no_program_in_a_checkpoint_is_run(run_dir, tmp_path, name):
    """Its checksum is right. In a file of raw numbers, a program is read as numbers."""
    folder = checkpoints_of(run_dir)[0]
    forge(folder, name, pickle.dumps(Program(tmp_path / "it-ran")).ljust((folder / name).stat().st_size, b"\0"))
    if name == "index.json":
        with pytest.raises(UserError, match="index.json is not an index of tensors"):
            verify(folder)
    else:
        export(folder, tmp_path / "out.pt")
    assert not (tmp_path / "it-ran").exists()


# ---- what an index may say

BOX = "weight.layers.0.mlp.dense_4h_to_h.weight"


def change_boxes(change):
    """A function that changes the entry of BOX in an index: its "shape" and its "boxes", [file, start, offset, size]"""
    def changed(index):
        change(index[BOX], index[BOX]["boxes"])
    return changed


def with_five_dimensions(entry, boxes):
    """The boxes still tile the tensor. But checking takes 2^dimensions steps, so 40 dimensions would take forever."""
    entry["shape"] = [1, 1, 1, *entry["shape"]]
    for box in boxes:
        box[2:] = [0, 0, 0, *box[2]], [1, 1, 1, *box[3]]


def without_a_layer(index):
    for name in [name for name in index if ".layers.0." in name]:
        del index[name]


def last_byte(index):
    """Let the first part of BOX start at the last byte of its file."""
    first = index[BOX]["boxes"][0]
    first[1] = max(start + math.prod(size) * getattr(torch, entry["dtype"]).itemsize for entry in index.values()
                   for file, start, _, size in entry["boxes"] if file == first[0]) - 1


INDICES = [("an absolute file", change_boxes(lambda entry, boxes: boxes[0].__setitem__(0, "/dev/zero")),
            "refers to /dev/zero, which the manifest does not list"),
           ("a file outside", change_boxes(lambda entry, boxes: boxes[0].__setitem__(0, "../other/rank-00000.bin")),
            "refers to ../other/rank-00000.bin, which the manifest does not list"),
           ("after the end", change_boxes(lambda entry, boxes: boxes[-1].__setitem__(1, 10**9)), "after the end of"),
           ("before the start", change_boxes(lambda entry, boxes: boxes[0].__setitem__(1, -4)), "an impossible shape"),
           ("a gap", change_boxes(lambda entry, boxes: boxes.pop()), "do not cover each element exactly once"),
           ("two values", change_boxes(lambda entry, boxes: boxes.append(boxes[0])),
            "do not cover each element exactly once"),
           ("an empty part", change_boxes(lambda entry, boxes: boxes[0].__setitem__(3, [0, 0])), "an impossible shape"),
           ("a hundred thousand parts", change_boxes(lambda entry, boxes: boxes.extend(boxes[:1] * 10**5)),
            "because it describes .* bytes of tensors"),
           ("a larger tensor", change_boxes(lambda entry, boxes: entry.update(shape=[10**12, 64])),
            "do not cover each element exactly once"),
           ("another shape", change_boxes(lambda entry, boxes: entry.update(shape=[1, 16, 64])), "an impossible shape"),
           ("five dimensions", change_boxes(with_five_dimensions), "an impossible shape"),
           ("a missing tensor", lambda index: index.pop(BOX), None),
           ("a missing layer", without_a_layer, "layers, but its manifest says num_layers"),
           ("no tensor", lambda index: index.clear(), "holds 0 layers"),
           ("the last byte", last_byte, "after the end of"),
           ("a fraction", change_boxes(lambda entry, boxes: boxes[0].__setitem__(1, 0.5)), "an impossible shape"),
           ("true", change_boxes(lambda entry, boxes: boxes[0].__setitem__(1, True)), "an impossible shape"),
           ("a list for a file", change_boxes(lambda entry, boxes: boxes[0].__setitem__(0, [])), "not an index of"),
           ("a type of another kind", change_boxes(lambda entry, boxes: entry.update(dtype="int8")), "not an index"),
           ("a list for a tensor", lambda index: index.update({BOX: []}), "not an index of tensors"),
           ("a tensor without a dtype", lambda index: index[BOX].pop("dtype"), "not an index of tensors")]


@pytest.mark.parametrize("change, message", [row[1:] for row in INDICES], ids=[row[0] for row in INDICES])
def test_an_index_that_breaks_a_rule_is_refused(run_dir, tmp_path, change, message):
    """By every reader, and before it reads or allocates a tensor: its checksum is right."""
    folder = checkpoints_of(run_dir)[0]
    index = json.loads((folder / "index.json").read_text())
    change(index)
    forge(folder, "index.json", json.dumps(index).encode())
    for action in (verify, find_checkpoint, lambda folder: export(folder, tmp_path / "out.pt")):
        if message or action != verify:                        # a missing tensor is found when the model is known
            with pytest.raises(UserError, match=message or f"lacks {BOX} of shape"):
                action(folder)
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("settings, message", [
    (dict(num_layers=10**9), "manifest says num_layers 1000000000"), (dict(num_layers="4"), "says num_layers 4;"),
    (dict(hidden_size=10**6), "lacks weight.* of shape"), (dict(vocab_size=10**9), "lacks weight.* of shape"),
    (dict(num_attention_heads=0), "num-attention-heads"),
    (dict(warp_drive=True), "this version does not know")], ids=str)
def test_settings_that_do_not_belong_to_the_tensors_are_refused(run_dir, tmp_path, settings, message):
    """A billion layers would take hours and gigabytes before their absence is noticed."""
    folder = checkpoints_of(run_dir)[0]
    forge(folder, "index.json", (folder / "index.json").read_bytes(), **settings)
    for action in (find_checkpoint, lambda folder: export(folder, tmp_path / "out.pt")):
        with pytest.raises(UserError, match=message):
            action(folder)
    assert (recorded_settings(folder) is None) == ("num_layers" in settings)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 3)], ids=str)
def test_boxes_tile_a_tensor_if_they_cover_each_element_once(shape):
    """Random boxes, some of which stick out, and divisions of the tensor, intact or with a box moved or repeated."""
    generator, outcomes = random.Random(0), []
    for _ in range(400):
        boxes = [Box((0,) * len(shape), shape)]
        for _ in range(generator.randrange(5)):                # cut a random box in two
            offset, size = boxes.pop(generator.randrange(len(boxes)))
            dim = generator.randrange(len(shape))
            cut = generator.randrange(size[dim] + 1)
            for first, length in ((0, cut), (cut, size[dim] - cut)):
                boxes.append(Box((*offset[:dim], offset[dim] + first, *offset[dim + 1:]),
                                 (*size[:dim], length, *size[dim + 1:])))
        if generator.random() < 0.5:
            i = generator.randrange(len(boxes))
            boxes[i] = Box(tuple(generator.randrange(4) for _ in shape), boxes[i].size)
        times = torch.zeros([9] * len(shape), dtype=torch.int)
        for offset, size in boxes:
            times[tuple(slice(first, first + length) for first, length in zip(offset, size))] += 1
        expected = torch.zeros_like(times)
        expected[tuple(map(slice, shape))] = 1
        outcomes.append(torch.equal(times, expected))
        assert tile(boxes, shape) == outcomes[-1], boxes
    assert 100 < sum(outcomes) < 350


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
    with pytest.raises(UserError, match="must give value, good_steps and patience of the loss scale, but has .*; use"):
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
    with pytest.raises(PermissionError):
        newest_intact_checkpoint(tmp_path)
