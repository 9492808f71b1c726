"""Converts text to token ids and back, with one of three kinds of tokenizer.

    byte    one token per byte, and end-of-text; needs no file and can encode every text
    gpt2    GPT-2's 50,257 tokens; a token is about four bytes of English, so a text has a quarter as many tokens
    PATH    the folder or the tokenizer.json of a Hugging Face tokenizer, such as Llama 3's (huggingface_tokenizer.py)

Byte-pair encoding (BPE; GPT-2's paper, section 2.2) splits a text into words with a regular expression, and each word
into bytes. Then it merges two neighbouring tokens of the word into one, again and again. The tokenizer has a list of
all possible merges, and the merge that comes first in the list is done first.

GPT-2's tokenizer is two files: encoder.json maps tokens to ids, and vocab.bpe is the list of merges. Both write bytes
as printable characters, for example a space as Ġ.
"""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import tiktoken

from nanodomino.corpus.huggingface_tokenizer import bytes_of_characters, read_huggingface
from nanodomino.corpus.safe_cuts import SAFE_CUT
from nanodomino.errors import UserError, require
from nanodomino.files import read_file

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = ("byte", "gpt2")
DOWNLOAD_SECONDS = 60
TEXTS_AT_ONCE = 64      # in one call of tiktoken

# GPT-2's regular expression for words. Possessive quantifiers (++) and limited runs ({1,500000}) are added, because
# tiktoken gives up when it has to backtrack a million characters. In a run of whitespace before a word, all but the
# last character form a separate word.
GPT2_WORDS = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
              r"""|\s++$|\s{1,500000}(?!\S)|\s""")


class Tokenizer(Protocol):
    """The methods and attributes that every tokenizer has. Documents and prompts are encoded alike."""
    name: str               # byte, gpt2 or huggingface, as in meta.json
    vocab_size: int         # 1 + the largest id
    end_of_text: int        # the id that ends a document
    begin_of_text: int | None       # the id in front of each document and prompt, if there is one
    safe_cut: re.Pattern    # matches where a long text may be cut (safe_cuts.py)
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
    safe_cut, begin_of_text = SAFE_CUT, None

    def __init__(self, encoding: tiktoken.Encoding, files=None):
        self.encoding, self.name, self.files = encoding, encoding.name, files or {}
        self.vocab_size, self.end_of_text = encoding.n_vocab, encoding.eot_token

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        groups = [texts[start:start + TEXTS_AT_ONCE] for start in range(0, len(texts), TEXTS_AT_ONCE)]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(chain.from_iterable(threads.map(self.encode_group, groups)))

    def encode_group(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts in one call, joined by end-of-text. A call for each short text would mostly wait for Python's
        lock, which the other threads use too."""
        ids = self.encoding.encode_to_numpy(END_OF_TEXT.join(texts), allowed_special={END_OF_TEXT})
        ends = np.flatnonzero(ids == self.end_of_text)
        if len(ends) >= len(texts):                            # a text contains the name of end-of-text
            return list(map(self.encode, texts))
        return [ids[start:end] for start, end in zip([0, *ends + 1], [*ends, len(ids)])]

    def decode(self, ids) -> str:
        return self.encoding.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)


class ByteTokenizer(TiktokenTokenizer):
    """A Tokenizer whose ids are bytes. It encodes lone surrogates as the bytes they stand for (surrogateescape)."""

    def __init__(self):
        super().__init__(tiktoken.Encoding("byte", pat_str=r"(?s:.)", special_tokens={END_OF_TEXT: 256},
                                           mergeable_ranks={bytes([byte]): byte for byte in range(256)}))

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)     # faster than tiktoken, same ids

    def encode_group(self, texts: list[str]) -> list[np.ndarray]:
        return list(map(self.encode, texts))


def build_tokenizer(name, vocab_file=None, merge_file=None, eod_token=None, special_tokens=False,
                    begin_of_text=False) -> Tokenizer:
    """Return the tokenizer `name`: "byte", "gpt2", or the path of a Hugging Face tokenizer. Raises UserError.

    vocab_file, merge_file: GPT-2's two files; without them they are downloaded.
    The other arguments are for Hugging Face tokenizers only:
    eod_token: see find_special_token in huggingface_tokenizer.py.
    special_tokens: the name of a special token in a text means the token; otherwise the name is ordinary text.
    begin_of_text: put the tokenizer's begin-of-text token in front of each document and prompt.
    """
    is_path = name not in TOKENIZERS
    require(not is_path or Path(name).exists(), f"unknown tokenizer '{name}'; try one of {', '.join(TOKENIZERS)}, or "
            "the path of a Hugging Face tokenizer's folder")
    require((vocab_file is None) == (merge_file is None),
            f"--vocab-file and --merge-file belong together, but only {vocab_file or merge_file} was given; "
            "give both or neither")
    require(vocab_file is None or not is_path,
            f"--vocab-file and --merge-file are for the tokenizer gpt2, but the tokenizer is {name}; leave them out")
    for flag, value in {"--eod-token": eod_token, "--special-tokens": special_tokens,
                        "--begin-of-text": begin_of_text}.items():
        require(not value or is_path, f"{flag} is for Hugging Face tokenizers, but the tokenizer is {name}; leave "
                f"{flag} out")
    require(vocab_file is None or name != "byte",
            f"the byte tokenizer has no files, but {vocab_file} was given; add --tokenizer gpt2 to use them")
    if is_path:
        return read_huggingface(name, eod_token, special_tokens, begin_of_text)
    if name == "byte":
        return ByteTokenizer()
    if vocab_file is None:
        return TiktokenTokenizer(download_gpt2())
    ranks, end_of_text = read_gpt2_files(vocab_file, merge_file)
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_WORDS, mergeable_ranks=ranks,
                                 special_tokens={END_OF_TEXT: end_of_text})
    return TiktokenTokenizer(encoding, {"encoder.json": vocab_file, "vocab.bpe": merge_file})


def read_gpt2_files(vocab_file, merge_file) -> tuple[dict[bytes, int], int]:
    """Read encoder.json and vocab.bpe. Return ({bytes of a token: id}, the id of end-of-text). Raises UserError.

    tiktoken's own reader is not used: it caches files by path, so it would miss that a file has changed.
    """
    byte_of = bytes_of_characters()
    try:
        vocabulary, lines = (json.loads(read_file(vocab_file)),
                             read_file(merge_file).decode("utf-8").split("\n"))
        end_of_text = vocabulary.pop(END_OF_TEXT, len(vocabulary))
        all_integers = {type(number) for number in (*vocabulary.values(), end_of_text)} == {int}   # not 1.0 or true
        ranks = {bytes(byte_of[character] for character in token): number for token, number in vocabulary.items()}
        merges = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
        merged = [vocabulary[first + second] for first, second in merges]
        # tiktoken merges in the order of ids, so the list of merges must have the same order.
        longer = sorted(number for token, number in ranks.items() if len(token) > 1)
        fits = (all_integers and merged == longer
                and sorted([*ranks.values(), end_of_text]) == list(range(257 + len(merged))))
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; --vocab-file and --merge-file need GPT-2's "
                        "encoder.json and vocab.bpe") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fits = False
    require(fits, f"{vocab_file} and {merge_file} are not a vocabulary and its merges in GPT-2's format; "
            "give encoder.json as --vocab-file and vocab.bpe as --merge-file")
    return ranks, end_of_text


def download_gpt2() -> tiktoken.Encoding:
    """Return tiktoken's gpt2 encoding, from its cache or the network. Raises UserError.

    A thread loads it, because tiktoken's download has no time limit.
    """
    outcome = {"reason": f"no answer in {DOWNLOAD_SECONDS} seconds"}

    def get():
        try:
            outcome["encoding"] = tiktoken.get_encoding("gpt2")
        except BaseException as error:      # whatever it is, the advice is the same
            outcome["reason"] = type(error).__name__

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    require("encoding" in outcome, f"the gpt2 vocabulary could not be downloaded ({outcome['reason']}); "
            "prepare the text with --vocab-file encoder.json --merge-file vocab.bpe, or with --tokenizer byte")
    return outcome["encoding"]
