"""Finds text files and reads the documents in them, for data/prepare.py.

A file's first bytes and its name (for a link: the link's) decide its type: gzip starts with 1f 8b, and what it contains
is one of the others, by its name without .gz; parquet starts with PAR1; JSON lines are named .jsonl, or start with a
JSON object with the key of the text and are not named .txt; anything else in UTF-8 is text.

A file may have gigabytes, so it is encoded in chunks. A tokenizer splits a text into words, and byte-pair encoding
(BPE) merges only within a word. If the chunks end between two words, they have the token ids of the whole file. (Llama
2's tokenizer puts a space in front of each text that it encodes, so also in front of each chunk.)
"""

import gzip
import io
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext, suppress

from nanodomino.errors import UserError, import_optional, require
from nanodomino.files import LIMIT

CHUNK = 1 << 20                 # characters read at once
# A cut is safe before a single space, because a word may begin with a space but never ends with one; between an ASCII
# letter or digit and any whitespace; after a single newline, if a letter, a digit or _ follows. Other cuts are not:
# GPT-2 gives the last character of a run of whitespace to the next word, Llama 3 joins newlines to the full stop before
# them. (Python counts the characters 1c to 1f as whitespace, the tokenizers do not.)
SAFE_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[^\S\x1c-\x1f])|(?<=\S\n)(?=\w)")


def find_files(inputs: list, key: str) -> tuple[dict[str, int], defaultdict]:
    """Find the text files in `inputs`, files and folders. Return ({path: bytes of text, or 0 if it holds more than one
    document}, {note: the files that it is about}). A file with several names is read once. Raises UserError."""
    sizes, notes, seen = {}, defaultdict(list), set()
    for name in map(str, inputs):
        require(os.path.exists(name), f"no file or folder matches the input {name}; check the path")
        for path in files_in(name, seen, notes):
            try:
                kind, *_ = next(pieces := read_pieces(path, key))
                sizes[path] = sum(len(text.encode()) for _, text, _ in pieces) if kind == "text" else 0
                if kind == "text" and path.lower().removesuffix(".gz").endswith(".json"):
                    notes[f'read as one text, because the first line is no JSON object with "{key}"'].append(path)
            except UserError as error:
                require(path != name, str(error))
                notes["skipped, not UTF-8 text or damaged"].append(path)
    return sizes, notes


def files_in(path: str, seen: set[str], notes: defaultdict) -> Iterator[str]:
    """Yield the file, or a folder's files and then its subfolders', in sorted order. seen: the real paths that are not
    read again, because a link may lead to a folder above itself; updated here, as are the notes."""
    if (real := os.path.realpath(path)) in seen:
        return
    seen.add(real)
    if os.path.isfile(path):
        yield path
    elif os.path.isdir(path):
        for entry in sorted(os.scandir(path), key=lambda entry: (entry.is_dir(), entry.path)):
            if entry.name.startswith("."):
                notes["skipped, hidden"].append(entry.path)
            else:
                yield from files_in(entry.path, seen, notes)
    else:
        notes["skipped, neither a file nor a folder"].append(path)


def read_pieces(path: str, key: str) -> Iterator[tuple[str, str, int]]:
    """Yield first (the file's type, "", 0). Then yield (place, text, bytes of the file read so far) for each document:
    its text, in chunks that can be tokenized one by one, and "". place: its file, and line or row. Raises UserError."""
    name = path.lower().removesuffix(".gz")
    try:
        with (open(path, "rb") as stored,
              gzip.open(stored) if stored.peek(2)[:2] == b"\x1f\x8b" else nullcontext(stored) as file):
            kind = "row" if file.peek(4)[:4] == b"PAR1" else "line" if name.endswith(".jsonl") else "text"
            if kind == "text" and not name.endswith(".txt"):
                with suppress(UserError):
                    text_of(file.readline(LIMIT), key, path)
                    kind = "line"
                file.seek(0)
            yield kind, "", 0
            if kind == "text":
                for chunk in text_chunks(file):
                    yield path, chunk, stored.tell()
                yield path, "", os.path.getsize(path)
                return
            if kind == "row":
                table = import_optional("pyarrow.parquet", path).parquet.ParquetFile(file)
                columns = [key] if key in table.schema_arrow.names else None        # text_of() shows all columns
                file = (row for rows in table.iter_batches(1000, columns=columns) for row in rows.to_pylist())
            for number, record in enumerate(file, 1):
                place = f"{path}, {kind} {number}"
                if text := "" if isinstance(record, bytes) and record.isspace() else text_of(record, key, place):
                    yield place, text, stored.tell()
                yield place, "", stored.tell()
    except (EOFError, zlib.error, ValueError, OSError) as error:
        raise UserError(f"the input {path} is not UTF-8 text, or damaged ({' '.join(str(error).split())}); convert it, "
                        "or replace it by an intact copy") from None


def text_of(record: bytes | dict, key: str, place: str, advice=", or name another key with --key") -> str:
    """Return the text of a JSON line or of a row. Raises UserError, with `place` and how to use another key."""
    try:
        record = json.loads(record) if isinstance(record, bytes) else record
        return record[key].encode("utf-8", "replace").decode()      # half of a surrogate pair becomes a question mark
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f'{place}, is not {{"{key}": "..."}} ({type(error).__name__}: {error}), but {str(record)[:200]}; correct '
                        f"it{advice}") from None


def text_chunks(file: io.BufferedIOBase) -> Iterator[str]:
    """Yield the text of a file, without a byte-order mark, in chunks. A chunk ends at the first safe cut after CHUNK
    characters, else after 2 CHUNK. Raises UnicodeError if the file is not UTF-8, or contains NUL, as UTF-16 does."""
    text, decoded = "", io.TextIOWrapper(file, "utf-8-sig", newline="")
    while part := decoded.read(CHUNK):
        if "\0" in part:
            raise UnicodeError("it contains NUL")
        text += part
        while (cut := SAFE_CUT.search(text, CHUNK, 2 * CHUNK)) or len(text) > 2 * CHUNK:
            end = cut.start() if cut else 2 * CHUNK
            yield text[:end]
            text = text[end:]
    if text:
        yield text
