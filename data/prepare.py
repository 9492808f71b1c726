"""Text -> tokens on disk, once, so that training only has to read numbers.

    python data/prepare.py                                               Python's own standard library, as bytes
    python data/prepare.py --input books/ --output data/books --tokenizer gpt2
    python data/prepare.py --input part-*.jsonl --output data/web --split 98,1,1
    python data/prepare.py --input books/ --output data/llama --tokenizer ../Llama-3.2-1B     a Hugging Face tokenizer

    files, folders, globs -> documents -> chunks of text -> token ids -> train.bin  valid.bin  test.bin  meta.json

A document is a text file or a line of a .jsonl file ({"text": ...}, Megatron-LM's convention). Each is followed by one
end-of-text token and goes wholly to one split, namely the one that is furthest behind its share of the bytes so far.
Every machine makes the same choice, the splits are mixed through the whole input, and the shares hold also where
documents are few and unequal. Does a split stay empty (one big file, say), its share is cut off the largest one's end.
Text must not leak from validation into training: a file that is matched twice is read once, and a document that was
held out is left out when it comes again.

Memory holds a few chunks of text, whatever the size of a file (a .jsonl line is one chunk), and a hundred bytes a
document. Everything is written to a hidden folder beside the output and renamed at the end: a folder of the right name
is complete.
"""

import argparse
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import uuid
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Iterator

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, Python looks only into data/

from nanodomino.config.terminal import run_command  # noqa: E402
from nanodomino.corpus.folder import FORMAT, SPLITS, file_sha256, load_corpus  # noqa: E402
from nanodomino.corpus.huggingface_tokenizer import FILES, SAFE_CUT, find_tokenizer  # noqa: E402
from nanodomino.corpus.tokenizer import build_tokenizer  # noqa: E402
from nanodomino.errors import UserError, require  # noqa: E402

DEFAULT_CORPUS = Path(__file__).resolve().parent / "python-stdlib"
STANDARD_LIBRARY = f"the standard library of Python {sys.version.split()[0]}"
OWN = {"meta.json", "encoder.json", "vocab.bpe", *FILES, *(f"{split}.bin" for split in SPLITS)}     # all it ever writes
CHUNK = 1 << 20                 # characters tokenized at once
DENSE_VOCABULARY = 1024         # up to here, pairs of tokens are counted in a full table
PAIRS_COUNTED = 1 << 24         # beyond it, they are counted in this many tokens, by sorting

LAST_SAFE_CUT = re.compile(r"(?s:.*)" + SAFE_CUT)


@dataclass
class Document:
    size: int                   # bytes of text, in which the shares of the splits are measured
    size_in_file: int           # bytes of its file, for the progress bar
    chunks: Iterator[str]


def prepare(inputs, output, tokenizer="byte", split=(949, 50, 1), vocab_file=None, merge_file=None, progress=True,
            source=None, overwrite=False, eod_token=None) -> dict:
    """Tokenize the documents of `inputs` into the folder `output`; returns its meta.json. Raises UserError.

    If another process has made the same corpus in the meantime, that one stays and ours is dropped."""
    inputs = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    output = Path(os.path.realpath(output))
    weights = check_split(split)
    encoding = build_tokenizer(tokenizer, vocab_file, merge_file, eod_token)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
    try:
        clear_leftovers(output)
        check_output(output, overwrite)
        files, skipped = find_files(inputs, output)
        for path in files:
            require(Path(path).parent != output,
                    f"the input {path} lies in the output, which would be replaced; choose another --output")
        with temporary_sibling(output) as folder:
            tokens, documents = write_splits(folder, files, encoding, dtype, weights, skipped, progress)
            cut_off = fill_empty_splits(folder, tokens, dtype, weights)
            unigram, bigram, counted = entropies(folder / "train.bin", dtype, encoding.n_vocab)
            meta = {
                "format": FORMAT, "source": source or summary_of(inputs),
                "tokenizer": encoding.name, "vocab_file": None, "merge_file": None,
                "vocab_size": encoding.n_vocab, "end_of_text": encoding.eot_token, "dtype": dtype.name,
                "split": weights, "tokens": dict(zip(SPLITS, tokens)), "documents": dict(zip(SPLITS, documents)),
                "cut_off": cut_off, "skipped": dict(+skipped),
                "unigram_entropy": unigram, "bigram_entropy": bigram, "bigram_tokens": counted,
                "sha256": {name: file_sha256(folder / f"{name}.bin") for name in SPLITS}}
            if vocab_file is not None:      # so that the tokens can still be read when the originals have moved
                meta |= {"vocab_file": "encoder.json", "merge_file": "vocab.bpe"}
                shutil.copyfile(vocab_file, folder / "encoder.json")
                shutil.copyfile(merge_file, folder / "vocab.bpe")
            if encoding.name == "huggingface":
                meta |= {"tokenizer_file": "tokenizer.json", "eod_token": encoding.end_of_text}
                copy_tokenizer(find_tokenizer(tokenizer), folder)
            (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", "utf-8")
            return publish(folder, output, meta, overwrite)
    except OSError as error:
        raise UserError(f"cannot prepare {output}, since the system says '{error.strerror or error}' about "
                        f"{error.filename or 'writing it'}; mend that, or choose another --input or "
                        "--output") from error


def copy_tokenizer(path: Path, folder: Path):
    """A tokenizer.json, by that name, and what belongs to it where it is there."""
    for name, original in zip(FILES, [path, *map(path.with_name, FILES[1:])]):
        if original == path or original.is_file():
            shutil.copyfile(original, folder / name)


def prepare_default_corpus(folder=DEFAULT_CORPUS, progress=True) -> dict:
    """Python's standard library as bytes: twelve megabytes of text that every machine already has. Made once."""
    finished = Path(folder) / "meta.json"
    if not finished.is_file():
        try:
            return prepare(standard_library(), folder, progress=progress, source=STANDARD_LIBRARY)
        except UserError:
            if not finished.is_file():      # otherwise another process has made it just before
                raise
    return load_corpus(folder).meta


def standard_library() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in library.rglob("*.py") if not left_out & set(path.relative_to(library).parts))


# What goes in and out

def check_split(split) -> list[float]:
    """(949, 50, 1) or "949,50,1" -> shares that sum to 1."""
    parts = split.split(",") if isinstance(split, str) else split
    try:
        weights = [float(part) for part in parts]
        fits = len(weights) == 3 and min(weights) >= 0 and weights[0] > 0 and math.isfinite(sum(weights))
    except (ValueError, TypeError):
        fits = False
    require(fits, "--split must be three numbers train,valid,test of at least 0, the first above 0, but is "
            f"{','.join(map(str, parts))}; try 949,50,1")
    return [weight / sum(weights) for weight in weights]


def check_output(output: Path, overwrite: bool):
    require(output.is_dir() or not output.exists(),
            f"the output {output} is a file, but must be a folder; choose another --output")
    if not output.exists() or not any(output.iterdir()):
        return
    try:
        load_corpus(output)
    except UserError:
        raise UserError(f"the output {output} holds other files, which are never replaced; choose another "
                        "--output") from None
    foreign = sorted({path.name for path in output.iterdir()} - OWN)
    require(not foreign, f"the output {output} holds other files too, such as {', '.join(foreign[:1])}, which are "
            "never replaced; move them away, or choose another --output")
    require(overwrite,
            f"the output {output} already holds a prepared corpus; choose another --output, or add --overwrite")


def find_files(inputs: list, output: Path) -> tuple[dict[str, bool], Counter]:
    """({real path: whether the user named it}, what was skipped). The real path is the key, so none is read twice."""
    files, skipped = {}, Counter()
    for pattern in map(str, inputs):
        matches = [pattern] if os.path.exists(pattern) else sorted(matches_of(pattern))
        require(matches, f"no file or folder matches the input {pattern}; check the path")
        for match in matches:
            if os.path.isdir(match):
                for path in text_files_below(match, output, skipped):
                    files.setdefault(os.path.realpath(path), False)
            else:
                require(os.path.isfile(match),
                        f"the input {match} is neither a file nor a folder; write its text to a file first")
                files[os.path.realpath(match)] = True
    return files, skipped


def matches_of(pattern: str) -> list[str]:
    """What a glob means; `**` is any folder below, or none. glob's own `**` has no end where links lead in a circle."""
    top, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/+|$)", pattern, maxsplit=1)
    if not rest:
        return glob.glob(pattern)
    return [match for begin in (glob.glob(top) if top else ["."]) for folder in folders_below(begin)
            for match in matches_of(os.path.join(glob.escape(folder), rest[0] or "*"))]


def folders_below(top: str) -> Iterator[str]:
    """A folder and those in it that are not hidden, behind links too, each once however many links lead to it."""
    seen = set()
    for folder, folders, _ in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and real not in seen)
        if real not in seen:
            yield folder
        seen.add(real)


def text_files_below(top: str, output: Path, skipped: Counter) -> Iterator[str]:
    """The text files of a folder in sorted order, without hidden ones and without an older output."""
    def cannot_list(error):
        raise error

    for folder, folders, names in os.walk(top, onerror=cannot_list):
        skipped["hidden files or folders"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = sorted(name for name in folders
                            if not name.startswith(".") and Path(folder, name).resolve() != output)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isfile(path):
                continue
            if is_text(path):
                yield path
            else:
                skipped["files that are not UTF-8 text"] += 1


def is_text(path: str) -> bool:
    """Whether all of a file is UTF-8 without a NUL."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return not any("\0" in chunk for chunk in iter(lambda: file.read(CHUNK), ""))
    except UnicodeDecodeError:
        return False


def summary_of(inputs: list) -> str:
    return ", ".join(map(str, inputs[:3])) + (f" and {len(inputs) - 3} more" if len(inputs) > 3 else "")


# Files -> documents -> chunks -> tokens

def documents_of(files: dict[str, bool], any_bytes: bool) -> Iterator[Document]:
    for path, named in files.items():
        if not path.endswith(".jsonl"):
            yield Document(os.path.getsize(path), os.path.getsize(path), text_chunks(path, any_bytes and named))
            continue
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                text = text_of_line(line, f"{path}, line {number},") if line.strip() else ""
                yield Document(len(raw(text)), len(line), iter([text]))


def text_of_line(line: bytes, place: str) -> str:
    try:
        document = json.loads(line, parse_int=float)           # of numbers nothing is wanted, however long they are
    except (ValueError, RecursionError):
        raise UserError(f"{place} is not JSON; each line of a .jsonl file must be an object with a "
                        "text field") from None
    require(isinstance(document, dict) and isinstance(document.get("text"), str),
            f'{place} has no text field; each line of a .jsonl file must look like {{"text": "..."}}')
    # JSON can spell half a surrogate pair, UTF-8 can't
    return document["text"].encode("utf-8", "replace").decode("utf-8")


def text_chunks(path: str, any_bytes: bool) -> Iterator[str]:
    """The text of a file in pieces that tokenize like the whole.
    Bytes that are no UTF-8 pass through if `any_bytes`."""
    rest = ""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape" if any_bytes else "strict", newline="") as file:
            while chunk := file.read(CHUNK):
                text = rest + chunk
                safe = LAST_SAFE_CUT.match(text) if len(chunk) == CHUNK else None   # a shorter chunk is the last
                cut = safe.end() if safe and safe.end() else len(text)  # or a megabyte has none
                yield text[:cut]
                rest = text[cut:]
    except UnicodeDecodeError:
        raise UserError(f"the input {path} is not UTF-8 text; convert it, or use --tokenizer byte, which "
                        "takes any bytes") from None
    if rest:
        yield rest


def raw(text: str) -> bytes:
    """Back to the bytes of the file, also those that were no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def encode(encoding, text: str, dtype) -> bytes:
    if encoding.name == "byte":
        ids = np.frombuffer(raw(text), np.uint8)    # what tiktoken would give, at the speed of a copy
    else:
        # an <|endoftext|> in a document is text like any other
        ids = encoding.encode_to_numpy(text, disallowed_special=())
    return ids.astype(dtype).tobytes()


def write_splits(folder: Path, files: dict[str, bool], encoding, dtype, weights: list[float], skipped: Counter,
                 progress: bool):
    """Every document to its split. Returns (tokens, documents), a number for each split."""
    total, position = sum(map(os.path.getsize, files)), 0
    documents, done, split_of = [0] * 3, [0] * 3, {}
    end_of_text = np.array([encoding.eot_token], dtype).tobytes()
    with ExitStack() as stack:
        outputs = [stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS]
        bar = stack.enter_context(tqdm(desc="tokenizing", total=total, unit="B", unit_scale=True,
                                       disable=None if progress else True))     # None: no bar in a log file
        for document in documents_of(files, any_bytes=encoding.name == "byte"):
            first = next(document.chunks, "")
            # Of a huge document its length and first chunk stand for the whole.
            fingerprint = hashlib.blake2b(b"%d " % document.size + raw(first), digest_size=8).digest()
            seen_in = split_of.get(fingerprint)
            if not first:
                skipped["empty documents"] += 1
            elif seen_in:                           # valid or test; train, 0, may keep its copies
                skipped["copies of held-out documents"] += 1
            else:
                expected = total * sum(done) / position if position else total      # text is part of a .jsonl only
                choice = 0 if seen_in == 0 else choose_split(document.size, done, documents, weights, expected)
                split_of[fingerprint] = choice
                documents[choice] += 1
                done[choice] += document.size
                for chunk in chain([first], document.chunks):
                    outputs[choice].write(encode(encoding, chunk, dtype))
                    bar.update(len(raw(chunk)))
                outputs[choice].write(end_of_text)
            position += document.size_in_file
            bar.update(position - bar.n)
        tokens = [output.tell() // dtype.itemsize for output in outputs]
    require(sum(documents),
            f"the input holds no text ({len(files)} files, {skipped_text(skipped) or 'none skipped'}); check the paths")
    return tokens, documents


def choose_split(size: int, done: list[int], documents: list[int], weights: list[float], total: float) -> int:
    """The split for a document of `size` bytes of `total`, when `done` bytes in so many `documents` have gone to each.

    Which split is furthest behind its weight, (done + half a document) / weight, doesn't ask how long this document
    is: held-out text is as long and as short as training text (Sainte-Lague's rule for seats in a parliament). But a
    split of few bytes is passed over if the document would overfill it by more than half the document."""
    half = sum(done) / max(2 * sum(documents), 1) or 1
    with_room = [i for i in range(3) if weights[i] and done[i] + size / 2 <= weights[i] * total]
    return min(with_room or [weights.index(max(weights))], key=lambda i: (done[i] + half) / weights[i])


def fill_empty_splits(folder: Path, tokens: list[int], dtype, weights: list[float]) -> list[str]:
    """Cut the share of each split that got nothing off the end of the largest one.
    Returns the names; updates `tokens`."""
    total, largest = sum(tokens), tokens.index(max(tokens))
    empty = [i for i in range(3) if weights[i] > 0 and not tokens[i]]
    for i in reversed(empty):       # from the end, so that the text goes on from train to valid to test
        count = min(math.ceil(weights[i] * total), tokens[largest] - 1)
        with (open(folder / f"{SPLITS[largest]}.bin", "r+b") as source,
              open(folder / f"{SPLITS[i]}.bin", "wb") as target):
            start = source.seek(-count * dtype.itemsize, os.SEEK_END)
            shutil.copyfileobj(source, target)
            source.truncate(start)
        tokens[i], tokens[largest] = count, tokens[largest] - count
    return [SPLITS[i] for i in empty]


# What a model can be measured against

def entropies(path: Path, dtype, vocabulary: int) -> tuple[float, float, int]:
    """(entropy of a token, entropy of a token given the one before, tokens that the second was counted on), in nats."""
    row, dense = np.memmap(path, dtype, mode="r"), vocabulary <= DENSE_VOCABULARY
    singles, pairs = np.zeros(vocabulary, np.int64), np.zeros(vocabulary ** 2 if dense else 0, np.int64)
    for start in range(0, len(row), CHUNK):
        block = row[start:start + CHUNK + 1].astype(np.int64)
        singles += np.bincount(block[:CHUNK], minlength=vocabulary)
        if dense:
            pairs += np.bincount(block[:-1] * vocabulary + block[1:], minlength=len(pairs))
    if dense:
        before = pairs.reshape(vocabulary, vocabulary).sum(axis=1)
    else:
        row = row[:PAIRS_COUNTED].astype(np.int64)
        before, pairs = np.bincount(row[:-1]), np.unique(row[:-1] * vocabulary + row[1:], return_counts=True)[1]
    # H(next | before) = H(both) - H(before)
    return entropy(singles), max(entropy(pairs) - entropy(before), 0.0), len(row)


def entropy(counts) -> float:
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(shares * np.log(shares)).sum()) + 0.0    # + 0.0: no minus zero


# All or nothing

@contextmanager
def temporary_sibling(output: Path) -> Iterator[Path]:
    """A folder that nobody takes for a corpus, on the disk of the output, where renaming it is one step."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        claim(descriptor)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)   # renamed by now, unless something failed
        os.close(descriptor)


def claim(descriptor: int) -> bool:
    """Whether no other process has this folder; the system lets go of it when this one ends, however it ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:                                 # another has it, or the file system knows no claims
        return False


def clear_leftovers(output: Path):
    """Take away what killed preparations of this output have left beside it, not what others are working on."""
    hidden = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{32}}(\.replaced)?")
    found = [path for path in output.parent.iterdir() if hidden.fullmatch(path.name)] if output.parent.is_dir() else []
    for folder in sorted(found):
        if folder.suffix == ".replaced":            # of one that was killed between its two renames
            if not output.exists() and not folder.with_suffix("").exists():
                folder.rename(output)
            elif output.exists():
                shutil.rmtree(folder, ignore_errors=True)
            continue
        descriptor = os.open(folder, os.O_RDONLY)
        if claim(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def publish(folder: Path, output: Path, meta: dict, overwrite: bool) -> dict:
    """Give the finished folder its name. A rename over a folder that isn't empty fails:
    then another process was first."""
    replaced = folder.with_name(folder.name + ".replaced")
    try:
        if overwrite and output.exists():
            check_output(output, overwrite)         # this has taken a while
            output.rename(replaced)
        folder.rename(output)
        return meta
    except OSError:
        if replaced.exists() and not output.exists():
            replaced.rename(output)
            raise
        if not output.is_dir():
            raise
    finally:
        shutil.rmtree(replaced, ignore_errors=True)
    theirs = load_corpus(output).meta
    require(theirs["sha256"] == meta["sha256"],
            f"another process has meanwhile put other data into {output}; choose another --output")
    return theirs


# The command line

def skipped_text(skipped: dict) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items() if count)


def print_summary(meta: dict, output: Path):
    tokens, documents = meta["tokens"], meta["documents"]
    print(f"{meta['source']}: {sum(documents.values()):,} documents, {sum(tokens.values()):,} tokens "
          f"of a vocabulary of {meta['vocab_size']:,} ({meta['tokenizer']})")
    for split in SPLITS:
        share = tokens[split] / sum(tokens.values())
        print(f"  {split:<5} {documents[split]:>9,} documents {tokens[split]:>15,} tokens {share:>7.2%}")
    if meta["cut_off"]:
        print(f"  too few documents to give {' and '.join(meta['cut_off'])} whole ones: cut off the end of the "
              "largest split")
    if meta["skipped"]:
        print(f"  skipped: {skipped_text(meta['skipped'])}")
    print(f"  knowing how often tokens come gives a loss of {meta['unigram_entropy']:.3f} nats, "
          f"seeing one token back {meta['bigram_entropy']:.3f}")
    print(f"written to {output}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; python data/prepare.py --help lists every flag")


def command_line() -> Parser:
    parser = Parser("prepare.py", usage="python data/prepare.py [flags]", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", metavar="TEXT",
                        help="text or .jsonl files, folders, globs (default: Python's own standard library)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="the folder to make")
    parser.add_argument("--tokenizer", default="byte", metavar="NAME",
                        help="byte (default), gpt2, or the folder or tokenizer.json of a Hugging Face tokenizer that "
                        "is byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2)")
    parser.add_argument("--eod-token", metavar="TOKEN",
                        help="which of a Hugging Face tokenizer's added tokens ends a document (default: the eos_token "
                        "of its tokenizer_config.json, else <|endoftext|> or the like)")
    parser.add_argument("--split", default="949,50,1", metavar="SHARES",
                        help="shares of train,valid,test (default 949,50,1)")
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2's encoder.json, to do without the download")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2's vocab.bpe")
    parser.add_argument("--overwrite", action="store_true", help="replace the corpus that --output holds already")
    parser.add_argument("--verify", type=Path, metavar="FOLDER", help="check every byte of a prepared corpus instead")
    return parser


def main():
    flags = command_line().parse_args()
    if flags.verify:
        load_corpus(flags.verify).verify()
        return print(f"{flags.verify} is as it was prepared")
    require(flags.output or not flags.input, "--input needs --output, the folder to make; try --output data/mine")
    inputs, output = flags.input or standard_library(), flags.output or DEFAULT_CORPUS
    meta = prepare(inputs, output, flags.tokenizer, flags.split, flags.vocab_file, flags.merge_file,
                   source=None if flags.input else STANDARD_LIBRARY, overwrite=flags.overwrite,
                   eod_token=flags.eod_token)
    print_summary(meta, output)


if __name__ == "__main__":
    run_command(main)
