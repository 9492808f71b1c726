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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch

from data import prepare as prepare_module
from data.prepare import prepare, prepare_default_corpus
from nanodomino.corpus import tokenizers
from nanodomino.corpus.prepared_folder import SPLITS, load_corpus
from nanodomino.corpus.tokenizers import END_OF_TEXT, Tokenizer
from nanodomino.data import TokenDataset
from nanodomino.errors import UserError
from nanodomino.settings.config import Config


PROSE = "The quick brown fox, they say, jumps over 12 lazy dogs.\n\n  It didn't see\tthem: naïve, 東京, 🙂!\n"


def row(folder, split="train") -> list[int]:
    return np.fromfile(Path(folder) / f"{split}.bin", load_corpus(folder).dtype).tolist()


def documents_in(folder, split="train") -> list[str]:
    """Return the documents of a split as text."""
    corpus, ids = load_corpus(folder), np.array(row(folder, split))
    *parts, rest = np.split(ids, np.flatnonzero(ids == corpus.end_of_text) + 1)
    assert not len(rest), "a split ends with a whole document"
    return [corpus.tokenizer().decode(part[:-1].tolist()) for part in parts]


def write_lines(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text, "number": i}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A thousand documents of unequal length, each containing its number."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = write_lines(folder / "text.jsonl", (f"document {i} " + "abc " * (i * 7919 % 101) for i in range(1000)))
    prepare([lines], folder / "tokens")
    return load_corpus(folder / "tokens")


@pytest.mark.parametrize("words, dtype, size", [(65_536, "uint16", 2), (65_537, "uint32", 4)])
def test_token_ids_above_65535_take_32_bits_and_survive_the_round_trip(tmp_path, monkeypatch, words, dtype, size):
    """The vocabulary holds pairs of bytes; end-of-text has the highest id, preceded by the pair zz."""
    tokens = [bytes([byte]) for byte in range(256)]
    pairs = sorted((one + other for one in tokens for other in tokens), key=lambda pair: pair == b"zz")
    gpt2 = tiktoken.Encoding("gpt2", pat_str=r"\w+", special_tokens={END_OF_TEXT: words - 1},
                             mergeable_ranks={token: i for i, token in enumerate(tokens + pairs[257 - words:])})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": gpt2}.get)
    (tmp_path / "a.txt").write_text("zzzz")
    meta = prepare(tmp_path / "a.txt", tmp_path / "out", "gpt2", split=(1, 0, 0))
    stored = [words - 2, words - 2, words - 1]
    assert (meta["vocab_size"], meta["dtype"], meta["end_of_text"]) == (words, dtype, words - 1)
    assert (tmp_path / "out" / "train.bin").stat().st_size == 3 * size
    dataset = TokenDataset(load_corpus(tmp_path / "out"), "train", 2, seed=0)
    assert dataset.batch(5, 0, 0, 1, 1, 1).labels.tolist() == [stored[1:]], "exactly one sample is enough"
    assert row(tmp_path / "out") == stored and documents_in(tmp_path / "out") == ["zzzz"]


def test_a_large_text_is_tokenized_by_all_cores_in_little_memory(tmp_path, monkeypatch):
    for module, name, value in ((tokenizers, "CHUNK", 1 << 16), (prepare_module, "AT_ONCE", 1 << 18),
                                (prepare_module, "BLOCK", 1 << 16), (prepare_module, "PAIRS_COUNTED", 1 << 16)):
        monkeypatch.setattr(module, name, value)
    batches, encode_batch = [], Tokenizer.encode_batch
    monkeypatch.setattr(Tokenizer, "encode_batch",
                        lambda tokenizer, texts: batches.append(len(texts)) or encode_batch(tokenizer, texts))
    (tmp_path / "a.txt").write_text("one line of text\n" * 500_000 + 2_000_000 * "x")      # at the end no safe cut
    tracemalloc.start()
    prepare(tmp_path / "a.txt", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6 < 10e6 < (tmp_path / "a.txt").stat().st_size, f"{peak} bytes"
    assert set(batches[:9]) == {4}, "a batch has a chunk for each of four threads"


def test_entropies_are_those_of_the_training_tokens(tmp_path, monkeypatch):
    """With a table of all pairs, and with sorted pairs for a larger vocabulary."""
    monkeypatch.setattr(prepare_module, "BLOCK", 1000)
    ids = np.random.default_rng(0).integers(97, 101, 5000).astype("<u2")
    ids.tofile(tmp_path / "ids")
    pairs, before, n = Counter(zip(ids, ids[1:])), Counter(ids[:-1]), len(ids) - 1
    expected = {"unigram_entropy": -sum(k / len(ids) * math.log(k / len(ids)) for k in Counter(ids).values()),
                "bigram_entropy": -sum(k / n * math.log(k / before[a]) for (a, _), k in pairs.items()),
                "bigram_tokens": len(ids)}
    for words in (257, 1025):
        assert prepare_module.entropies(tmp_path / "ids", ids.dtype, words) == pytest.approx(expected)


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
    meta = prepare(["in", "in/link"], tmp_path / "out", split=(1, 0, 0))
    assert documents_in(tmp_path / "out") == ["bb", "c0", "c\ufffd🙂", "aa", "az", "ee"]        # U+FFFD for half a pair
    assert meta["notes"] == [
        "skipped, hidden: 2 (in/.hidden; in/.git)",
        "skipped, not UTF-8 text or damaged: 6 (in/0.png; in/1.png; in/2.png; in/3.png; in/4.png; ...)",
        "skipped, neither a file nor a folder: 1 (in/dangling)",
        "skipped, empty: 2 (in/c.jsonl, line 2; in/empty.txt)",
        "with U+FFFD, the sign for unreadable characters: 1 (in/c.jsonl, line 3)"]


LINES, BOM, TWO = b'{"text": "one", "id": 1}\n{"id": 2, "text": "two"}\n', b"\xef\xbb\xbf", ["one", "two"]
TYPES = [       # (name, content, documents): the name as typed and the first bytes decide
    ("a.jsonl", LINES, TWO), ("a.jsonl.gz", gzip.compress(LINES[:25]) + gzip.compress(LINES[25:]), TWO),
    ("a.json", BOM + LINES.replace(b"{", b"{" + (1 << 20) * b" ", 1), TWO), ("blob", gzip.compress(LINES), TWO),
    ("a.jsonl.gz", LINES, TWO), ("a.txt", LINES, [LINES.decode()]), ("a.md", b"x\r\n", ["x\r\n"]),
    ("a.json", b'{\n"text": "one"\n}', ['{\n"text": "one"\n}']), ("a.md", b"\n" + LINES, ["\n" + LINES.decode()]),
    ("a.txt.gz", gzip.compress(BOM + LINES), [LINES.decode()])]


def test_the_name_as_typed_and_the_first_bytes_decide_the_type(tmp_path):
    """A link's own name counts, not its target's: a cache that is ordered by content names files by checksums."""
    for i, (name, content, expected) in enumerate(TYPES):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}/stored.jsonl").write_bytes(content)
        (path := tmp_path / f"{i}" / name).symlink_to("stored.jsonl")
        meta = prepare(path, tmp_path / f"out{i}", split=(1, 0, 0))
        assert documents_in(tmp_path / f"out{i}") == expected, (i, name)
        noted = ['read as one text, because the first line is no JSON object with "text": 1 (' + f"{path})"]
        assert meta["notes"] == noted * (name == "a.json" and expected != TWO)


def test_parquet_is_read_by_column(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -r requirements-extra.txt")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"id": [1, 2, 3], "words": ["one", "zwei", None], "text": ["1", "2", "3"]}), tmp_path / "a", 2)
    prepare(tmp_path / "a", tmp_path / "out", split=(1, 0, 0))
    assert documents_in(tmp_path / "out") == ["1", "2", "3"]
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-9])
    for name, key, message in [("a", "words", r"""/a, row 3, .*\(the value is no string\), but {'words': None};"""),
                               ("a", "x", r"missing\), but {'id': 1, 'words': 'one', 'text': '1'}; correct"),
                               ("b", "text", r"/b is not UTF-8 text, or damaged \(")]:
        with pytest.raises(UserError, match=message):
            prepare(tmp_path / name, tmp_path / "other", key=key)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="needs the package pyarrow, .*; pip install -r requirements-extra.txt"):
        prepare(tmp_path / "a", tmp_path / "other")


def test_copies_never_reach_a_second_split(tmp_path):
    """The same text can come as several documents, also of different kinds of files. Only the first chunk of documents
    of equal length is compared."""
    texts, folder = [f"document № {i % 100} {END_OF_TEXT}\r\n" + i % 100 * PROSE for i in range(400)], tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", texts[100:])
    for i, text in enumerate(texts[:100]):
        (folder / f"{i}.txt").write_text(text, "utf-8", newline="")
    meta = prepare(folder, tmp_path / "out", split=(6, 3, 1))
    found = [documents_in(tmp_path / "out", split) for split in SPLITS]
    assert sorted(sum(found, [])) == sorted(texts) and [len(part) for part in found] == list(meta["documents"].values())
    assert [len(set(part)) for part in found] == [len(part) / 4 for part in found] and min(map(len, found)) > 0
    assert all(len(row(tmp_path / "out", split)) == meta["tokens"][split] for split in SPLITS)


def test_a_text_is_split_as_by_earlier_versions(tmp_path):
    """Lines, empty lines, copies and a large text, as prepared on 2026-11-27. The shares hold in bytes."""
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/a.jsonl", [f"line {i % 90} " * (i * 7919 % 101) for i in range(500)])
    (tmp_path / "in/c.txt").write_text(PROSE * 300, "utf-8")
    meta = prepare(tmp_path / "in", tmp_path / "out", split=(8, 1, 1))
    assert meta["documents"] == {"train": 386, "valid": 59, "test": 51}
    assert meta["tokens"] == {"train": 187_610, "valid": 19_808, "test": 20_016}
    assert [checksum[:8] for checksum in meta["sha256"].values()] == ["7beb22a3", "e0eeb1f4", "081334a9"]


@pytest.mark.parametrize("byte, seconds, noticed", [
    (None, 0, False), (None, 9, False), (0, 0, True), (-1, 0, True), (100_000, 9, True)])
def test_a_changed_text_is_noticed_and_a_copied_one_is_not(tmp_path, byte, seconds, noticed):
    """Byte 100,000 lies between two of the blocks that every start compares. A copy has other time stamps."""
    for path in (paths := {split: tmp_path / f"{split}.bin" for split in SPLITS}).values():
        np.arange(1_500_000, dtype="<u2").tofile(path)
    sha256, stamps = ({split: find(path) for split, path in paths.items()}
                      for find in (prepare_module.sha256, prepare_module.file_stamp))
    content = bytearray(paths["valid"].read_bytes())
    content[byte or 0] ^= byte is not None
    paths["valid"].write_bytes(content)
    os.utime(paths["valid"], (0, stamps["valid"]["time"] + seconds))
    corpus = SimpleNamespace(path=tmp_path, sha256=sha256, meta=dict(stamps=stamps))
    with pytest.raises(UserError, match="valid.bin has changed .*; prepare") if noticed else nullcontext():
        prepare_module.check_unchanged(corpus)


def test_nothing_is_replaced_and_failures_leave_nothing_behind(tmp_path, monkeypatch):
    """The first of two processes to finish makes the default corpus. On a full disk the error names the output."""
    (tmp_path / "a.py").write_text("some = text")
    out, entropies = tmp_path / "out", prepare_module.entropies

    def another_process_is_faster(*arguments):
        assert not out.exists(), "no half of a corpus is ever seen"
        monkeypatch.setattr(prepare_module, "entropies", entropies)
        prepare(tmp_path / "a.py", out)
        return entropies(*arguments)

    monkeypatch.setattr(prepare_module, "entropies", another_process_is_faster)
    monkeypatch.setattr(prepare_module.sysconfig, "get_path", lambda name: tmp_path)
    prepare_default_corpus(out)
    assert load_corpus(out).meta["source"] == str(tmp_path / "a.py")
    prepare(output=tmp_path / "python")
    assert load_corpus(tmp_path / "python").meta["source"].startswith("the standard library of Python 3.")
    with pytest.raises(UserError, match="out already exists, and nothing is replaced; choose another"):
        prepare(tmp_path / "a.py", out)

    def fail(*arguments):
        raise OSError(28, "No space left on device")           # write() does not name the file

    monkeypatch.setattr(prepare_module, "entropies", fail)
    with pytest.raises(OSError, match="No space left.*/full'"):
        prepare(tmp_path / "a.py", tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "out", "python"]


def test_one_document_is_cut_in_three_and_the_command_line_says_so(tmp_path, monkeypatch, capsys):
    """One text file must still leave a sample to validate and to test on."""
    monkeypatch.chdir(tmp_path)
    text = "".join(f"line {i}\n" for i in range(10_000))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *"--input a.txt --output out".split()])
    prepare_module.main()
    parts = [row("out", split) for split in SPLITS]
    assert sum(parts, []) == [*text.encode(), 256], "train, then valid, then test, nothing twice, nothing lost"
    assert 2049 <= len(parts[2]) < 0.05 * len(text) and load_corpus("out").meta["documents"]["valid"] == 0
    said, errors = capsys.readouterr()
    for words in ("a.txt: 98,891 tokens of a vocabulary of 257 (byte)", " 1 document ", "and test cut off the end of",
                  "loss of", "written to out"):
        assert words in said
    assert errors == "", "no progress bar where nobody looks"


MISTAKES = [     # (arguments, message)
    ("empty.txt", "the input holds no text (1 file; skipped, empty: 1 (empty.txt)); check"),
    ("pipe", "the input holds no text (0 files; skipped, neither a file nor a folder: 1 (pipe))"),
    ("latin.txt", "latin.txt is not UTF-8 text, or damaged ('utf-8' codec can't decode byte 0xe9);"),
    ("lines.jsonl", 'lines.jsonl, line 2, is not {"text": "..."} (it is not JSON: Expecting value: '),
    ("lines.jsonl --key words", """line 1, is not {"words": "..."} (the key is missing), but {'text': 'a'}; correct"""),
    ("list.jsonl", "list.jsonl, line 1, is not"), ("null.jsonl", "null.jsonl, line 1, is not"),
    ("cut.jsonl.gz", "cut.jsonl.gz is not UTF-8 text, or damaged (Compressed file ended"),
    ("a.txt --split 9,-1,2", "but is [9.0, -1.0, 2.0]"), ("a.txt --split 1,nan,1", "but is [1.0, nan, 1.0]"),
    ("a.txt --split x", "invalid shares"), ("a.txt --special-tokens", "but the tokenizer is byte; leave")]


def test_command_line_mistakes_are_one_sentence(tmp_path, monkeypatch):
    """tests/run/test_bad_input.py has more of them."""
    for name, content in {"a.txt": b"text", "empty.txt": b"", "latin.txt": b"good start\n" * 9 + b"caf\xe9",
                          "lines.jsonl": b'{"text": "a"}\n{"text": \n', "list.jsonl": b'["text"]',
                          "null.jsonl": b'{"text": null}', "cut.jsonl.gz": gzip.compress(LINES)[:-9]}.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    for arguments, message in [*((f"{mistake} --output out", message) for mistake, message in MISTAKES),
                               ("a.txt", "--input needs --output")]:
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
