"""Makes a corpus appear complete or not at all.

The files are written to a hidden folder next to the output. At the end the hidden folder is renamed to the output.
Renaming is atomic, so a reader never sees half a corpus. If several processes prepare the same output, the first to
finish wins. A process that is killed leaves its hidden folder, which a user can delete.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanodomino.corpus.huggingface_tokenizer import FILES
from nanodomino.corpus.prepared_folder import SPLITS
from nanodomino.errors import require
from nanodomino.files import check_outside_ours, delete

OUR_FILES = {"meta.json", *FILES, *(f"{split}.bin" for split in SPLITS)}


def check_output(output: Path, overwrite: bool):
    """Raise UserError unless `output` does not exist, is an empty folder, or is a corpus and `overwrite` is true."""
    require(output.is_dir() or not output.exists(),
            f"the output {output} is a file, but must be a folder; choose another --output")
    check_outside_ours(output)
    names = {path.name for path in output.iterdir()} if output.exists() else set()
    foreign = sorted(names - OUR_FILES if {"meta.json", "train.bin"} <= names else names)
    require(not foreign, f"the output {output} holds other files, such as {', '.join(foreign[:1])}, which are never "
            "replaced; move them away, or choose another --output")
    require(overwrite or not names,
            f"the output {output} already holds a prepared corpus; choose another --output, or add --overwrite")


@contextmanager
def hidden_folder(output: Path) -> Iterator[Path]:
    """Yield a new hidden folder on the output's disk. Delete it at the end unless publish() has renamed it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        yield folder
    finally:
        delete(folder)


def publish(folder: Path, output: Path, overwrite: bool):
    """Rename the finished folder to `output`. Raises UserError if other files have appeared there meanwhile."""
    check_output(output, overwrite)
    replaced = folder.with_name(folder.name + ".replaced")
    if output.exists():
        output.rename(replaced)
    folder.rename(output)
    delete(replaced)
