"""Converts text to token ids and back, with one of three kinds of tokenizer.

    byte    one token per byte, and end-of-text; needs no file and can encode every text
    gpt2    GPT-2's 50,257 tokens; a token is about four bytes of English, so a text has a quarter as many tokens
    PATH    the folder or the tokenizer.json of a Hugging Face tokenizer, which the package `tokenizers` reads

Byte-pair encoding (BPE; GPT-2's paper, section 2.2) splits a text into words with a regular expression, and each word
into bytes. Then it merges two neighbouring tokens of the word into one, again and again. The tokenizer has a list of
all possible merges, and the merge that comes first in the list is done first. A tokenizer.json spells bytes as
printable characters, such as Ġ for a space (byte-level: GPT-2, Llama 3, Qwen, SmolLM2), or spells only the bytes of
characters that are no tokens, such as <0xE6> (byte_fallback: Llama 2, Mistral). So the bytes of each token are known,
and generated text can be printed token by token.

The name of a special token is ordinary text in documents and prompts: a web page about <|endoftext|> does not end where
it mentions this token. With --special-tokens the name means the token, as in the text that a chat template writes.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

from nanodomino.errors import UserError, import_optional, require
from nanodomino.files import read_json

TOKENIZERS = ("byte", "gpt2")
END_OF_TEXT, SEPARATORS = "<|endoftext|>", ("<|endoftext|>", "<|end_of_text|>", "</s>")
# The files of a Hugging Face tokenizer; all but the first are optional.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json")
# GPT-2's table {printable character: byte}, which all byte-level tokenizers share
PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
# Each normalizer but NFC changes it; q\u0303 has no composed form
SAMPLE = "x \t\r\n  \n" + "".join(map(chr, range(33, 127))) + " é q\u0303 ﬁ ² 東京 한 🙂 \a\u00a0  "


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


class HuggingFaceTokenizer(TiktokenTokenizer):
    """Wraps a tokenizer of the package `tokenizers`. path: its tokenizer.json. Raises UserError if the tokenizer is of
    neither kind above, or if decoding the ids of a text gives another text, but for composed characters (NFC)."""
    name = "huggingface"

    def __init__(self, path: Path, special_tokens: bool, begin_of_text: bool, end_of_text: str | int | None):
        package = import_optional("tokenizers", path)
        try:
            self.encoding = package.Tokenizer.from_file(str(path))
        except Exception as error:                  # the package raises no other class
            raise UserError(f"{path} can't be read as a tokenizer.json ({' '.join(str(error).split())[:200]}); write "
                            "one with AutoTokenizer's save_pretrained") from None
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
        if begin_of_text:
            self.begin_of_text = self.id_of(bos, "<|begin_of_text|>", "<s>")
        names = [eos, *SEPARATORS] if eos in SEPARATORS else [*SEPARATORS[:2], eos, "</s>"]     # eos may end a chat's turn
        names = {None: names, "eos_token": [eos, *names]}.get(end_of_text, [end_of_text])
        self.end_of_text = end_of_text if isinstance(end_of_text, int) else self.id_of(*names)

    def id_of(self, *names: str | None) -> int:
        """Return the id of the first of `names` that is a token of its own. Raises UserError."""
        added = {token.content: i for i, token in self.encoding.get_added_tokens_decoder().items()}
        found = [added[name] for name in names if name in added]
        require(found, f"{self.files['tokenizer.json']} has no added token {' or '.join(filter(None, names))}, only "
                f"{', '.join(sorted(added)[:8])}; name one as --end-of-text, or leave out --begin-of-text")
        return found[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self.encoding.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]

    def decode(self, ids) -> str:
        return self.encoding.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        text = self.encoding.id_to_token(token) or ""
        if self.is_byte_level:
            return bytes(map(BYTE_OF.get, text)) if BYTE_OF.keys() >= set(text) else text.encode()
        hexadecimal = re.fullmatch("<0x([0-9A-F]{2})>", text)
        return bytes.fromhex(hexadecimal[1]) if hexadecimal else text.replace("▁", " ").encode()


Tokenizer = TiktokenTokenizer


def build_tokenizer(name, special_tokens=False, begin_of_text=False, end_of_text=None) -> Tokenizer:
    """Return the tokenizer `name`: "byte", "gpt2", or the path of a Hugging Face tokenizer, for which alone the options
    are. Raises UserError. special_tokens: the name of a special token in a text means the token. begin_of_text: put the
    begin-of-text token in front of each document and prompt. end_of_text: name or id of the token that ends a document.
    "eos_token": the eos_token of tokenizer_config.json. None: the same, unless it may end a chat turn and the tokenizer
    has <|endoftext|> or <|end_of_text|>."""
    if name not in TOKENIZERS:
        path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
        require(path.is_file(), f"unknown tokenizer '{name}'; try one of {', '.join(TOKENIZERS)}, or the path of a "
                "Hugging Face tokenizer's folder, which holds a tokenizer.json")
        return HuggingFaceTokenizer(path, special_tokens, begin_of_text, end_of_text)
    require(not (special_tokens or begin_of_text or isinstance(end_of_text, str)), "--special-tokens, --begin-of-text "
            f"and --end-of-text are for Hugging Face tokenizers, but the tokenizer is {name}; leave them out")
    if name == "byte":
        return TiktokenTokenizer(tiktoken.Encoding("byte", pat_str=r"(?s:.)", special_tokens={END_OF_TEXT: 256},
                                                   mergeable_ranks={bytes([byte]): byte for byte in range(256)}))
    try:
        return TiktokenTokenizer(tiktoken.get_encoding("gpt2"))
    except Exception as error:              # tiktoken's cache, the network, a proxy: the advice is the same
        raise UserError(f"the gpt2 vocabulary could not be downloaded ({type(error).__name__}); prepare the text with "
                        "the folder of GPT-2's tokenizer.json as --tokenizer, or with --tokenizer byte") from None
