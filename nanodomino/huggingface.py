"""A model from Hugging Face becomes a checkpoint, and a checkpoint becomes a folder that Transformers loads.

    python -m nanodomino.huggingface import DIR --output CHECKPOINT
    python train.py --load CHECKPOINT --finetune --data-path DATA --run-dir RUN      on any layout
    python -m nanodomino.huggingface export RUN DIR                                  from_pretrained("DIR")

    DIR/config.json                    sizes and choices       families.py says how they are called
    DIR/model.safetensors              {name: tensor}, or several such files and an index, {name: file}
    DIR/tokenizer.json ...             the tokenizer's: they come along, there and back

**In bounded memory.** No model is ever whole. To import, torch.distributed.checkpoint is told the shapes alone; when it
comes to write a tensor it asks for it, and only then are its parts read, joined and made fp32. To export, one of our
tensors at a time is read, cut and rounded, and kept until its file is written: at most --max-shard-size.

**The same bits.** A 16-bit number is an fp32 number, so import loses nothing, and export, in the type that the model
came in, rounds to what it was. The vocabulary's padding is zeros, which nobody reads; it is not exported.

**Whole or not there.** All that can be wrong with names, shapes and sizes is found in the headers, before a tensor is
read. Then everything is written to a hidden folder beside the wanted one, flushed, and renamed.

safetensors files hold numbers and no program. What torch.save wrote (pytorch_model.bin) is a program, and not read.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nanodomino.checkpoint import CarefulReader, complete, read_alone, write_alone
from nanodomino.command import run
from nanodomino.config import DTYPES, Config, from_record
from nanodomino.families import Family, Placed, family_of, family_of_record, read_config, tensors_of, write_config
from nanodomino.huggingface_tokenizer import FILES
from nanodomino.manifest import FORMAT, find_checkpoint, flush_folder, read_manifest, step_of
from nanodomino.settings import UserError, require

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
*TOKENIZER_FILES, GENERATION = FILES
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def safetensors():
    """The package. Raises UserError where it is missing."""
    try:
        import safetensors.torch
        return safetensors
    except Exception as error:                                 # what it imports in turn can raise anything
        raise UserError(f"the files of Hugging Face's models need the package safetensors, which can't be imported "
                        f"({error}); pip install -r requirements-extra.txt") from None


# ---- a folder of Hugging Face's

def read_json(path: Path) -> dict:
    """One JSON object. Raises UserError."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} can't be read ({getattr(error, 'strerror', None) or error}); get the folder's files "
                        "again") from None
    require(isinstance(values, dict), f"{path} must hold one JSON object; get the folder's files again")
    return values


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, known by its header."""
    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str                   # of STORED_DTYPES, if it is a weight

    def load(self) -> torch.Tensor:
        """A view of the file: pages come as they are read, and go when the tensor goes."""
        with safetensors().safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All of them by their names, from the headers of all files. Raises UserError."""
    paths, mapped = [folder / WEIGHTS], None
    if not paths[0].exists():
        require((folder / INDEX).exists(),
                f"{folder} has neither {WEIGHTS} nor {INDEX}; give a folder with weights in this format, as "
                "save_pretrained(DIR) writes them")
        mapped = read_json(folder / INDEX).get("weight_map")
        require(isinstance(mapped, dict) and mapped and all(
            isinstance(name, str) and name == Path(name).name and name not in ("", ".", "..")
            for name in mapped.values()), f"{folder / INDEX} must say of each tensor which file beside it it is in, "
            "as weight_map; get the folder's files again")
        paths = [folder / name for name in sorted(set(mapped.values()))]
    found = {}
    for path in paths:
        for one in header(path):
            other = found.setdefault(one.name, one)
            require(other is one, f"{one.name[:80]} is in {other.path} and in {path}; get the folder's files again")
    for name, file in (mapped or {}).items():
        require(name in found and found[name].path.name == file,
                f"{folder / INDEX} says that {name[:80]} is in {file}, but it is not; get the folder's files again")
    return found


def header(path: Path) -> list[Stored]:
    """What a file holds. Raises UserError."""
    package = safetensors()
    try:
        require(path.is_file(), f"{path} is missing; get the folder's files again")
        with package.safe_open(path, framework="pt") as file:
            about = {name: file.get_slice(name) for name in file.keys()}
            return [Stored(path, name, tuple(one.get_shape()), one.get_dtype()) for name, one in about.items()]
    except (OSError, package.SafetensorError) as error:
        raise UserError(f"{path} is damaged or no safetensors file ({error}); get it again") from None


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


# ---- whole or not there

@contextmanager
def made_whole(final: Path):
    """A hidden folder that takes its name when the block is done, and is gone when it fails. Raises UserError."""
    require(not os.path.lexists(final), f"{final} is there already, and nothing is overwritten; choose another name, "
            "or move it away")
    place = final.absolute()
    temporary = place.with_name(f".{place.name}.unfinished")
    try:
        shutil.rmtree(temporary, ignore_errors=True)           # of one that was killed
        temporary.mkdir(parents=True)
        yield temporary
        flush_folder(temporary)
        temporary.rename(final)
        flush_folder(temporary.parent)
    except (OSError, RuntimeError, dcp.CheckpointException, safetensors().SafetensorError) as error:
        raise UserError(f"{final} can't be written ({reason(error)}); make room, or choose another place") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def reason(error: BaseException) -> str:
    """What the system has said, which torch's writer wraps, and follows with an error of its own."""
    while isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def write_flushed(path: Path, data: bytes):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, values: dict):
    write_flushed(path, (json.dumps(values, indent=2) + "\n").encode())


def copy_along(names, source: Path, target: Path) -> list[str]:
    """Those of these files that are there."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        write_flushed(target / name, (source / name).read_bytes())
    return found


# ---- import

class MadeWhenWritten(torch.Tensor):
    """A tensor of a checkpoint that is made when the writer asks for it, and forgotten when it is written. See Pieces
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
        write_alone(tensors, temporary)
        carried = copy_along((*TOKENIZER_FILES, GENERATION), folder, temporary)
        special = {name: values[name] for name in SPECIAL_TOKENS if values.get(name) is not None}
        if GENERATION not in carried and special:              # else they would be lost with config.json
            write_json(temporary / GENERATION, special)
        complete(temporary, dict(format=FORMAT, step=0, adam_steps=0, skipped_in_a_row=0, loss_scale=None,
                                 config=dataclasses.asdict(config)), "import it again")
    return (f"{output}: {family.architecture}, {len(placed)} tensors, {count(placed):,} numbers in {name}, "
            f"{told_of(carried)}")


def count(placed: list[Placed]) -> int:
    """Numbers of the model, without padding."""
    return sum(shape.numel() for one in placed for shape in one.theirs.values())


def told_of(carried: list[str]) -> str:
    return f"with {', '.join(carried)}" if carried else "without a tokenizer, as none lies beside it"


# ---- export

class ReadsIndexOnce(CarefulReader):
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
    read_alone({f"weight.{one.name}": whole}, reader)
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


# ---- the command line

USAGE = ("python -m nanodomino.huggingface import DIR --output CHECKPOINT, or: "
         "python -m nanodomino.huggingface export CHECKPOINT DIR")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; usage: {USAGE}")


def size_in_bytes(text: str) -> int:
    """5GB, 500 MB, 1000000. Raises UserError."""
    found = re.fullmatch(r"([1-9][0-9]{0,14}) *([KMG]?B)?", text.strip().upper())
    require(found, f"--max-shard-size must be a number of B, KB, MB or GB, but is {text[:80]}; try 5GB")
    return int(found[1]) * UNITS[found[2] or ""]


def command_line() -> Parser:
    parser = Parser("python -m nanodomino.huggingface", allow_abbrev=False,
                    description="Models from and to Hugging Face, on one process without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import | export")
    bring = commands.add_parser("import", help="make a checkpoint of a folder of Hugging Face's", allow_abbrev=False)
    bring.add_argument("folder", metavar="DIR", type=Path, help="the folder with config.json and the weights")
    bring.add_argument("--output", metavar="CHECKPOINT", type=Path, required=True,
                       help="the checkpoint to write, for --load of train.py and of nanodomino.generate")
    give = commands.add_parser("export", help="make a folder that Transformers loads", allow_abbrev=False)
    give.add_argument("folder", metavar="CHECKPOINT", type=Path,
                      help="a checkpoint, or the folder of a run (its newest sound one)")
    give.add_argument("out", metavar="DIR", type=Path, help="the folder to write, for from_pretrained")
    give.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the run's, or what was imported)")
    give.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a file (default 5GB)")
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    flags = command_line().parse_args(arguments)
    if flags.command == "import":
        print(import_model(flags.folder, flags.output))
    else:
        print(export_model(flags.folder, flags.out, flags.dtype, size_in_bytes(flags.max_shard_size)))
    return 0


if __name__ == "__main__":
    run(main, sys.argv[1:])
