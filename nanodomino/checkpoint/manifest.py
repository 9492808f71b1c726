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

from nanodomino.checkpoint.format import FORMAT, INDEX, Share, index_text
from nanodomino.errors import UserError, require
from nanodomino.files import file_size, read_file, sha256, write_file

STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")      # matches exactly the names f"step-{step:08d}"
FILE_NAME = re.compile(r"\w[\w.-]{0,99}")                      # with a / it could lead to any file
MEASURES = dict(size=file_size, sha256=sha256)                 # in this order, because large files take long to hash
TYPES = dict(step=int, adam_steps=int, config=dict, files=dict)


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, such as 12 for step-00000012; None for any other kind of name."""
    found = STEP_NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


# ---- checksums

def file_digest(path: Path) -> dict:
    """Return the size and SHA-256 of a file. Raises OSError."""
    return {name: measure(path) for name, measure in MEASURES.items()}


def manifest_text(content: dict) -> str:
    """Return the text of a manifest: the checksum of the content, then the content."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest} | body, indent=1) + "\n"


# ---- write

def write_manifest(folder: Path, content: dict, shares: list[Share], advice: str):
    """Write the index and the manifest of a checkpoint and flush them to the disk. content: all entries of the manifest
    except "files", which is added. Raises UserError with this advice if a file is missing."""
    write_file(folder / INDEX, index_text(shares).encode(), flush=True)
    files = {share.file: share.digest for share in shares}
    missing = [name for name in files if not (folder / name).is_file()]
    require(not missing, f"{folder} lacks {', '.join(missing)}; {advice}")
    content["files"] = files | {path.name: file_digest(path) for path in sorted(folder.iterdir())
                                if path.name not in files}
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
    wrong = [name for name, kind in TYPES.items() if type(content.get(name)) is not kind]
    require(not wrong, f"{path} lacks {', '.join(wrong)}; use another checkpoint")
    for name in content["files"]:
        require(FILE_NAME.fullmatch(name), f"{path} must list files beside it, but has {name[:80]!r}; use another "
                "checkpoint")
    return content


def verify(folder: Path) -> dict:
    """Check every byte of a checkpoint, and return its manifest. Raises UserError, which names the damaged file."""
    content = read_manifest(folder)
    require(step_of(folder) in (None, content["step"]), f"{folder} holds the checkpoint of step {content['step']}, but "
            "its name says another step; rename the folder")
    files = content["files"]
    try:
        for measure, function in MEASURES.items():
            with ThreadPoolExecutor() as pool:                 # hashlib releases the interpreter lock
                for name, value in zip(files, pool.map(function, [folder / name for name in files])):
                    require(isinstance(files[name], dict) and files[name].get(measure) == value, f"{folder / name} is "
                            f"damaged: its {measure} differs from the manifest's; use another checkpoint")
    except OSError as error:
        raise UserError(f"{error.filename} can't be read ({error.strerror}); use another checkpoint") from None
    return content
