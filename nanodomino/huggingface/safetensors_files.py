"""Reads the headers of safetensors files, and writes folders that are either complete or absent."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import torch

from nanodomino.corpus.tokenizers import FILES
from nanodomino.errors import UserError, require
from nanodomino.files import delete, read_json, write_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
*TOKENIZER_FILES, GENERATION = FILES
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def import_safetensors():
    """Return the package safetensors. Raises UserError if it can't be imported."""
    try:
        import safetensors.torch
        return safetensors
    except Exception as error:                                 # its own imports can raise anything
        raise UserError("the files of Hugging Face models need the package safetensors, which can't be imported "
                        f"({error}); pip install -r requirements-extra.txt") from None


# ---- read

def open_weight_files(folder: Path) -> dict:
    """Return {tensor's name: the open safetensors file that holds it} of a folder. Only headers are read. A tensor is
    mapped into memory when it is used. Raises UserError.

    The index of a large model names its files; without an index they are the files model-*.safetensors.
    match_tensors() finds out whether a tensor is missing.
    """
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


# ---- write

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


def copy_files(names, source: Path, target: Path) -> list[str]:
    """Copy those of the named files that exist, and return their names."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        write_file(target / name, (source / name).read_bytes())
    return found


def tokenizer_summary(copied: list[str]) -> str:
    return f"with {', '.join(copied)}" if copied else "without a tokenizer, since none was found"
