"""Converts text to token ids and back, with one of three kinds of tokenizer.

    byte    one token per byte, and end-of-text; needs no file and can encode every text
    gpt2    GPT-2's 50,257 tokens; a token is about four bytes of English, so a text has a quarter as many tokens
    PATH    the folder or the tokenizer.json of a Hugging Face tokenizer, such as Llama 3's (huggingface_tokenizer.py)

Byte-pair encoding (BPE; GPT-2's paper, section 2.2) splits a text into words with a regular expression, and each word
into bytes. Then it merges two neighbouring tokens of the word into one, again and again. The tokenizer has a list of
all possible merges, and the merge that comes first in the list is done first.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import tiktoken

from nanodomino.corpus.tokenizers import read_huggingface
from nanodomino.errors import UserError, require

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = ("byte", "gpt2")


class Tokenizer(Protocol):
    """The methods and attributes that every tokenizer has. Documents and prompts are encoded alike."""
    name: str               # byte, gpt2 or huggingface, as in meta.json
    vocab_size: int         # 1 + the largest id
    end_of_text: int        # the id that ends a document
    begin_of_text: int | None       # the id in front of each document and prompt, if there is one
    files: dict[str, Path]  # the tokenizer's own files: {name of the copy in a corpus: original file}

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, without begin_of_text and end_of_text. "<|endoftext|>" is ordinary text, unless
        the tokenizer was built with special_tokens."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return encode(text) of each text; several threads share the work."""

    def decode(self, ids) -> str:
        """Return the text of these ids. Bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. They may be only a part of a UTF-8 character."""


class TiktokenTokenizer:
    """Wraps a tiktoken.Encoding as a Tokenizer."""
    begin_of_text, files = None, {}

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding, self.name = encoding, encoding.name
        self.vocab_size, self.end_of_text = encoding.n_vocab, encoding.eot_token

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(self.encode, texts))

    def decode(self, ids) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)


class ByteTokenizer(TiktokenTokenizer):
    """A Tokenizer whose ids are bytes."""

    def __init__(self):
        super().__init__(tiktoken.Encoding("byte", pat_str=r"(?s:.)", special_tokens={END_OF_TEXT: 256},
                                           mergeable_ranks={bytes([byte]): byte for byte in range(256)}))

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)       # faster than tiktoken, same ids


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
        return read_huggingface(name, special_tokens, begin_of_text, end_of_text)
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
