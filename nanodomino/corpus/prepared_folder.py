"""Reads a corpus: a folder that data/prepare.py has made.

    train.bin  valid.bin  test.bin    token ids, uint16 or uint32, each document followed by end-of-text
    meta.json                         the tokenizer, sizes in tokens, checksums, entropies
    tokenizer.json ...                copies of the tokenizer's files, if it has any
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nanodomino.corpus.tokenizers import Tokenizer, build_tokenizer
from nanodomino.errors import UserError, require
from nanodomino.files import read_file

SPLITS = ("train", "valid", "test")
BLOCK = 1 << 20         # tokens counted at once


@dataclass
class Corpus:
    """The contents of meta.json."""
    path: Path
    tokenizer_name: str
    vocab_size: int
    end_of_text: int
    dtype: np.dtype
    tokens: dict[str, int]      # {split: number of tokens}
    sha256: dict[str, str]      # {split: checksum}
    unigram_entropy: float      # nats per training token: the loss of a model that knows only token frequencies,
    bigram_entropy: float       # and of one that also sees the previous token
    meta: dict                  # the whole of meta.json

    def text_bytes(self, split: str, count: int) -> int | None:
        """Return the bytes of text in tokens 1 to `count` of a split, the labels of its first windows. None if the
        tokenizer can't be loaded."""
        if self.token_sizes is None:
            return None
        stream, total = np.memmap(self.path / f"{split}.bin", self.dtype, mode="r"), 0
        for start in range(0, count, BLOCK):
            tokens = stream[start:min(start + BLOCK, count) + 1]
            begins = self.token_sizes[0, tokens[:-1]] == 0     # only end-of-text and begin-of-text have no text
            total += int(self.token_sizes[begins.astype(int), tokens[1:]].sum())
        return total

    @cached_property
    def token_sizes(self) -> np.ndarray | None:
        """The bytes of text of each token id, [2, vocab_size]: row 1 for the first token of a document, row 0 for the
        others. Row 1 leaves out the space that tokenizers such as Llama 2's put in front of each document."""
        try:
            tokenizer = self.tokenizer()
        except UserError:
            return None
        texts = [tokenizer.token_bytes(token) for token in range(self.vocab_size)]
        added = b" " if texts[tokenizer.encode("x")[0]].startswith(b" ") else b""
        sizes = np.array([[len(text.removeprefix(prefix)) for text in texts] for prefix in (b"", added)])
        sizes[:, [token for token in (tokenizer.begin_of_text, tokenizer.end_of_text) if token is not None]] = 0
        return sizes

    def tokenizer(self, special_tokens=False, begin_of_text=False) -> Tokenizer:
        """Build the tokenizer that encoded this corpus. Raises UserError. special_tokens and begin_of_text: turn these
        options on even if the corpus was encoded without them."""
        return build_tokenizer(self.path if self.tokenizer_name == "huggingface" else self.tokenizer_name,
                               special_tokens or self.meta.get("special_tokens", False),
                               begin_of_text or self.meta.get("begin_of_text", False), self.end_of_text)

    def check_tokenizer_of(self, checkpoint: Path):
        """Raise UserError if an imported checkpoint's tokenizer.json reads other text from the first training tokens.
        The sizes do not tell: the tokenizers of Llama 2 and of Mistral 7B both have 32,000 tokens."""
        if (checkpoint / "tokenizer.json").is_file():
            ids = np.fromfile(self.path / "train.bin", self.dtype, count=4096)
            ids = ids[ids != self.end_of_text].tolist()        # a model may rename its end-of-text
            require(self.tokenizer().decode(ids) == build_tokenizer(checkpoint).decode(ids), f"{self.path} was prepared"
                    f" with another tokenizer than the tokenizer.json of {checkpoint}; prepare its text with "
                    f"data/prepare.py --tokenizer {checkpoint}")


def load_corpus(folder) -> Corpus:
    """Read the meta.json of a corpus, and compare it with the files' sizes. Raises UserError."""
    folder, path = Path(folder), Path(folder) / "meta.json"
    require(path.is_file(), f"there is no data folder {folder} with a meta.json; give another folder, or make one with "
            f"data/prepare.py --input {folder if folder.is_file() else 'TEXT'} --output {folder}"
            + "-prepared" * folder.exists())
    try:
        meta = json.loads(read_file(path))
        corpus = Corpus(folder, str(meta["tokenizer"]), int(meta["vocab_size"]), int(meta["end_of_text"]),
                        np.dtype(meta["dtype"]), {split: int(meta["tokens"][split]) for split in SPLITS},
                        {split: str(meta["sha256"][split]) for split in SPLITS},
                        float(meta["unigram_entropy"]), float(meta["bigram_entropy"]), meta)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path} is damaged ({reason}); prepare the text again") from None
    for split, tokens in corpus.tokens.items():
        path = folder / f"{split}.bin"
        size = path.stat().st_size if path.is_file() else 0
        require(size == tokens * corpus.dtype.itemsize, f"{path} should hold {tokens} tokens in "
                f"{tokens * corpus.dtype.itemsize} bytes, but has {size} bytes; prepare the text again")
    return corpus
