"""Converts text to token ids and back, with one of three kinds of tokenizer.

    byte    one token per byte, and end-of-text; needs no file and can encode every text
    gpt2    GPT-2's 50,257 tokens; a token is about four bytes of English, so a text has a quarter as many tokens
    PATH    the folder or the tokenizer.json of a Hugging Face tokenizer, such as Llama 3's

Byte-pair encoding (BPE; GPT-2's paper, section 2.2) splits a text into words with a regular expression, and each word
into bytes. Then it merges two neighbouring tokens of the word into one, again and again. The tokenizer has a list of
all possible merges, and the merge that comes first in the list is done first.

A tokenizer.json is read with the optional package `tokenizers`. Two kinds of BPE are accepted:

    byte-level       GPT-2, Llama 3, Qwen, SmolLM2    the symbols are bytes, spelled as printable characters; space is Ġ
    byte_fallback    Llama 2, Mistral                 the symbols are characters, space is ▁; a character that is not in
                                                      the vocabulary becomes its UTF-8 bytes, such as <0xE6>

For both kinds the bytes of each token are known, so generated text can be printed token by token. The name of a
special token is ordinary text in documents and prompts: a web page about <|endoftext|> does not end where it mentions
this token. With --special-tokens the name means the token, as in the text that a chat template writes. A tokenizer must
not change a text, except that it may compose characters, as Qwen's does (Unicode's NFC).
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tiktoken

from nanodomino.errors import UserError, import_optional, require
from nanodomino.files import read_file, read_json

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = ("byte", "gpt2")


class TiktokenTokenizer:
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
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return encode(text) of each text; several threads share the work."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(self.encode, texts))

    def decode(self, ids) -> str:
        """Return the text of these ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. They may be only a part of a UTF-8 character."""
        return self.encoding.decode_single_token_bytes(token)


class ByteTokenizer(TiktokenTokenizer):
    """A tokenizer whose ids are bytes."""

    def __init__(self):
        super().__init__(tiktoken.Encoding("byte", pat_str=r"(?s:.)", special_tokens={END_OF_TEXT: 256},
                                           mergeable_ranks={bytes([byte]): byte for byte in range(256)}))

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)       # faster than tiktoken, same ids


# ---- Hugging Face

# The files of a tokenizer; all but the first are optional.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json")
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>")       # end documents, but not a chat's turns
SPECIAL_TOKENS = {"eos_token": (*SEPARATORS, "</s>"), "bos_token": ("<|begin_of_text|>", "<s>")}        # usual names
# Each normalizer but NFC changes it; q\u0303 has no composed form
SAMPLE = "x \t\r\n  \n" + "".join(map(chr, range(33, 127))) + " é q\u0303 ﬁ ² 東京 한 🙂 \a\u00a0  "
ACCEPTED = "only BPE that is byte-level (GPT-2, Llama 3, Qwen, SmolLM2) or has byte_fallback (Llama 2, Mistral) works"


def bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's table {printable character: byte}, which all byte-level tokenizers share."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class HuggingFaceTokenizer:
    """Wraps a tokenizer of the package. path: its tokenizer.json. Raises UserError if the tokenizer is of neither kind
    above, or if decoding the ids of a text gives another text."""
    name = "huggingface"

    def __init__(self, package_tokenizer, path: Path, special_tokens: bool, begin_of_text: bool, end_of_text):
        package_tokenizer.no_truncation()
        package_tokenizer.no_padding()
        package_tokenizer.encode_special_tokens = not special_tokens
        self.package_tokenizer = package_tokenizer
        self.files = {name: path.with_name(name) for name in FILES if path.with_name(name).is_file()}
        self.files["tokenizer.json"] = path
        model, byte_level = package_tokenizer.model, "ByteLevel" in repr(package_tokenizer.decoder)
        require(type(model).__name__ == "BPE" and (byte_level or model.byte_fallback), f"{path} is a "
                f"{type(model).__name__} tokenizer without byte-level symbols or byte_fallback; {ACCEPTED}")
        self.byte_of = bytes_of_characters() if byte_level else {}
        self.vocab_size = 1 + max(package_tokenizer.get_vocab().values())       # there may be gaps between ids
        self.end_of_text = end_of_text if isinstance(end_of_text, int) else self.id_of(
            "eos_token", " or as --end-of-text", end_of_text)
        self.begin_of_text = self.id_of(
            "bos_token", ", or leave out --begin-of-text", "bos_token") if begin_of_text else None
        ids = self.encode(SAMPLE)
        require(self.decode(ids) == b"".join(map(self.token_bytes, ids)).decode(errors="replace").lstrip() == SAMPLE
                and self.decode(self.encode("  x")).startswith(" "),        # Mistral's removes one space
                f"{path} changes a text that is encoded and then decoded; {ACCEPTED}")

    def id_of(self, key: str, otherwise: str, name: str | None) -> int:
        """Return the id of the token `name`, which ends or begins a document. If name is `key`, it is the token that
        tokenizer_config.json names under `key`, else the first usual one. If name is None, a separator of documents
        also replaces an unusual token there. Raises UserError, which ends with the advice `otherwise`."""
        added = {token.content: i for i, token in self.package_tokenizer.get_added_tokens_decoder().items()}
        config = self.files.get("tokenizer_config.json")
        found = read_json(config).get(key) if config else None
        found = found.get("content") if isinstance(found, dict) else found
        usual = SPECIAL_TOKENS[key]
        others = usual if not found else SEPARATORS if name is None and found not in usual else ()
        found = name if name not in (None, key) else next((token for token in others if token in added), found)
        require(found in added, f"{self.files['tokenizer.json']} has no added token {str(found)[:80]!r} as its {key}; "
                f"name one in tokenizer_config.json{otherwise}: {', '.join(sorted(added)[:8]) or 'it has none'}")
        return added[found]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with errors_of_the_package(f"encode a text with {self.files['tokenizer.json']}"):
            return [np.array(encoding.ids, np.uint32) for encoding in
                    self.package_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids) -> str:
        return self.package_tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        text = self.package_tokenizer.id_to_token(token) or ""
        if self.byte_of:
            return bytes(map(self.byte_of.get, text)) if self.byte_of.keys() >= set(text) else text.encode()
        hexadecimal = re.fullmatch("<0x([0-9A-F]{2})>", text)
        return bytes.fromhex(hexadecimal[1]) if hexadecimal else text.replace("▁", " ").encode()


@contextmanager
def errors_of_the_package(action: str):
    """Turn any error in a with block into a UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:                  # a panic of the package's Rust code is no Exception
        raise UserError(f"the tokenizers package cannot {action} ({' '.join(str(error).split())[:200]}); choose "
                        "another tokenizer") from None


def read_huggingface(path: Path, *options) -> HuggingFaceTokenizer:
    """Read a tokenizer.json, or the one in a folder. options: as for build_tokenizer(). Raises UserError."""
    path = path / "tokenizer.json" if path.is_dir() else path
    require(path.is_file() and path.name != "tokenizer.model", f"there is no {path} (sentencepiece's tokenizer.model "
            "can't be used instead); write one with AutoTokenizer's save_pretrained, or choose another folder")
    package = import_optional("tokenizers", path)
    with errors_of_the_package(f"read {path}"):
        return HuggingFaceTokenizer(package.Tokenizer.from_str(read_file(path).decode()), path, *options)


Tokenizer = TiktokenTokenizer | HuggingFaceTokenizer


def build_tokenizer(name, special_tokens=False, begin_of_text=False, end_of_text=None) -> Tokenizer:
    """Return the tokenizer `name`: "byte", "gpt2", or the path of a Hugging Face tokenizer. Raises UserError.

    The other arguments are for Hugging Face tokenizers only:
    special_tokens: the name of a special token in a text means the token; otherwise the name is ordinary text.
    begin_of_text: put the tokenizer's begin-of-text token in front of each document and prompt.
    end_of_text: name or id of the token that ends a document. "eos_token": the eos_token of tokenizer_config.json.
        None: the eos_token too, unless it may end a chat turn and the tokenizer has <|endoftext|> or <|end_of_text|>.
    """
    if name not in TOKENIZERS:
        require(Path(name).exists(), f"unknown tokenizer '{name}'; try one of {', '.join(TOKENIZERS)}, or the path of "
                "a Hugging Face tokenizer's folder")
        return read_huggingface(Path(name), special_tokens, begin_of_text, end_of_text)
    for flag, value in (("--special-tokens", special_tokens), ("--begin-of-text", begin_of_text),
                        ("--end-of-text", isinstance(end_of_text, str))):
        require(not value, f"{flag} is for Hugging Face tokenizers, but the tokenizer is {name}; leave {flag} out")
    if name == "byte":
        return ByteTokenizer()
    try:
        return TiktokenTokenizer(tiktoken.get_encoding("gpt2"))
    except Exception as error:              # tiktoken's cache, the network, a proxy: the advice is the same
        raise UserError(f"the gpt2 vocabulary could not be downloaded ({type(error).__name__}); prepare the text with "
                        "the folder of GPT-2's tokenizer.json as --tokenizer, or with --tokenizer byte") from None
