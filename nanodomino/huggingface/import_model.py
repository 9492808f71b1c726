"""Imports a Hugging Face folder as a checkpoint, with one tensor in memory at a time."""

import dataclasses
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import torch

from nanodomino.checkpoint.index import FORMAT, write_boxes
from nanodomino.checkpoint.manifest import step_of, write_manifest
from nanodomino.checkpoint.shards import LocalBox
from nanodomino.config.config import Config
from nanodomino.config.presets import DTYPES
from nanodomino.errors import require
from nanodomino.huggingface.families import Family, family_of, family_of_json, read_config
from nanodomino.huggingface.safetensors_files import (GENERATION, SPECIAL_TOKENS, STORED_DTYPES, TOKENIZER_FILES,
                                                      WEIGHTS, StoredTensor, copy_files, import_safetensors, new_folder,
                                                      read_json, stored_tensors, tokenizer_summary, write_json)
from nanodomino.huggingface.tensor_mapping import TensorMapping, element_count, map_tensors


def match_tensors(mappings: list[TensorMapping], stored: dict[str, StoredTensor], family: Family, config: Config,
                  folder: Path) -> dict[str, StoredTensor]:
    """Return {Hugging Face name: stored tensor} for all tensors of the model.

    Raises UserError if a tensor is missing, is unknown, or has the wrong shape or dtype.
    """
    needed = {name: tuple(shape) for mapping in mappings for name, shape in mapping.hf_shapes.items()}
    (embedding, *_), found = mappings[0].hf_shapes, {}
    for stored_name, tensor in stored.items():
        name = stored_name if stored_name.startswith((family.prefix, "lm_head.")) else family.prefix + stored_name
        if re.fullmatch(family.ignored_tensors, name):
            continue
        if name == "lm_head.weight" and config.tied:           # some writers store the tied matrix twice
            needed[name] = needed[embedding]
        require(name in needed and name not in found,
                f"{tensor.path} holds {stored_name[:80]}, which a {family.architecture} with this config.json does not "
                "have; import a model whose files belong together")
        require(tensor.shape == needed[name], f"{stored_name} in {tensor.path} has shape {tensor.shape}, but "
                f"config.json implies {needed[name]}; import a model whose files belong together")
        require(tensor.dtype_name in STORED_DTYPES, f"{stored_name} in {tensor.path} has type {tensor.dtype_name}, but "
                f"weights must be of type {', '.join(STORED_DTYPES)}; import a model that is not quantized")
        found[name] = tensor
    missing = [name for name in needed if name not in found]
    require(not missing, f"{folder} lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}, which a "
            f"{family.architecture} with this config.json has; download the folder again")
    copy = found.pop("lm_head.weight", None) if config.tied else None
    require(copy is None or torch.equal(copy.load(), found[embedding].load()),
            f"{folder} has tie_word_embeddings true, but its lm_head.weight differs from its {embedding}; set "
            "tie_word_embeddings to false in its config.json if the model has a separate head, else download it again")
    return found


def convert_from_hf(mapping: TensorMapping, found: dict[str, StoredTensor], config: Config,
                    dtype: torch.dtype) -> torch.Tensor:
    """Load the Hugging Face tensors of a mapping, and convert them to its box of the parameter."""
    parts = [found[name].load() for name in mapping.hf_shapes]
    return mapping.conversion.from_hf(parts, config).to(dtype).contiguous().view(mapping.box.size)


def full_boxes(mappings: list[TensorMapping], found: dict[str, StoredTensor], config: Config,
               dtype: torch.dtype) -> Iterator[LocalBox]:
    """Yield every parameter as one box, or as one box per expert, so that only one tensor is in memory at a time."""
    for mapping in mappings:
        values = convert_from_hf(mapping, found, config, dtype)
        yield LocalBox(f"weight.{mapping.name}", mapping.shape, mapping.box, values)


def import_model(folder: Path, output: Path) -> str:
    """Import the model in `folder` as the checkpoint `output`, and return a line that describes the result.

    Raises UserError.
    """
    import_safetensors()
    require(folder.is_dir() or not folder.exists(), f"{folder} is a file, not a folder; give the folder around it")
    require(folder.is_dir(), f"there is no folder {folder}; give one with config.json and {WEIGHTS}")
    require((folder / "config.json").is_file(), f"{folder} has no config.json; give the folder of a model")
    require(step_of(output) in (None, 0), f"--output {output} is a name for step {step_of(output)}, but an imported "
            "model is at step 0; choose another name")
    values = read_json(folder / "config.json")
    family = family_of_json(values, folder / "config.json")
    stored = stored_tensors(folder)
    config = read_config(values, folder / "config.json", most_layers=len(stored))
    mappings = map_tensors(config, family.modules)
    found = match_tensors(mappings, stored, family, config, folder)
    dtype = reduce(torch.promote_types, (STORED_DTYPES[tensor.dtype_name] for tensor in found.values()))
    (dtype_name,) = (name for name, candidate in DTYPES.items() if candidate == dtype)
    config = dataclasses.replace(config, dtype=dtype_name)
    wide = torch.promote_types(dtype, torch.float32)           # the dtype of a run's master weights
    with new_folder(output) as temporary:
        share = write_boxes(temporary / "rank-00000.bin", full_boxes(mappings, found, config, wide))
        copied = copy_files((*TOKENIZER_FILES, GENERATION), folder, temporary)
        special = {name: values[name] for name in SPECIAL_TOKENS if values.get(name) is not None}
        if GENERATION not in copied and special:               # a checkpoint has no other place for them
            write_json(temporary / GENERATION, special)
        write_manifest(temporary, dict(format=FORMAT, step=0, adam_steps=0, skipped_in_a_row=0, loss_scale=None,
                                       config=dataclasses.asdict(config)), [share], "import it again")
    exported_as, name = family_of(config).architecture, family.architecture
    if exported_as != name:
        name += f" (exported as {exported_as}, with equal logits)"
    return (f"{output}: {name}, {len(mappings)} tensors, {element_count(mappings):,} elements in "
            f"{dtype_name}, {tokenizer_summary(copied)}")
