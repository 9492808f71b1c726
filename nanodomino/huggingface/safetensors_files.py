import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from nanodomino.checkpoint.manifest import flush_folder
from nanodomino.corpus.huggingface_tokenizer import FILES
from nanodomino.errors import UserError, require

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
*TOKENIZER_FILES, GENERATION = FILES
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


def count(placed) -> int:
    """Numbers of the model, without padding."""
    return sum(shape.numel() for one in placed for shape in one.theirs.values())


def told_of(carried: list[str]) -> str:
    return f"with {', '.join(carried)}" if carried else "without a tokenizer, as none lies beside it"
