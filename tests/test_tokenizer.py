"""A Hugging Face tokenizer read by nanodomino gives the ids of the `tokenizers` package, in chunks too, or says why not."""

import json
import random
import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data import prepare as prepare_module
from data.prepare import prepare
from nanodomino.data import SPLITS, load_corpus
from nanodomino.huggingface_tokenizer import FILES, spelled_bytes
from nanodomino.settings import UserError
from nanodomino.tokenizer import build_tokenizer

SCRIPT = Path(prepare_module.__file__).resolve()
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
          r"|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
FAMILIES = ("gpt2", "llama3", "qwen2", "smollm2")
UNKNOWN = "\x00\x04\x06\x13\x1d"                    # what smollm2's vocabulary lacks of ASCII here

TEXTS = [
    "", " ", "\n", "x", "The quick brown fox, they say, jumps over 12 lazy dogs.\n\n  It didn't see\tthem: naïve, 東京, 🙂!\n",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 ☺️", "a  b   c    d\t\te \t f\n\n\ng \n \n h\r\ni\r\n\r\nj  \r\n  k \n", "   ", " \t\n ", "end.   ", "end.\n\n\n", "(x);\n\ty",
    "1 12 123 1234 12345 1234567890 3.14 1,000 x1 1x  7   8\n9 \t10\n\n11 ½ ² Ⅷ ٣٤٥ 一二三  ½", "it's IT'S we'll WE'LL I'd 'tis ''s x'ſ o’clock",
    bytes(range(256)).decode("latin-1"), " ".join(bytes(range(256)).decode("latin-1")), "e\u0301 e \u0301 \u1e9b\u0323 ಕ\u0cc6\u0cc2 \u0958 x\u0958\ny\u0958. ア\u3099\n\u0301",
    "각 \u1100\u1161\u11a8 Å \u212b \u2126 ﬁ ǆ >\u0338= a\u0327\u0301 a\u0301\u0327", "Она сказала: «Нет!» … Ελληνικά, אֱלֹהִים; مَرْحَبًا بِالعَالَم، ١٢٣. नमस्ते दुनिया। สวัสดีชาวโลก",
    "今日は。\n東京は1234年、「雨」。　次　行\r\n中文，没有空格。한국어 문장.", "<|endoftext|> a<|begin_of_text|>b <|end_of_text|><|im_start|>user\n<|im_end|> <think> x</think>\n\n<thin k>",
    "\u00a0a\u2003b\u2028c\u2029d\u0085e\x0bf\x0cg\x1ch\x1f i\u200bj\ufeffk", "def f(x):\n    return {'a': [1, 2,3]}  # y\n\n\nif __name__ == \"__main__\":\n\tf(0x1F)\n",
    "x" * 300 + " " * 300 + "\n" * 300 + "1" * 300 + "!" * 300 + "東" * 300, "https://example.org/a-b_c?d=e&f=%20#g ---- ==== ....\n****\n", "\U0001d800\U0010fffd\ue000"]


def random_texts(count: int, seed: int) -> list[str]:
    """Of what regular expressions and normal forms look at, and of all that Unicode 3.2 knew: of later accents some versions
    of normal forms know the order, others not."""
    choose, few = random.Random(seed), " \n\r\t.,'-_!<>|/aZeslrtv109é½\u3000\u00a0\u0301\u0327\u0338\u0958\u093c\u1100\u1161東🙂\u200d"
    every = [chr(code) for code in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs", "Co")]
    return ["".join(choose.choices(few if i % 3 else every, k=choose.randrange(40))) for i in range(count)]


def family(name: str, folder: Path) -> Path:
    """A small tokenizer of the structure of that model's, trained here."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
    from tokenizers.models import BPE
    tokenizer = Tokenizer(BPE(ignore_merges=name == "llama3"))
    split = {"llama3": LLAMA3, "qwen2": QWEN2}.get(name)
    levels = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split:
        levels.insert(0, pre_tokenizers.Split(Regex(split), "isolated", invert=False))
    if name == "smollm2":
        levels.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(levels) if len(levels) > 1 else levels[0]
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    first = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"] if name == "smollm2" else []
    alphabet = set(pre_tokenizers.ByteLevel.alphabet()) - ({chr(256 + ord(byte)) for byte in UNKNOWN} if first else set())
    tokenizer.train_from_iterator(
        [text.translate(dict.fromkeys(map(ord, UNKNOWN))) for text in TEXTS * 3] + ["1234 1999 2024 ./", "  \n    \n\t\t"] * 9,
        trainers.BpeTrainer(vocab_size=700, initial_alphabet=sorted(alphabet), special_tokens=first, show_progress=False))
    if name == "gpt2":
        tokenizer.add_special_tokens(["<|endoftext|>"])
    if name == "llama3":
        tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(12))])
        begin = tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", None, [("<|begin_of_text|>", begin)])
    if name == "qwen2":
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    tokenizer.decoder = decoders.ByteLevel()
    (folder / name).mkdir()
    tokenizer.save(str(folder / name / "tokenizer.json"))
    end = {"llama3": {"content": "<|end_of_text|>", "lstrip": False}, "qwen2": "<|im_end|>"}.get(name)
    if end:
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "model_max_length": 1024}))
    return folder / name


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict:
    pytest.importorskip("tokenizers", reason="needs tokenizers: pip install -r requirements-extra.txt")
    folder = tmp_path_factory.mktemp("families")
    return {name: family(name, folder) for name in FAMILIES}


@cache
def package(folder: Path):
    from tokenizers import Tokenizer
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def words(folder: Path, text: str) -> list[bytes]:
    """What the package cuts a text into, before any merge."""
    tokenizer, byte_of = package(folder), spelled_bytes()
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [bytes(byte_of[character] for character in word) for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def theirs(folder: Path, text: str, as_text=True) -> list[int]:
    """The package's ids; `as_text`: of a text that may not use special tokens."""
    tokenizer = package(folder)
    tokenizer.encode_special_tokens = as_text
    return tokenizer.encode(text, add_special_tokens=False).ids


def changed(folder: Path, target: Path, change) -> Path:
    """A copy of a tokenizer.json with something changed; change(record)."""
    record = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    record = change(record) or record
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_text(json.dumps(record), "utf-8")
    return target


# ---- the same ids

@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_tokenizers_package(families, name):
    encoding = build_tokenizer(families[name])
    assert encoding.n_vocab == package(families[name]).get_vocab_size(with_added_tokens=True)
    for text in TEXTS + random_texts(1000, seed=1):
        ids = encoding.encode(text, disallowed_special=())
        assert ids == theirs(families[name], text), repr(text)
        assert encoding.decode(ids) == package(families[name]).decode(ids, skip_special_tokens=False), repr(text)
        assert encoding.encode_to_numpy(text, disallowed_special=()).tolist() == encoding.encode_ordinary(text) == ids
        prompt = encoding.encode(text, allowed_special="all")
        assert prompt == theirs(families[name], text, as_text=False), repr(text)
        if name != "smollm2":
            assert encoding.decode(prompt) == (unicodedata.normalize("NFC", text) if name == "qwen2" else text)


@pytest.mark.parametrize("name", FAMILIES)
def test_words_are_those_of_the_package(families, name):
    """Each word of the package is a token here, so that a word cut elsewhere shows, whatever the merges."""
    encoding, texts = build_tokenizer(families[name]), [*TEXTS, *random_texts(200, seed=2), *pairs_at_blanks()]
    expected = [words(families[name], text) for text in texts]
    tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *(word for one in expected for word in one)])
    ranks = {token: i for i, token in enumerate(tokens)}
    every = tiktoken.Encoding("words", pat_str=encoding._pat_str, mergeable_ranks=ranks, special_tokens={})
    for text, one in zip(texts, expected):
        assert every.decode_tokens_bytes(every.encode_ordinary(encoding.normalize(text))) == one, repr(text)


# ---- in chunks

@pytest.mark.parametrize("name", FAMILIES)
def test_at_every_safe_cut_both_sides_give_the_words_of_the_whole(families, name):
    cuts = 0
    for text in [*TEXTS, *random_texts(200, seed=2), *pairs_at_blanks()]:
        for cut in re.finditer(prepare_module.SAFE_CUT, text):
            left, right = text[:cut.end()], text[cut.end():]
            assert words(families[name], left) + words(families[name], right) == words(families[name], text), (left, right)
            cuts += 1
    assert cuts > 500


def pairs_at_blanks() -> list[str]:
    """Each kind of character on each side of each kind of run of blanks."""
    kinds = ["e", "e\u0301", "\u0958", "東", "1", "½", ".", "'s", "_", "\u0338", "</think>"]
    blanks = [" ", "  ", "\n", "\n\n", " \n", "\n ", "\r\n", "\t", "\n \n  ", " \u3000", " \x1c "]
    return [left + blank + right for left in kinds for blank in blanks for right in kinds]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_in_chunks_gives_the_packages_ids(tmp_path, monkeypatch, families, name):
    text = "".join(text for text in TEXTS if len(text) < 1000) * 3
    (tmp_path / "a.txt").write_bytes(text.encode())
    for chunk in (331, 947, 1 << 20):
        monkeypatch.setattr(prepare_module, "CHUNK", chunk)
        assert len(list(prepare_module.text_chunks(tmp_path / "a.txt", False))) >= len(text) // (2 * chunk)
        meta = prepare(tmp_path / "a.txt", tmp_path / str(chunk), families[name], split=(1, 0, 0), progress=False)
        ids = np.fromfile(tmp_path / str(chunk) / "train.bin", load_corpus(tmp_path / str(chunk)).dtype).tolist()
        assert ids == [*theirs(families[name], text), meta["end_of_text"]]
