"""Finds text files and reads the documents in them: a document is a text file, or a line of a .jsonl file."""

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanodomino.corpus.safe_cuts import pieces
from nanodomino.errors import UserError, require

CHUNK = 1 << 20                 # characters read at once


@dataclass
class Document:
    size: int                   # bytes of text
    size_in_file: int           # bytes in the file, for the progress bar
    chunks: Iterator[str]


def find_files(inputs: list, output: Path) -> tuple[dict[str, bool], Counter]:
    """Return ({real path: whether the user named this file}, {reason: files skipped}). Raises UserError.

    Real paths are unique, so a file that several inputs match is read once.
    """
    files, skipped = {}, Counter()
    for pattern in map(str, inputs):
        matches = [pattern] if os.path.exists(pattern) else sorted(expand_glob(pattern))
        require(matches, f"no file or folder matches the input {pattern}; check the path")
        for match in matches:
            if os.path.isdir(match):
                for path in text_files_below(match, output, skipped):
                    files.setdefault(os.path.realpath(path), False)
            else:
                require(os.path.isfile(match),
                        f"the input {match} is neither a file nor a folder; write its text to a file first")
                files[os.path.realpath(match)] = True
    return files, skipped


def expand_glob(pattern: str) -> list[str]:
    """Return the matching paths. ** is any number of folders; Python's own ** never ends if links are cyclic."""
    top, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/+|$)", pattern, maxsplit=1)
    if not rest:
        return glob.glob(pattern)
    return [match for start in (glob.glob(top) if top else ["."]) for folder in folders_below(start)
            for match in expand_glob(os.path.join(glob.escape(folder), rest[0] or "*"))]


def folders_below(top: str) -> Iterator[str]:
    """Yield `top` and the folders below it that are not hidden, following links, each real folder once."""
    seen = set()
    for folder, folders, _ in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in seen)
        if real not in seen:
            yield folder
        seen.add(real)


def text_files_below(top: str, output: Path, skipped: Counter) -> Iterator[str]:
    """Yield the text files of a folder in sorted order, without hidden ones and without an older output."""
    def fail(error):
        raise error

    for folder, folders, names in os.walk(top, onerror=fail):
        skipped["hidden files or folders"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = sorted(name for name in folders
                            if not name.startswith(".") and Path(folder, name).resolve() != output)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isfile(path):
                continue
            if is_text(path):
                yield path
            else:
                skipped["files that are not UTF-8 text"] += 1


def is_text(path: str) -> bool:
    """Return whether the whole file is UTF-8 without a NUL."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return not any("\0" in chunk for chunk in iter(lambda: file.read(CHUNK), ""))
    except UnicodeDecodeError:
        return False


def read_documents(files: dict[str, bool], safe_cut: re.Pattern, any_bytes: bool) -> Iterator[Document]:
    """Yield the documents of the files in order. any_bytes: a file that the user named need not be UTF-8."""
    for path, named in files.items():
        if not path.endswith(".jsonl"):
            size = os.path.getsize(path)
            yield Document(size, size, text_chunks(path, safe_cut, any_bytes and named))
            continue
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                text = text_of_line(line, f"{path}, line {number},") if line.strip() else ""
                yield Document(len(text.encode()), len(line), iter([text]))


def text_of_line(line: bytes, place: str) -> str:
    """Return the text field of a line of a .jsonl file. `place` names the line in an error."""
    try:
        document = json.loads(line, parse_int=float)           # Python refuses to read an int of 5,000 digits
    except (ValueError, RecursionError):
        raise UserError(f"{place} is not JSON; each line of a .jsonl file must be an object with a "
                        "text field") from None
    require(isinstance(document, dict) and isinstance(document.get("text"), str),
            f'{place} has no text field; each line of a .jsonl file must look like {{"text": "..."}}')
    # JSON can spell half a surrogate pair, UTF-8 cannot
    return document["text"].encode("utf-8", "replace").decode("utf-8")


def text_chunks(path: str, safe_cut: re.Pattern, any_bytes: bool) -> Iterator[str]:
    """Yield the text of a file in chunks, cut where it is safe. Raises UserError if it is not UTF-8.

    With any_bytes, bytes that are not UTF-8 become lone surrogates, as Python's surrogateescape does.
    """
    rest = ""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape" if any_bytes else "strict", newline="") as file:
            while chunk := file.read(CHUNK):
                *chunks, rest = pieces(rest + chunk, safe_cut, CHUNK, 2 * CHUNK)
                yield from chunks
    except UnicodeDecodeError:
        raise UserError(f"the input {path} is not UTF-8 text; convert it, or use --tokenizer byte, which "
                        "takes any bytes") from None
    if rest:
        yield rest
