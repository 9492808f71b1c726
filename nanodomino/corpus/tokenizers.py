"""Converts text to token ids and back, and reads the text of files, for data/prepare.py.

    byte    one token per byte, and end-of-text; needs no file and can encode every text
    gpt2    GPT-2's 50,257 tokens; a token is about four bytes of English, so a text has a quarter as many tokens
    PATH    the folder or the tokenizer.json of a Hugging Face tokenizer, which the package `tokenizers` reads

Byte-pair encoding (BPE; GPT-2's paper, section 2.2) splits a text into words with a regular expression, and each word
into bytes. Then it merges two neighbouring tokens of the word into one, again and again. The tokenizer has a list of
all possible merges, and the merge that comes first in the list is done first. A tokenizer.json spells bytes as
printable characters, such as Ġ for a space (byte-level: GPT-2, Llama 3, Qwen, SmolLM2), or spells only the bytes of
characters that are no tokens, such as <0xE6> (byte_fallback: Llama 2, Mistral). So the bytes of each token are known,
and generated text can be printed token by token.

A file may have gigabytes, so it is encoded in chunks. BPE merges only within a word. If the chunks end between two
words, they have the token ids of the whole file. (Llama 2's tokenizer puts a space in front of each chunk.)
"""

import gzip
import io
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import tiktoken

from nanodomino.errors import UserError, attempt, import_optional, require
from nanodomino.files import LIMIT, read_json

END_OF_TEXT, SEPARATORS = "<|endoftext|>", ("<|endoftext|>", "<|end_of_text|>", "</s>")
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json")
# GPT-2's table {printable character: byte}, which all byte-level tokenizers share
PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
# Each normalizer but NFC changes it; q\u0303 has no composed form
SAMPLE = "x \t\r\n  \n" + "".join(map(chr, range(33, 127))) + " é q\u0303 ﬁ ² 東京 한 🙂 \a\u00a0  "
CHUNK = 1 << 20                 # characters read at once
# A cut is safe before a single space, because a word may begin with a space but never ends with one; between an ASCII
# letter or digit and whitespace (but not 1c to 1f); after a single newline, if \w follows. Other cuts are not: GPT-2
# gives the last of several spaces to the next word, Llama 3 joins newlines to the full stop before them.
SAFE_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[^\S\x1c-\x1f])|(?<=\S\n)(?=\w)")


class Tokenizer:
    """Wraps a tiktoken.Encoding. Every tokenizer has the methods and attributes of this class."""
    begin_of_text: int | None = None        # the id in front of each document and prompt, if there is one
    files: dict[str, Path] = {}             # the tokenizer's own files: {name of the copy in a corpus: original file}

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding
        self.name = encoding.name                   # byte, gpt2 or huggingface, as in meta.json
        self.vocab_size = encoding.n_vocab          # 1 + the largest id
        self.end_of_text = encoding.eot_token       # the id that ends a document

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, without begin_of_text and end_of_text. "<|endoftext|>" is ordinary text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return encode(text) of each text; several threads share the work."""
        if self.name == "byte":                     # faster than tiktoken, same ids
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(lambda text: self.encoding.encode_to_numpy(text, disallowed_special=()), texts))

    def decode(self, ids) -> str:
        """Return the text of these ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. They may be only a part of a UTF-8 character."""
        return self.encoding.decode_single_token_bytes(token)


class HuggingFaceTokenizer(Tokenizer):
    """Wraps a tokenizer of the package `tokenizers`. path: its tokenizer.json. Raises UserError if the tokenizer is of
    neither kind above, or if decoding the ids of a text gives another text, but for composed characters (NFC)."""
    name = "huggingface"

    def __init__(self, path: Path, special_tokens: bool, begin_of_text: bool, end_of_text: str | int | None):
        package = import_optional("tokenizers", path)
        self.encoding = attempt(f"{path} can't be read as a tokenizer.json", package.Tokenizer.from_file,
                                str(path), advice="write one with AutoTokenizer's save_pretrained")
        self.encoding.no_truncation()
        self.encoding.no_padding()
        self.encoding.encode_special_tokens = not special_tokens
        self.files = {name: path.with_name(name) for name in FILES if path.with_name(name).is_file()}
        self.files["tokenizer.json"] = path
        self.vocab_size = 1 + max(self.encoding.get_vocab().values())       # there may be gaps between ids
        self.is_byte_level = "ByteLevel" in repr(self.encoding.decoder)
        require((self.is_byte_level or getattr(self.encoding.model, "byte_fallback", False))
                and self.decode(ids := self.encode(SAMPLE)).lstrip() == SAMPLE
                == b"".join(map(self.token_bytes, ids)).decode(errors="replace").lstrip()
                and self.decode(self.encode("  x")).startswith(" "),        # Mistral's removes one space
                f"{path} changes a text that is encoded and then decoded, or is no byte-level BPE (GPT-2, Llama 3, "
                "Qwen, SmolLM2) or BPE with byte_fallback (Llama 2, Mistral); choose another tokenizer")
        config = read_json(self.files["tokenizer_config.json"]) if "tokenizer_config.json" in self.files else {}
        bos, eos = (token["content"] if isinstance(token := config.get(key), dict) else token
                    for key in ("bos_token", "eos_token"))
        self.begin_of_text = self.id_of(bos, "<|begin_of_text|>", "<s>") if begin_of_text else None
        names = [eos, *SEPARATORS] if eos in SEPARATORS else [*SEPARATORS[:2], eos, "</s>"]   # eos may end a chat turn
        names = {None: names, "eos_token": [eos, *names]}.get(end_of_text, [end_of_text])
        self.end_of_text = end_of_text if isinstance(end_of_text, int) else self.id_of(*names)

    def id_of(self, *names: str | None) -> int:
        """Return the id of the first of `names` that is a token of its own. Raises UserError."""
        added = {token.content: i for i, token in self.encoding.get_added_tokens_decoder().items()}
        found = [added[name] for name in names if name in added]
        require(found, f"{self.files['tokenizer.json']} has no added token {' or '.join(filter(None, names))}, but "
                f"{', '.join(sorted(added)[:8]) or 'none'}; name one as --end-of-text, or leave out --begin-of-text")
        return found[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(it.ids, np.uint32) for it in self.encoding.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids) -> str:
        return self.encoding.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        text = self.encoding.id_to_token(token) or ""
        if self.is_byte_level:
            return bytes(map(BYTE_OF.get, text)) if BYTE_OF.keys() >= set(text) else text.encode()
        hexadecimal = re.fullmatch("<0x([0-9A-F]{2})>", text)
        return bytes.fromhex(hexadecimal[1]) if hexadecimal else text.replace("▁", " ").encode()


def build_tokenizer(name, special_tokens=False, begin_of_text=False, end_of_text=None) -> Tokenizer:
    """Return the tokenizer `name`: "byte", "gpt2", or the path of a Hugging Face tokenizer, for which alone the options
    are. Raises UserError. special_tokens: the name of a special token in a text, otherwise ordinary text, means the
    token. begin_of_text: each document and prompt begins with it. end_of_text: name or id of the token that ends each
    document; "eos_token": that of tokenizer_config.json; None: the same, unless it may end a chat turn."""
    if name not in ("byte", "gpt2"):
        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        require(path.is_file(), f"unknown tokenizer '{name}'; try one of byte, gpt2, or the path of a Hugging Face "
                "tokenizer's folder, which holds a tokenizer.json")
        return HuggingFaceTokenizer(path, special_tokens, begin_of_text, end_of_text)
    require(not (special_tokens or begin_of_text or isinstance(end_of_text, str)), "--special-tokens, --begin-of-text "
            f"and --end-of-text are for Hugging Face tokenizers, but the tokenizer is {name}; leave them out")
    if name == "byte":
        return Tokenizer(tiktoken.Encoding("byte", pat_str=r"(?s:.)", special_tokens={END_OF_TEXT: 256},
                                           mergeable_ranks={bytes([byte]): byte for byte in range(256)}))
    advice = "prepare the text with the folder of GPT-2's tokenizer.json as --tokenizer, or with --tokenizer byte"
    return Tokenizer(attempt("the gpt2 vocabulary could not be downloaded", tiktoken.get_encoding, "gpt2",
                             advice=advice))


def find_files(inputs: list, key: str) -> tuple[dict[str, int], defaultdict]:
    """Find the text files in `inputs`, files and folders. Return ({path: bytes of text, or 0 if it holds more than one
    document}, {note: the files that it is about}). A file with several names is read once. Raises UserError."""
    sizes, notes, seen = {}, defaultdict(list), set()

    def files_in(path: str) -> Iterator[str]:
        """Yield the file, or a folder's files and then its subfolders', in sorted order."""
        if (real := os.path.realpath(path)) in seen:    # a link may lead to a folder above itself
            return
        seen.add(real)
        if os.path.isfile(path):
            yield path
        elif os.path.isdir(path):
            for entry in sorted(os.scandir(path), key=lambda entry: (entry.is_dir(), entry.path)):
                if entry.name.startswith("."):
                    notes["skipped, hidden"].append(entry.path)
                else:
                    yield from files_in(entry.path)
        else:
            notes["skipped, neither a file nor a folder"].append(path)

    for name in map(str, inputs):
        require(os.path.exists(name), f"no file or folder matches the input {name}; check the path")
        for path in files_in(name):
            try:
                kind, *_ = next(pieces := read_pieces(path, key))
                sizes[path] = sum(len(text.encode()) for _, text, _ in pieces) if kind == "text" else 0
                if kind == "text" and path.lower().removesuffix(".gz").endswith(".json"):
                    notes[f'read as one text, because the first line is no JSON object with "{key}"'].append(path)
            except UserError as error:
                require(path != name, str(error))
                notes["skipped, not UTF-8 text or damaged"].append(path)
    return sizes, notes


def read_pieces(path: str, key: str) -> Iterator[tuple[str, str, int]]:
    """Yield first (the file's type, "", 0). Then yield (place, text, bytes of the file read so far) for each document:
    its text, in chunks that can be tokenized one by one, and "". place: its file, and line or row. Raises UserError.

    gzip starts with 1f 8b; its content is of another type, by the file's name without .gz. parquet starts with PAR1.
    JSON lines are named .jsonl, or start with an object with the key and are not named .txt. Else UTF-8 is text."""
    name = path.lower().removesuffix(".gz")
    try:
        with (open(path, "rb") as stored,
              gzip.open(stored) if stored.peek(2)[:2] == b"\x1f\x8b" else nullcontext(stored) as file):
            kind = "row" if file.peek(4)[:4] == b"PAR1" else "line" if name.endswith(".jsonl") else "text"
            if kind == "text" and not name.endswith(".txt") and b"{" in file.peek(64)[:64]:
                with suppress(UserError):
                    text_of(file.readline(LIMIT), key, path)
                    kind = "line"
                file.seek(0)
            yield kind, "", 0
            if kind == "text":
                text, decoded = "", io.TextIOWrapper(file, "utf-8-sig", newline="")
                while part := decoded.read(CHUNK):
                    require("\0" not in part, f"the input {path} contains NUL, so it is no text; convert it to UTF-8")
                    text += part
                    while (cut := SAFE_CUT.search(text, CHUNK, 2 * CHUNK)) or len(text) > 2 * CHUNK:
                        end = cut.start() if cut else 2 * CHUNK
                        yield path, text[:end], stored.tell()
                        text = text[end:]
                if text:
                    yield path, text, stored.tell()
                yield path, "", stored.tell()
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
        reason = " ".join(str(error).partition(" in position")[0].split())     # a position counts from some buffer
        raise UserError(f"the input {path} is not UTF-8 text, or damaged ({reason}); convert or replace it") from None


def text_of(record: bytes | dict, key: str, place: str, advice=", or name another key with --key") -> str:
    """Return the text of a JSON line or of a row. Raises UserError, with `place` and how to use another key."""
    try:
        record = json.loads(record) if isinstance(record, bytes) else record
        return record[key].encode("utf-16", "surrogatepass").decode("utf-16", "replace")    # half a pair: U+FFFD
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = {KeyError: "the key is missing", AttributeError: "the value is no string", TypeError: "no object",
                  RecursionError: "it is nested too deeply"}.get(type(error), f"it is not JSON: {error}")
        raise UserError(f'{place}, is not {{"{key}": "..."}} ({reason}), but {str(record)[:200]}; correct it{advice}'
                        ) from None
