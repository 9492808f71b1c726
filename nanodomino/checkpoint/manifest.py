"""What makes a checkpoint whole: a manifest of every byte, and a name that is given last.

    step-00000100/manifest.json    {"sha256": of the rest of this file, "format", "step", "adam_steps",
                                    "skipped_in_a_row", "loss_scale", "config",
                                    "files": {name: {"size", "sha256"}}}

A folder named step-... was complete when it got its name (see checkpoint.py). What happens to it afterwards, a flipped
byte, a truncated or a missing file, its manifest finds out, and the checkpoint before is taken. A folder of any other
name, such as a copy that somebody has made, is neither looked for nor ever deleted.
"""

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanodomino.config.config import Config
from nanodomino.config.records import from_record
from nanodomino.config.setting import flag_settings, names_affecting
from nanodomino.errors import UserError, require
from nanodomino.optim.loss_scale import is_valid_state

FORMAT = "nanodomino-checkpoint-1"
LARGEST_STEP = 10**12
NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")       # f"step-{step:08d}", and nothing else
SAVED = "saved"                # a file in the folder of a run that has had a checkpoint; it must not begin anew unasked


def file_digest(path: Path) -> dict:
    """Size and SHA-256 of a file. Raises UserError."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return dict(size=path.stat().st_size, sha256=digest.hexdigest())
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); mend that, or use another checkpoint") from None


def file_digests(paths: list[Path]) -> dict[str, dict]:
    """{name: size and SHA-256} of files, several at once: on big checkpoints this is what takes the time."""
    with ThreadPoolExecutor() as pool:                       # hashlib lets other threads run
        return {path.name: digest for path, digest in zip(paths, pool.map(file_digest, paths))}


def manifest_text(content: dict) -> str:
    """The manifest as it is written: its own checksum is its first line's."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest} | body, indent=1) + "\n"


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint, whole and of a known format, or UserError."""
    path = folder / "manifest.json"
    try:
        require_plain_file(path)
        text = path.read_text()
        content = json.loads(text)
        sound = isinstance(content, dict) and text == manifest_text(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder} is not a whole checkpoint: its manifest.json can't be read ({error}); "
                        "use another one") from None
    require(sound, f"{path} is damaged: it does not have the checksum that it records; use another checkpoint")
    require(content.get("format") == FORMAT,
            f"{path} is of format {content.get('format')!r}, but this version reads {FORMAT!r}; "
            "use the version that wrote it")
    content.setdefault("skipped_in_a_row", 0)                  # older versions counted anew after each start
    counts = ("step", "adam_steps", "skipped_in_a_row")
    wrong = [name for name, kind in (*((name, int) for name in counts), ("config", dict), ("files", dict))
             if not isinstance(content.get(name), kind)]
    require(not wrong, f"{path} does not say {', '.join(wrong)}; use another checkpoint")
    steps = [content[name] for name in counts]
    require(0 <= min(steps) and max(steps) <= LARGEST_STEP and bool not in map(type, steps),
            f"{path} says step {steps[0]}, adam_steps {steps[1]} and skipped_in_a_row {steps[2]}, which must be from 0 "
            f"to {LARGEST_STEP}; use another checkpoint")
    scale = content.setdefault("loss_scale", None)             # older versions had none
    require(is_valid_state(scale), f"{path} must give value, good_steps and patience of a loss scale, but has "
            f"{str(scale)[:80]}; use another checkpoint")
    for name, about in content["files"].items():               # a stranger's manifest may name any file of this machine
        require(name == Path(name).name and name not in ("", ".", "..", path.name) and isinstance(about, dict)
                and type(about.get("size")) is int and isinstance(about.get("sha256"), str),
                f"{path} must give size and SHA-256 of files beside it, but has '{name[:80]}': {str(about)[:80]}; use "
                "another checkpoint")
    require(".metadata" in content["files"], f"{path} names no .metadata, without which no tensor is found; use "
            "another checkpoint")
    return content


def require_plain_file(path: Path):
    """A pipe, or a device, would be waited for or never end. Raises UserError; what is not there, whoever opens it."""
    require(path.is_file() or path.is_dir() or not path.exists(),
            f"{path} is no file to read but something else; use another checkpoint")


def verify(folder: Path) -> dict:
    """Check every byte of a checkpoint; returns its manifest.
    Raises UserError that names the file and what is wrong with it."""
    content = read_manifest(folder)
    require(step_of(folder) in (None, content["step"]),
            f"{folder} holds a checkpoint of step {content['step']}, which is not what its name says; give it a name "
            "of your own or its old one")
    paths = [folder / name for name in content["files"]]
    for path in paths:
        instead = "no file but a folder, a device or a link to nowhere" if os.path.lexists(path) else "missing"
        require(path.is_file(), f"{path} is {instead}; use another checkpoint")
        size, expected = path.stat().st_size, content["files"][path.name]["size"]
        require(size == expected, f"{path} should have {expected} bytes, but has {size}; use another checkpoint")
    for name, found in file_digests(paths).items():
        require(found == content["files"][name],
                f"{folder / name} is damaged: its SHA-256 is not the recorded one; use another checkpoint")
    return content


def step_of(folder: Path) -> int | None:
    """The step that the name of a checkpoint says; None if that is not a name that we give."""
    found = NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder, newest first. Raises UserError if it can't be looked into."""
    parent = run_dir / "checkpoints"
    try:
        found = list(parent.iterdir()) if parent.is_dir() else []
    except OSError as error:                                 # it may hold any: not the same as none
        raise UserError(f"{parent} can't be read ({error.strerror}); mend that, or choose another folder") from None
    return sorted((path for path in found if step_of(path) is not None), key=step_of, reverse=True)


def newest_sound(run_dir: Path, report=print) -> Path | None:
    """The newest checkpoint of a run that is sound in every byte; damaged ones are named and passed over."""
    for folder in checkpoints_of(run_dir):
        try:
            verify(folder)
            return folder
        except UserError as error:
            report(f"warning: {error}; going back to the one before")
    return None


def find_checkpoint(folder: Path) -> Path:
    """What --load names: a checkpoint, or a run whose newest sound checkpoint is meant. Raises UserError."""
    try:
        there = folder.is_dir()
    except OSError as error:                                   # a name that no disk can hold
        raise UserError(f"--load {str(folder)[:80]}... can't be looked for ({error.strerror}); give a checkpoint or "
                        "the folder of a run") from None
    require(there, f"there is no folder {folder} to load from; give a checkpoint or the folder of a run")
    if (folder / "checkpoints").is_dir():
        checkpoint = newest_sound(folder)
        require(checkpoint, f"{folder / 'checkpoints'} holds no sound checkpoint; give another one")
        return checkpoint
    verify(folder)
    return folder


def newest_record(folder: Path) -> dict | None:
    """The settings with which a run was last started, or a checkpoint made; None where none can be read."""
    try:
        record = json.loads((folder / "config.json").read_text())
        if isinstance(record, dict):
            return record
    except (OSError, ValueError, RecursionError):
        pass                                                 # no run, or one that was killed while it wrote this
    try:
        found = [folder, *checkpoints_of(folder)]
    except UserError:                                        # a name that no disk can hold
        return None
    for checkpoint in found:
        try:
            return read_manifest(checkpoint)["config"]
        except UserError:
            pass
    return None


def check_settings(record: dict, source, config: Config, *roles):
    """Refuse a change that can't be honoured, with both values named. Raises UserError."""
    saved = from_record(record, source)
    follows = {one.name: one.metadata["derived"] for one in flag_settings(Config)}
    for name in sorted(names_affecting(Config, *roles), key=lambda name: follows.get(name, False)):      # causes first
        there, here = getattr(saved, name), getattr(config, name)
        require(there == here, f"{source} was made with {name.replace('_', '-')} {there}, but this run has {here}; "
                "give the same again, or start another run (with --load FOLDER --finetune from its weights, if the "
                "model is the same)")


def discard(folder: Path):
    """Take away a checkpoint: first its name, so that one that is half deleted isn't taken for whole."""
    hidden = folder.with_name(f".{folder.name}.discarded")
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clear_leftovers(run_dir: Path):
    """What a kill has left behind of a save or of a start: it would keep a full disk full."""
    for name in ("unfinished", "discarded"):
        for folder in (run_dir / "checkpoints").glob(f".step-*.{name}"):
            shutil.rmtree(folder, ignore_errors=True)
    for file in run_dir.glob(".shared-*"):
        file.unlink(missing_ok=True)


def flush_folder(folder: Path):
    """The entries of a folder, onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
