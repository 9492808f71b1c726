"""The path of the data from text to tokens to batches, and what must not go wrong on it."""

import fcntl
import itertools
import gzip
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import torch

import nanodomino.corpus.tokenizer
from data import prepare as prepare_module
from data.prepare import prepare, prepare_default_corpus
from nanodomino.corpus import documents
from nanodomino.corpus.prepared_folder import SPLITS, load_corpus
from nanodomino.corpus.safe_cuts import SAFE_CUT
from nanodomino.corpus.tokenizer import END_OF_TEXT, build_tokenizer
from nanodomino.data import EndOfText, TokenDataset
from nanodomino.errors import UserError

SCRIPT = Path(prepare_module.__file__).resolve()
PROSE = "The quick brown fox, they say, jumps over 12 lazy dogs.\n\n  It didn't see\tthem: naïve, 東京, 🙂!\n"
BYTE_END = 256


def quietly(inputs, output, **settings) -> dict:
    return prepare(inputs, output, progress=False, **settings)


def row(folder, split) -> list[int]:
    return np.fromfile(Path(folder) / f"{split}.bin", load_corpus(folder).dtype).tolist()


def documents_in(folder, split) -> list[str]:
    """Return the documents of a split as text."""
    ids, found, start = row(folder, split), [], 0
    tokenizer, end = load_corpus(folder).tokenizer(), load_corpus(folder).end_of_text
    for i, token in enumerate(ids):
        if token == end:
            found.append(tokenizer.decode(ids[start:i]))
            start = i + 1
    assert start == len(ids), "a split ends with a whole document"
    return found


def command(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True,
                          timeout=60, **options)


def write_lines(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text, "number": i}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory) -> dict:
    """A small vocabulary in GPT-2's format, trained here: the most frequent pair is merged, 60 times."""
    order = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    order += [byte for byte in range(256) if byte not in order]
    spelling = {byte: chr(byte) if chr(byte).isprintable() and byte != 32 else None for byte in range(256)}
    for i, byte in enumerate(byte for byte in order if spelling[byte] is None):
        spelling[byte] = chr(256 + i)
    words = [" " + word for word in PROSE.split()] + 9 * ["    ", "\n\n", "\n  ", "  \n", " \n \n", " \x1c"]
    words = [[spelling[byte] for byte in word.encode()] for word in words]
    vocabulary, merges = [spelling[byte] for byte in order], []
    while len(merges) < 60:
        pair = Counter(pair for word in words for pair in zip(word, word[1:])).most_common(1)[0][0]
        if "".join(pair) not in vocabulary:
            vocabulary.append("".join(pair))
            merges.append(pair)
        words = [merge_in(word, pair) for word in words]
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary + [END_OF_TEXT])}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), "utf-8")
    return dict(vocab_file=folder / "encoder.json", merge_file=folder / "vocab.bpe")


def merge_in(word, pair):
    merged, i = [], 0
    while i < len(word):
        both = tuple(word[i:i + 2]) == pair
        merged.append("".join(pair) if both else word[i])
        i += 2 if both else 1
    return merged


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A thousand documents of unequal length, each containing its number."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = write_lines(folder / "text.jsonl", (f"document {i} " + "abc " * (i * 7919 % 101) for i in range(1000)))
    quietly([lines], folder / "tokens")
    return load_corpus(folder / "tokens")


# Tokenizers

def test_byte_tokens_are_the_bytes():
    tokenizer = build_tokenizer("byte")
    assert tokenizer.vocab_size == 257 and tokenizer.end_of_text == BYTE_END
    assert tokenizer.encode(PROSE).tolist() == list(PROSE.encode())
    assert b"".join(map(tokenizer.token_bytes, range(256))) == bytes(range(256))


def test_gpt2_files_give_the_tokens_of_tiktokens_own_reader(gpt2_files, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    ours = build_tokenizer("gpt2", **gpt2_files)
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(gpt2_files["merge_file"]), str(gpt2_files["vocab_file"]))
    assert ours.encoding._mergeable_ranks == ranks and ours.vocab_size == 317 and ours.end_of_text == 316
    assert ours.decode(ours.encode(PROSE).tolist()) == PROSE
    assert len(ours.encode(PROSE)) < len(PROSE.encode()) * 0.7


def test_a_changed_vocabulary_file_is_read_again(gpt2_files, tmp_path):
    vocab_file, merge_file = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    vocabulary = json.loads(gpt2_files["vocab_file"].read_text())
    merges = gpt2_files["merge_file"].read_text("utf-8").split("\n")
    for size in (316, 300):
        vocab_file.write_text(json.dumps({token: i for token, i in vocabulary.items() if i < size}))
        merge_file.write_text("\n".join(merges[:size - 255]), "utf-8")
        assert build_tokenizer("gpt2", vocab_file, merge_file).vocab_size == size + 1


def test_a_bad_tokenizer_is_refused_in_one_sentence(gpt2_files, tmp_path):
    vocab_file, merge_file = gpt2_files["vocab_file"], gpt2_files["merge_file"]
    (tmp_path / "foreign.json").write_text('{"model": {"vocab": [1, 2]}}')
    (tmp_path / "list.json").write_text("[1, 2]")
    lines = merge_file.read_text("utf-8").split("\n")
    (tmp_path / "swapped.bpe").write_text("\n".join([lines[0], lines[2], lines[1], *lines[3:]]), "utf-8")
    (tmp_path / "short.bpe").write_text("\n".join(lines[:-5]), "utf-8")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    vocabulary = json.loads(vocab_file.read_text())
    (tmp_path / "float.json").write_text(json.dumps(vocabulary | {END_OF_TEXT: 316.0}))
    (tmp_path / "bool.json").write_text(json.dumps(vocabulary | {token: True for token, i in vocabulary.items()
                                                                 if i == 1}))
    (tmp_path / "deep.json").write_text(100_000 * "[")
    for arguments, message in [
            (("llama",), "unknown tokenizer 'llama'; try one of byte, gpt2"),
            (("gpt2", vocab_file), "belong together"), (("gpt2", None, merge_file), "belong together"),
            (("byte", vocab_file, merge_file), "the byte tokenizer has no files"),
            (("gpt2", tmp_path / "none.json", merge_file), "none.json: No such file"),
            (("gpt2", tmp_path / "foreign.json", merge_file), "not a vocabulary and its merges in GPT-2's format"),
            (("gpt2", tmp_path / "list.json", merge_file), "in GPT-2's format"),
            (("gpt2", tmp_path / "binary", merge_file), "in GPT-2's format"),
            (("gpt2", tmp_path / "float.json", merge_file), "in GPT-2's format"),
            (("gpt2", tmp_path / "bool.json", merge_file), "in GPT-2's format"),
            (("gpt2", tmp_path / "deep.json", merge_file), "in GPT-2's format"),
            (("gpt2", vocab_file, tmp_path / "binary"), "in GPT-2's format"),
            (("gpt2", vocab_file, tmp_path / "list.json"), "in GPT-2's format"),
            (("gpt2", vocab_file, tmp_path / "swapped.bpe"), "in GPT-2's format"),
            (("gpt2", vocab_file, tmp_path / "short.bpe"), "in GPT-2's format"),
            (("gpt2", merge_file, vocab_file), "in GPT-2's format")]:
        with pytest.raises(UserError, match=message) as caught:
            build_tokenizer(*arguments)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("failure", [ConnectionError("no route"), ImportError("requests"), ValueError("hash"),
                                     SystemExit(1)])
def test_a_failed_download_names_the_alternatives(monkeypatch, failure):
    def get_encoding(name):
        raise failure

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    with pytest.raises(UserError, match=f"{type(failure).__name__}.*--vocab-file .* --merge-file .*--tokenizer byte"):
        build_tokenizer("gpt2")


def test_a_download_without_an_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: time.sleep(30))
    monkeypatch.setattr(nanodomino.corpus.tokenizer, "DOWNLOAD_SECONDS", 0.2)
    with pytest.raises(UserError, match="no answer in 0.2 seconds"):
        build_tokenizer("gpt2")


# Text -> tokens

@pytest.mark.parametrize("tokenizer", ["byte", "gpt2"])
def test_text_survives_the_round_trip(tmp_path, gpt2_files, tokenizer):
    texts = [f"{i}: {PROSE}" for i in range(40)] + [f"special? {END_OF_TEXT} no\r\n"]
    meta = quietly(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", tokenizer=tokenizer, split="80,15,5",
                   **(gpt2_files if tokenizer == "gpt2" else {}))
    found = [documents_in(tmp_path / "out", split) for split in SPLITS]
    assert sorted(sum(found, [])) == sorted(texts)
    assert [len(part) for part in found] == list(meta["documents"].values())
    assert all(len(row(tmp_path / "out", split)) == meta["tokens"][split] > 0 for split in SPLITS)
    assert list(meta["bytes"].values()) == [sum(len(text.encode()) for text in part) for part in found]
    assert meta["vocab_size"] == (257 if tokenizer == "byte" else 317) and meta["dtype"] == "uint16"
    load_corpus(tmp_path / "out").verify()


@pytest.mark.parametrize("words, dtype, size", [(65_536, "uint16", 2), (65_537, "uint32", 4)])
def test_token_ids_above_65535_take_32_bits_and_survive_the_round_trip(tmp_path, words, dtype, size):
    """The vocabulary holds pairs of bytes; end-of-text has the highest id, preceded by the pairs in the text."""
    plain = [byte for byte in range(256) if chr(byte).isprintable() and byte != 32]
    single = [*map(chr, plain), *map(chr, range(256, 512 - len(plain)))]
    pairs = sorted(itertools.product(single, repeat=2),
                   key=lambda pair: ("z" in pair) + (pair == ("z", "z")))[257 - words:]
    vocabulary = {token: i for i, token in enumerate([*single, *map("".join, pairs), END_OF_TEXT])}
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    (tmp_path / "vocab.bpe").write_text("".join(f"{one} {other}\n" for one, other in pairs), "utf-8")
    (tmp_path / "a.txt").write_text("zzzzaz")
    meta = quietly(tmp_path / "a.txt", tmp_path / "out", tokenizer="gpt2", split=(1, 0, 0),
                   vocab_file=tmp_path / "encoder.json", merge_file=tmp_path / "vocab.bpe")
    stored = [words - 2, words - 2, vocabulary["az"], words - 1]
    assert (len(vocabulary), meta["vocab_size"], meta["dtype"], meta["end_of_text"]) == (words, words, dtype, words - 1)
    assert (tmp_path / "out" / "train.bin").stat().st_size == 4 * size
    loaded = load_corpus(tmp_path / "out")
    loaded.verify()
    assert TokenDataset(loaded, "train", 3, seed=0).batch(0, 0, 0, 1, 1, 1).labels.tolist() == [stored[1:]]
    assert row(tmp_path / "out", "train") == stored and documents_in(tmp_path / "out", "train") == ["zzzzaz"]


def test_decoding_works_after_the_vocabulary_files_have_moved(tmp_path, gpt2_files):
    copies = {name: tmp_path / path.name for name, path in gpt2_files.items()}
    for name, path in copies.items():
        path.write_bytes(gpt2_files[name].read_bytes())
    (tmp_path / "a.txt").write_text(PROSE, "utf-8")
    quietly(tmp_path / "a.txt", tmp_path / "out", tokenizer="gpt2", split=(1, 0, 0), **copies)
    for path in copies.values():
        path.unlink()
    assert documents_in(tmp_path / "out", "train") == [PROSE]


def test_bytes_that_are_no_utf8_pass_through_in_a_named_file(tmp_path):
    content = bytes(range(256)) * 3 + b"\xff\xfe\r\n\xe6\x9d"
    (tmp_path / "a.bin").write_bytes(content)
    quietly(tmp_path / "a.bin", tmp_path / "out", split=(1, 0, 0))
    assert row(tmp_path / "out", "train") == [*content, BYTE_END]


def test_half_a_surrogate_pair_in_json_does_no_harm(tmp_path, gpt2_files):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b\\ud83d\\ude42\\udc80"}\n')
    quietly(tmp_path / "a.jsonl", tmp_path / "byte", split=(1, 0, 0))
    quietly(tmp_path / "a.jsonl", tmp_path / "gpt2", split=(1, 0, 0), tokenizer="gpt2", **gpt2_files)
    assert documents_in(tmp_path / "byte", "train") == documents_in(tmp_path / "gpt2", "train") == ["a?b🙂?"]


@pytest.mark.parametrize("text", [
    PROSE * 30, "word " * 500, "  \n \t x\n\n\n y" * 300, "it's  \r\n\r\n 'll " * 200,
    "\n\u3000あ\n\n\u3000い  \u00a0z" * 300, "a\x1c b\x1f  \x85 c\n\x1cd \x1ce" * 300])
def test_chunks_tokenize_like_the_whole(tmp_path, monkeypatch, gpt2_files, text):
    """A document far larger than a chunk has the tokens of a single call."""
    monkeypatch.setattr(documents, "CHUNK", 97)
    (tmp_path / "a.txt").write_bytes(text.encode())
    for tokenizer, files in (("byte", {}), ("gpt2", gpt2_files)):
        quietly(tmp_path / "a.txt", tmp_path / tokenizer, split=(1, 0, 0), tokenizer=tokenizer, **files)
        whole = build_tokenizer(tokenizer, **files).encoding.encode_ordinary(text)
        assert row(tmp_path / tokenizer, "train") == [*whole, load_corpus(tmp_path / tokenizer).end_of_text]


def test_short_documents_are_tokenized_many_at_a_time(tmp_path, monkeypatch, gpt2_files):
    """With one call for each document all threads but one have nothing to do."""
    tokenizer, sizes = build_tokenizer("gpt2", **gpt2_files), []
    texts = [f"{i} {PROSE[i % 70:]}" for i in range(1000)] + ["", " ", f"special? {END_OF_TEXT}"]
    ids = [tokenizer.encode(text).tolist() for text in texts]
    assert [part.tolist() for part in tokenizer.encode_batch(texts)] == ids
    monkeypatch.setattr(nanodomino.corpus.tokenizer.TiktokenTokenizer, "encode_batch",
                        lambda tokenizer, texts: sizes.append(len(texts)) or list(map(tokenizer.encode, texts)))
    quietly(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", split=(1, 0, 0), tokenizer="gpt2", **gpt2_files)
    assert sizes == [1002] and row(tmp_path / "out", "train") == [
        token for part in ids if part for token in (*part, tokenizer.end_of_text)]


@pytest.mark.parametrize("text", ["x" * 5000, " " * 5000, "\n" * 5000, "東" * 5000])
def test_a_document_without_a_safe_cut_still_comes_in_small_chunks(tmp_path, monkeypatch, gpt2_files, text):
    monkeypatch.setattr(documents, "CHUNK", 97)
    (tmp_path / "a.txt").write_text(text, "utf-8")
    assert max(map(len, documents.text_chunks(tmp_path / "a.txt", SAFE_CUT, False))) <= 2 * 97
    quietly(tmp_path / "a.txt", tmp_path / "out", split=(1, 0, 0), tokenizer="gpt2", **gpt2_files)
    assert documents_in(tmp_path / "out", "train") == [text]


def test_memory_does_not_grow_with_the_document(tmp_path):
    (tmp_path / "a.txt").write_text("one line of text\n" * 4_000_000)
    tracemalloc.start()
    quietly(tmp_path / "a.txt", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6 < 68e6 == (tmp_path / "a.txt").stat().st_size, f"{peak} bytes"


def test_entropies_are_those_of_the_training_tokens(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(np.random.default_rng(0).integers(97, 101, 5000).astype(np.uint8).tobytes())
    for name, dense in (("dense", 1024), ("sorted", 0)):
        monkeypatch.setattr(prepare_module, "DENSE_VOCABULARY", dense)
        monkeypatch.setattr(prepare_module, "BLOCK", 1000)
        meta = quietly(tmp_path / "a.txt", tmp_path / name, split=(1, 0, 0))
        ids = row(tmp_path / name, "train")
        pairs, before = Counter(zip(ids, ids[1:])), Counter(ids[:-1])
        expected = -sum(n / (len(ids) - 1) * math.log(n / before[a]) for (a, _), n in pairs.items())
        assert meta["bigram_entropy"] == pytest.approx(expected) and meta["bigram_tokens"] == len(ids)
        assert meta["unigram_entropy"] == pytest.approx(-sum(n / len(ids) * math.log(n / len(ids))
                                                             for n in Counter(ids).values()))


def test_the_default_corpus_is_python_itself(tmp_path):
    started = time.perf_counter()
    meta = prepare_default_corpus(tmp_path / "python", progress=False)
    seconds = time.perf_counter() - started
    assert sum(meta["tokens"].values()) > 5_000_000 and seconds < 30
    assert 2.9 < meta["unigram_entropy"] < 3.5 and 2.1 < meta["bigram_entropy"] < 2.7
    for split, share in zip(SPLITS, (0.949, 0.05, 0.001)):
        assert meta["tokens"][split] / sum(meta["tokens"].values()) == pytest.approx(share, abs=0.01)
    assert prepare_default_corpus(tmp_path / "python") == meta, "made once"


# Inputs

def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path):
    for name, content in {"b.txt": b"bb", "a/z.txt": b"az", "a/a.md": b"aa",
                          "c.jsonl": b'{"text": "c0"}\n\n{"text": "c1"}\n',
                          ".git/config": b"no", ".hidden": b"no", "image.png": b"\x89PNG\xff", "zero.txt": b"a\0b",
                          "empty.txt": b""}.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "in" / "dangling").symlink_to("nowhere")
    meta = quietly(tmp_path / "in", tmp_path / "in" / "out", split=(1, 0, 0))
    assert documents_in(tmp_path / "in" / "out", "train") == ["bb", "c0", "c1", "aa", "az"]
    assert meta["skipped"] == {"hidden files or folders": 2, "files that are not UTF-8 text": 2, "empty documents": 2}
    again = quietly(tmp_path / "in", tmp_path / "in" / "out", split=(1, 0, 0), overwrite=True)
    assert again["sha256"] == meta["sha256"], "the output is not its own input"


def test_a_glob_is_expanded_in_order(tmp_path):
    for name in ("part-2.txt", "part-1.txt", "other.txt", "deep/part-3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    quietly(tmp_path / "**" / "part-*.txt", tmp_path / "out", split=(1, 0, 0))
    assert documents_in(tmp_path / "out", "train") == ["deep/part-3.txt", "part-1.txt", "part-2.txt"]


def test_a_glob_over_links_in_a_circle_ends_and_finds_each_file_once(tmp_path, monkeypatch):
    """Links to other folders are followed, hidden files are not found. Python's own `**` would take years here."""
    for name in ("in/a/b/1.txt", "in/2.txt", "in/.hidden/3.txt", "elsewhere/b/4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(Path(name).stem)
    for link, target in (("self", "."), ("a/up", ".."), ("a/b/top", "../.."), ("away", "../elsewhere")):
        (tmp_path / "in" / link).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("it is still looking"))
    signal.alarm(20)
    try:
        for i, (pattern, found) in enumerate([("in/**", "124"), ("in/**/*.txt", "124"), ("i*/**/b/*.txt", "14"),
                                              ("in/**/b/**/*.txt", "124"), (tmp_path / "in/**/2.txt", "2"),
                                              ("**/4.txt", "4")]):
            quietly(pattern, tmp_path / f"out{i}", split=(1, 0, 0))
            assert "".join(sorted(documents_in(tmp_path / f"out{i}", "train"))) == found, pattern
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_name_with_brackets_is_a_name(tmp_path):
    (tmp_path / "b[2]").mkdir()
    for name in ("a[1].txt", "b[2]/c.txt"):
        (tmp_path / name).write_text(name)
    quietly(tmp_path / "a[1].txt", tmp_path / "file", split=(1, 0, 0))
    assert documents_in(tmp_path / "file", "train") == ["a[1].txt"]
    quietly(tmp_path / "**" / "*.txt", tmp_path / "all", split=(1, 0, 0))
    assert documents_in(tmp_path / "all", "train") == ["a[1].txt", "b[2]/c.txt"], "also of a folder that ** enters"


# Splits

def test_a_document_lies_in_one_split_only(corpus):
    """Otherwise validation would measure what training has read."""
    found = [set(documents_in(corpus.path, split)) for split in SPLITS]
    assert sum(map(len, found)) == 1000 == len(set.union(*found))


def test_a_file_matched_twice_is_read_once(tmp_path):
    """Its second reading could go to another split."""
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
        (tmp_path / f"link-{i}.txt").symlink_to(f"{i}.txt")
    meta = quietly([tmp_path, tmp_path / "*.txt", tmp_path / "3.txt"], tmp_path / "out", split=(1, 1, 1))
    assert sum(meta["documents"].values()) == 50


def test_copies_never_reach_a_second_split(tmp_path):
    """The same text can come as several documents."""
    texts = [f"document {i % 100} of a hundred" for i in range(1000)]
    meta = quietly(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", split=(6, 3, 1))
    found = [set(documents_in(tmp_path / "out", split)) for split in SPLITS]
    assert sum(map(len, found)) == len(set.union(*found)) == 100
    assert meta["documents"]["valid"] == len(found[1]) and meta["skipped"]["copies of held-out documents"] > 0


def test_documents_that_only_begin_alike_are_no_copies(tmp_path, monkeypatch):
    """Such as files under one licence: only the first chunk is compared, but also the length."""
    monkeypatch.setattr(documents, "CHUNK", 97)
    texts = ["the same licence\n" * 20 + "end\n" * i for i in range(30)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    meta = quietly(tmp_path / "*.txt", tmp_path / "out", split=(1, 1, 1))
    assert meta["skipped"] == {} and min(meta["documents"].values()) > 0
    assert sorted(sum((documents_in(tmp_path / "out", split) for split in SPLITS), [])) == sorted(texts)


@pytest.mark.parametrize("weights", [(949, 50, 1), (80, 10, 10), (1, 1, 1), (90, 10, 0), (1, 0, 0), (0.7, 0.2, 0.1)])
@pytest.mark.parametrize("sizes", ["equal", "unequal", "one huge"])
def test_shares_hold_in_tokens(tmp_path, weights, sizes):
    """Also in a text so small that 0.1 % of it would not be a sample."""
    lengths = np.full(2000,
                      100) if sizes == "equal" else np.random.default_rng(1).lognormal(4, 1.5, 2000).astype(int) + 10
    if sizes == "one huge":
        lengths[9] = lengths.sum() // 8
    texts = [f"{i} ".ljust(length, "x") for i, length in enumerate(lengths)]
    meta = quietly(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out", split=weights)
    for split, weight in zip(SPLITS, meta["split"]):
        half_a_document = max(lengths) / lengths.sum() / 2
        share = meta["tokens"][split] / sum(meta["tokens"].values())
        assert share == pytest.approx(weight, abs=max(0.01, half_a_document))
    assert meta["tokens"]["test"] > 2049 or weights[2] == 0


def test_held_out_documents_are_as_long_as_training_documents(tmp_path):
    """A small split that took whatever fits would hold only short documents."""
    lengths = np.random.default_rng(2).lognormal(5, 1, 4000).astype(int) + 10
    texts = [f"{i} ".ljust(length, "x") for i, length in enumerate(lengths)]
    meta = quietly(write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out")
    mean = {split: meta["tokens"][split] / meta["documents"][split] for split in SPLITS}
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
    assert list(meta["bytes"].values()) == [len(parts[0]), len(parts[1]), len(parts[2]) - 1]


def test_a_folder_without_bytes_is_read_but_one_with_impossible_bytes_is_not(tmp_path, corpus):
    """Folders prepared by older versions have none."""
    shutil.copytree(corpus.path, tmp_path / "old")
    path = tmp_path / "old/meta.json"
    meta = json.loads(path.read_text())
    assert load_corpus(tmp_path / "old").bits_per_byte("valid", math.log(2)) == pytest.approx(
        meta["tokens"]["valid"] / meta["bytes"]["valid"])
    for sizes in ({}, [], {"train": 1, "valid": -1, "test": 1}, {"train": 1, "valid": 10**400, "test": 1}):
        path.write_text(json.dumps(meta | {"bytes": sizes}))
        with pytest.raises(UserError, match="; prepare the text again"):
            load_corpus(tmp_path / "old")
    del meta["bytes"]
    path.write_text(json.dumps(meta))
    assert load_corpus(tmp_path / "old").bits_per_byte("valid", 2.0) is None


def test_two_tokenizers_of_the_same_size_have_different_names(tmp_path, corpus):
    """Wherever the corpus lies. plot uses the name to tell whether losses per token can be compared."""
    names = []
    for folder, content in (("a", "{}"), ("b", "{}"), ("c", "[]")):
        path = Path(shutil.copytree(corpus.path, tmp_path / folder)) / "meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": "huggingface",
                                                                   "tokenizer_file": "tokenizer.json"}))
        path.with_name("tokenizer.json").write_text(content)
        names.append(load_corpus(tmp_path / folder).tokenizer_id)
    assert corpus.tokenizer_id == "byte-257" and names[0] == names[1] != names[2]


def test_a_split_of_weight_zero_stays_empty(tmp_path):
    (tmp_path / "a.txt").write_text("some text to cut")
    assert quietly(tmp_path / "a.txt", tmp_path / "out",
                   split=(90, 10, 0))["tokens"] == {"train": 15, "valid": 2, "test": 0}
    corpus = load_corpus(tmp_path / "out")
    with pytest.raises(UserError, match="the test split .* has 0 tokens, but one sample needs seq-length . 1 = 5"):
        TokenDataset(corpus, "test", 4, 0)


@pytest.mark.parametrize("ids", [False, True])
def test_a_text_of_one_token_leaves_a_split_empty(tmp_path, ids):
    """Together with end-of-text it has two tokens, which are too few for three splits."""
    (tmp_path / "a.jsonl").write_text('{"tokens": [97]}' if ids else '{"text": "a"}')
    meta = quietly(tmp_path / "a.jsonl", tmp_path / "out", ids=ids)
    assert meta["tokens"] == {"train": 1, "valid": 0, "test": 1} and meta["cut_off"] == ["test"]
    assert meta["bytes"] == {"train": 1, "valid": 0, "test": 0}
    load_corpus(tmp_path / "out").verify()


def test_the_same_input_gives_the_same_files(tmp_path, corpus):
    """Also if gzip has compressed it."""
    text, compressed = corpus.path.parent / "text.jsonl", tmp_path / "in" / "text.jsonl.gz"
    assert quietly(text, tmp_path / "out")["sha256"] == corpus.sha256
    (tmp_path / "in").mkdir()
    compressed.write_bytes(gzip.compress(text.read_bytes()))
    assert quietly(compressed, tmp_path / "out2")["sha256"] == corpus.sha256
    whole = quietly(shutil.copy(text, tmp_path / "text.txt"), tmp_path / "out3")
    compressed.rename(compressed.with_name("text.gz"))
    assert quietly(compressed.parent, tmp_path / "out4")["sha256"] == whole["sha256"]


# Outputs

def test_meta_says_what_is_there(corpus):
    assert corpus.vocab_size == 257 and corpus.end_of_text == BYTE_END and corpus.tokenizer_name == "byte"
    assert corpus.meta["source"].endswith("text.jsonl") and corpus.meta["bigram_tokens"] == corpus.tokens["train"]
    assert 0 < corpus.bigram_entropy < corpus.unigram_entropy < math.log(257)
    assert {path.name for path in corpus.path.iterdir()} == {"meta.json", "train.bin", "valid.bin", "test.bin"}
    assert [path.name for path in corpus.path.parent.iterdir() if path.name.startswith(".")] == []


def test_only_a_corpus_is_overwritten_and_only_on_demand(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("other text, longer")
    first = quietly(tmp_path / "a.txt", tmp_path / "out")
    with pytest.raises(UserError, match="already holds a prepared corpus.*--overwrite"):
        quietly(tmp_path / "b.txt", tmp_path / "out")
    assert load_corpus(tmp_path / "out").meta == first
    assert quietly(tmp_path / "b.txt", tmp_path / "out", overwrite=True) == load_corpus(tmp_path / "out").meta != first
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"dear")
    with pytest.raises(UserError, match="photos holds other files"):
        quietly(tmp_path / "b.txt", tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "me.jpg").read_bytes() == b"dear"
    (tmp_path / "empty").mkdir()
    quietly(tmp_path / "b.txt", tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "empty", "out", "photos"]


def test_what_a_user_has_put_beside_a_corpus_is_not_replaced_with_it(tmp_path):
    """Notes, or even the input; also files that appear while the text is being prepared."""
    (tmp_path / "text.txt").write_text("some text")
    first = quietly(tmp_path / "text.txt", tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("dear")
    for text in ("text.txt", "out/notes.txt", "out"):
        with pytest.raises(UserError,
                           match="out holds other files too, such as notes.txt, which are never replaced; move"):
            quietly(tmp_path / text, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "notes.txt").rename(tmp_path / "notes.txt")
    for text in ("out", "out/meta.json"):
        with pytest.raises(UserError, match="meta.json lies in the output|holds no text"):
            quietly(tmp_path / text, tmp_path / "out", overwrite=True)
    entropies = prepare_module.entropies
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "entropies",
                      lambda *others: (entropies(*others), (tmp_path / "out" / "late.txt").write_text("dear"))[0])
        with pytest.raises(UserError, match="late.txt, which are never replaced"):
            quietly(tmp_path / "text.txt", tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "late.txt").unlink()
    assert load_corpus(tmp_path / "out").meta == first
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_corpus_that_could_not_be_replaced_is_still_there(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some text")
    first, rename = quietly(tmp_path / "text.txt", tmp_path / "out"), Path.rename

    def fails(path, target):
        if len(path.suffix) == 33:                  # the finished folder's
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(UserError, match="Input/output error"):
        quietly(tmp_path / "text.txt", tmp_path / "out", overwrite=True)
    assert load_corpus(tmp_path / "out").meta == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_what_a_killed_preparation_has_left_is_gone_at_the_next(tmp_path):
    """A live process's folder stays. If the kill came between the two renames, the old corpus is restored."""
    (tmp_path / "text.txt").write_text("some text")
    killed, alive = (tmp_path / f".out.{digit * 32}" for digit in "ab")
    for folder in (killed, alive, tmp_path / ".out.mine", tmp_path / f".other.{32 * 'a'}"):
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"half")
    first = quietly(tmp_path / "text.txt", tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path / f".out.{32 * 'a'}.replaced")
    descriptor = os.open(alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="already holds a prepared corpus"):
            quietly(tmp_path / "text.txt", tmp_path / "out")
    finally:
        os.close(descriptor)
    assert load_corpus(tmp_path / "out").meta == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".other.{32 * 'a'}", alive.name, ".out.mine", "out",
                                                                "text.txt"]
    quietly(tmp_path / "text.txt", tmp_path / "out", overwrite=True)
    assert not alive.exists()


def test_the_default_corpus_may_be_made_by_every_rank(tmp_path, monkeypatch):
    """A rank that finds no corpus at first, and one when it is done, takes that one."""
    (tmp_path / "a.txt").write_text("some text")

    def another_rank_is_faster():
        quietly(tmp_path / "a.txt", tmp_path / "out", source="the other")
        return [tmp_path / "a.txt"]

    monkeypatch.setattr(prepare_module, "standard_library", another_rank_is_faster)
    assert prepare_default_corpus(tmp_path / "out", progress=False)["source"] == "the other"
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"dear")
    monkeypatch.setattr(prepare_module, "standard_library", lambda: [tmp_path / "a.txt"])
    with pytest.raises(UserError, match="photos holds other files"):
        prepare_default_corpus(tmp_path / "photos", progress=False)


def test_the_second_of_two_processes_uses_the_first_ones_corpus(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("other text")
    real_entropies = prepare_module.entropies

    def another_process_is_faster(*arguments):
        monkeypatch.setattr(prepare_module, "entropies", real_entropies)
        quietly(tmp_path / "a.txt", tmp_path / "out", source="the other")
        return real_entropies(*arguments)

    monkeypatch.setattr(prepare_module, "entropies", another_process_is_faster)
    assert quietly(tmp_path / "a.txt", tmp_path / "out")["source"] == "the other"
    prepare_module.shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(prepare_module, "entropies", another_process_is_faster)
    with pytest.raises(UserError, match="another process has meanwhile written a different corpus to"):
        quietly(tmp_path / "b.txt", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "out"]


def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path):
    """Otherwise half a corpus would pass for a whole one."""
    (tmp_path / "a.txt").write_text("one line of text\n" * 3_000_000)
    process = subprocess.Popen([sys.executable, SCRIPT, "--input", tmp_path / "a.txt", "--output", tmp_path / "out"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 30
    while time.time() < deadline and not any(path.stat().st_size for path in tmp_path.glob(".out.*/train.bin")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".out.*"))
    with pytest.raises(UserError, match="there is no data folder"):
        load_corpus(tmp_path / "out")
    (tmp_path / "a.txt").write_text("a new start")
    quietly(tmp_path / "a.txt", tmp_path / "out")
    assert load_corpus(tmp_path / "out").meta["tokens"]["train"] == 10


@pytest.mark.exhaustive
def test_the_command_line_tells_a_person_what_it_made(tmp_path):
    (tmp_path / "a.txt").write_text("some text to cut\n" * 100)
    done = command("--input", "a.txt", "--output", "out", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert "a.txt: 1 document, 1,701 tokens of a vocabulary of 257 (byte)" in done.stdout
    assert "too few documents" in done.stdout and "loss of" in done.stdout and "written to out" in done.stdout
    assert command("--verify", "out", cwd=tmp_path).stdout == "out is intact\n"
    (tmp_path / "out" / "train.bin").write_bytes((tmp_path / "out" / "train.bin").read_bytes()[::-1])
    load_corpus(tmp_path / "out")
    assert "does not have the SHA-256" in command("--verify", "out", cwd=tmp_path).stderr


def test_command_line_mistakes_are_one_sentence_and_exit_code_two(tmp_path, monkeypatch, capsys):
    """These run in this process, for speed; the next test runs in a shell."""
    for name, content in {"a.txt": b"text", "empty.txt": b"", "latin.txt": b"caf\xe9",
                          "bad.jsonl": b'{"text": "a"}\n{"text": \n',
                          "textless.jsonl": b'\n{"content": "a"}\n', "number.jsonl": b'{"text": 3}\n',
                          "cut.gz": gzip.compress(b"text")[:-9], "a.jsonl.zst": b"(\xb5/\xfd-", "a.parquet": b"PAR1-",
                          "list.jsonl": b'["text"]', "latin.jsonl": b'{"text": "caf\xe9"}'}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    good = ["--input", "a.txt", "--output", "out"]
    for arguments, message in [
            (["--input", "empty.txt", "--output", "out"], "the input holds no text (1 file, empty documents: 1)"),
            (["--input", "nothing", "--output", "out"], "the input holds no text (0 files"),
            (["--input", "pipe", "--output", "out"], "pipe is neither a file nor a folder"),
            (["--input", "bad.jsonl", "--output", "out"], "bad.jsonl, line 2, is not JSON"),
            (["--input", "latin.jsonl", "--output", "out"], "latin.jsonl, line 1, is not JSON"),
            (["--input", "textless.jsonl", "--output", "out"], "textless.jsonl, line 2, has no text field"),
            (["--input", "number.jsonl", "--output", "out"], "number.jsonl, line 1, has no text field"),
            (["--input", "list.jsonl", "--output", "out"], "list.jsonl, line 1, has no text field"),
            (["--input", "cut.gz", "--output", "out"], "cut.gz is a damaged gzip file (Compressed file ended before"),
            (["--input", "a.jsonl.zst", "--output", "out"], "a compressed format; convert it first: zstd -d"),
            (["--input", "a.parquet", "--output", "out"], "convert it first: pandas.read_parquet(FILE).to_json("),
            (["--input", "a.txt"], "--input needs --output"),
            (["--input", "a.txt", "--output", "empty.txt"], "empty.txt is a file, but must be a folder"),
            (["--input", "a.txt", "--output", "empty.txt/out"], "File exists"),
            (good + ["--split", "0,0,0"], "but is 0,0,0"), (good + ["--split", "9,-1,2"], "but is 9,-1,2"),
            (good + ["--split", "a,b,c"], "but is a,b,c"), (good + ["--split", "0,1,1"], "the first above 0"),
            (good + ["--vocab-file", "a.txt"], "belong together"),
            (["--verify", "nothing"], "no meta.json")]:
        monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments])
        with pytest.raises(UserError) as caught:
            prepare_module.main()
        assert message in str(caught.value) and "\n" not in str(caught.value), (arguments, str(caught.value))
    assert capsys.readouterr().err == "", "no progress bar where nobody looks"
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*")), "failures leave nothing behind"


def test_a_shell_sees_exit_code_two_and_one_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nnot fine\n')
    (tmp_path / "large.txt").write_text("text " * 400_000)

    def no_space_left():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    for name, message, options in [("bad.jsonl", "line 2, is not JSON", {}),
                                   ("large.txt", "File too large", dict(preexec_fn=no_space_left))]:
        done = command("--input", tmp_path / name, "--output", tmp_path / "out", **options)
        assert done.returncode == 2 and done.stdout == ""
        assert message in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_a_named_file_that_is_no_utf8_needs_the_byte_tokenizer(tmp_path, gpt2_files):
    (tmp_path / "latin.txt").write_bytes(b"good start\n" * 9 + b"caf\xe9")
    with pytest.raises(UserError, match="latin.txt is not UTF-8 text.*--tokenizer byte"):
        quietly(tmp_path / "latin.txt", tmp_path / "out", tokenizer="gpt2", **gpt2_files)


# Tokens -> batches

def starts(batch) -> list[tuple]:
    return [tuple(line) for line in batch.tokens.tolist()]


def whole_step(dataset, step, dp, micro, batch_size=24, shuffle=True):
    """Return (sample_ids, tokens) of a global batch, in the order of replicas and microbatches."""
    parts = [dataset.batch(step, m, r, dp, micro, batch_size, shuffle) for r in range(dp)
             for m in range(batch_size // dp // micro)]
    return sum((part.sample_ids for part in parts), []), torch.cat([part.tokens for part in parts])


def test_a_batch_has_the_shapes_and_labels_that_it_promises(corpus):
    batch = TokenDataset(corpus, "train", 16, seed=1).batch(3, 1, 1, 2, 4, 16)
    for tensor in (batch.tokens, batch.labels, batch.loss_mask, batch.positions):
        assert tensor.shape == (4, 16)
        assert tensor.dtype == (torch.float32 if tensor is batch.loss_mask else torch.int64)
    assert batch.sample_ids == [3 * 16 + 8 + 4 + i for i in range(4)]
    assert batch.positions.tolist() == [list(range(16))] * 4 and batch.loss_mask.min() == 1
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])


def test_a_number_of_any_length_beside_a_text_is_no_error():
    assert documents.text_of_line(b'{"text": "a", "n": ' + 6000 * b"9" + b"}", "line 1") == "a"
    with pytest.raises(UserError, match="line 1"):
        documents.text_of_line(b'{"text": 7}', "line 1")


def test_to_a_gpu_goes_one_copy_of_the_rows_and_the_host_does_not_wait(corpus, monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda rows: copies.append(("pinned", tuple(rows.shape))) or rows)
    monkeypatch.setattr(torch.Tensor, "to",
                        lambda rows, device, non_blocking: copies.append((device.type, non_blocking)) or rows)
    TokenDataset(corpus, "train", 16, seed=1, end_of_text=EndOfText(corpus.end_of_text, mask_loss=True),
                 device=torch.device("cuda")).batch(0, 0, 0, 1, 4, 4)
    assert copies == [("pinned", (4, 17)), ("cuda", True)]


@pytest.mark.parametrize("virtual_stages, places", [(1, [(0, 0), (1, 0)]), (2, [(2, 1), (0, 1)])],
                         ids=["stages", "chunks"])
def test_a_chunk_between_embedding_and_head_reads_no_tokens_but_knows_its_samples(corpus, virtual_stages, places):
    import train
    from nanodomino.config.config import Config
    from nanodomino.mesh import meta_mesh
    config = Config(seq_length=16, micro_batch_size=4, global_batch_size=16, data_parallel_size=2,
                    pipeline_model_parallel_size=3, virtual_stages=virtual_stages).resolve(6)
    dataset = TokenDataset(corpus, "train", 16, seed=1)
    ends, middle = (train.get_batch(dataset, config, meta_mesh(3, 2, 1, stage, 1), 3, True, 1, chunk)
                    for stage, chunk in places)
    assert middle.tokens is middle.labels is middle.loss_mask is middle.positions is None
    assert middle.sample_ids == ends.sample_ids and ends.tokens.shape == (4, 16)
    assert [part.sample_ids for part in middle.split(3)] == [part.sample_ids for part in ends.split(3)]


def test_labels_are_the_next_tokens_and_windows_cover_the_row_once(corpus):
    dataset, stored = TokenDataset(corpus, "valid", 16, seed=1), row(corpus.path, "valid")
    batches = [dataset.batch(w, 0, 0, 1, 1, 1, shuffle=False) for w in range(dataset.windows)]
    assert sum((batch.tokens[0].tolist() for batch in batches), []) == stored[:dataset.windows * 16]
    assert sum((batch.labels[0].tolist() for batch in batches), []) == stored[1:dataset.windows * 16 + 1]
    assert len(stored) - dataset.windows * 16 <= 16, "no window that would have fitted is left out"


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
    assert [again.window_of(i) for i in range(dataset.windows)] == epochs[0] != [other.window_of(i)
                                                                                 for i in range(dataset.windows)]


def test_a_batch_depends_on_its_numbers_alone(corpus):
    """A resumed run reads step 1000 without having read the steps before it."""
    dataset = TokenDataset(corpus, "train", 64, seed=1)
    steps = [starts(dataset.batch(step, 0, 0, 1, 8, 8)) for step in range(0, 2000, 31)]
    fresh = [starts(TokenDataset(corpus, "train", 64, seed=1).batch(step, 0, 0, 1, 8, 8))
             for step in range(0, 2000, 31)]
    assert steps == fresh and steps == [starts(dataset.batch(step, 0, 0, 1, 8, 8)) for step in range(0, 2000, 31)]
    assert 2000 * 8 > 3 * dataset.windows, "several epochs"


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
    """This holds although ranks count different numbers of tokens and the last batch is not full."""
    dataset = TokenDataset(corpus, "valid", 16, seed=1)
    steps = dataset.windows // 24 + 3
    for dp, micro in [(1, 24), (4, 3)]:
        seen, counted = [], 0
        for step in range(steps):
            for r in range(dp):
                for m in range(24 // dp // micro):
                    batch = dataset.batch(step, m, r, dp, micro, 24, shuffle=False)
                    assert batch.tokens.shape == (micro, 16)
                    real = batch.loss_mask.amin(dim=1) == 1
                    assert (batch.loss_mask[~real] == 0).all() and (batch.tokens < corpus.vocab_size).all()
                    seen += batch.tokens[real].flatten().tolist()
                    counted += int(batch.loss_mask.sum())
        assert seen == row(corpus.path, "valid")[:dataset.windows * 16] and counted == dataset.windows * 16


def test_end_of_text_can_be_masked_from_the_loss(corpus):
    for asked in (False, True):
        end_of_text = EndOfText(corpus.end_of_text, mask_loss=asked)
        batch = TokenDataset(corpus, "train", 512, seed=1, end_of_text=end_of_text).batch(0, 0, 0, 1, 8, 8)
        at_end = batch.labels == corpus.end_of_text
        assert at_end.any() and torch.equal(batch.loss_mask == 0, at_end & torch.tensor(asked))


def test_a_batch_that_does_not_divide_is_refused(corpus):
    with pytest.raises(UserError,
                       match="global-batch-size 10 must be divisible by micro-batch-size x data parallel = 4 x 2 = 8"):
        TokenDataset(corpus, "train", 16, seed=1).batch(0, 0, 0, 2, 4, 10)
