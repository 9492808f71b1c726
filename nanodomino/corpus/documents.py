"""Finds text files and reads the documents in them: a document is a text file, or a line of a .jsonl file.

**Long documents.** A file is encoded in chunks, because it may have gigabytes, and encoding takes some 60 bytes of
memory per byte of text. A tokenizer splits a text into words, and byte-pair encoding (BPE) merges only within a word.
If the chunks end between two words, they have the token ids of the whole file. (Some tokenizers, such as Llama 2's, put
a space in front of each text that they encode. They also put one in front of each chunk.)
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from nanodomino.errors import UserError, require

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


def read_documents(files: list[str]) -> Iterator[Document]:
    """Yield the documents in the files that find_files() returned."""
    for path in files:
        if not path.endswith(".jsonl"):
            yield Document(size := os.path.getsize(path), size, text_chunks(path))
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


def text_chunks(path: str) -> Iterator[str]:
    """Yield the text of a file in chunks that end at safe cuts. Raises UserError if it is not UTF-8."""
    rest = ""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while chunk := file.read(CHUNK):
                *chunks, rest = split_at_safe_cuts(rest + chunk)
                yield from chunks
    except UnicodeDecodeError:
        raise UserError(f"the input {path} is not UTF-8 text; convert or decompress it first") from None
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
