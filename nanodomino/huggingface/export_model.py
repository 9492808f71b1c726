"""Exports a checkpoint to a folder that Transformers can load, with one weight file in memory at a time."""

from pathlib import Path

import torch

from nanodomino.checkpoint.format import Index
from nanodomino.checkpoint.load import find_checkpoint, open_weights, read_box
from nanodomino.errors import counted, require
from nanodomino.files import read_json
from nanodomino.huggingface.convert import (GENERATION, INDEX, SPECIAL_TOKENS, TOKENIZER_FILES, WEIGHTS, copy_files,
                                            import_safetensors, new_folder, tokenizer_summary, write_json)
from nanodomino.huggingface.families import family_of, write_config
from nanodomino.huggingface.tensors import TensorMapping, element_count, map_tensors
from nanodomino.settings.config import Config
from nanodomino.settings.presets import DTYPES


def split_into_files(mappings: list[TensorMapping], dtype: torch.dtype, max_bytes: int) -> list[list[TensorMapping]]:
    """Return the mappings in one list per weight file. A file has at most max_bytes, or a single larger parameter."""
    files, space = [], 0
    for mapping in mappings:
        size = element_count([mapping]) * dtype.itemsize
        if size > space:
            files.append([])
            space = max_bytes
        files[-1].append(mapping)
        space -= size
    return files


def convert_to_hf(mapping: TensorMapping, index: Index, config: Config,
                  dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read one parameter, or one expert's part, and return {Hugging Face name: tensor}. Raises UserError if a value
    overflows `dtype`."""
    values, tensors = read_box(f"weight.{mapping.name}", mapping.shape, index, mapping.box).view(mapping.size), {}
    for name, part in zip(mapping.hf_shapes, mapping.conversion.to_hf(values, config)):
        tensors[name] = part.to(dtype).contiguous()
        largest, limit = float(part.abs().max()), torch.finfo(dtype).max
        require(not limit < largest < torch.inf, f"{name} has values up to {largest:g}, above the maximum {limit:g} of "
                f"{dtype}; export with --dtype bfloat16")
    return tensors


def export_model(folder: Path, out: Path, dtype_name: str | None = None, max_bytes=5 * 10**9) -> str:
    """Export the checkpoint in `folder` to `out`, and return a line that describes the result. Raises UserError.

    folder: a checkpoint or a run; dtype_name: a key of DTYPES, or None for the dtype of the run or of the imported
    model; max_bytes: the largest size of a weight file with several parameters.
    """
    package = import_safetensors()
    checkpoint = find_checkpoint(folder)
    index, model = open_weights(checkpoint)
    config, left_out = model.config.for_export()
    dtype_name = dtype_name or config.dtype
    dtype, family, values = DTYPES[dtype_name], family_of(config), write_config(config, dtype_name)
    mappings = map_tensors(config, family.modules)
    files = split_into_files(mappings, dtype, max_bytes)
    names = [WEIGHTS] if len(files) == 1 else [f"model-{number:05d}-of-{len(files):05d}.safetensors"
                                               for number in range(1, len(files) + 1)]
    with new_folder(out) as temporary:
        for name, mappings_of_file in zip(names, files):
            tensors = {}
            for mapping in mappings_of_file:
                tensors |= convert_to_hf(mapping, index, config, dtype)
            package.torch.save_file(tensors, temporary / name, metadata={"format": "pt"})
            (temporary / name).chmod(temporary.stat().st_mode & 0o666)         # safetensors lets only its owner read it
        if len(files) > 1:
            write_json(temporary / INDEX, dict(
                metadata=dict(total_size=element_count(mappings) * dtype.itemsize),
                weight_map={hf_name: name for name, mappings_of_file in zip(names, files)
                            for mapping in mappings_of_file for hf_name in mapping.hf_shapes}))
        imported = any((checkpoint / name).is_file() for name in TOKENIZER_FILES)       # else take the data folder's
        source = checkpoint if imported or not config.data_path else Path(config.data_path)
        copied = copy_files((*TOKENIZER_FILES, GENERATION), source, temporary)
        write_json(temporary / "config.json", values | special_tokens(temporary, source / "meta.json"))
    return (f"{out}: {family.architecture}, {counted(len(names), 'weight file')}, "
            f"{element_count(mappings):,} elements in {dtype_name}, {tokenizer_summary(copied)}{left_out}")


def special_tokens(folder: Path, meta: Path) -> dict:
    """Return the ids of the special tokens, {name: id}. An unknown id is None: if it were left out, Transformers
    would assume an id that this vocabulary may not have. The end-of-text in `meta`, the data's meta.json if there is
    one, is what generate uses, so it replaces another one, also in the generation_config.json of `folder`.
    """
    stored = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    old, end = stored.get("eos_token_id"), read_json(meta).get("end_of_text") if meta.is_file() else None
    if end is not None and end not in (old if isinstance(old, list) else [old]):
        stored |= dict(eos_token_id=end)
        write_json(folder / GENERATION, stored)
    return {name: stored.get(name) for name in SPECIAL_TOKENS}
