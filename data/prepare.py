"""Turns text into token ids on disk, once, so that training only has to read numbers.

    python data/prepare.py                                               Python's own standard library, as bytes
    python data/prepare.py --input books/ --output data/books --tokenizer gpt2
    python data/prepare.py --input part-*.jsonl --output data/web --split 98,1,1
    python data/prepare.py --input books/ --output data/llama --tokenizer ../Llama-3.2-1B     a Hugging Face tokenizer

    files, folders -> documents -> chunks of text -> token ids -> train.bin  valid.bin  test.bin  meta.json

A document is a text file, a row of a parquet file, or a line of a .jsonl file ({"text": ...}, Megatron-LM's
convention; also of another file, such as .json, whose first line is such an object). Any may be compressed with gzip.
Each document ends with one end-of-text token. It is the tokenizer's separator of documents, such as <|endoftext|>, even
if its eos_token ends a chat turn, such as <|im_end|>. The document goes as a whole to the split that is furthest below
its share of the bytes so far. This rule needs no random numbers. Each split gets documents from all parts of the input,
and the shares are met even if there are few documents or their sizes differ. For a small text they are raised to about
2,049 tokens, a sample of most models, but at most to a twentieth of the text. If a split gets no document, for example
because the input is one big file, its share is cut off the end of the largest split.

No document may be in both training and validation data. So a file that several inputs name is read once, and copies
of a document go to the same split.

Memory use does not grow with the size of a text file, because text is read in chunks. Each document costs about a
hundred bytes of memory. The tokenizer gets the chunks of many documents at once, so that all cores have work.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import sysconfig
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a script, Python looks in data/ only

from nanodomino.corpus.documents import find_files, read_documents
from nanodomino.corpus.prepared_folder import BLOCK, FORMAT, SPLITS, Corpus, check, load_corpus
from nanodomino.corpus.tokenizers import Tokenizer, build_tokenizer
from nanodomino.errors import UserError, counted, require, run_command
from nanodomino.files import delete, naming, open_regular_file, read_file, sha256, write_file
from nanodomino.settings.flags import Parser

DEFAULT_CORPUS = Path(__file__).resolve().parent / "python-stdlib"
STANDARD_LIBRARY = f"the standard library of Python {sys.version.split()[0]}"
SAMPLE_TOKENS = 2049            # of a sample of 2,048 tokens and their labels
AT_ONCE = 1 << 22               # characters of all texts that are tokenized at once
SEPARATOR_INSIDE = "documents with end-of-text inside, where --reset-attention-mask cuts them (see --end-of-text)"
PAIRS_COUNTED = 1 << 24         # only pairs in the first 2**24 tokens are counted, which takes up to 0.5 GB of memory


def prepare(inputs, output, tokenizer="byte", split=(949, 50, 1), progress=True, source=None, special_tokens=False,
            begin_of_text=False, end_of_text=None, key="text") -> dict:
    """Tokenize the documents of `inputs` into the folder `output`; return its meta.json as a dict. Raises UserError."""
    inputs = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    weights = check_split(split)
    text_tokenizer = build_tokenizer(tokenizer, special_tokens, begin_of_text, end_of_text)
    dtype = np.dtype("<u2" if text_tokenizer.vocab_size <= 1 << 16 else "<u4")
    output = Path(os.path.realpath(output))
    with new_folder(output) as folder:
        files, notes = find_files(inputs, key)
        total = sum(os.path.getsize(path) for path, _, _ in files)
        weights = raise_small_shares(weights, total)
        tokens, documents = write_splits(folder, files, total, text_tokenizer, dtype, weights, notes, progress, key)
        cut_off = fill_empty_splits(folder, tokens, dtype, weights)
        paths = {split: folder / f"{split}.bin" for split in SPLITS}
        counts = token_counts(paths["train"], dtype, text_tokenizer.vocab_size)
        bigram, pairs = bigram_entropy(paths["train"], dtype, text_tokenizer.vocab_size)
        meta = {
            "format": FORMAT, "source": source or ", ".join(map(str, inputs[:9])), "tokenizer": text_tokenizer.name,
            "vocab_size": text_tokenizer.vocab_size, "end_of_text": text_tokenizer.end_of_text,
            "dtype": dtype.name, "split": weights, "tokens": dict(zip(SPLITS, tokens)),
            "documents": dict(zip(SPLITS, documents)), "cut_off": cut_off, "notes": note_lines(notes),
            "unigram_entropy": entropy(counts), "bigram_entropy": bigram, "bigram_tokens": pairs,
            "sha256": {split: sha256(path) for split, path in paths.items()},
            "stamps": {split: file_stamp(path) for split, path in paths.items()}}
        if text_tokenizer.name == "huggingface":
            meta |= dict(special_tokens=special_tokens, begin_of_text=begin_of_text)
        for name, path in text_tokenizer.files.items():         # copies, because the originals may move
            write_file(folder / name, read_file(path))
        write_file(folder / "meta.json", (json.dumps(meta, indent=2) + "\n").encode())
        return meta


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a hidden folder next to `output`, and rename it to `output` at the end, so that a reader never sees half a
    corpus. Renaming fails if `output` holds files by then: of several processes that prepare the same output, the first
    to finish wins. A process that is killed leaves its hidden folder, which a user can delete."""
    require(not output.exists() or output.is_dir() and not any(output.iterdir()),
            f"the output {output} already exists, and nothing is replaced; delete it, or choose another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        with naming(output):                                   # a write to a full disk names no file
            yield folder
            folder.rename(output)
    finally:
        delete(folder)


def prepare_default_corpus(folder=DEFAULT_CORPUS, progress=True) -> dict:
    """Prepare Python's standard library, 12 MB that every machine has, unless that is done; return its meta.json."""
    finished = Path(folder) / "meta.json"
    if not finished.is_file():
        try:
            return prepare(standard_library(), folder, progress=progress, source=STANDARD_LIBRARY)
        except (UserError, OSError):
            if not finished.is_file():      # else another process was faster
                raise
    return load_corpus(folder).meta


def standard_library() -> list[Path]:
    """Return the standard library's source files, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in library.rglob("*.py") if not left_out & set(path.relative_to(library).parts))


def check_split(split) -> list[float]:
    """Convert a split such as (949, 50, 1) or "949,50,1" to shares that sum to 1. Raises UserError."""
    parts = split.split(",") if isinstance(split, str) else split
    try:
        weights = [float(part) for part in parts]
        fits = len(weights) == 3 and min(weights) >= 0 and weights[0] > 0 and math.isfinite(sum(weights))
    except (ValueError, TypeError):
        fits = False
    require(fits, "--split must be three numbers train,valid,test of at least 0, the first above 0, but is "
            f"{','.join(map(str, parts))}; try 949,50,1")
    return [weight / sum(weights) for weight in weights]


def raise_small_shares(weights: list[float], size: int) -> list[float]:
    """Raise shares below that of a sample in `size` bytes of text, up to a twentieth. A token has about 4 bytes."""
    least = min(4 * SAMPLE_TOKENS / max(size, 1), 1 / 20)
    raised = [weight and max(weight, least) for weight in weights]
    return [weight / sum(raised) for weight in raised]


# ---- documents -> splits of token ids

def write_splits(folder: Path, files: list, total: int, tokenizer: Tokenizer, dtype, weights: list[float],
                 notes: defaultdict, progress: bool, key: str) -> tuple[list[int], list[int]]:
    """Write each document to its split. Return the numbers of tokens and of documents in each split. total: bytes of
    all files. notes: from find_files(); updated here."""
    begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
    documents, written, split_of, separator = [0] * 3, [0] * 3, {}, [tokenizer.end_of_text]
    with ExitStack() as stack:
        outputs = [stack.enter_context(open_regular_file(folder / f"{split}.bin", "wb")) for split in SPLITS]
        bar = stack.enter_context(tqdm(desc="tokenizing", total=total, unit="B", unit_scale=True,
                                       disable=None if progress else True))     # None: no bar in a log file

        def pieces():
            """Yield (split, text to be tokenized, or None at the end of a document, the document's place)."""
            position = 0
            for document in read_documents(files, key):
                first = next(document.chunks, "")
                if first:
                    # documents of equal length with equal first chunks count as copies
                    copies = hashlib.blake2b(b"%d " % document.size + first.encode(), digest_size=8).digest()
                    if copies not in split_of:
                        # a file may be compressed or not all text, so extrapolate from the text read so far
                        expected = total * sum(written) / position if position else total
                        split_of[copies] = choose_split(document.size, written, documents, weights, expected)
                    split = split_of[copies]
                    documents[split] += 1
                    written[split] += document.size
                    for chunk in chain([first], document.chunks):
                        yield split, chunk, document.place
                        bar.update(len(chunk.encode()))
                    yield split, None, document.place
                else:
                    notes["skipped, empty"].append(document.place)
                position = document.position
                bar.update(position - bar.n)

        last, inside = None, False          # of this document: the last token so far; whether the separator is inside
        for batch in batches(pieces()):
            encoded = iter(tokenizer.encode_batch([text for _, text, _ in batch if text is not None]))
            for split, text, place in batch:
                if text is None:
                    ids = np.array([] if last == separator else separator)
                    if inside:
                        notes[SEPARATOR_INSIDE].append(place)
                    last, inside = None, False
                else:
                    ids = next(encoded)
                    inside |= last == separator or separator[0] in ids[:-1]
                    if begin and last is None and ids[:1].tolist() != begin:
                        ids = np.append(begin, ids)
                    last = ids[-1:].tolist()
                outputs[split].write(ids.astype(dtype).tobytes())
        tokens = [output.tell() // dtype.itemsize for output in outputs]
    require(sum(documents), f"the input holds no text "
            f"({'; '.join([counted(len(files), 'file'), *note_lines(notes)])}); check the paths")
    return tokens, documents


def batches(pieces: Iterator[tuple[int, str | None, str]]) -> Iterator[list[tuple[int, str | None, str]]]:
    """Yield lists of pieces (split, text, place) of about AT_ONCE characters. A text counts 64 more for its memory."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1] or "") + 64
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def choose_split(size: int, written: list[int], documents: list[int], weights: list[float], total: float) -> int:
    """Return the split, 0 to 2, for a document of `size` bytes, given the bytes and documents in each split so far.

    The document goes to the split with the smallest (bytes + half a mean document) / weight. This is Sainte-Laguë's
    rule, by which parliaments allocate seats. It ignores the document's size, so held-out documents are about as long
    as training documents. But a split is passed over if more than half of the document would exceed the split's share
    of `total`, the expected bytes of all documents. If all are passed over, the split with the largest weight gets it.
    """
    half = sum(written) / max(2 * sum(documents), 1) or 1
    with_room = [i for i in range(3) if weights[i] and written[i] + size / 2 <= weights[i] * total]
    return min(with_room or [weights.index(max(weights))], key=lambda i: (written[i] + half) / weights[i])


def fill_empty_splits(folder: Path, tokens: list[int], dtype, weights: list[float]) -> list[str]:
    """Fill each empty split from the end of the largest split. Return the filled splits. tokens: the number of tokens
    in each split; updated here."""
    total, largest = sum(tokens), tokens.index(max(tokens))
    empty = [i for i in range(3) if weights[i] > 0 and not tokens[i]]
    for i in reversed(empty):       # test first, so that the text continues from train to valid to test
        count = min(math.ceil(weights[i] * total), tokens[largest] - 1)
        with (open_regular_file(folder / f"{SPLITS[largest]}.bin", "r+b") as source,
              open_regular_file(folder / f"{SPLITS[i]}.bin", "wb") as target):
            start = source.seek(-count * dtype.itemsize, os.SEEK_END)
            shutil.copyfileobj(source, target)
            source.truncate(start)
        tokens[i], tokens[largest] = count, tokens[largest] - count
    return [SPLITS[i] for i in empty if tokens[i]]


# ---- counts and reference losses

def file_stamp(path: Path) -> dict:
    """Return what shows cheaply that a file has changed: its size, its time stamp in seconds, and the SHA-256 of 16
    blocks spread over the file."""
    digest, status, block = hashlib.sha256(), path.stat(), 1 << 16
    with open(path, "rb") as file:
        for number in range(16):
            file.seek(max(status.st_size - block, 0) * number // 15)
            digest.update(file.read(block))
    return dict(size=status.st_size, time=int(status.st_mtime), blocks=digest.hexdigest())


def check_unchanged(corpus: Corpus):
    """Raise UserError if a file of tokens has changed since it was prepared. If a stamp differs, the checksums decide:
    they take longer, but a copied folder may have other time stamps, and one of an earlier version has none."""
    paths = {split: corpus.path / f"{split}.bin" for split in SPLITS}
    if {split: file_stamp(path) for split, path in paths.items()} != corpus.meta.get("stamps"):
        for split, path in paths.items():
            check(sha256(path) == corpus.sha256[split],
                  f"{path} has changed since it was prepared: its SHA-256 is not the one in meta.json")


def token_counts(path: Path, dtype, vocabulary: int) -> np.ndarray:
    """Return how often each token occurs. Counts in blocks, because np.bincount takes 8 bytes of memory per token."""
    counts = np.zeros(vocabulary, np.int64)
    with open(path, "rb") as file:
        while len(block := np.fromfile(file, dtype, BLOCK)):
            counts += np.bincount(block, minlength=vocabulary)
    return counts


def bigram_entropy(path: Path, dtype, vocabulary: int) -> tuple[float, int]:
    """Return (H(token | previous token), the number of tokens from which it was counted).

    This is the loss of a model that sees only the previous token, as H(token), the unigram entropy, is the loss of a
    model that knows only how frequent each token is. Both are in nats per token.
    """
    first = np.fromfile(path, dtype, PAIRS_COUNTED).astype(np.int64)
    pairs = first[:-1] * vocabulary + first[1:]
    counts = np.bincount(pairs) if vocabulary <= 1024 else np.unique(pairs, return_counts=True)[1]   # a table is faster
    # H(token | previous) = H(previous, token) - H(previous)
    return max(entropy(counts) - entropy(np.bincount(first[:-1])), 0.0), len(first)


def entropy(counts) -> float:
    """Return the entropy, in nats, of the distribution that `counts` gives."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0    # + 0.0 turns -0.0 into 0.0


# ---- the command line

def note_lines(notes: dict[str, list[str]]) -> list[str]:
    """Return for example "skipped, hidden: 12 (.a; .b; .c; .d; .e; ...)" for each note."""
    return [f"{what}: {len(names):,} ({'; '.join(names[:5])}{'; ...' * (len(names) > 5)})"
            for what, names in notes.items()]


def print_summary(meta: dict, output: Path):
    """Print what was written: documents and tokens of each split, and the reference losses."""
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
          f"one that also sees the previous token {meta['bigram_entropy']:.3f}\nwritten to {output}")


def main():
    parser = Parser("python data/prepare.py", usage="python data/prepare.py [flags]", description=__doc__,
                    allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", metavar="TEXT",
                        help="text, .jsonl or parquet files, and folders (default: Python's own standard library)")
    parser.add_argument("--key", default="text", metavar="NAME",
                        help="the key, or column, of the text in JSON lines and parquet (default text)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="the folder to create")
    parser.add_argument("--tokenizer", default="byte", metavar="NAME",
                        help="byte (default), gpt2, or the folder or tokenizer.json of a Hugging Face tokenizer "
                        "(GPT-2, Llama 2 and 3, Mistral, Qwen, SmolLM2), which needs the package tokenizers")
    parser.add_argument("--special-tokens", action="store_true",
                        help="for a Hugging Face tokenizer: convert the names of special tokens in the text, such "
                        "as <|im_end|>, to these tokens (default: treat them as ordinary text)")
    parser.add_argument("--begin-of-text", action="store_true",
                        help="for a Hugging Face tokenizer: put its begin-of-text token, such as <s>, in front of each "
                        "document")
    parser.add_argument("--end-of-text", metavar="TOKEN",
                        help="for a Hugging Face tokenizer: the token that ends each document (default: <|endoftext|> "
                        "or <|end_of_text|> if it has one, else its eos_token)")
    parser.add_argument("--split", default="949,50,1", metavar="SHARES",
                        help="shares of train,valid,test (default 949,50,1); raised for a small text so that each "
                        "split holds a sample")
    flags = vars(parser.parse_args())
    inputs, output = flags.pop("input"), flags.pop("output")
    require(output or not inputs, "--input needs --output, the folder to create; try --output data/mine")
    source, output = None if inputs else STANDARD_LIBRARY, output or DEFAULT_CORPUS
    print_summary(prepare(inputs or standard_library(), output, source=source, **flags), output)


if __name__ == "__main__":
    run_command(main)
