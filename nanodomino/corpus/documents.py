"""Finds text files and reads the documents in them: a document is a text file, or a line of a .jsonl file."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nanodomino.corpus.safe_cuts import split_at_safe_cuts
from nanodomino.errors import UserError, require

CHUNK = 1 << 20                 # characters read at once


@dataclass
class Document:
    size: int                   # bytes of text
    size_in_file: int           # bytes in the file, for the progress bar
    chunks: Iterator[str]       # the text, in parts that can be tokenized one by one


def find_files(inputs: list) -> tuple[list[str], Counter]:
    """Find the text files that `inputs`, files and folders, name. Raises UserError.

    Returns (paths, {reason: number of files skipped}). Links are resolved, so a file that several inputs name is read
    once.
    """
    files, skipped = {}, Counter()              # files: an ordered set
    for name in map(str, inputs):
        require(os.path.exists(name), f"no file or folder matches the input {name}; check the path")
        if os.path.isdir(name):
            files |= dict.fromkeys(map(os.path.realpath, text_files_below(name, skipped)))
            continue
        require(os.path.isfile(name),
                f"the input {name} is neither a file nor a folder; write its text to a file first")
        files[os.path.realpath(name)] = None
    return list(files), skipped


def text_files_below(top: str, skipped: Counter) -> Iterator[str]:
    """Yield the text files in a folder and its subfolders in sorted order. Counts in `skipped` the files that it skips:
    hidden ones, and those that are not text."""
    def fail(error):
        raise error

    for folder, folders, names in os.walk(top, onerror=fail):
        skipped["hidden files or folders"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")):
            if os.path.isfile(path):
                if is_text(path):
                    yield path
                else:
                    skipped["files that are not UTF-8 text"] += 1


def is_text(path: str) -> bool:
    """Return whether the whole file is UTF-8 without NUL characters."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return not any("\0" in chunk for chunk in iter(lambda: file.read(CHUNK), ""))
    except UnicodeDecodeError:
        return False


def read_documents(files: list[str], safe_cut: re.Pattern) -> Iterator[Document]:
    """Yield the documents in the files that find_files() returned."""
    for path in files:
        if not path.endswith(".jsonl"):
            yield Document(size := os.path.getsize(path), size, text_chunks(path, safe_cut))
            continue
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = text_of_line(line, f"{path}, line {number},") if line.strip() else ""
                yield Document(len(text.encode()), len(line), iter([text]))


def text_of_line(line: bytes, place: str) -> str:
    """Return the text field of a line of a .jsonl file. Raises UserError. place: file and line number, for errors."""
    try:
        # JSON can contain half of a surrogate pair, which UTF-8 can't encode: it becomes a question mark.
        return json.loads(line)["text"].encode("utf-8", "replace").decode("utf-8")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f'{place} is no JSON object with a text field; each line of a .jsonl file must look like '
                        '{"text": "..."}') from None


def text_chunks(path: str, safe_cut: re.Pattern) -> Iterator[str]:
    """Yield the text of a file in chunks that end at safe cuts (safe_cuts.py). Raises UserError if it is not UTF-8."""
    rest = ""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while chunk := file.read(CHUNK):
                *chunks, rest = split_at_safe_cuts(rest + chunk, safe_cut, CHUNK, 2 * CHUNK)
                yield from chunks
    except UnicodeDecodeError:
        raise UserError(f"the input {path} is not UTF-8 text; convert or decompress it first") from None
    if rest:
        yield rest
