"""Makes a prepared folder appear complete or not at all.

The files are written to a hidden folder next to the output, which is renamed at the end. Renaming is atomic, so a
reader never sees half a corpus. If several processes prepare the same output, the first one wins.
"""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanodomino.corpus.huggingface_tokenizer import FILES
from nanodomino.corpus.prepared_folder import SPLITS, load_corpus
from nanodomino.errors import UserError, require

OUR_FILES = {"meta.json", "encoder.json", "vocab.bpe", *FILES, *(f"{split}.bin" for split in SPLITS)}


def check_output(output: Path, overwrite: bool):
    """Raise UserError unless `output` may be written: it does not exist, is empty, or is a corpus to overwrite."""
    require(output.is_dir() or not output.exists(),
            f"the output {output} is a file, but must be a folder; choose another --output")
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
    """Make a hidden, locked folder next to the output, thus on the same disk, and remove what is left of it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try_lock(descriptor)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)   # does not exist any more if it was published
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Return whether the folder is locked now. The system releases the lock when this process ends, however it ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:                                 # another process has it, or the file system has no locks
        return False


def clear_leftovers(output: Path):
    """Remove the hidden folders that killed processes left next to the output, but none that a live process locks."""
    hidden = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{32}}(\.replaced)?")
    found = [path for path in output.parent.iterdir() if hidden.fullmatch(path.name)] if output.parent.is_dir() else []
    for folder in sorted(found):
        if folder.suffix == ".replaced":            # from a process that was killed between the renames of publish()
            if not output.exists() and not folder.with_suffix("").exists():
                folder.rename(output)
            elif output.exists():
                shutil.rmtree(folder, ignore_errors=True)
            continue
        descriptor = os.open(folder, os.O_RDONLY)
        if try_lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def publish(folder: Path, output: Path, meta: dict, overwrite: bool) -> dict:
    """Rename the finished folder to `output` and return its meta.json.

    If the rename fails because another process has published first, keep the other process's corpus. Raises UserError
    if the two corpora differ.
    """
    replaced = folder.with_name(folder.name + ".replaced")
    try:
        if overwrite and output.exists():
            check_output(output, overwrite)         # again, since preparing took a while
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
        shutil.rmtree(replaced, ignore_errors=True)
    theirs = load_corpus(output).meta
    require(theirs["sha256"] == meta["sha256"],
            f"another process has put other data into {output} in the meantime; choose another --output")
    return theirs
