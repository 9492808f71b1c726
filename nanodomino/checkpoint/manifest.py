"""Writes and checks the manifest, which lists the size and SHA-256 of every other file of a checkpoint.

    step-00000100/manifest.json    {"sha256": of the rest of this file, "format", "step", "adam_steps",
                                    "skipped_in_a_row", "loss_scale", "config",
                                    "files": {name: {"size", "sha256"}}}

The manifest is written last, when all other files are on the disk. verify() finds any later damage: flipped bits,
truncated files, missing files.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanodomino.checkpoint.index import FORMAT, INDEX, Index, Share, index_text
from nanodomino.errors import UserError, require
from nanodomino.files import read_file, write_file
from nanodomino.optim.loss_scale import is_valid_state

LARGEST_STEP = 10**12
NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")           # matches exactly the names f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, such as 12 for step-00000012; None for any other kind of name."""
    found = NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


# ---- checksums

def file_digest(path: Path) -> dict:
    """Return the size and SHA-256 of a file. Raises UserError."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return dict(size=path.stat().st_size, sha256=digest.hexdigest())
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); fix that, or use another checkpoint") from None


def file_digests(paths: list[Path]) -> dict[str, dict]:
    """Return {name: size and SHA-256} of the files. Hashes them in parallel, because large files take long to hash."""
    with ThreadPoolExecutor() as pool:                         # hashlib releases the interpreter lock
        return {path.name: digest for path, digest in zip(paths, pool.map(file_digest, paths))}


def manifest_text(content: dict) -> str:
    """Return the text of a manifest: the checksum of the content, then the content."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest} | body, indent=1) + "\n"


# ---- write

def write_manifest(folder: Path, content: dict, shares: list[Share], advice: str):
    """Write the index and the manifest of a checkpoint and flush them to the disk.

    content: all entries except "files", which is added. Raises UserError if the index breaks a rule or a file is
    missing. advice: the fix to suggest for a missing file.
    """
    write_file(folder / INDEX, index_text(shares).encode(), flush=True)
    files = {share.file: share.digest for share in shares}
    missing = [name for name in files if not (folder / name).is_file()]
    require(not missing, f"{folder} lacks {', '.join(missing)}; {advice}")
    content["files"] = files | file_digests([path for path in sorted(folder.iterdir()) if path.name not in files])
    Index(folder, content)
    write_file(folder / "manifest.json", manifest_text(content).encode(), flush=True)
    flush_folder(folder)


def flush_folder(folder: Path):
    """Flush a folder's own entries to the disk, so that new and renamed files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- read and verify

def read_manifest(folder: Path) -> dict:
    """Return the manifest of a checkpoint. Raises UserError if it is missing, damaged or of another format."""
    path = folder / "manifest.json"
    try:
        text = read_file(path).decode()
        content = json.loads(text)
        intact = isinstance(content, dict) and text == manifest_text(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder} is not a complete checkpoint: its manifest.json can't be read ({error}); "
                        "use another checkpoint") from None
    require(intact, f"{path} is damaged: its checksum is wrong; use another checkpoint")
    require(content.get("format") == FORMAT, f"{path} has format {str(content.get('format'))[:80]!r}, but this version "
            f"reads {FORMAT!r}; use the version that wrote it")
    check_manifest(content, path)
    return content


def check_manifest(content: dict, path: Path):
    """Check the types and ranges of a manifest's entries: a valid checksum does not mean that save.py wrote it.
    Raises UserError."""
    content.setdefault("skipped_in_a_row", 0)                  # older versions did not save it
    counts = ("step", "adam_steps", "skipped_in_a_row")
    types = dict.fromkeys(counts, int) | dict(config=dict, files=dict)
    wrong = [name for name, type_ in types.items() if not isinstance(content.get(name), type_)]
    require(not wrong, f"{path} lacks {', '.join(wrong)}; use another checkpoint")
    steps = [content[name] for name in counts]
    require(0 <= min(steps) and max(steps) <= LARGEST_STEP and bool not in map(type, steps),
            f"{path} has step {steps[0]}, adam_steps {steps[1]} and skipped_in_a_row {steps[2]}, but each must be from "
            f"0 to {LARGEST_STEP}; use another checkpoint")
    scale = content.setdefault("loss_scale", None)             # older versions had none
    require(is_valid_state(scale), f"{path} must give value, good_steps and patience of the loss scale, but has "
            f"{str(scale)[:80]}; use another checkpoint")
    for name, entry in content["files"].items():               # a name with / could lead to any file
        require(name == Path(name).name and name not in ("", ".", "..", path.name) and isinstance(entry, dict)
                and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str),
                f"{path} must list files beside it with their size and SHA-256, but has '{name[:80]}': "
                f"{str(entry)[:80]}; use another checkpoint")
    require(INDEX in content["files"],
            f"{path} does not list {INDEX}, the index of the tensors; use another checkpoint")


def verify(folder: Path) -> dict:
    """Check every byte of a checkpoint and the rules of its index, and return its manifest.
    Raises UserError, which names the damaged file and says what is wrong with it."""
    content = read_manifest(folder)
    require(step_of(folder) in (None, content["step"]), f"{folder} holds the checkpoint of step {content['step']}, but "
            "its name says another step; rename the folder")
    paths = [folder / name for name in content["files"]]
    for path in paths:
        problem = "a folder, a device or a broken link, not a file" if os.path.lexists(path) else "missing"
        require(path.is_file(), f"{path} is {problem}; use another checkpoint")
        size, expected = path.stat().st_size, content["files"][path.name]["size"]
        require(size == expected, f"{path} should have {expected} bytes, but has {size}; use another checkpoint")
    for name, digest in file_digests(paths).items():
        require(digest == content["files"][name],
                f"{folder / name} is damaged: its SHA-256 differs from the manifest's; use another checkpoint")
    Index(folder, content)
    return content
