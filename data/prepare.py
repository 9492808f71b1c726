"""Turns text into token ids on disk, once, so that training only has to read numbers.

    python data/prepare.py                                               Python's own standard library, as bytes
    python data/prepare.py --input books/ --output data/books --tokenizer gpt2
    python data/prepare.py --input part-*.jsonl --output data/web --split 98,1,1
    python data/prepare.py --input books/ --output data/llama --tokenizer ../Llama-3.2-1B     a Hugging Face tokenizer

A document is a text file, a row of a parquet file, or a line of a .jsonl file ({"text": ...}, Megatron-LM's
convention; also of a .json file whose first line is such an object). Any may be compressed with gzip. A document ends
with one end-of-text token, and goes as a whole to the split that is furthest below its share of the bytes so far. For a
small text the shares are raised to about 2,049 tokens, a sample of most models, but at most to a twentieth of the text.
If a split gets no document, for example because the input is one big file, its share is cut off the end of the largest
split. No document may be in both training and validation data. So a file that several inputs name is read once, and
copies of a document go to the same split.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a script, Python looks in data/ only

from nanodomino.corpus.prepared_folder import BLOCK, SPLITS, Corpus
from nanodomino.corpus.tokenizers import Tokenizer, build_tokenizer, find_files, read_pieces
from nanodomino.errors import UserError, counted, require, run_command
from nanodomino.files import naming, open_regular_file, read_file, sha256, write_file
from nanodomino.settings.flags import Parser

DEFAULT_CORPUS = Path(__file__).resolve().parent / "python-stdlib"
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}     # of the default corpus
AT_ONCE = 1 << 22               # characters of all texts that are tokenized at once, so that all cores have work
SEPARATOR_INSIDE = "documents with end-of-text inside, where --reset-attention-mask cuts them (see --end-of-text)"
PAIRS_COUNTED = 1 << 24         # only pairs in the first 2**24 tokens are counted, which takes up to 0.5 GB of memory


def prepare(inputs=None, output=DEFAULT_CORPUS, tokenizer="byte", split=(949, 50, 1), special_tokens=False,
            begin_of_text=False, end_of_text=None, key="text") -> dict:
    """Tokenize the documents of `inputs`, by default Python's standard library without its tests, into the folder
    `output`; return its meta.json as a dict. Raises UserError. The new folder is hidden until it is complete. If
    several processes prepare the same output, the first to finish wins, and the others fail to rename theirs."""
    require(len(split) == 3 and all(0 <= share < math.inf for share in split) and split[0] > 0, "--split must be three "
            f"numbers train,valid,test of at least 0, the first above 0, but is {split}; try 949,50,1")
    output, inputs = Path(os.path.realpath(output)), [inputs] if isinstance(inputs, (str, Path)) else inputs
    require(not output.exists() or output.is_dir() and not any(output.iterdir()),
            f"the output {output} already exists, and nothing is replaced; choose another --output")
    source = ", ".join(map(str, inputs[:9])) if inputs else f"the standard library of Python {sys.version.split()[0]}"
    if not inputs:
        library = Path(sysconfig.get_path("stdlib"))
        inputs = sorted(path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts))
    tokenizer = build_tokenizer(tokenizer, special_tokens, begin_of_text, end_of_text)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    sizes, notes = find_files(inputs, key)
    total = sum(map(os.path.getsize, sizes))
    least = min(4 * 2049 / max(total, 1), 1 / 20)           # 2,048 tokens and their labels have about 4 bytes each
    weights = [share and max(share / sum(split), least) for share in split]
    weights = [weight / sum(weights) for weight in weights]
    output.parent.mkdir(parents=True, exist_ok=True)
    with naming(output), TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as hidden:
        folder, documents = Path(hidden) / output.name, [0] * 3
        folder.mkdir()
        paths = [folder / f"{split}.bin" for split in SPLITS]
        with tqdm(desc="tokenizing", total=total, unit="B", unit_scale=True, disable=None) as bar:    # none in a log
            pieces = split_documents(sizes, key, weights, documents, notes, bar)
            tokens = write_tokens(paths, pieces, tokenizer, dtype, notes)
        notes = [f"{what}: {len(names):,} ({'; '.join(names[:5])}{'; ...' * (len(names) > 5)})"
                 for what, names in notes.items()]
        require(sum(documents), f"the input holds no text ({'; '.join([counted(len(sizes), 'file'), *notes])}); check "
                "the paths")
        cut_off = fill_empty_splits(paths, tokens, dtype, weights)
        meta = {
            "format": "nanodomino-corpus-1", "source": source, "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text, "dtype": dtype.name,
            "split": weights, "tokens": dict(zip(SPLITS, tokens)), "documents": dict(zip(SPLITS, documents)),
            "cut_off": cut_off, "notes": notes, **entropies(paths[0], dtype, tokenizer.vocab_size),
            "sha256": dict(zip(SPLITS, map(sha256, paths))), "stamps": dict(zip(SPLITS, map(file_stamp, paths)))}
        if tokenizer.name == "huggingface":
            meta |= dict(special_tokens=special_tokens, begin_of_text=begin_of_text)
        for name, path in tokenizer.files.items():              # copies, because the originals may move
            write_file(folder / name, read_file(path))
        write_file(folder / "meta.json", (json.dumps(meta, indent=2) + "\n").encode())
        folder.rename(output)
    return meta


def prepare_default_corpus(folder=DEFAULT_CORPUS):
    """Prepare the default corpus, 12 MB that every machine has, unless another process of this or another host does."""
    try:
        prepare(output=folder)
    except (UserError, OSError):
        if not (Path(folder) / "meta.json").is_file():
            raise


def split_documents(sizes: dict[str, int], key: str, weights: list[float], documents: list[int], notes: dict,
                    bar: tqdm) -> Iterator[tuple[int, str, str]]:
    """Choose a split for each document in the files that find_files() found. Yield (split, text to be tokenized, or ""
    at the end of a document, its place). documents: their number in each split; updated here, as are notes and bar.

    A document goes to the split with the smallest (bytes so far + half a mean document) / weight. This is
    Sainte-Laguë's rule, by which parliaments allocate seats. It ignores the document's size, so held-out documents are
    about as long as training documents. But a split is passed over if more than half of the document would exceed the
    split's share of all text. If all are passed over, the split with the largest weight gets it."""
    written, split_of, split, done, position = [0] * 3, {}, None, 0, 0
    for path in sizes:
        next(pieces := read_pieces(path, key))
        for place, text, read in pieces:
            if "\ufffd" in text:
                notes["with U+FFFD, the sign for unreadable characters"].append(place)
            if text and split is None:
                size = sizes[path] or len(text.encode())
                copies = hash((size, text))         # documents of equal length with equal first chunks count as copies
                if copies not in split_of:
                    # a file may be compressed or not all text, so extrapolate from the text read so far
                    expected = bar.total * sum(written) / position if position else bar.total
                    half = sum(written) / max(2 * sum(documents), 1) or 1
                    with_room = [i for i in range(3) if weights[i] and written[i] + size / 2 <= weights[i] * expected]
                    split_of[copies] = min(with_room or [weights.index(max(weights))],
                                           key=lambda i: (written[i] + half) / weights[i])
                split = split_of[copies]
                documents[split] += 1
                written[split] += size
            if split is None:
                notes["skipped, empty"].append(place)
            else:
                yield split, text, place
            bar.update(done + read - bar.n)
            if not text:
                split, position = None, done + read
        done += os.path.getsize(path)


def write_tokens(paths: list[Path], pieces: Iterator, tokenizer: Tokenizer, dtype, notes: dict) -> list[int]:
    """Tokenize the pieces of split_documents(), and write them. Return the number of tokens in each split."""
    def take() -> Iterator[tuple[int, str, str]]:
        size = 0
        while size < AT_ONCE and (piece := next(pieces, None)):
            size += len(piece[1]) + 64                  # the memory of a short text
            yield piece

    begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
    last, ends = None, 0            # of this document so far: the last id, and how often it contains end-of-text
    with ExitStack() as stack:
        outputs = [stack.enter_context(open_regular_file(path, "wb")) for path in paths]
        while batch := list(take()):
            for (split, text, place), ids in zip(batch, tokenizer.encode_batch([text for _, text, _ in batch])):
                if text:
                    if last is None and begin not in (None, *ids[:1]):
                        ids = np.append(begin, ids)
                    last, ends = ids[-1] if len(ids) else -1, ends + np.count_nonzero(ids == end)
                else:
                    if ends > (last == end):
                        notes[SEPARATOR_INSIDE].append(place)
                    ids, last, ends = np.array([] if last == end else [end]), None, 0
                outputs[split].write(ids.astype(dtype).tobytes())
        return [output.tell() // dtype.itemsize for output in outputs]


def fill_empty_splits(paths: list[Path], tokens: list[int], dtype, weights: list[float]) -> list[str]:
    """Fill each empty split from the end of the largest split. Return the filled splits. tokens: the number of tokens
    in each split; updated here."""
    total, largest = sum(tokens), tokens.index(max(tokens))
    empty = [i for i in range(3) if weights[i] > 0 and not tokens[i]]
    for i in reversed(empty):       # test first, so that the text continues from train to valid to test
        tokens[i] = min(math.ceil(weights[i] * total), tokens[largest] - 1)
        tokens[largest] -= tokens[i]
        source, start = paths[largest], tokens[largest] * dtype.itemsize
        write_file(paths[i], np.fromfile(source, np.uint8, offset=start).tobytes())
        os.truncate(source, start)
    return [SPLITS[i] for i in empty if tokens[i]]


def file_stamp(path: Path) -> dict:
    """Return what shows cheaply that a file has changed: size, time in seconds, and the SHA-256 of 16 blocks of it."""
    digest, status, block = hashlib.sha256(), path.stat(), 1 << 16
    with open(path, "rb") as file:
        for number in range(16):
            file.seek(max(status.st_size - block, 0) * number // 15)
            digest.update(file.read(block))
    return dict(size=status.st_size, time=int(status.st_mtime), blocks=digest.hexdigest())


def check_unchanged(corpus: Corpus):
    """Raise UserError if a file of tokens has changed since it was prepared. If its stamp differs, its checksum
    decides: this takes longer, but a copied file may have another time stamp."""
    for split, checksum in corpus.sha256.items():
        path, stamps = corpus.path / f"{split}.bin", corpus.meta.get("stamps", {})
        require(file_stamp(path) == stamps.get(split) or sha256(path) == checksum, f"{path} has changed since it was "
                "prepared: its SHA-256 is not the one in meta.json; prepare the text again")


def entropies(path: Path, dtype, vocabulary: int) -> dict:
    """Return H(token), the loss in nats per token of a model that knows only how frequent each token is; H(token |
    previous token) = H(previous, token) - H(previous); and the number of tokens from which the latter was counted."""
    def entropy(counts) -> float:
        shares = counts[counts > 0] / max(counts.sum(), 1)
        return float(-(shares * np.log(shares)).sum()) + 0.0    # + 0.0 turns -0.0 into 0.0

    starts = range(0, path.stat().st_size, BLOCK * dtype.itemsize)      # np.bincount takes 8 bytes of memory per token
    counts = sum((np.bincount(np.fromfile(path, dtype, BLOCK, offset=start), minlength=vocabulary) for start in starts),
                 np.zeros(vocabulary, int))
    first = np.fromfile(path, dtype, PAIRS_COUNTED).astype(np.int64)
    pairs = first[:-1] * vocabulary + first[1:]
    pairs = np.bincount(pairs) if vocabulary <= 1024 else np.unique(pairs, return_counts=True)[1]   # a table is faster
    return {"unigram_entropy": entropy(counts),
            "bigram_entropy": max(entropy(pairs) - entropy(np.bincount(first[:-1])), 0.0), "bigram_tokens": len(first)}


def main():
    def shares(text: str) -> list[float]:
        return [float(share) for share in text.split(",")]

    parser = Parser("python data/prepare.py", usage="python data/prepare.py [flags]", description=__doc__,
                    allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, help, options in (
            ("--input", "text, .jsonl or parquet files, and folders (default: Python's own standard library)",
             dict(dest="inputs", nargs="+", metavar="TEXT")),
            ("--key", "the text's key in JSON lines, or column in parquet (default text)", dict(default="text")),
            ("--output", "the folder to create", dict(type=Path, default=DEFAULT_CORPUS, metavar="FOLDER")),
            ("--tokenizer", "byte (default), gpt2, or the folder or tokenizer.json of a Hugging Face tokenizer (GPT-2, "
             "Llama 2 and 3, Mistral, Qwen, SmolLM2), which needs the package tokenizers", dict(default="byte")),
            ("--special-tokens", "for a Hugging Face tokenizer: convert the names of special tokens in the text, such "
             "as <|im_end|>, to these tokens (default: treat them as ordinary text)", dict(action="store_true")),
            ("--begin-of-text", "for a Hugging Face tokenizer: put its begin-of-text token, such as <s>, in front of "
             "each document", dict(action="store_true")),
            ("--end-of-text", "for a Hugging Face tokenizer: the token that ends each document (default: <|endoftext|> "
             "or <|end_of_text|> if it has one, else its eos_token)", dict(metavar="TOKEN")),
            ("--split", "shares of train,valid,test (default 949,50,1); raised for a small text so that each split "
             "holds a sample", dict(type=shares, default="949,50,1"))):
        parser.add_argument(name, help=help, **options)
    flags = parser.parse_args()
    require(flags.output != DEFAULT_CORPUS or not flags.inputs, "--input needs --output; try --output data/mine")
    meta = prepare(**vars(flags))
    total = sum(meta["tokens"].values())
    print(f"{meta['source']}: {counted(total, 'token', ',')} of a vocabulary of {meta['vocab_size']:,} "
          f"({meta['tokenizer']})")
    for split, tokens in meta["tokens"].items():
        print(f"  {split:<5} {counted(meta['documents'][split], 'document', ','):>19} "
              f"{counted(tokens, 'token', ','):>22} {tokens / total:>7.2%}")
    if meta["cut_off"]:
        print(f"  too few documents for all splits: {' and '.join(meta['cut_off'])} cut off the end of the largest one")
    for note in meta["notes"]:
        print(f"  {note}")
    print(f"  a model that knows only token frequencies has a loss of {meta['unigram_entropy']:.3f} nats per token, "
          f"one that also sees the previous token {meta['bigram_entropy']:.3f}\nwritten to {flags.output}")


if __name__ == "__main__":
    run_command(main)
