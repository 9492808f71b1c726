"""Imports a Hugging Face folder as a checkpoint, with one tensor in memory at a time."""

import dataclasses
import re
from functools import partial, reduce
from pathlib import Path

import torch

from nanodomino.checkpoint.format import FORMAT, LocalBox, write_boxes, write_manifest
from nanodomino.errors import require
from nanodomino.files import read_json
from nanodomino.huggingface.convert import (GENERATION, SPECIAL_TOKENS, STORED_DTYPES, TOKENIZER_FILES, copy_files,
                                            import_safetensors, new_folder, open_weight_files, tokenizer_summary,
                                            write_json)
from nanodomino.huggingface.families import Family, family_of_json, read_config
from nanodomino.huggingface.tensors import TensorMapping, element_count, map_tensors
from nanodomino.settings.config import Config
from nanodomino.settings.presets import DTYPES


def match_tensors(mappings: list[TensorMapping], family: Family, config: Config, folder: Path) -> tuple[dict, set]:
    """Return {Hugging Face name: function that loads this tensor} for all tensors of the model, and the names of their
    dtypes. Raises UserError if a tensor is missing, is unknown, or has the wrong shape or dtype."""
    needed = {name: list(shape) for mapping in mappings for name, shape in mapping.hf_shapes.items()}
    (embedding, *_), found, dtypes = mappings[0].hf_shapes, {}, set()
    for stored_name, file in open_weight_files(folder).items():
        shape, dtype = file.get_slice(stored_name).get_shape(), file.get_slice(stored_name).get_dtype()
        name = stored_name if stored_name.startswith((family.prefix, "lm_head.")) else family.prefix + stored_name
        if re.fullmatch(family.ignored_tensors, name):
            continue
        if name == "lm_head.weight" and config.tied:           # some writers store the tied matrix twice
            needed[name] = needed[embedding]
        require(name in needed and name not in found,
                f"{folder} holds {stored_name[:80]}, which a {family.architecture} with this config.json does not "
                "have; import a model whose files belong together")
        require(shape == needed[name], f"{stored_name} in {folder} has shape {shape}, but config.json implies "
                f"{needed[name]}; import a model whose files belong together")
        require(dtype in STORED_DTYPES, f"{stored_name} in {folder} has type {dtype}, but weights must be of type "
                f"{', '.join(STORED_DTYPES)}; import a model that is not quantized")
        found[name] = partial(file.get_tensor, stored_name)
        dtypes.add(dtype)
    missing = [name for name in needed if name not in found]
    require(not missing, f"{folder} lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}, which a "
            f"{family.architecture} with this config.json has; download the folder again")
    copy = found.pop("lm_head.weight", None) if config.tied else None
    require(copy is None or torch.equal(copy(), found[embedding]()),
            f"{folder} has tie_word_embeddings true, but its lm_head.weight differs from its {embedding}; set "
            "tie_word_embeddings to false in its config.json if the model has a separate head, else download it again")
    return found, dtypes


def convert_from_hf(mapping: TensorMapping, found: dict, config: Config, dtype: torch.dtype) -> torch.Tensor:
    """Load the Hugging Face tensors of a mapping, and convert them to its box of the parameter."""
    parts = [found[name]() for name in mapping.hf_shapes]
    return mapping.conversion.from_hf(parts, config).to(dtype).contiguous().view(mapping.box.size)


def import_model(folder: Path, output: Path) -> str:
    """Import the model in `folder` as the checkpoint `output`, and return a line that describes the result.

    Raises UserError.
    """
    import_safetensors()
    values = read_json(folder / "config.json")
    family = family_of_json(values, folder / "config.json")
    config = read_config(values, folder / "config.json")
    mappings = map_tensors(config, family.modules)
    found, dtypes = match_tensors(mappings, family, config, folder)
    dtype = reduce(torch.promote_types, (STORED_DTYPES[name] for name in dtypes))
    (dtype_name,) = (name for name, candidate in DTYPES.items() if candidate == dtype)
    config = dataclasses.replace(config, dtype=dtype_name)
    wide = torch.promote_types(dtype, torch.float32)           # the dtype of a run's master weights
    with new_folder(output) as temporary:
        share = write_boxes(temporary / "rank-00000.bin", (     # a generator: only one tensor is in memory at a time
            LocalBox(f"weight.{one.name}", one.shape, one.box, convert_from_hf(one, found, config, wide))
            for one in mappings))
        copied = copy_files((*TOKENIZER_FILES, GENERATION), folder, temporary)
        special = {name: values[name] for name in SPECIAL_TOKENS if values.get(name) is not None}
        if GENERATION not in copied and special:               # a checkpoint has no other place for these ids
            write_json(temporary / GENERATION, special)
        write_manifest(temporary, dict(format=FORMAT, step=0, adam_steps=0, skipped_in_a_row=0, loss_scale=None,
                                       config=dataclasses.asdict(config)), [share], "import it again")
    return (f"{output}: {family.architecture}, {len(mappings)} tensors, {element_count(mappings):,} elements in "
            f"{dtype_name}, {tokenizer_summary(copied)}")
