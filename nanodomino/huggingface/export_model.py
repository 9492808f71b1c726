import os
from pathlib import Path

import torch

from nanodomino.checkpoint.folders import find_checkpoint
from nanodomino.checkpoint.load import read_single_process
from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.checkpoint.safe_load import SafeReader
from nanodomino.config.config import Config
from nanodomino.config.presets import DTYPES
from nanodomino.config.records import from_record
from nanodomino.errors import require
from nanodomino.huggingface.families import Placed, family_of, tensors_of, write_config
from nanodomino.huggingface.safetensors_files import (GENERATION, INDEX, SPECIAL_TOKENS, TOKENIZER_FILES, WEIGHTS,
                                                      copy_along, count, made_whole, read_json, safetensors, told_of,
                                                      write_json)


# ---- export

class ReadsIndexOnce(SafeReader):
    """For many reads of one checkpoint."""
    index = None

    def read_metadata(self, *args, **kwargs):
        self.index = self.index or super().read_metadata(*args, **kwargs)
        return self.index


def cut_into_files(placed: list[Placed], dtype: torch.dtype, most: int) -> list[list[Placed]]:
    """Runs of tensors of at most so many bytes; what is larger by itself is a run of its own."""
    files, size = [[]], 0
    for one in placed:
        size += count([one]) * dtype.itemsize
        if files[-1] and size > most:
            files.append([])
            size = count([one]) * dtype.itemsize
        files[-1].append(one)
    return files


def split(one: Placed, reader: ReadsIndexOnce, config: Config, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the family has of one of our tensors, by its names. Raises UserError."""
    about = reader.read_metadata().state_dict_metadata.get(f"weight.{one.name}")
    require(about and about.size == one.shape,
            f"{reader.path} lacks {one.name} of shape {tuple(one.shape)}; use another checkpoint")
    whole = torch.empty(one.shape, dtype=about.properties.dtype)
    read_single_process({f"weight.{one.name}": whole}, reader)
    parts = {}
    for name, part in zip(one.theirs, one.packing.split(whole, config)):
        parts[name] = part.to(dtype).contiguous()
        largest, limit = float(part.abs().max()), torch.finfo(dtype).max
        require(not limit < largest < torch.inf,
                f"{name} has numbers up to {largest:g}, above the {limit:g} of {dtype}; export with --dtype bfloat16")
    return parts


def export_model(folder: Path, out: Path, dtype_name: str | None, most: int) -> str:
    """Write a folder that Transformers loads; says what it is. Raises UserError."""
    package = safetensors()
    checkpoint = find_checkpoint(folder)
    config = from_record(read_manifest(checkpoint)["config"], checkpoint)
    dtype_name = dtype_name or config.dtype
    dtype, family, values = DTYPES[dtype_name], family_of(config), write_config(config, dtype_name)
    placed, reader = tensors_of(config, family), ReadsIndexOnce(checkpoint)
    files = cut_into_files(placed, dtype, most)
    names = [WEIGHTS] if len(files) == 1 else [f"model-{number:05d}-of-{len(files):05d}.safetensors"
                                               for number in range(1, len(files) + 1)]
    with made_whole(out) as temporary:
        for name, run_of_tensors in zip(names, files):
            tensors = {}
            for one in run_of_tensors:
                tensors |= split(one, reader, config, dtype)
            package.torch.save_file(tensors, temporary / name, metadata={"format": "pt"})
            seal_file(temporary / name)
        if len(files) > 1:
            write_json(temporary / INDEX, dict(
                metadata=dict(total_size=count(placed) * dtype.itemsize),
                weight_map={theirs: name for name, some in zip(names, files) for one in some for theirs in one.theirs}))
        carried = copy_along((*TOKENIZER_FILES, GENERATION), tokenizer_folder(checkpoint, config), temporary)
        write_json(temporary / "config.json", values | special_tokens(temporary, config))
    files_of_weights = f"{len(names)} file{'s' * (len(names) > 1)} of weights"
    return (f"{out}: {family.architecture}, {files_of_weights}, {count(placed):,} numbers in {dtype_name}, "
            f"{told_of(carried)}")


def seal_file(path: Path):
    """What the package has written, flushed, and for the eyes of all who may look into the folder, not its owner's."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    path.chmod(path.parent.stat().st_mode & 0o666)


def tokenizer_folder(checkpoint: Path, config: Config) -> Path:
    """Where the tokenizer's files may lie: in what was imported; of a run, with its text."""
    with_it = any((checkpoint / name).is_file() for name in TOKENIZER_FILES)
    return checkpoint if with_it or not config.data_path else Path(config.data_path)


def special_tokens(folder: Path, config: Config) -> dict:
    """Their ids. Those that Transformers would else assume need not be in this vocabulary."""
    known = dict.fromkeys(SPECIAL_TOKENS)
    data = Path(config.data_path or "") / "meta.json"
    if (folder / GENERATION).is_file():
        known |= {name: value for name, value in read_json(folder / GENERATION).items() if name in SPECIAL_TOKENS}
    elif config.data_path and data.is_file():
        known["eos_token_id"] = read_json(data).get("end_of_text")
    return known
