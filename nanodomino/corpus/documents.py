"""Finds text files and reads the documents in them, for data/prepare.py.

**Types.** open_input() decides the type of a file by its name as typed (for a link: its own) and by its first bytes:

    gzip          starts with 1f 8b; decompressed, it is one of the following, by its name without .gz
    parquet       starts with PAR1; a row is a document
    JSON lines    is named .jsonl, or starts with a line that is a JSON object with the key of the text and is not named
                  .txt; a line is a document
    text          is anything else in UTF-8, also another .json file; the file is a document

**Long documents.** A file is encoded in chunks, because it may have gigabytes, and encoding takes some 60 bytes of
memory per byte of text. A tokenizer splits a text into words, and byte-pair encoding (BPE) merges only within a word.
If the chunks end between two words, they have the token ids of the whole file. (Some tokenizers, such as Llama 2's, put
a space in front of each text that they encode, so also in front of each chunk.)
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
from dataclasses import dataclass

from nanodomino.errors import UserError, import_optional, require
from nanodomino.files import LIMIT

CHUNK = 1 << 20                 # characters read at once

# A cut is safe
#   - before a single space, because a word may begin with a space but never ends with one;
#   - between an ASCII letter or digit and any whitespace;
#   - after a single newline, if a letter, a digit or _ follows.
# Other cuts in whitespace are not safe. GPT-2 gives the last character of a run of whitespace to the next word. Llama 3
# joins newlines to the full stop before them. SmolLM2 does not split a run of whitespace before a digit. (Python counts
# the characters 1c to 1f as whitespace, the tokenizers do not.)
SAFE_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[^\S\x1c-\x1f])|(?<=\S\n)(?=\w)")


@dataclass
class Document:
    place: str                  # its file, and its line or row
    size: int                   # bytes of text
    position: int               # bytes of all files, as they are stored, up to its end; for the progress bar
    chunks: Iterator[str]       # the text, in parts that can be tokenized one by one


def find_files(inputs: list, key: str) -> tuple[list[tuple[str, str, int]], defaultdict]:
    """Find the text files that `inputs`, files and folders, name. Return ([(path, type, bytes if the type is text)],
    {note: the files that it is about}). A file with several names or links is read once. Raises UserError."""
    found, notes, folders = {}, defaultdict(list), set()
    for name in map(str, inputs):
        require(os.path.exists(name), f"no file or folder matches the input {name}; check the path")
        require(os.path.isfile(name) or os.path.isdir(name),
                f"the input {name} is neither a file nor a folder; write its text to a file first")
        for path in files_in(name, folders, notes):
            if (real := os.path.realpath(path)) in found:
                continue
            try:
                with open_input(path, key) as (kind, _, _):
                    size = sum(len(chunk.encode()) for chunk in text_chunks(path, key)) if kind == "text" else 0
                found[real] = path, kind, size
                if kind == "text" and path.lower().removesuffix(".gz").endswith(".json"):
                    notes[f'read as one text, because the first line is no JSON object with "{key}"'].append(path)
            except UserError as error:
                require(path != name, str(error))
                notes["skipped, not UTF-8 text or damaged"].append(path)
    return list(found.values()), notes


def files_in(path: str, seen: set[str], notes: defaultdict) -> Iterator[str]:
    """Yield the file, or a folder's files and then its subfolders', in sorted order. seen: the real paths of folders
    that are not read again, because a link may lead to a folder above itself; updated here."""
    if os.path.isfile(path):
        yield path
    elif not os.path.isdir(path):
        notes["skipped, neither a file nor a folder"].append(path)
    elif (real := os.path.realpath(path)) not in seen:
        seen.add(real)
        paths = [os.path.join(path, name) for name in os.listdir(path)]
        for below in sorted(paths, key=lambda below: (os.path.isdir(below), below)):
            if os.path.basename(below).startswith("."):
                notes["skipped, hidden"].append(below)
            else:
                yield from files_in(below, seen, notes)


@contextmanager
def open_input(path: str, key: str) -> Iterator[tuple[str, io.BufferedIOBase, io.BufferedIOBase]]:
    """Open a file and yield (its type, the file, the file as it is stored, which may be compressed). Raises UserError
    if the file is damaged, also while the with block reads it."""
    name = path.lower().removesuffix(".gz")
    try:
        with (open(path, "rb") as stored,
              gzip.open(stored) if stored.peek(2)[:2] == b"\x1f\x8b" else nullcontext(stored) as file):
            kind = "parquet" if file.peek(4)[:4] == b"PAR1" else "JSON lines" if name.endswith(".jsonl") else "text"
            if kind == "text" and not name.endswith(".txt") and b"{" in file.peek(64)[:64]:
                with suppress(UserError):
                    text_of(file.readline(LIMIT), key, path)
                    kind = "JSON lines"
                file.seek(0)
            yield kind, file, stored
    except (EOFError, zlib.error, ValueError, OSError) as error:
        if getattr(error, "filename", None):
            raise
        fault = ("not UTF-8 text; convert or decompress it first" if isinstance(error, UnicodeError)
                 else f"damaged ({' '.join(str(error).split())}); replace it by an intact copy")
        raise UserError(f"the input {path} is {fault}") from None


def read_documents(files: list[tuple[str, str, int]], key: str) -> Iterator[Document]:
    """Yield the documents in the files that find_files() returned. Raises UserError."""
    done = 0
    for path, kind, size in files:
        end = done + os.path.getsize(path)
        if kind == "text":
            yield Document(path, size, end, text_chunks(path, key))
        else:
            with open_input(path, key) as (_, file, stored):
                for number, record in enumerate(file if kind == "JSON lines" else parquet_rows(path, file, key), 1):
                    place = f"{path}, {'line' if kind == 'JSON lines' else 'row'} {number}"
                    text = "" if isinstance(record, bytes) and record.isspace() else text_of(record, key, place)
                    yield Document(place, len(text.encode()), done + stored.tell(), iter([text]))
        done = end


def parquet_rows(path: str, file: io.BufferedIOBase, key: str) -> Iterator[dict]:
    """Yield {key: text} for each row. Raises UserError."""
    table = import_optional("pyarrow.parquet", path).parquet.ParquetFile(file)
    columns = table.schema_arrow.names
    require(key in columns, f'{path} has no column "{key}", only {str(columns)[:200]}; name another with --key')
    for rows in table.iter_batches(1000, columns=[key]):
        yield from rows.to_pylist()


def text_of(record: bytes | dict, key: str, place: str, advice=", and --key names another key") -> str:
    """Return the text of a JSON line or of a row. Raises UserError, with `place` and how to use another key."""
    advice = f'; each must look like {{"{key}": "..."}}{advice}'
    try:
        record = json.loads(record) if isinstance(record, bytes) else record
    except (ValueError, RecursionError) as error:
        fault = f"is not JSON ({error})" if isinstance(error, ValueError) else "is nested too deeply"
        raise UserError(f"{place}, {fault}{advice}") from None
    require(isinstance(record, dict), f"{place}, is no JSON object{advice}")
    require(key in record, f'{place}, has no key "{key}", only {str([*record])[:200]}{advice}')
    require(isinstance(text := record[key], str), f'{place}, has no string as "{key}", but {str(text)[:40]}{advice}')
    # JSON can contain half of a surrogate pair, which UTF-8 can't encode: it becomes a question mark
    return text.encode("utf-8", "replace").decode("utf-8")


def text_chunks(path: str, key: str) -> Iterator[str]:
    """Yield the text of a file, without a byte-order mark, in chunks that end at safe cuts. Raises UserError if it is
    not UTF-8, or contains NUL, as UTF-16 and binary files do."""
    rest = ""
    with open_input(path, key) as (_, binary, _), io.TextIOWrapper(binary, "utf-8-sig", newline="") as file:
        while chunk := file.read(CHUNK):
            if "\0" in chunk:
                raise UnicodeError
            *chunks, rest = split_at_safe_cuts(rest + chunk)
            yield from chunks
    if rest:
        yield rest


def split_at_safe_cuts(text: str) -> Iterator[str]:
    """Yield the text in chunks. A chunk ends at the first safe cut after CHUNK characters, else after 2 CHUNK."""
    start = 0
    while len(text) - start > CHUNK:
        cut = SAFE_CUT.search(text, start + CHUNK, start + 2 * CHUNK)
        end = cut.start() if cut else start + 2 * CHUNK
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
