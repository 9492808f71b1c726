"""The path of the data from text to tokens to batches, and what must not go wrong on it."""

import gzip
import json
import math
import os
import shutil
import sys
import tracemalloc
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from tiktoken._educational import bpe_train

from data import prepare as prepare_module
from data.prepare import prepare, prepare_default_corpus
from nanodomino.corpus import documents
from nanodomino.corpus.prepared_folder import SPLITS, load_corpus
from nanodomino.corpus.tokenizers import END_OF_TEXT, TiktokenTokenizer, build_tokenizer
from nanodomino.data import Batch, TokenDataset
from nanodomino.errors import UserError
from nanodomino.settings.config import Config

PROSE = "The quick brown fox, they say, jumps over 12 lazy dogs.\n\n  It didn't see\tthem: naïve, 東京, 🙂!\n"
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BYTE_END = 256


def quietly(inputs, output, **settings) -> dict:
    return prepare(inputs, output, progress=False, **settings)


def row(folder, split="train") -> list[int]:
    return np.fromfile(Path(folder) / f"{split}.bin", load_corpus(folder).dtype).tolist()


def documents_in(folder, split="train") -> list[str]:
    """Return the documents of a split as text."""
    ids, found, start = row(folder, split), [], 0
    tokenizer, end = load_corpus(folder).tokenizer(), load_corpus(folder).end_of_text
    for i, token in enumerate(ids):
        if token == end:
            found.append(tokenizer.decode(ids[start:i]))
            start = i + 1
    assert start == len(ids), "a split ends with a whole document"
    return found


def write_lines(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text, "number": i}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path


def use_gpt2(monkeypatch, ranks: dict[bytes, int]):
    """Let these mergeable tokens be GPT-2's, instead of a download."""
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_WORDS, mergeable_ranks=ranks,
                                 special_tokens={END_OF_TEXT: len(ranks)})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


@pytest.fixture(scope="module")
def small_ranks():
    return bpe_train(f"{PROSE} {8 * ' '}{9 * ' x'}" + 9 * "\n\n  y\n", 317, GPT2_WORDS, visualise=None)


@pytest.fixture
def gpt2(monkeypatch, small_ranks):
    """A small vocabulary, trained here, in the place of GPT-2's."""
    use_gpt2(monkeypatch, small_ranks)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A thousand documents of unequal length, each containing its number."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = write_lines(folder / "text.jsonl", (f"document {i} " + "abc " * (i * 7919 % 101) for i in range(1000)))
    quietly([lines], folder / "tokens")
    return load_corpus(folder / "tokens")


# Tokenizers

def test_a_failed_download_names_the_alternatives(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    with pytest.raises(UserError, match="ZeroDivisionError.*GPT-2's tokenizer.json .*--tokenizer byte"):
        build_tokenizer("gpt2")


# Text -> tokens

@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_text_survives_the_round_trip(tmp_path, gpt2, tokenizer):
    texts = [f"{i}: {PROSE}" for i in range(40)] + [f"special? {END_OF_TEXT} no\r\n"]
    meta = quietly(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", tokenizer=tokenizer, split="80,15,5")
    found = [documents_in(tmp_path / "out", split) for split in SPLITS]
    assert sorted(sum(found, [])) == sorted(texts)
    assert [len(part) for part in found] == list(meta["documents"].values())
    assert all(len(row(tmp_path / "out", split)) == meta["tokens"][split] > 0 for split in SPLITS)
    assert meta["vocab_size"] == (257 if tokenizer == "byte" else 318) and meta["dtype"] == "uint16"


@pytest.mark.parametrize("words, dtype, size", [(65_536, "uint16", 2), (65_537, "uint32", 4)])
def test_token_ids_above_65535_take_32_bits_and_survive_the_round_trip(tmp_path, monkeypatch, words, dtype, size):
    """The vocabulary holds pairs of bytes; end-of-text has the highest id, preceded by the pair zz."""
    tokens = [bytes([byte]) for byte in range(256)]
    pairs = sorted((one + other for one in tokens for other in tokens), key=lambda pair: pair == b"zz")
    use_gpt2(monkeypatch, {token: i for i, token in enumerate(tokens + pairs[257 - words:])})
    (tmp_path / "a.txt").write_text("zzzz")
    meta = quietly(tmp_path / "a.txt", tmp_path / "out", tokenizer="gpt2", split=(1, 0, 0))
    stored = [words - 2, words - 2, words - 1]
    assert (meta["vocab_size"], meta["dtype"], meta["end_of_text"]) == (words, dtype, words - 1)
    assert (tmp_path / "out" / "train.bin").stat().st_size == 3 * size
    dataset = TokenDataset(load_corpus(tmp_path / "out"), "train", 2, seed=0)
    assert dataset.batch(0, 0, 0, 1, 1, 1).labels.tolist() == [stored[1:]]
    assert row(tmp_path / "out") == stored and documents_in(tmp_path / "out") == ["zzzz"]


def test_short_documents_are_tokenized_many_at_a_time(tmp_path, monkeypatch, gpt2):
    """With one call for each document all threads but one have nothing to do."""
    sizes, encode_batch = [], TiktokenTokenizer.encode_batch
    monkeypatch.setattr(TiktokenTokenizer, "encode_batch",
                        lambda tokenizer, texts: sizes.append(len(texts)) or encode_batch(tokenizer, texts))
    quietly(write_lines(tmp_path / "a.jsonl", [PROSE] * 999), tmp_path / "out", tokenizer="gpt2")
    assert sizes == [999]


def test_memory_does_not_grow_with_the_document(tmp_path, monkeypatch):
    for module, name, value in ((documents, "CHUNK", 1 << 16), (prepare_module, "AT_ONCE", 1 << 18),
                                (prepare_module, "BLOCK", 1 << 16), (prepare_module, "PAIRS_COUNTED", 1 << 16)):
        monkeypatch.setattr(module, name, value)
    (tmp_path / "a.txt").write_text("one line of text\n" * 500_000 + 2_000_000 * "x")      # at the end no safe cut
    tracemalloc.start()
    quietly(tmp_path / "a.txt", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6 < 10e6 < (tmp_path / "a.txt").stat().st_size, f"{peak} bytes"


def test_entropies_are_those_of_the_training_tokens(tmp_path, monkeypatch):
    """With a table of all pairs, and with sorted pairs for a larger vocabulary."""
    monkeypatch.setattr(prepare_module, "BLOCK", 1000)
    (tmp_path / "a.txt").write_bytes(np.random.default_rng(0).integers(97, 101, 5000).astype(np.uint8).tobytes())
    meta = quietly(tmp_path / "a.txt", tmp_path / "out", split=(1, 0, 0))
    ids, path = row(tmp_path / "out"), tmp_path / "out" / "train.bin"
    pairs, before, n = Counter(zip(ids, ids[1:])), Counter(ids[:-1]), len(ids) - 1
    expected = pytest.approx(-sum(k / n * math.log(k / before[a]) for (a, _), k in pairs.items())), len(ids)
    assert [prepare_module.bigram_entropy(path, np.uint16, words) for words in (257, 1025)] == [expected, expected]
    assert (meta["bigram_entropy"], meta["bigram_tokens"]) == expected
    assert meta["unigram_entropy"] == pytest.approx(-sum(k / len(ids) * math.log(k / len(ids))
                                                         for k in Counter(ids).values()))


def test_the_default_corpus_is_python_itself(tmp_path):
    meta = prepare_default_corpus(tmp_path / "python", progress=False)
    assert sum(meta["tokens"].values()) > 5_000_000
    assert 2.9 < meta["unigram_entropy"] < 3.5 and 2.1 < meta["bigram_entropy"] < 2.7
    assert prepare_default_corpus(tmp_path / "python") == meta, "made once"


# Inputs

def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path, monkeypatch):
    """A file with two names is read once: its second reading could go to another split. A link to a folder above it
    ends nothing."""
    for name, content in {"in/b.txt": b"bb", "in/a/z.txt": b"az", "in/a/a.md": b"aa", "elsewhere/e.txt": b"ee",
                          "in/c.jsonl": b'{"text": "c0"}\n\n{"text": "c\\ud800\\ud83d\\ude42"}\n',
                          **{f"in/{i}.png": b"\x89PNG\xff" for i in range(5)}, "in/.git/config": b"no",
                          "in/.hidden": b"no", "in/zero.txt": b"a\0b", "in/empty.txt": b""}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "in" / "dangling").symlink_to("nowhere")
    for name, target in {"link": "b.txt", "a/loop": "../../in", "z": "../elsewhere"}.items():
        (tmp_path / "in" / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    meta = quietly(["in", "in/link"], tmp_path / "out", split=(1, 0, 0))
    assert documents_in(tmp_path / "out") == ["bb", "c0", "c?🙂", "aa", "az", "ee"], "half a surrogate pair becomes ?"
    assert meta["notes"] == [
        "skipped, hidden: 2 (in/.hidden; in/.git)",
        "skipped, not UTF-8 text or damaged: 6 (in/0.png; in/1.png; in/2.png; in/3.png; in/4.png; ...)",
        "skipped, neither a file nor a folder: 1 (in/dangling)",
        "skipped, empty: 2 (in/c.jsonl, line 2; in/empty.txt)"]


LINES, BOM, TWO = b'{"text": "one", "id": 1}\n{"id": 2, "text": "two"}\n', b"\xef\xbb\xbf", ["one", "two"]
TYPES = [       # (name, content, documents): the name as typed and the first bytes decide
    ("a.jsonl", LINES, TWO), ("a.jsonl.gz", gzip.compress(LINES[:25]) + gzip.compress(LINES[25:]), TWO),
    ("a.jsonl.gz", LINES, TWO), ("a.json", BOM + LINES, TWO), ("blob", gzip.compress(LINES), TWO),
    ("a.txt", LINES, [LINES.decode()]), ("a.json", b'{\n"text": "one"\n}', ['{\n"text": "one"\n}']),
    ("a.md", b"\n" + LINES, ["\n" + LINES.decode()]), ("a.txt.gz", gzip.compress(BOM + LINES), [LINES.decode()]),
    ("a.md", b"x\r\n", ["x\r\n"])]


@pytest.mark.parametrize("target", ["a.txt", "a.jsonl", None])
def test_the_name_as_typed_and_the_first_bytes_decide_the_type(tmp_path, target):
    """A link's own name counts, not its target's: a cache that is ordered by content names files by checksums."""
    for i, (name, content, expected) in enumerate(TYPES):
        (tmp_path / f"{i}").mkdir()
        (stored := tmp_path / f"{i}" / (target or name)).write_bytes(content)
        if not (path := stored.with_name(name)).exists():
            path.symlink_to(stored)
        meta = quietly(path, tmp_path / f"out{i}", split=(1, 0, 0))
        assert documents_in(tmp_path / f"out{i}") == expected, (i, name)
        noted = ['read as one text, because the first line is no JSON object with "text": 1 (' + f"{path})"]
        assert meta["notes"] == noted * (name == "a.json" and expected != TWO)


def test_parquet_is_read_by_column(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -r requirements-extra.txt")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"id": [1, 2, 3], "words": ["one", "zwei", None], "text": ["1", "2", "3"]}), tmp_path / "a", 2)
    quietly(tmp_path / "a", tmp_path / "out", split=(1, 0, 0))
    assert documents_in(tmp_path / "out") == ["1", "2", "3"]
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-9])
    for name, key, message in [("a", "words", '/a, row 3, has no string as "words", but None;'),
                               ("a", "x", """/a has no column "x", only ['id', 'words', 'text']; name another with"""),
                               ("b", "text", "/b is damaged (")]:
        with pytest.raises(UserError) as caught:
            quietly(tmp_path / name, tmp_path / "other", key=key)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="needs the package pyarrow, .*; pip install -r requirements-extra.txt"):
        quietly(tmp_path / "a", tmp_path / "other")


# Splits

def test_copies_never_reach_a_second_split(tmp_path):
    """The same text can come as several documents, also of different kinds of files."""
    texts, folder = [f"document № {i % 100} of a hundred" for i in range(1000)], tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", texts[100:])
    for i, text in enumerate(texts[:100]):
        (folder / f"{i}.txt").write_text(text)
    quietly(folder, tmp_path / "out", split=(6, 3, 1))
    found = [documents_in(tmp_path / "out", split) for split in SPLITS]
    assert sorted(sum(found, [])) == sorted(texts)
    assert [len(set(part)) for part in found] == [len(part) / 10 for part in found] and min(map(len, found)) > 0


def test_documents_that_only_begin_alike_are_no_copies(tmp_path, monkeypatch):
    """Such as files under one licence: only the first chunk is compared, but also the length."""
    monkeypatch.setattr(documents, "CHUNK", 97)
    texts = ["the same licence\n" * 20 + "end\n" * i for i in range(30)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    meta = quietly(tmp_path, tmp_path / "out", split=(1, 1, 1))
    assert min(meta["documents"].values()) > 0
    assert sorted(sum((documents_in(tmp_path / "out", split) for split in SPLITS), [])) == sorted(texts)


@pytest.mark.parametrize("sizes, weights", [("equal", (1, 1, 1)), ("equal", (949, 50, 1)), ("unequal", (949, 50, 1)),
                                            ("one huge", (949, 50, 1)), ("one huge", (90, 10, 0))])
def test_shares_hold_in_tokens_and_held_out_documents_are_no_shorter(tmp_path, sizes, weights):
    """Also in a text so small that 0.1 % of it would not be a sample. A small split that took whatever fits would hold
    only short documents."""
    draw = np.random.default_rng(1).lognormal
    lengths = {"equal": np.full(2000, 100), "unequal": draw(5, 1, 2000), "one huge": draw(4, 1.5, 2000)}[sizes]
    lengths = lengths.astype(int) + 10
    if sizes == "one huge":
        lengths[9] = lengths.sum() // 8
    texts = [f"{i} ".ljust(length, "x") for i, length in enumerate(lengths)]
    files = [write_lines(tmp_path / f"{name}.jsonl", part) for name, part in (("a", texts[:5]), ("b", texts[5:]))]
    meta = quietly(files, tmp_path / "out", split=weights)
    tokens, half_a_document = meta["tokens"], max(lengths) / lengths.sum() / 2
    for split, weight in zip(SPLITS, meta["split"]):
        assert tokens[split] / sum(tokens.values()) == pytest.approx(weight, abs=max(0.01, half_a_document))
    assert tokens["test"] > 2049 if weights[2] else tokens["test"] == 0
    if sizes == "unequal":
        mean = {split: tokens[split] / meta["documents"][split] for split in ("train", "valid")}
        assert mean["valid"] == pytest.approx(mean["train"], rel=0.25)


@pytest.mark.parametrize("lines, sample", [(400, 129), (10_000, 2049)])
def test_one_document_is_cut_in_three(tmp_path, lines, sample):
    """One text file must still leave a sample to validate and to test on, a small one a sample of nano."""
    text = "".join(f"line {i}\n" for i in range(lines))
    (tmp_path / "a.txt").write_text(text)
    meta = quietly(tmp_path / "a.txt", tmp_path / "out")
    parts = [row(tmp_path / "out", split) for split in SPLITS]
    assert sum(parts, []) == [*text.encode(), BYTE_END], "train, then valid, then test, nothing twice, nothing lost"
    assert meta["cut_off"] == ["valid", "test"] and meta["documents"] == {"train": 1, "valid": 0, "test": 0}
    assert sample <= len(parts[2]) < 0.05 * len(text) and meta["split"] == pytest.approx([0.905, 0.048, 0.048], rel=0.1)


def test_a_text_of_one_token_leaves_a_split_empty(tmp_path):
    """Together with end-of-text it has two tokens, which are too few for three splits."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    meta = quietly(tmp_path / "a.jsonl", tmp_path / "out")
    assert meta["tokens"] == {"train": 1, "valid": 0, "test": 1} and meta["cut_off"] == ["test"]


# Outputs

@pytest.mark.parametrize("byte, seconds, stamped, noticed", [
    (None, 0, True, False), (None, 9, True, False), (None, 0, False, False), (0, 0, True, True), (-1, 0, True, True),
    (100_000, 9, True, True), (100_000, 0, False, True)])
def test_a_changed_text_is_noticed_and_a_copied_one_is_not(tmp_path, byte, seconds, stamped, noticed):
    """Byte 100,000 lies between two of the blocks that every start compares. A copy has other time stamps, and a folder
    of an earlier version has none."""
    for path in (paths := {split: tmp_path / f"{split}.bin" for split in SPLITS}).values():
        np.arange(1_500_000, dtype="<u2").tofile(path)
    sha256, stamps = ({split: find(path) for split, path in paths.items()}
                      for find in (prepare_module.sha256, prepare_module.file_stamp))
    content = bytearray(paths["valid"].read_bytes())
    content[byte or 0] ^= byte is not None
    paths["valid"].write_bytes(content)
    os.utime(paths["valid"], (0, stamps["valid"]["time"] + seconds))
    corpus = SimpleNamespace(path=tmp_path, sha256=sha256, meta=dict(stamps=stamps) if stamped else {})
    with pytest.raises(UserError, match="valid.bin has changed .*; prepare") if noticed else nullcontext():
        prepare_module.check_unchanged(corpus)


def test_nothing_is_replaced(tmp_path):
    """Neither a corpus nor a user's notes, also not notes that appear while the text is being prepared."""
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "empty").mkdir()
    first = quietly(tmp_path / "a.txt", tmp_path / "empty")
    with pytest.raises(UserError, match="empty already exists, and nothing is replaced; delete it, or choose another"):
        quietly(tmp_path / "a.txt", tmp_path / "empty")
    with pytest.raises(OSError, match="No space left.*/full'"), prepare_module.new_folder(tmp_path / "full"):
        raise OSError(28, "No space left on device")           # write() does not name the file
    with pytest.raises(OSError, match="not empty"), prepare_module.new_folder(tmp_path / "notes"):
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "mine").write_text("dear")
    assert (tmp_path / "notes" / "mine").read_text() == "dear" and load_corpus(tmp_path / "empty").meta == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty", "notes"]


def test_of_two_processes_the_first_to_finish_makes_the_corpus(tmp_path, monkeypatch):
    """A rank that needs the default corpus takes that of the faster process."""
    (tmp_path / "a.txt").write_text("some text")
    out, count = tmp_path / "out", prepare_module.token_counts

    def another_process_is_faster(*arguments):
        assert not out.exists(), "no half of a corpus is ever seen"
        monkeypatch.setattr(prepare_module, "token_counts", count)
        quietly(tmp_path / "a.txt", out, source="the other")
        return count(*arguments)

    monkeypatch.setattr(prepare_module, "token_counts", another_process_is_faster)
    monkeypatch.setattr(prepare_module, "standard_library", lambda: [tmp_path / "a.txt"])
    assert prepare_default_corpus(out, progress=False)["source"] == "the other"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]
    (out / "meta.json").unlink()
    with pytest.raises(UserError, match="out already exists, and nothing is replaced"):
        prepare_default_corpus(out, progress=False)


def test_the_command_line_tells_a_person_what_it_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text to cut\n" * 100)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *"--input a.txt --output out".split()])
    prepare_module.main()
    said, errors = capsys.readouterr()
    for words in ("a.txt: 1,701 tokens of a vocabulary of 257 (byte)", " 1 document ", "too few documents", "loss of",
                  "written to out"):
        assert words in said
    assert errors == "", "no progress bar where nobody looks"


FAULTS = [       # (line, message)
    (b'{"text": ', "is not JSON (Expecting value: line 2 column 1 (char 10))"), (b'["text"]', "is no JSON object"),
    (b'{"words": "a", "id": 1}', """has no key "text", only ['words', 'id']"""), (b"{}", 'has no key "text", only []'),
    (b'{"text": null}', 'has no string as "text", but None'),
    (b'{"text": ' + b"[" * 100_000, "is nested too deeply"), (b'"text"', "is no JSON object")]
MISTAKES = [     # (arguments, message)
    ("empty.txt --output out", "the input holds no text (1 file; skipped, empty: 1 (empty.txt))"),
    ("nothing --output out", "the input holds no text (0 files)"),
    ("pipe --output out", "pipe is neither a file nor a folder"),
    ("latin.txt --output out", "latin.txt is not UTF-8 text; convert or"),
    *[(f"{i}.jsonl --output out", f'{i}.jsonl, line 2, {fault}; each must look like {{"text": "..."}}, and --key names')
      for i, (_, fault) in enumerate(FAULTS)],
    ("0.jsonl --output out --key words", """0.jsonl, line 1, has no key "words", only ['text']; each must look like"""),
    ("cut.jsonl.gz --output out", "cut.jsonl.gz is damaged (Compressed file ended"),
    ("a.txt", "--input needs --output"), ("a.txt --output out --split 9,-1,2", "but is 9,-1,2"),
    ("a.txt --output out --split 1,nan,1", "but is 1,nan,1"), ("a.txt --output out --split 0,1,1", "the first above 0"),
    ("a.txt --output out --special-tokens", "--special-tokens is for Hugging Face tokenizers, but the tokenizer is")]


def test_command_line_mistakes_are_one_sentence(tmp_path, monkeypatch):
    """tests/run/test_bad_input.py has more of them."""
    for name, content in {"a.txt": b"text", "empty.txt": b"", "latin.txt": b"good start\n" * 9 + b"caf\xe9",
                          **{f"{i}.jsonl": b'{"text": "a"}\n' + line + b"\n" for i, (line, _) in enumerate(FAULTS)},
                          "cut.jsonl.gz": gzip.compress(LINES)[:-9]}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    for arguments, message in MISTAKES:
        monkeypatch.setattr(sys, "argv", ["prepare.py", "--input", *arguments.split()])
        with pytest.raises(UserError) as caught:
            prepare_module.main()
        assert message in str(caught.value) and "\n" not in str(caught.value), (arguments, str(caught.value))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*")), "failures leave nothing behind"


# Tokens -> batches

def whole_step(dataset, step, dp, micro, batch_size=24, shuffle=True):
    """Return (sample_ids, tokens) of a global batch, in the order of replicas and microbatches."""
    parts = [dataset.batch(step * batch_size, m, r, dp, micro, batch_size, shuffle) for r in range(dp)
             for m in range(batch_size // dp // micro)]
    return sum((part.sample_ids for part in parts), []), torch.cat([part.tokens for part in parts])


@pytest.mark.parametrize("virtual_stages, places", [(1, [(0, 0), (1, 0)]), (2, [(2, 1), (0, 1)])],
                         ids=["stages", "chunks"])
def test_a_chunk_between_embedding_and_head_reads_no_tokens_but_knows_its_samples(corpus, virtual_stages, places):
    import train
    from nanodomino.mesh import meta_mesh
    config = Config(seq_length=16, micro_batch_size=4, global_batch_size=16, data_parallel_size=2,
                    pipeline_model_parallel_size=3, virtual_stages=virtual_stages).resolve(6)
    dataset = TokenDataset(corpus, "train", 16, seed=1)
    ends, middle = (train.get_batch(dataset, config, meta_mesh(3, 2, 1, stage, 1), 3, True, 1, chunk)
                    for stage, chunk in places)
    assert middle.tokens is middle.labels is middle.loss_mask is middle.positions is None
    assert middle.sample_ids == ends.sample_ids and ends.tokens.shape == (4, 16)
    assert [part.sample_ids for part in middle.split(3)] == [part.sample_ids for part in ends.split(3)]


def test_a_split_of_exactly_one_window_is_enough(tmp_path):
    (tmp_path / "a.txt").write_text("12345678")
    quietly(tmp_path / "a.txt", tmp_path / "out", split=(1, 0, 0))      # nine tokens with end-of-text
    batch = TokenDataset(load_corpus(tmp_path / "out"), "train", 8, 0).batch(5, 0, 0, 1, 1, 1)
    assert batch.labels.tolist() == [[*b"2345678", BYTE_END]]
    with pytest.raises(UserError, match="has 9 tokens, but one sample needs seq-length . 1 = 10; lower --seq-length"):
        TokenDataset(load_corpus(tmp_path / "out"), "train", 9, 0)


def test_an_epoch_shows_every_window_once_in_an_order_of_its_own(corpus):
    dataset = TokenDataset(corpus, "train", 64, seed=1)
    epochs = [[dataset.window_of(e * dataset.windows + i) for i in range(dataset.windows)] for e in range(3)]
    assert all(sorted(epoch) == list(range(dataset.windows)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != sorted(epochs[0])
    again, other = TokenDataset(corpus, "train", 64, seed=1), TokenDataset(corpus, "train", 64, seed=2)
    assert [again.window_of(i) for i in range(dataset.windows)] == epochs[0]
    assert [other.window_of(i) for i in range(dataset.windows)] not in epochs, "epoch 1 of seed 1 is not that of seed 2"
    assert epochs[1][:4] == [1324, 773, 383, 1415], "a resumed run of an older version goes on in the same order"


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_global_batch_is_the_same_for_every_layout(corpus, shuffle):
    """Otherwise replicas could read the same tokens, and the layout would change what is learned."""
    dataset = TokenDataset(corpus, "train", 64, seed=1)
    for step in (0, 5, dataset.windows // 24, 100):     # the third one lies across the end of an epoch
        reference_ids, reference = whole_step(dataset, step, 1, 24, shuffle=shuffle)
        assert reference_ids == list(range(step * 24, step * 24 + 24))
        for dp, micro in [(1, 1), (1, 8), (2, 1), (2, 6), (2, 12), (4, 3), (8, 3), (24, 1), (3, 2)]:
            ids, tokens = whole_step(dataset, step, dp, micro, shuffle=shuffle)
            assert ids == reference_ids and torch.equal(tokens, reference)


def test_evaluation_stops_at_the_end_and_counts_no_token_twice(corpus):
    """Labels are the next tokens. Ranks count different numbers of tokens, and the last batch is not full."""
    dataset, stored = TokenDataset(corpus, "valid", 16, seed=1), row(corpus.path, "valid")
    end = dataset.windows * 16
    assert 0 < len(stored) - end <= 16, "no window that would have fitted is left out"
    for dp, micro in [(1, 24), (4, 3)]:
        tokens, labels, counted = [], [], 0
        for step, r, m in product(range(dataset.windows // 24 + 3), range(dp), range(24 // dp // micro)):
            batch = dataset.batch(24 * step, m, r, dp, micro, 24, shuffle=False)
            assert batch.tokens.shape == (micro, 16) and (batch.tokens < corpus.vocab_size).all()
            real = batch.loss_mask.amin(dim=1) == 1
            tokens += batch.tokens[real].flatten().tolist()
            labels += batch.labels[real].flatten().tolist()
            counted += int(batch.loss_mask.sum())
        assert tokens == stored[:end] and labels == stored[1:end + 1] and counted == end


def test_a_slice_has_its_rows_of_every_tensor_and_of_what_options_add():
    rows = torch.arange(15).view(3, 5)
    later = Batch.from_rows(rows + 1, [7, 8, 9])
    batch = replace(Batch.from_rows(rows, [7, 8, 9]), in_order=False, extras={"bounds": rows * 2, "later": later})
    one, other = batch.split(2)
    assert (len(one.tokens), one.sample_ids, other.sample_ids, other.in_order) == (2, [7, 8], [9], False)
    assert torch.equal(other.tokens, rows[2:, :-1]) and torch.equal(other.labels, rows[2:, 1:])
    assert torch.equal(other.extras["bounds"], rows[2:] * 2)
    assert torch.equal(other.extras["later"].labels, rows[2:, 1:] + 1)


def test_a_token_id_outside_the_vocabulary_is_refused_also_as_the_last_label(tmp_path, corpus):
    folder = Path(shutil.copytree(corpus.path, tmp_path / "copy"))
    np.array([1, 2, 3, 4, corpus.vocab_size], corpus.dtype).tofile(folder / "train.bin")
    with pytest.raises(UserError, match="holds token id 257, outside the vocabulary of 257"):
        TokenDataset(replace(corpus, path=folder), "train", 4, seed=1).batch(0, 0, 0, 1, 1, 1, shuffle=False)


def test_end_of_text_can_be_masked_from_the_loss(corpus):
    for asked in (False, True):
        prepare_batch = partial(Config(eod_mask_loss=asked).prepare_batch, end_of_text=corpus.end_of_text)
        batch = TokenDataset(corpus, "train", 512, seed=1, prepare=prepare_batch).batch(0, 0, 0, 1, 8, 8)
        at_end = batch.labels == corpus.end_of_text
        assert at_end.any() and torch.equal(batch.loss_mask == 0, at_end & torch.tensor(asked))


def test_to_a_gpu_goes_one_copy_of_the_rows_and_the_host_does_not_wait(corpus, monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: copies.append(("pinned", tuple(rows.shape))) or rows)
    monkeypatch.setattr(torch.Tensor, "to",
                        lambda rows, device, non_blocking: copies.append((device.type, non_blocking)) or rows)
    prepare_batch = partial(Config(eod_mask_loss=True).prepare_batch, end_of_text=corpus.end_of_text)
    TokenDataset(corpus, "train", 16, 1, torch.device("cuda"), prepare_batch).batch(0, 0, 0, 1, 4, 4)
    assert copies == [("pinned", (4, 17)), ("cuda", True)]
