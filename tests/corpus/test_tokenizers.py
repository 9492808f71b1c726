"""Hugging Face tokenizers: whole documents and documents in chunks get the ids of the `tokenizers` package.

The tokenizers have the structure of GPT-2's, Llama 3's, Qwen 2's, Llama 2's and Mistral's, and are trained here
on a few texts. Wherever the package itself is the reference, it encodes the whole text in one call.
"""

import json
import random
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import needs

from data.prepare import SEPARATOR_INSIDE, prepare
from nanodomino.corpus import prepared_folder, tokenizers
from nanodomino.corpus.prepared_folder import load_corpus
from nanodomino.corpus.tokenizers import FILES, build_tokenizer
from nanodomino.errors import UserError
from nanodomino.generate.__main__ import find_tokenizer


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTE_LEVEL, BYTE_FALLBACK = ("gpt2", "llama3", "qwen2"), ("llama2", "mistral")
FAMILIES = BYTE_LEVEL + BYTE_FALLBACK

PROSE = "The quick brown fox, they say, jumps over 12 lazy dogs.\n\n  It didn't see\tthem: naïve, 東京, 🙂!\n"
TEXTS = [
    "", " ", "\n", "x", PROSE, "a  b   c    d\t\te \t f\n\n\ng \n \n h\r\ni\r\n\r\nj  \r\n  k \n",
    "1 12 123 1234 12345 1234567890 3.14 1,000 x1 1x  7   8\n9 \t10\n\n11 ½ ² Ⅷ ٣٤٥ 一二三  ½",
    "it's IT'S we'll WE'LL I'd 'tis ''s x'ſ o’clock", bytes(range(256)).decode("latin-1"),
    "e\u0301 e \u0301 \u1e9b\u0323 ಕ\u0cc6\u0cc2 \u0958 x\u0958\ny\u0958. ア\u3099\n\u0301",
    "Она сказала: «Нет!» … אֱלֹהִים; مَرْحَبًا ١٢٣. नमस्ते दुनिया। 東京は1234年、「雨」。　次　行\r\n中文，没有空格。한국어",
    "<|endoftext|> a<|begin_of_text|>b <|end_of_text|><|im_start|>user\n<|im_end|> <think> x</think>\n\n<thin k>",
    "def f(x):\n    return {'a': [1, 2,3]}  # y\n\n\nif __name__ == \"__main__\":\n\tf(0x1F)\n",
    "x" * 300 + " " * 300 + "\n" * 300 + "1" * 300 + "!" * 300 + "東" * 300]


def byte_level_family(name: str):
    """A small tokenizer with the structure of that model's, trained here."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
    from tokenizers.models import BPE
    tokenizer, regex = Tokenizer(BPE(ignore_merges=name == "llama3")), {"llama3": LLAMA3, "qwen2": QWEN2}.get(name)
    split = [pre_tokenizers.Split(Regex(regex), "isolated", invert=False)] if regex else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)])
    tokenizer.train_from_iterator(
        TEXTS * 3 + ["1234 1999 2024 ./", "  \n    \n\t\t"] * 9, trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    tokenizer.add_special_tokens({
        "gpt2": ["<|endoftext|>"], "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|endoftext|>", "<|reserved_special_token_5|>"]}[name])
    if name == "llama3":
        begin = "<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", None, [begin])
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback_family(name: str):
    """A small tokenizer with the structure of Llama 2's (no pre-tokenizer) or of Mistral's second (Metaspace)."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
    from tokenizers.models import BPE
    tokenizer = Tokenizer(BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(
        vocab_size=800, limit_alphabet=120, initial_alphabet=list(map(chr, range(33, 127))),
        special_tokens=special + byte_tokens, show_progress=False))
    record = json.loads(tokenizer.to_str())             # <0x00> etc. are not special tokens in the published files
    record["added_tokens"] = [token for token in record["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(record))
    if name == "llama2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return tokenizer


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict:
    """{name: folder of that tokenizer}"""
    needs("tokenizers")
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in folders.items():
        tokenizer = (byte_level_family if name in BYTE_LEVEL else byte_fallback_family)(name)
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, end in (("llama3", "<|end_of_text|>"), ("qwen2", {"content": "<|im_end|>", "lstrip": False})):
        (folders[name] / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "model_max_length": 1024}))
    return folders


@cache
def package(folder: Path):
    from tokenizers import Tokenizer
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def package_ids(folder: Path, text: str, special_tokens_are_text=True) -> list[int]:
    """The package's ids of a text that it encodes as a whole."""
    package(folder).encode_special_tokens = special_tokens_are_text
    return package(folder).encode(text, add_special_tokens=False).ids


def changed(folder: Path, target: Path, change) -> Path:
    """A copy of a tokenizer.json after change(record)."""
    record = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(record)
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_text(json.dumps(record), "utf-8")
    return target


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8", newline="")
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_text_are_those_of_the_package(families, name):
    tokenizer, special = (build_tokenizer(families[name], special_tokens=special) for special in (False, True))
    assert tokenizer.vocab_size == package(families[name]).get_vocab_size(with_added_tokens=True)
    for text, ids in zip(TEXTS, map(list, tokenizer.encode_batch(TEXTS))):
        assert ids == package_ids(families[name], text), repr(text)
        assert tokenizer.decode(ids) == package(families[name]).decode(ids, skip_special_tokens=False), repr(text)
        prompt = special.encode(text).tolist()
        assert prompt == package_ids(families[name], text, special_tokens_are_text=False), repr(text)
        if name in ("gpt2", "llama3", "llama2"):
            assert tokenizer.decode(ids) == tokenizer.decode(prompt) == text
        # generated text is printed token by token; Llama 2's kind starts with a space, which decode removes
        printed = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        assert tokenizer.decode(ids) == (printed.removeprefix(" ") if name in BYTE_FALLBACK else printed), repr(text)


def test_truncation_in_the_file_changes_no_ids_and_an_id_between_two_tokens_ids_has_no_text(tmp_path, families):
    """Files of models for embeddings cut each text at 128 tokens."""
    def change(record):
        record["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        record["model"]["vocab"]["<|endoftext|>"] = record["added_tokens"][0]["id"] = before.vocab_size + 4

    before = build_tokenizer(families["gpt2"])
    tokenizer = build_tokenizer(changed(families["gpt2"], tmp_path, change))
    assert tokenizer.encode(PROSE).tolist() == before.encode(PROSE).tolist()
    assert tokenizer.vocab_size == before.vocab_size + 5 == tokenizer.end_of_text + 1
    assert tokenizer.token_bytes(before.vocab_size) == b""


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_document_in_chunks_has_the_ids_of_the_whole(tmp_path, monkeypatch, families, name):
    """The package encodes the whole text at once. In this text many cuts would be wrong."""
    text = PROSE * 9 + "".join(random.Random(0).choices("ab1  _.é'\n\n\r\t\u3000\x1c", k=60_000))
    monkeypatch.setattr(tokenizers, "CHUNK", 40)
    prepare(write(tmp_path / "a.txt", text), tmp_path / "out", families[name], split=(1, 0, 0))
    corpus = load_corpus(tmp_path / "out")
    assert np.fromfile(tmp_path / "out" / "train.bin", corpus.dtype).tolist() == [
        *package_ids(families[name], text), corpus.end_of_text]


@pytest.mark.parametrize("family, special, begin, end, chosen", [
    ("gpt2", False, None, "<|endoftext|>", None), ("qwen2", True, None, "<|endoftext|>", None),
    ("qwen2", False, None, "<|im_end|>", "<|im_end|>"), ("llama2", False, "<s>", "</s>", None),
    ("llama3", True, "<|begin_of_text|>", "<|end_of_text|>", None), ("llama3", False, None, "<|end_of_text|>", None)])
def test_a_data_folder_encodes_text_as_it_was_prepared_after_the_tokenizer_has_moved(
        tmp_path, families, family, special, begin, end, chosen):
    """generate builds its tokenizer from the folder. End-of-text is --end-of-text, else the separator of documents
    (qwen2's eos_token is <|im_end|>), else a usual name. In a document the name of a special token is text."""
    original, id_of = tmp_path / "original", package(families[family]).token_to_id
    shutil.copytree(families[family], original)
    (original / "special_tokens_map.json").write_text("{}")
    text = f"Hello <|im_end|></s>{'' if special else end} you\n"
    options = dict(split=(1, 0, 0), special_tokens=special, begin_of_text=begin is not None, end_of_text=chosen)
    prepare(write(tmp_path / "a.txt", text), tmp_path / "out", original, **options)
    shutil.rmtree(original)
    prepare(tmp_path / "a.txt", tmp_path / "again", tmp_path / "out" / "tokenizer.json", **options)
    begins = [id_of(begin)] if begin else []
    for folder in (tmp_path / "out", tmp_path / "again"):
        corpus, tokenizer = load_corpus(folder), load_corpus(folder).tokenizer()
        ids = np.fromfile(folder / "train.bin", corpus.dtype).tolist()
        assert ids == [*begins, *package_ids(families[family], text, not special), id_of(end)]
        assert tokenizer.encode(text).tolist() == ids[len(begins):-1]
        assert tokenizer.begin_of_text == (begins or [None])[0]
        assert tokenizer.end_of_text == corpus.end_of_text == ids[-1]
        assert {name for name in FILES if (folder / name).exists()} == {
            path.name for path in families[family].iterdir()} | {"special_tokens_map.json"}


def test_generate_ends_a_chat_models_turn_unless_the_data_end_with_another_token(families):
    config = flags = SimpleNamespace(data_path=None, vocab_size=10**6, special_tokens=False, begin_of_text=False)
    found = find_tokenizer(families["qwen2"], config, flags)
    assert found.end_of_text == package(families["qwen2"]).token_to_id("<|im_end|>")


def test_a_document_ends_once_and_one_with_its_own_separator_inside_is_named(tmp_path, monkeypatch, families):
    """A document's chunk may end with the separator. A document that has begin-of-text gets no second one."""
    monkeypatch.setattr(tokenizers, "CHUNK", 20)
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    texts, out = [f"a{end}b", f"ccccccc{end} c", f"d{end}{end}", "e", f"f{end}", f"{begin}g"], tmp_path / "out"
    for i, text in enumerate(texts):
        write(tmp_path / f"{i}.txt", text)
    monkeypatch.chdir(tmp_path)
    meta = prepare([f"{i}.txt" for i in range(6)], out, families["llama3"], split=(1, 0, 0),
                   special_tokens=True, begin_of_text=True)
    ids = np.fromfile(out / "train.bin", load_corpus(out).dtype)
    assert load_corpus(out).tokenizer().decode(ids) == "".join(
        begin + text.removeprefix(begin).removesuffix(end) + end for text in texts)
    assert meta["notes"] == [f"{SEPARATOR_INSIDE}: 3 (0.txt; 1.txt; 2.txt)"]


def test_a_corpus_of_another_tokenizer_than_an_imported_models_is_refused(tmp_path, families):
    """Two tokenizers of the same size can differ. A change of the special tokens alone makes no other tokenizer."""
    prepare(write(tmp_path / "a.txt", "q\nHello, you"), tmp_path / "out", families["llama3"])
    text, corpus = (families["llama3"] / "tokenizer.json").read_text(), load_corpus(tmp_path / "out")
    corpus.check_tokenizer_of(tmp_path)                        # an import without a tokenizer
    write(tmp_path / "tokenizer.json", text.replace("reserved_special_token_5", "eot_id"))
    corpus.check_tokenizer_of(tmp_path)
    write(tmp_path / "tokenizer.json", text.replace('"q":', '"Q0":').replace('"Q":', '"q":').replace('"Q0":', '"Q":'))
    for folder in (tmp_path, families["qwen2"]):
        with pytest.raises(UserError, match=f"with another tokenizer than the tokenizer.json of {folder}; prepare"):
            corpus.check_tokenizer_of(folder)


@pytest.mark.parametrize("name, begins", [("llama3", True), ("llama2", False), ("llama2", True), ("mistral", False)])
def test_the_bytes_of_text_are_those_of_the_labels_that_are_scored(tmp_path, monkeypatch, families, name, begins):
    """English first, Russian after it: the mean of the whole split gives other numbers. The space in front of a
    document, its begin and its end are no text. The first token of a split is no label."""
    monkeypatch.setattr(prepared_folder, "BLOCK", 7)
    texts = ["x", *9 * ["The quick brown fox  they say\n"], *9 * ["\n Она сказала: «Нет!»"]]
    write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(tmp_path / "a.jsonl", tmp_path / "out", families[name], (1, 0, 0), begin_of_text=begins)
    corpus = load_corpus(tmp_path / "out")
    ends = np.flatnonzero(np.fromfile(tmp_path / "out/train.bin", corpus.dtype) == corpus.end_of_text)
    expected = np.cumsum([len(text.encode()) for text in texts]) - (not begins) * len("x")
    assert [corpus.text_bytes("train", end) for end in ends] == expected.tolist()
    assert abs(ends[9] / ends[-1] * expected[-1] / expected[9] - 1) > 0.1
    (tmp_path / "out/tokenizer.json").unlink()
    assert load_corpus(tmp_path / "out").text_bytes("train", 9) is None


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_a_tokenizer_that_changes_a_text_is_refused(tmp_path, families, family):
    """So is one that is no BPE."""
    changes = [dict(normalizer={"type": name}) for name in ("Lowercase", "NFKC", "NFD", "NFKD", "StripAccents", "Nmt")]
    changes += [dict(normalizer=dict(type="Strip", strip_left=left, strip_right=not left)) for left in (True, False)]
    changes += [dict(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, decoder=None)]
    for change in changes:
        folder = changed(families[family], tmp_path / "it", lambda record: record.update(change))
        with pytest.raises(UserError, match=r"it/tokenizer.json changes a text that is .*\); choose another tokenizer"):
            build_tokenizer(folder)


def test_missing_and_broken_files_are_named_in_one_sentence(tmp_path, families, monkeypatch):
    for name, config, message in [
            ("broken", "{}", r"broken/tokenizer.json can't be read as a tokenizer.json \(EOF while"),
            ("config", "{", r"tokenizer_config.json can't be read \("),
            ("end", '{"bos_token": "x"}', r"no added token x or <\|begin_of_text\|> or <s>, but <\|endoftext\|>;"),
            ("nowhere", None, "try one of byte, gpt2, or the path of a Hugging Face tokenizer's folder")]:
        if config:
            changed(families["gpt2"], tmp_path / name, lambda record: record)
            write(tmp_path / name / "tokenizer_config.json", config)
            write(tmp_path / "broken/tokenizer.json", "{")
        with pytest.raises(UserError, match=message):
            build_tokenizer(tmp_path / name, begin_of_text=name == "end")
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: 1 / 0)
    with pytest.raises(UserError, match="could not be downloaded .*; .*GPT-2's tokenizer.json .*--tokenizer byte"):
        build_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="needs the package tokenizers, .*; pip install -r requirements-extra.txt"):
        build_tokenizer(tmp_path / "end")
