"""Finds text files and reads the documents in them, for data/prepare.py.

A file's name as typed (for a link: its own) and its first bytes decide its type:

    gzip          starts with 1f 8b; decompressed, it is one of the following, by its name without .gz
    parquet       starts with PAR1; a row is a document
    JSON lines    is named .jsonl, or starts with a line that is a JSON object with the key of the text and is not named
                  .txt; a line is a document
    text          is anything else in UTF-8, also another .json file; the file is a document

**Long documents.** A file may have gigabytes, so it is encoded in chunks. A tokenizer splits a text into words, and
byte-pair encoding (BPE) merges only within a word. If the chunks end between two words, they have the token ids of the
whole file. (Llama 2's tokenizer puts a space in front of each text that it encodes, so also in front of each chunk.)
"""

import gzip
import io
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from nanodomino.errors import UserError, import_optional, require
from nanodomino.files import LIMIT

CHUNK = 1 << 20                 # characters read at once

# A cut is safe before a single space, because a word may begin with a space but never ends with one; between an ASCII
# letter or digit and any whitespace; after a single newline, if a letter, a digit or _ follows. Other cuts in whitespace
# are not: GPT-2 gives the last character of a run of whitespace to the next word, Llama 3 joins newlines to the full
# stop before them. (Python counts the characters 1c to 1f as whitespace, the tokenizers do not.)
SAFE_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[^\S\x1c-\x1f])|(?<=\S\n)(?=\w)")


def find_files(inputs: list, key: str) -> tuple[dict[str, int], defaultdict]:
    """Find the text files that `inputs`, files and folders, name. Return ({path: bytes of text, or 0 if it holds more
    than one document}, {note: the files that it is about}). A file with several names or links is read once. Raises
    UserError."""
    sizes, notes, seen = {}, defaultdict(list), set()
    for name in map(str, inputs):
        require(os.path.isfile(name) or os.path.isdir(name), f"no file or folder matches the input {name}; check the "
                "path, and write what a pipe contains to a file first")
        for path in files_in(name, seen, notes):
            try:
                with open_input(path, key) as (kind, file, _):
                    sizes[path] = sum(len(chunk.encode()) for chunk in text_chunks(file)) if kind == "text" else 0
                if kind == "text" and path.lower().removesuffix(".gz").endswith(".json"):
                    notes[f'read as one text, because the first line is no JSON object with "{key}"'].append(path)
            except UserError as error:
                require(path != name, str(error))
                notes["skipped, not UTF-8 text or damaged"].append(path)
    return sizes, notes


def files_in(path: str, seen: set[str], notes: defaultdict) -> Iterator[str]:
    """Yield the file, or a folder's files and then its subfolders', in sorted order. seen: the real paths that are not
    read again; a link may lead to a folder above itself. Updated here, as are the notes."""
    real, is_folder = os.path.realpath(path), os.path.isdir(path)
    if not is_folder and not os.path.isfile(path):
        notes["skipped, neither a file nor a folder"].append(path)
    elif real not in seen:
        seen.add(real)
        if not is_folder:
            yield path
        for entry in sorted(os.scandir(path), key=lambda entry: (entry.is_dir(), entry.path)) if is_folder else ():
            if entry.name.startswith("."):
                notes["skipped, hidden"].append(entry.path)
            else:
                yield from files_in(entry.path, seen, notes)


@contextmanager
def open_input(path: str, key: str) -> Iterator[tuple[str, io.BufferedIOBase, io.BufferedIOBase]]:
    """Open a file and yield (its type, the file, the file as it is stored, which may be compressed). Raises UserError
    if the file is damaged, also while the with block reads it."""
    name = path.lower().removesuffix(".gz")
    try:
        with (open(path, "rb") as stored,
              gzip.open(stored) if stored.peek(2)[:2] == b"\x1f\x8b" else nullcontext(stored) as file):
            kind = "parquet" if file.peek(4)[:4] == b"PAR1" else "JSON lines" if name.endswith(".jsonl") else "text"
            if kind == "text" and not name.endswith(".txt"):
                with suppress(UserError):
                    text_of(file.readline(LIMIT), key, path)
                    kind = "JSON lines"
                file.seek(0)
            yield kind, file, stored
    except (EOFError, zlib.error, ValueError, OSError) as error:
        if getattr(error, "filename", None):
            raise
        fault = "not UTF-8 text" if isinstance(error, UnicodeError) else f"damaged ({' '.join(str(error).split())})"
        raise UserError(f"the input {path} is {fault}; convert it, or replace it by an intact copy") from None


def read_documents(sizes: dict[str, int], key: str) -> Iterator[tuple[str, int, int, Iterator[str]]]:
    """Yield each document in the files that find_files() returned: its place (its file, and its line or row), its bytes
    of text, the bytes of all files as they are stored up to its end, and its text in chunks that can be tokenized one
    by one. Raises UserError."""
    done = 0
    for path, size in sizes.items():
        with open_input(path, key) as (kind, file, stored):
            if kind == "text":
                yield path, size, done + os.path.getsize(path), text_chunks(file)
                file = ()
            for number, record in enumerate(parquet_rows(path, file, key) if kind == "parquet" else file, 1):
                place = f"{path}, {'row' if kind == 'parquet' else 'line'} {number}"
                text = "" if isinstance(record, bytes) and record.isspace() else text_of(record, key, place)
                yield place, len(text.encode()), done + stored.tell(), filter(None, [text])
        done += os.path.getsize(path)


def parquet_rows(path: str, file: io.BufferedIOBase, key: str) -> Iterator[dict]:
    """Yield {key: text} for each row. If there is no column `key`, yield all columns, which text_of() shows."""
    table = import_optional("pyarrow.parquet", path).parquet.ParquetFile(file)
    for rows in table.iter_batches(1000, columns=[key] if key in table.schema_arrow.names else None):
        yield from rows.to_pylist()


def text_of(record: bytes | dict, key: str, place: str, advice=", and --key names another key") -> str:
    """Return the text of a JSON line or of a row. Raises UserError, with `place` and how to use another key."""
    advice = f'; each must look like {{"{key}": "..."}}{advice}'
    try:
        record = json.loads(record) if isinstance(record, bytes) else record
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}, is not JSON ({error}){advice}") from None
    text = record.get(key) if isinstance(record, dict) else None
    require(isinstance(text, str), f'{place}, has no string as "{key}", but is {str(record)[:200]}{advice}')
    # JSON can contain half of a surrogate pair, which UTF-8 can't encode: it becomes a question mark
    return text.encode("utf-8", "replace").decode("utf-8")


def text_chunks(file: io.BufferedIOBase) -> Iterator[str]:
    """Yield the text of a file, without a byte-order mark, in chunks. A chunk ends at the first safe cut after CHUNK
    characters, else after 2 CHUNK. Raises UnicodeError if the file is not UTF-8, or contains NUL, as UTF-16 does."""
    text, decoded = "", io.TextIOWrapper(file, "utf-8-sig", newline="")
    while part := decoded.read(CHUNK):
        if "\0" in part:
            raise UnicodeError
        text += part
        while (cut := SAFE_CUT.search(text, CHUNK, 2 * CHUNK)) or len(text) > 2 * CHUNK:
            end = cut.start() if cut else 2 * CHUNK
            yield text[:end]
            text = text[end:]
    if text:
        yield text
