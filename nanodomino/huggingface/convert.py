"""Imports a Hugging Face folder as a checkpoint, and exports a checkpoint to a folder that Transformers can load.

    python -m nanodomino.huggingface import DIR --output CHECKPOINT
    python train.py --load CHECKPOINT --finetune --data-path DATA --run-dir RUN      on any layout
    python -m nanodomino.huggingface export RUN DIR                                  from_pretrained("DIR")

    DIR/config.json             sizes and other choices                                 families.py
    DIR/model.safetensors       {name: tensor}                                          tensors.py
    DIR/tokenizer.json ...      the tokenizer's files, copied in both directions

A large model has several weight files, and model.safetensors.index.json with {"weight_map": {name: file}}.

**The same bits.** Every 16-bit number can be represented in fp32, so import loses nothing. Export uses the dtype of the
imported model by default, so it restores the original bits. Import pads the vocabulary with rows of zeros, which export
leaves out.

**Little memory.** Import reads, converts and writes one parameter at a time. Export also converts one at a time, but
holds a whole weight file: at most 5 GB, unless a single parameter is larger.

**No code.** safetensors files hold only numbers. A file written by torch.save, such as pytorch_model.bin, can run code
when it is loaded, so it is never read.
"""

import dataclasses
import json
import os
import re
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path

import torch

from nanodomino.checkpoint.format import FORMAT, Index, LocalBox, write_boxes, write_manifest
from nanodomino.checkpoint.load import find_checkpoint, open_weights, read_box
from nanodomino.settings.config import Config
from nanodomino.corpus.tokenizers import FILES
from nanodomino.errors import UserError, counted, import_optional, require
from nanodomino.files import delete, read_json, write_file
from nanodomino.huggingface.families import Family, family_of, family_of_json, read_config, write_config
from nanodomino.huggingface.tensors import TensorMapping, element_count, map_tensors
from nanodomino.settings.presets import DTYPES
from nanodomino.settings.flags import flag_name

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
*TOKENIZER_FILES, GENERATION = FILES
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
import_safetensors = partial(import_optional, "safetensors.torch", "the file format of Hugging Face")


@contextmanager
def new_folder(final: Path):
    """Yield a hidden folder that is renamed to `final` if the block succeeds, and deleted if it fails.
    Raises UserError if `final` exists or can't be written."""
    require(not os.path.lexists(final), f"{final} already exists, and nothing is overwritten; choose another name, or "
            "move it away")
    absolute = final.absolute()
    temporary = absolute.with_name(f".{absolute.name}.unfinished")
    try:
        delete(temporary)                                      # left by a process that was killed
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(final)
    except (OSError, import_safetensors().SafetensorError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{final} can't be written ({reason}); free some space, or choose another folder") from None
    finally:
        delete(temporary)


def write_json(path: Path, values: dict):
    write_file(path, (json.dumps(values, indent=2) + "\n").encode())


def copy_tokenizer(source: Path, target: Path) -> str:
    """Copy the tokenizer's files that exist in `source`. Return a phrase about them for the result's line."""
    found = [name for name in FILES if (source / name).is_file()]
    for name in found:
        write_file(target / name, (source / name).read_bytes())
    return f"with {', '.join(found)}" if found else "without a tokenizer, since none was found"


# ---- import

def open_weight_files(folder: Path) -> dict:
    """Return {name of a tensor: the open safetensors file that holds it} for all tensors in a folder. Only headers are
    read. Without an index, the files of a large model are model-*.safetensors. Raises UserError."""
    whole, index, found = folder / WEIGHTS, folder / INDEX, {}
    paths = [whole] if whole.exists() else sorted(folder.glob("model-*.safetensors"))
    if not whole.exists() and index.exists():
        names = read_json(index).get("weight_map")
        require(isinstance(names, dict), f"{index} has no weight_map {{tensor: file}}; download it again")
        paths = [folder / name for name in sorted(set(map(str, names.values())))]
    require(paths, f"{folder} has neither {WEIGHTS} nor model-00001-of-*.safetensors; give a folder in the format that "
            "save_pretrained(DIR) writes")
    package = import_safetensors()
    for path in paths:
        try:
            file = package.safe_open(path, framework="pt")
        except (OSError, package.SafetensorError) as error:
            raise UserError(f"{path} is damaged or not a safetensors file ({error}); download it again") from None
        for name in file.keys():
            require(name not in found, f"{name[:80]} is in {path} and in another file; download the folder again")
            found[name] = file
    return found


def match_tensors(mappings: list[TensorMapping], family: Family, config: Config, folder: Path) -> tuple[dict, set]:
    """Return {Hugging Face name: function that loads this tensor} for all tensors of the model, and the names of their
    dtypes. Raises UserError if a tensor is missing or unknown, or has the wrong shape or dtype."""
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
    """Import the model in `folder` as the checkpoint `output`, and return a line about the result. Raises UserError."""
    import_safetensors()
    values = read_json(folder / "config.json")
    family = family_of_json(values, folder / "config.json")
    config = read_config(values, folder / "config.json")
    mappings = map_tensors(config, family.modules)
    found, dtypes = match_tensors(mappings, family, config, folder)
    dtype = reduce(torch.promote_types, (STORED_DTYPES[name] for name in dtypes))
    dtype_name = str(dtype).removeprefix("torch.")
    config = dataclasses.replace(config, dtype=dtype_name)
    wide = torch.promote_types(dtype, torch.float32)           # the dtype of a run's master weights
    with new_folder(output) as temporary:
        share = write_boxes(temporary / "rank-00000.bin", (     # a generator: only one tensor is in memory at a time
            LocalBox(f"weight.{one.name}", one.shape, one.box, convert_from_hf(one, found, config, wide))
            for one in mappings))
        copied = copy_tokenizer(folder, temporary)
        special = {name: values[name] for name in SPECIAL_TOKENS if values.get(name) is not None}
        if special and not (temporary / GENERATION).exists():  # a checkpoint has no other place for these ids
            write_json(temporary / GENERATION, special)
        write_manifest(temporary, dict(format=FORMAT, step=0, adam_steps=0, skipped_in_a_row=0, loss_scale=None,
                                       config=dataclasses.asdict(config)), [share], "import it again")
    return (f"{output}: {family.architecture}, {len(mappings)} tensors, {element_count(mappings):,} elements in "
            f"{dtype_name}, {copied}")


# ---- export

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


def convert_to_hf(mapping: TensorMapping, index: Index, config: Config, dtype: torch.dtype) -> dict[str, torch.Tensor]:
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
    """Export a checkpoint, or a run's newest, to `out`, and return a line about the result. Raises UserError.
    dtype_name: None for the dtype of the run or of the imported model. max_bytes: see split_into_files()."""
    package = import_safetensors()
    checkpoint = find_checkpoint(folder)
    index, model = open_weights(checkpoint)
    config, depths = dataclasses.replace(model.config, mtp_num_layers=0), model.config.behind_head.in_words
    left_out = f"; without the {depths}" * bool(depths)
    masks = [flag_name(name) for name in ("reset_position_ids", "reset_attention_mask") if getattr(config, name)]
    if masks:
        left_out += f"; trained with {' and '.join(masks)}, so give Transformers one document at a time"
    dtype_name = dtype_name or config.dtype
    dtype, family, values = DTYPES[dtype_name], family_of(config), write_config(config, dtype_name)
    mappings = map_tensors(config, family.modules)
    files = split_into_files(mappings, dtype, max_bytes)
    names = [WEIGHTS] if len(files) == 1 else [f"model-{number:05d}-of-{len(files):05d}.safetensors"
                                               for number in range(1, len(files) + 1)]
    with new_folder(out) as temporary:
        weight_map = {}
        for name, mappings_of_file in zip(names, files):
            tensors = {}
            for mapping in mappings_of_file:
                tensors |= convert_to_hf(mapping, index, config, dtype)
            package.torch.save_file(tensors, temporary / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
            (temporary / name).chmod(temporary.stat().st_mode & 0o666)         # safetensors lets only its owner read it
        if len(files) > 1:
            write_json(temporary / INDEX, dict(metadata=dict(total_size=element_count(mappings) * dtype.itemsize),
                                               weight_map=weight_map))
        imported = any((checkpoint / name).is_file() for name in TOKENIZER_FILES)       # else take the data folder's
        source = checkpoint if imported or not config.data_path else Path(config.data_path)
        copied = copy_tokenizer(source, temporary)
        write_json(temporary / "config.json", values | special_tokens(temporary, source / "meta.json"))
    return (f"{out}: {family.architecture}, {counted(len(names), 'weight file')}, "
            f"{element_count(mappings):,} elements in {dtype_name}, {copied}{left_out}")


def special_tokens(folder: Path, meta: Path) -> dict:
    """Return the ids of the special tokens, {name: id}. An unknown id is None: if it were left out, Transformers
    would assume an id that this vocabulary may not have. The end-of-text in `meta`, the data's meta.json if there is
    one, is what generate uses, so it replaces another one, also in the generation_config.json of `folder`."""
    stored = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    old, end = stored.get("eos_token_id"), read_json(meta).get("end_of_text") if meta.is_file() else None
    if end is not None and end not in (old if isinstance(old, list) else [old]):
        stored |= dict(eos_token_id=end)
        write_json(folder / GENERATION, stored)
    return {name: stored.get(name) for name in SPECIAL_TOKENS}
