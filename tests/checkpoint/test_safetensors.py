"""The files of a checkpoint are safetensors files, which the package of that name reads too, and so are those that it
writes. Files of the previous format are still read."""

import json
import shutil
from pathlib import Path

import torch
from support import needs
from support.checkpoints import DP2, config_for, train_from

from nanodomino.checkpoint.format import (FORMAT_2, STORED_DTYPES, manifest_text, read_header, read_manifest,
                                          read_tensor, verify, write_tensors)
from nanodomino.checkpoint.load import checkpoints_of, full_weights
from nanodomino.files import sha256

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
