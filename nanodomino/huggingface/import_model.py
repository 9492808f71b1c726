import dataclasses
import re
from functools import partial, reduce
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nanodomino.checkpoint.manifest import FORMAT, step_of, write_manifest
from nanodomino.checkpoint.save import write_single_process
from nanodomino.config.config import Config
from nanodomino.config.presets import DTYPES
from nanodomino.errors import require
from nanodomino.huggingface.families import Family, Placed, family_of_record, read_config, tensors_of
from nanodomino.huggingface.safetensors_files import (GENERATION, SPECIAL_TOKENS, STORED_DTYPES, TOKENIZER_FILES,
                                                      WEIGHTS, Stored, copy_along, count, made_whole, read_json,
                                                      safetensors, stored_tensors, told_of, write_json)


def match(placed: list[Placed], stored: dict[str, Stored], family: Family, config: Config,
          folder: Path) -> dict[str, Stored]:
    """{the family's name: what is stored} of exactly the model's tensors. Raises UserError."""
    wanted = {name: tuple(shape) for one in placed for name, shape in one.theirs.items()}
    (embedding, *_), found = next(iter(placed)).theirs, {}
    for name, one in stored.items():
        full = name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name
        if re.fullmatch(family.leftovers, full):
            continue
        if full == "lm_head.weight" and config.tied:           # a copy, which some writers keep
            wanted[full] = wanted[embedding]
        require(full in wanted and full not in found, f"{one.path} holds {name[:80]}, which a {family.architecture} of "
                "this config.json does not have; import a model whose files belong together")
        require(one.shape == wanted[full], f"{name} of {one.path} is of shape {one.shape}, but by config.json it must "
                f"be of {wanted[full]}; import a model whose files belong together")
        require(one.kind in STORED_DTYPES, f"{name} of {one.path} is of type {one.kind}, but weights are read in "
                f"{', '.join(STORED_DTYPES)} alone; import a model that is not quantized")
        found[full] = one
    missing = [name for name in wanted if name not in found]
    require(not missing, f"{folder} lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}, which a "
            f"{family.architecture} of this config.json has; get the folder's files again")
    copy = found.pop("lm_head.weight", None) if config.tied else None
    require(copy is None or torch.equal(copy.load(), found[embedding].load()),
            f"{folder} has tie_word_embeddings, but its lm_head.weight is not equal to its {embedding}; set "
            "tie_word_embeddings to false in its config.json if the head is a matrix of its own")
    return found


# ---- import

class MadeWhenWritten(torch.Tensor):
    """A tensor of a checkpoint that is made when the writer asks for it, and forgotten when it is written. See LocalBoxes
    for the methods with underscores."""

    @classmethod
    def of(cls, shape, dtype, make) -> "MadeWhenWritten":
        """make() -> the tensor of this shape and type."""
        whole = torch.empty((), dtype=dtype).expand(shape).as_subclass(cls)      # one number, whatever the size
        whole.make = make
        return whole

    def __create_write_items__(self, name, _):
        where = torch.Size([0] * self.dim())
        return [WriteItem(MetadataIndex(name, where), WriteItemType.SHARD, tensor_data=TensorWriteData(
            ChunkStorageMetadata(where, self.size()), TensorProperties(self.dtype), self.size()))]

    def __get_tensor_shard__(self, _):
        return self.make()


def join(one: Placed, found: dict[str, Stored], config: Config, dtype: torch.dtype) -> torch.Tensor:
    """One of our tensors, from the family's."""
    return one.packing.join([found[name].load() for name in one.theirs], config).to(dtype).contiguous()


def import_model(folder: Path, output: Path) -> str:
    """Write a checkpoint of the model in a folder of Hugging Face's; says what it is. Raises UserError."""
    safetensors()
    require(folder.is_dir(), f"there is no folder {folder}; give one with config.json and {WEIGHTS}")
    require((folder / "config.json").is_file(), f"{folder} has no config.json; give the folder of a model")
    require(step_of(output) in (None, 0), f"--output {output} is a name for step {step_of(output)}, but what is "
            "imported is at step 0; choose another name")
    values = read_json(folder / "config.json")
    family = family_of_record(values, folder / "config.json")
    stored = stored_tensors(folder)
    config = read_config(values, folder / "config.json")
    placed = tensors_of(config, family)
    found = match(placed, stored, family, config, folder)
    dtype = reduce(torch.promote_types, (STORED_DTYPES[one.kind] for one in found.values()))     # that holds them all
    (name,) = (name for name, one in DTYPES.items() if one == dtype)
    config = dataclasses.replace(config, dtype=name)
    wide = torch.promote_types(dtype, torch.float32)           # as a run's own master weights
    tensors = {f"weight.{one.name}": MadeWhenWritten.of(one.shape, wide, partial(join, one, found, config, wide))
               for one in placed}
    with made_whole(output) as temporary:
        write_single_process(tensors, temporary)
        carried = copy_along((*TOKENIZER_FILES, GENERATION), folder, temporary)
        special = {name: values[name] for name in SPECIAL_TOKENS if values.get(name) is not None}
        if GENERATION not in carried and special:              # else they would be lost with config.json
            write_json(temporary / GENERATION, special)
        write_manifest(temporary, dict(format=FORMAT, step=0, adam_steps=0, skipped_in_a_row=0, loss_scale=None,
                                 config=dataclasses.asdict(config)), "import it again")
    return (f"{output}: {family.architecture}, {len(placed)} tensors, {count(placed):,} numbers in {name}, "
            f"{told_of(carried)}")
