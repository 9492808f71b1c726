"""Imports a Hugging Face folder as a checkpoint, and exports a checkpoint to a folder that Transformers can load.

    python -m nanodomino.huggingface import DIR --output CHECKPOINT
    python train.py --load CHECKPOINT --finetune --data-path DATA --run-dir RUN      on any layout
    python -m nanodomino.huggingface export RUN DIR                                  from_pretrained("DIR")

    DIR/config.json             sizes and other choices                                 families.py
    DIR/model.safetensors       {name: tensor}                                          tensors.py
    DIR/tokenizer.json ...      the tokenizer's files, copied in both directions

**The same bits.** Every 16-bit number can be represented in fp32, so import loses nothing. Export uses the dtype of the
imported model by default. Import pads the vocabulary with rows of zeros, which export leaves out. Apart from compare(),
import and export hold one parameter at a time in memory. docs/huggingface.md has the rest.
"""

import dataclasses
import json
import math
import os
import re
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path

import torch
import torch.distributed as dist

from nanodomino.checkpoint.format import (FORMAT, SUFFIX, Index, read_header, read_tensor, stored_name, write_manifest,
                                          write_tensors)
from nanodomino.checkpoint.load import load_weights, find_checkpoint, open_weights
from nanodomino.corpus.tokenizers import FILES
from nanodomino.errors import require
from nanodomino.files import delete, read_json, write_file
from nanodomino.huggingface.families import (FAMILIES, import_transformers, load_configuration, read_config, try_model,
                                             write_config)
from nanodomino.huggingface.tensors import TensorMapping, element_count, map_tensors
from nanodomino.mesh import meta_mesh
from nanodomino.model import GPT
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name
from nanodomino.settings.presets import DTYPES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
*TOKENIZER_FILES, GENERATION = FILES
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD = f"rank-00000{SUFFIX}"
BUFFERS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")    # in old files; they are not weights


@contextmanager
def new_folder(final: Path):
    """Yield a hidden folder that is renamed to `final` if the block succeeds, and deleted if it fails. Raises OSError,
    and UserError if `final` exists."""
    require(not os.path.lexists(final), f"{final} already exists, and nothing is overwritten; choose another name, or "
            "move it away")
    temporary = final.absolute().with_name(f".{final.absolute().name}.unfinished")
    delete(temporary)                                          # left by a process that was killed
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.rename(final)
    finally:
        delete(temporary)


def copy_tokenizer(source: Path, target: Path) -> str:
    """Copy the tokenizer's files that exist in `source`. Return a phrase about them for the result's line."""
    found = [name for name in FILES if (source / name).is_file()]
    for name in found:
        if name.endswith(".json"):
            read_json(source / name)                           # raises UserError if the file is damaged
        write_file(target / name, (source / name).read_bytes())
    return f"with {', '.join(found)}" if found else "without a tokenizer, since none was found"


# ---- import

def open_tensors(folder: Path, needed: dict, tied: bool) -> tuple[dict, torch.dtype]:
    """Return {name: function that loads this tensor} for all tensors in a folder, and a dtype that holds them all. Only
    headers are read. needed: {name: shape} of all tensors of the model. Raises UserError if the folder has others, or
    other shapes or dtypes."""
    (embedding, *_), found = needed, {}
    prefix = embedding.partition(".")[0] + "."                 # of all names but lm_head's; some files leave it out
    files = {WEIGHTS} if (folder / WEIGHTS).exists() else try_model(     # a large model has several files
        f"{folder} has neither {WEIGHTS} nor a list of weight files", lambda: {
            *read_json(folder / INDEX)["weight_map"].values()})
    for file in sorted(files):
        found |= {name if name.startswith((prefix, "lm_head.")) else prefix + name: stored
                  for name, stored in read_header(folder / file).items() if not BUFFERS.fullmatch(name)}
    if tied:                                                   # some writers store the tied matrix twice
        found.pop("lm_head.weight", None)
    for verb, names in (("lacks", needed.keys() - found.keys()), ("has", found.keys() - needed.keys())):
        require(not names, f"{folder} {verb} {', '.join(sorted(names)[:3])}{' ...' * (len(names) > 3)}, unlike "
                "nanodomino's model with this config.json; import another model, or download the folder again")
    for name, stored in found.items():
        require(stored.shape == tuple(needed[name]) and stored.dtype in DTYPES.values(), f"{name} in {folder} has "
                f"shape {list(stored.shape)} and type {stored.dtype}, but config.json implies {list(needed[name])}, "
                f"and nanodomino knows {', '.join(DTYPES)}; import another model")
    return {name: partial(read_tensor, stored) for name, stored in found.items()}, reduce(
        torch.promote_types, {stored.dtype for stored in found.values()})


def convert_from_hf(mapping: TensorMapping, found: dict, config: Config, dtype: torch.dtype) -> torch.Tensor:
    """Load the Hugging Face tensors of a mapping, and convert them to its box of the parameter."""
    parts = [found[name]().to(dtype) for name in mapping.hf_shapes]
    for name, part in zip(mapping.hf_shapes, parts):
        require(part.isfinite().all(), f"{name} has numbers that are infinite or NaN; import another model, or "
                "download the folder again")
    return mapping.from_hf(parts, config).contiguous().view(mapping.box.size)


def import_model(folder: Path, output: Path, check=True) -> str:
    """Import the model in `folder` as the checkpoint `output`, and return a line about the result. check: compare its
    logits with those of Transformers. Raises UserError."""
    configuration = load_configuration(folder)
    family, config = FAMILIES[configuration.model_type], read_config(configuration, folder / "config.json")
    mappings = map_tensors(config, family.modules)
    found, dtype = open_tensors(folder, {name: one.hf_shapes[name] for one in mappings for name in one.hf_shapes},
                                config.tied)
    needed, free = 8 * element_count(mappings), free_memory()
    require(not check or needed < free, f"a comparison with Transformers needs {needed / 1e9:.1f} GB of memory, but "
            f"only {free / 1e9:.1f} GB are free; free some, or give --no-check")
    config = dataclasses.replace(config, dtype=str(dtype).removeprefix("torch."))
    wide = torch.promote_types(dtype, torch.float32)           # the dtype of a run's master weights
    with new_folder(output) as temporary:
        types = {stored_name(f"weight.{one.name}", one.box.offset): (wide, one.box.size) for one in mappings}
        digest = write_tensors(temporary / SHARD, types, (
            convert_from_hf(one, found, config, wide) for one in mappings))
        copied = copy_tokenizer(folder, temporary)
        special = {name: value for name, value in read_json(folder / "config.json").items()
                   if name in SPECIAL_TOKENS and value is not None}
        if special and not (temporary / GENERATION).exists():  # a checkpoint has no other place for these ids
            write_file(temporary / GENERATION, json.dumps(special, indent=2).encode())
        write_manifest(temporary, dict(format=FORMAT, step=0, adam_steps=0, skipped_in_a_row=0, loss_scale=None,
                                       config=dataclasses.asdict(config)), {SHARD: digest}, "import it again")
        proof = compare(folder, temporary) if check else ""
    return (f"{output}: {family.architecture}, {len(mappings)} tensors, {element_count(mappings):,} elements in "
            f"{config.dtype}, {copied}{proof}")


def free_memory() -> float:
    """Return the bytes of memory that are available, or infinity: only Linux says."""
    path = Path("/proc/meminfo")
    return 1024 * int(re.search(r"MemAvailable: *(\d+)", path.read_text())[1]) if path.exists() else math.inf


@torch.no_grad()
def compare(folder: Path, checkpoint: Path, samples=5, length=32, window=4) -> str:
    """Compare the logits of a checkpoint with those of Transformers. Return words about the largest difference. Raises
    UserError if they differ by more than rounding.

    docs/huggingface.md says how a few tokens show a wrong reading of config.json. Transformers rounds routers to fp32,
    which can change the choice between two experts, so the median of the samples counts.
    """
    configuration = load_configuration(folder)
    if getattr(configuration, "sliding_window", None):
        configuration.sliding_window = min(configuration.sliding_window, window)
    config = dataclasses.replace(read_config(configuration, folder), dtype="float64")
    tokens = torch.randint(config.vocab_size, (samples, min(length, config.max_position_embeddings)),
                           generator=torch.Generator().manual_seed(0))
    spread = torch.logspace(0, math.log2(config.max_position_embeddings), tokens.size(1), 2, dtype=torch.float64)
    positions = (spread.round().long() - 1).expand_as(tokens)

    model = try_model(f"Transformers can't load {folder}", import_transformers().AutoModelForCausalLM.from_pretrained,
                      folder, config=configuration, dtype=torch.float64, local_files_only=True, use_safetensors=True,
                      trust_remote_code=False, experts_implementation="eager").eval()
    theirs = model(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    del model                                                  # before ours needs as much memory
    mesh = meta_mesh(1, 1, 1)
    groups = dict.fromkeys(mesh.rows, dist.ProcessGroup(0, 1))           # groups of one member never communicate
    model = GPT(config, dataclasses.replace(mesh, device=torch.device("cpu"), groups=groups), parallel_output=False,
                initialize=False)
    load_weights(checkpoint, model)
    ours = model(tokens, positions)
    differences = (ours - theirs).abs().flatten(1) / theirs.abs().max()
    sample = differences.amax(1).median(0).indices
    largest, place = differences[sample].max(0)
    require(largest < 1e-4, f"{folder} can't be imported, because the logit of the same token is "
            f"{theirs[sample].flatten()[place]:.6g} in Transformers and {ours[sample].flatten()[place]:.6g} in "
            "nanodomino; import another model")
    return f", logits equal to Transformers' up to {largest:.0e}"


# ---- export

def convert_to_hf(mapping: TensorMapping, index: Index, config: Config, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read one parameter, or one expert's part, and return {Hugging Face name: tensor}. Raises UserError if a value
    overflows `dtype`."""
    values, tensors = index.read(f"weight.{mapping.name}", mapping.box).view(mapping.size), {}
    for name, part in zip(mapping.hf_shapes, mapping.to_hf(values, config)):
        tensors[name] = part.to(dtype).contiguous()
        largest, limit = float(part.abs().max()), torch.finfo(dtype).max
        require(not limit < largest < torch.inf, f"{name} has values up to {largest:g}, above the maximum {limit:g} of "
                f"{dtype}; export with --dtype bfloat16")
    return tensors


def export_model(folder: Path, out: Path, dtype_name: str | None = None) -> str:
    """Export a checkpoint, or a run's newest, to `out`, and return a line about the result. Raises UserError.
    dtype_name: None for the dtype of the run or of the imported model."""
    checkpoint = find_checkpoint(folder)
    index, model = open_weights(checkpoint)
    config, depths = dataclasses.replace(model.config, mtp_num_layers=0), model.config.behind_head.in_words
    left_out = f"; without the {depths}" * bool(depths)
    masks = [flag_name(name) for name in ("reset_position_ids", "reset_attention_mask") if getattr(config, name)]
    if masks:
        left_out += f"; trained with {' and '.join(masks)}, so give Transformers one document at a time"
    dtype_name = dtype_name or config.dtype
    dtype, configuration = DTYPES[dtype_name], write_config(config, dtype_name)
    mappings = map_tensors(config, FAMILIES[configuration.model_type].modules)
    with new_folder(out) as temporary:
        types = {name: (dtype, shape) for one in mappings for name, shape in one.hf_shapes.items()}
        write_tensors(temporary / WEIGHTS, types, (
            part for one in mappings for part in convert_to_hf(one, index, config, dtype).values()))
        imported = any((checkpoint / name).is_file() for name in TOKENIZER_FILES)       # else take the data folder's
        source = checkpoint if imported or not config.data_path else Path(config.data_path)
        copied = copy_tokenizer(source, temporary)
        configuration.update(special_tokens(temporary, source / "meta.json"))
        configuration.save_pretrained(temporary)
    return (f"{out}: {configuration.architectures[0]}, {len(types)} tensors, {element_count(mappings):,} elements in "
            f"{dtype_name}, {copied}{left_out}")


def special_tokens(folder: Path, meta: Path) -> dict:
    """Return {name: id} of the special tokens. An unknown id is None, or Transformers would assume one. The end-of-text
    in `meta`, the data's meta.json if there is one, is what generate uses. So it replaces another one, also in the
    generation_config.json of `folder`."""
    stored = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    old, end = stored.get("eos_token_id"), read_json(meta).get("end_of_text") if meta.is_file() else None
    if end is not None and end not in (old if isinstance(old, list) else [old]):
        stored |= dict(eos_token_id=end)
        write_file(folder / GENERATION, json.dumps(stored, indent=2).encode())
    return {name: stored.get(name) for name in SPECIAL_TOKENS}
