"""Makes a corpus appear complete or not at all.

The files are written to a hidden folder next to the output. At the end the hidden folder is renamed to the output.
Renaming is atomic, so a reader never sees half a corpus. If several processes prepare the same output, the first to
finish wins.
"""

import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanodomino.corpus.huggingface_tokenizer import FILES
from nanodomino.corpus.prepared_folder import SPLITS, load_corpus
from nanodomino.errors import UserError, require
from nanodomino.files import check_outside_ours, delete

OUR_FILES = {"meta.json", "encoder.json", "vocab.bpe", *FILES, *(f"{split}.bin" for split in SPLITS)}


def check_output(output: Path, overwrite: bool):
    """Raise UserError unless `output` does not exist, is an empty folder, or is a corpus and `overwrite` is true."""
    require(output.is_dir() or not output.exists(),
            f"the output {output} is a file, but must be a folder; choose another --output")
    check_outside_ours(output)
    if not output.exists() or not any(output.iterdir()):
        return
    try:
        load_corpus(output)
    except UserError:
        raise UserError(f"the output {output} holds other files, which are never replaced; choose another "
                        "--output") from None
    foreign = sorted({path.name for path in output.iterdir()} - OUR_FILES)
    require(not foreign, f"the output {output} holds other files too, such as {', '.join(foreign[:1])}, which are "
            "never replaced; move them away, or choose another --output")
    require(overwrite,
            f"the output {output} already holds a prepared corpus; choose another --output, or add --overwrite")


@contextmanager
def temporary_sibling(output: Path) -> Iterator[Path]:
    """Yield a new hidden folder, locked, on the output's disk. Delete it at the end unless publish() has renamed it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try_lock(descriptor)
        yield folder
    finally:
        delete(folder)                              # publish() may have renamed it
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Try to lock a folder and return whether that succeeded. The system unlocks it if this process is killed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:                                 # another process holds the lock, or the file system has no locks
        return False


def clear_leftovers(output: Path):
    """Delete the hidden folders that killed processes left next to the output. Live processes hold a lock on theirs."""
    hidden = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{32}}(\.replaced)?")
    found = sorted(output.parent.iterdir()) if output.parent.is_dir() else []
    for folder in (path for path in found if hidden.fullmatch(path.name) and path.is_dir() and not path.is_symlink()):
        if folder.suffix == ".replaced":            # an old corpus: publish() was killed after moving it
            if not output.exists() and not folder.with_suffix("").exists():
                folder.rename(output)
            elif output.exists():
                delete(folder)
            continue
        descriptor = os.open(folder, os.O_RDONLY)
        if try_lock(descriptor):
            delete(folder)
        os.close(descriptor)


def publish(folder: Path, output: Path, meta: dict, overwrite: bool) -> dict:
    """Rename the finished folder to `output`, and return the meta.json of the corpus that is there now.

    If another process has published its corpus first, keep that corpus. Raises UserError if it differs from ours.
    """
    replaced = folder.with_name(folder.name + ".replaced")
    try:
        if overwrite and output.exists():
            check_output(output, overwrite)         # again: files may have appeared since the first check
            output.rename(replaced)
        folder.rename(output)
        return meta
    except OSError:
        if replaced.exists() and not output.exists():
            replaced.rename(output)
            raise
        if not output.is_dir():
            raise
    finally:
        delete(replaced)
    theirs = load_corpus(output).meta
    require(theirs["sha256"] == meta["sha256"],
            f"another process has meanwhile written a different corpus to {output}; choose another --output")
    return theirs
