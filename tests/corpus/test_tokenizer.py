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
from nanodomino.corpus.folder import SPLITS, load_corpus
from nanodomino.corpus.huggingface_tokenizer import FILES, SAFE_CUT, spelled_bytes
from nanodomino.corpus.tokenizer import build_tokenizer
from nanodomino.errors import UserError

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
    end = {"llama3": "<|end_of_text|>", "qwen2": {"content": "<|im_end|>", "lstrip": False}}.get(name)
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


def test_what_the_regular_expression_does_not_match_is_a_word_too(tmp_path, families):
    regex = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+|\s+(?!\S)|\s"
    folder = changed(families["llama3"], tmp_path / "it", lambda record: record["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": regex}))
    encoding = build_tokenizer(folder)
    for text in TEXTS:
        assert encoding.encode_ordinary(text) == theirs(folder, text), text


# ---- in chunks

@pytest.mark.parametrize("name", FAMILIES)
def test_at_every_safe_cut_both_sides_give_the_words_of_the_whole(families, name):
    cuts = 0
    for text in [*TEXTS, *random_texts(200, seed=2), *pairs_at_blanks()]:
        for cut in re.finditer(SAFE_CUT, text):
            left, right = text[:cut.end()], text[cut.end():]
            assert words(families[name], left) + words(families[name], right) == words(families[name], text), (left, right)
            cuts += 1
    assert cuts > 400


def pairs_at_blanks() -> list[str]:
    """Each kind of character on each side of each kind of run of blanks."""
    kinds = ["e", "e\u0301", "\u0958", "東", "1", "½", ".", "'s", "</think>"]
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


# ---- in the data folder

def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("name, end", [("gpt2", "<|endoftext|>"), ("llama3", "<|end_of_text|>"), ("qwen2", "<|im_end|>"), ("smollm2", "<|endoftext|>")])
def test_a_data_folder_reads_its_tokens_after_the_tokenizer_has_moved(tmp_path, families, name, end):
    """End-of-text is what tokenizer_config.json says, else a well-known name; what a document spells is text."""
    original = tmp_path / "original"
    original.mkdir()
    for file in families[name].iterdir():
        (original / file.name).write_bytes(file.read_bytes())
    (original / "special_tokens_map.json").write_text("{}")
    (original / "model.safetensors").write_bytes(b"large")
    text = f"Hello {end} you\n"
    meta = prepare(write(tmp_path / "a.txt", text), tmp_path / "out", original, split=(1, 0, 0), progress=False)
    for file in original.iterdir():
        file.unlink()
    corpus = load_corpus(tmp_path / "out")
    corpus.verify()
    ids, encoding = np.fromfile(tmp_path / "out/train.bin", corpus.dtype).tolist(), corpus.tokenizer()
    assert encoding.decode(ids) == text + end and ids.count(package(families[name]).token_to_id(end)) == 1
    assert (meta["tokenizer"], meta["tokenizer_file"], meta["eod_token"]) == ("huggingface", "tokenizer.json", end)
    assert ids[-1] == encoding.eot_token == corpus.end_of_text == meta["end_of_text"]
    assert encoding.encode(end, allowed_special="all") == [corpus.end_of_text], "a prompt may use it"
    kept = {file.name for file in (tmp_path / "out").iterdir()} - {f"{split}.bin" for split in SPLITS} - {"meta.json"}
    assert kept == {FILES[0], FILES[2], *(FILES[1:2] if (families[name] / FILES[1]).exists() else ())}
    prepare(tmp_path / "a.txt", tmp_path / "out", tmp_path / "out/tokenizer.json", split=(1, 0, 0), progress=False, overwrite=True)
    assert np.fromfile(tmp_path / "out/train.bin", corpus.dtype).tolist() == ids, "its own copy serves as the tokenizer"
    prepare(tmp_path / "a.txt", tmp_path / "out", "byte", split=(1, 0, 0), progress=False, overwrite=True)
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_a_word_that_is_added_and_not_special_is_one_token_in_a_document(families):
    encoding = build_tokenizer(families["qwen2"])
    think = package(families["qwen2"]).token_to_id("<think>")
    assert encoding.encode_ordinary("a<think>b").count(think) == 1
    assert encoding.encode_to_numpy("a<think>b<|im_end|>", disallowed_special=()).tolist().count(think) == 1
    with pytest.raises(ValueError, match="special token"):
        encoding.encode("a<|im_end|>")


def test_eod_token_names_the_end_of_text(tmp_path, families, monkeypatch, capsys):
    write(tmp_path / "a.txt", "some text")
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--split", "1,0,0",
                                      "--tokenizer", str(families["qwen2"] / "tokenizer.json"), "--eod-token", "<|endoftext|>"])
    prepare_module.main()
    corpus, end = load_corpus(tmp_path / "out"), package(families["qwen2"]).token_to_id("<|endoftext|>")
    assert corpus.end_of_text == corpus.tokenizer().eot_token == end
    assert np.fromfile(tmp_path / "out/train.bin", corpus.dtype)[-1] == end
    assert f"{corpus.vocab_size} (huggingface)" in capsys.readouterr().out


def test_a_gap_between_ids_is_no_text_and_a_lacking_byte_is_left_out(tmp_path, families):
    def move(record):
        record["added_tokens"][0]["id"] += 5
        record["model"]["vocab"].pop("<|endoftext|>", None)

    encoding, size = build_tokenizer(changed(families["gpt2"], tmp_path, move)), build_tokenizer(families["gpt2"]).n_vocab
    assert encoding.n_vocab == size + 5 == encoding.eot_token + 1
    assert {bytes([255]) + b"unused token %d" % token for token in range(size - 1, size + 4)} == set(
        map(encoding.decode_single_token_bytes, range(size - 1, size + 4)))
    lacking = build_tokenizer(families["smollm2"])
    for text in ("a\x00b", "a \x04b", "\x13", "x \x1d\x06 1", "\x04\n\n"):
        assert lacking.encode_ordinary(text) == theirs(families["smollm2"], text)
        assert lacking.encode_to_numpy(text).tolist() == lacking.encode_ordinary(text)


# ---- merges and ids

def tiny(folder: Path, merges: list, ignore_merges=False, ids=None, extra=()) -> Path:
    """All bytes, the tokens of these merges (or these tokens, as ids), and end-of-text at 0."""
    letters = sorted(spelled_bytes())
    tokens = ids or list(dict.fromkeys("".join(merge) for merge in merges))
    end = {"id": 0, "content": "<|endoftext|>", "special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    record = {"added_tokens": [end], "normalizer": None,
              "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
              "model": {"type": "BPE", "vocab": {token: 1 + i for i, token in enumerate([*letters, *tokens, *extra])},
                        "merges": merges, "ignore_merges": ignore_merges}}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(record), "utf-8")
    return folder


def test_merges_are_strings_or_pairs_and_a_token_may_have_several(tmp_path, families):
    pairs = [("a", "b"), ("ab", "c"), ("a", "bc"), ("b", "c")]
    with pytest.raises(UserError, match="another order than the ids"):
        build_tokenizer(tiny(tmp_path, pairs[:1] + pairs[3:] + pairs[1:3], ids=["abc", "ab", "bc"]))
    pairs = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    for merges in (pairs, [" ".join(pair) for pair in pairs]):
        folder = tiny(tmp_path / f"merges {type(merges[0]).__name__}", merges, ids=["ab", "bc", "abc"])
        for text in ("abc", "xabcx", "bcabc", "abbcab"):
            assert build_tokenizer(folder).encode_ordinary(text) == theirs(folder, text)


def test_a_token_that_merges_do_not_make_is_refused_unless_whole_words_come_first(tmp_path, families):
    """`cab`: c and ab are never neighbours in the list, yet tiktoken would join them. `xyz`: nobody can make it."""
    with pytest.raises(UserError, match="has the token b'cab', which its merges do not make"):
        build_tokenizer(tiny(tmp_path / "0", [("a", "b")], ignore_merges=True, extra=["cab"]))
    with pytest.raises(UserError, match="has the token b'xyz', which its merges do not make"):
        build_tokenizer(tiny(tmp_path / "1", [("a", "b")], extra=["xyz"]))
    with pytest.raises(UserError, match="has the token b'abc', which its merges do not make"):
        build_tokenizer(tiny(tmp_path / "2", [("b", "c"), ("a", "b"), ("ab", "c")]))
    folder = tiny(tmp_path / "3", [("a", "b")], ignore_merges=True, extra=["xyz"])
    for text in ("xyz", "xyzz", " xyz", "abxyz", "1xyz"):
        assert build_tokenizer(folder).encode_ordinary(text) == theirs(folder, text)


# ---- what can't be read is told in a sentence

def model(**changes):
    return lambda record: record["model"].update(changes)


def whole(**changes):
    return lambda record: record.update(changes)


def added(content="<x y>", **changes):
    token = {"id": 900, "content": content, "special": True, "lstrip": False, "rstrip": False, "single_word": False}
    return lambda record: record["added_tokens"].append(token | changes)


def level(**changes):
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True} | changes


def sequence(*steps):
    return whole(pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, level(use_regex=False)]})


def split(regex, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: regex}, "behavior": behavior, "invert": invert}


def bytes_without_q(record):
    vocabulary = {token: i for token, i in record["model"]["vocab"].items() if len(token) == 1 and token != "Q"}
    record["model"] |= {"vocab": vocabulary, "merges": []}


BAD = [
    (model(type="Unigram"), "is a Unigram tokenizer; only byte-level BPE as in GPT-2"), (model(type="WordPiece"), "is a WordPiece"),
    (model(byte_fallback=True), "has byte_fallback True; only byte-level BPE"), (model(dropout=0.1), "has dropout 0.1"),
    (model(end_of_word_suffix="</w>"), "has end_of_word_suffix '</w>'"), (model(continuing_subword_prefix="##"), "continuing_subword_prefix"),
    (whole(normalizer={"type": "NFKC"}), "normalizes text by NFKC"), (whole(normalizer={"type": "Sequence", "normalizers": []}), "text by Sequence"),
    (whole(pre_tokenizer=None), "cuts words by None"), (whole(pre_tokenizer={"type": "Metaspace"}), "cuts words by Metaspace"),
    (whole(pre_tokenizer=level(add_prefix_space=True)), "has add_prefix_space"), (whole(pre_tokenizer=level(use_regex=False)), "with use_regex False"),
    (sequence({"type": "Digits", "individual_digits": True}), "Digits, then ByteLevel with use_regex False"),
    (whole(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, level()]}), "keeps digits together"),
    (sequence(split("x"), split("y")), "cuts words by Split, then Split, then ByteLevel"), (sequence(split("x", "Removed")), "with behavior Removed"),
    (sequence(split("x", invert=True)), "must by a regular expression and Isolated"), (sequence(split("x", kind="String")), "must by a regular"),
    (sequence(split("(")), "that tiktoken cannot read"), (sequence(split(r"[^\n]*\n|[^\n]+")), "so that long texts could not be cut"),
    (sequence(split(r"\p{L}+")), "so that long texts could not be cut"),
    (added("<x y>", special=False), "'<x y>', which must be special or hold no blank"), (added("<|end"), "'<|end' that begins another, '<|endoftext|>'"),
    (added(lstrip=True), "with lstrip"), (added(id=True), "no tokenizer of Hugging Face"), (added(id=3), "each be one token's"), (added(id=10 ** 9), "reach 1000000000"),
    (added(id=-1), "whole numbers"), (model(vocab={"東": 1}), "has the token '東', which does not spell bytes"), (model(vocab=[["a", 1.0]]), "no tokenizer of Hugging"),
    (model(merges=["a b c"]), "no tokenizer of Hugging Face"), (model(merges=[["Ġ", "@"]]), "has a merge without its tokens"),
    (model(merges=[]), "which its merges do not make"), (lambda record: record.pop("model") and None, "no tokenizer of Hugging Face"),
    (lambda record: record["model"]["vocab"].pop("e") and None, "a merge without its tokens"), (bytes_without_q, "loses plain text"),
    (lambda record: record["model"].update(unk_token="?") or record["model"]["vocab"].pop("ÿ") and None, "takes the unk_token '?'"),
    (whole(added_tokens=[]), "does not say which token ends a text; name it with --eod-token, one of: it has none"),
    (lambda record: [1], "holds no JSON object")]


@pytest.mark.parametrize("change, message", BAD, ids=[message for _, message in BAD])
def test_another_kind_of_tokenizer_is_told_in_a_sentence(tmp_path, families, change, message):
    with pytest.raises(UserError) as caught:
        build_tokenizer(changed(families["gpt2"], tmp_path / "it", change))
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(tmp_path / "it/tokenizer.json") in str(caught.value)


def test_missing_and_broken_files_are_told_in_a_sentence(tmp_path, families):
    for name, files in [("empty", {}), ("sentencepiece", {"tokenizer.model": "x"}), ("broken", {"tokenizer.json": "{"}),
                        ("deep", {"tokenizer.json": 100_000 * "["}),
                        ("config", {"tokenizer.json": (families["gpt2"] / "tokenizer.json").read_text("utf-8"), "tokenizer_config.json": "{"}),
                        ("end", {"tokenizer.json": (families["gpt2"] / "tokenizer.json").read_text("utf-8"), "tokenizer_config.json": '{"eos_token": "</s>"}'})]:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            write(tmp_path / name / file, text)
    for arguments, message in [
            (("empty",), "empty has no tokenizer.json; save one there"), (("sentencepiece",), "has a tokenizer.model of sentencepiece"),
            (("sentencepiece/tokenizer.model",), "tokenizer.model is of sentencepiece"), (("broken",), "tokenizer.json is not JSON"),
            (("deep",), "tokenizer.json is not JSON"), (("config",), "tokenizer_config.json is not JSON"),
            (("end",), "gives '</s>' as eos_token, which is no added token of tokenizer.json; name one with --eod-token: <|endoftext|>"),
            (("nowhere",), "try one of byte, gpt2, or the path of a Hugging Face tokenizer's folder"),
            (("end", "v", "m"), "--vocab-file and --merge-file are GPT-2's"), (("end", None, None, "<x>"), "has no added token '<x>'; give one of its own")]:
        with pytest.raises(UserError) as caught:
            build_tokenizer(tmp_path / arguments[0], *arguments[1:])
        assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--eod-token is for Hugging Face tokenizers"):
        build_tokenizer("byte", eod_token="<|endoftext|>")


def test_a_damaged_meta_names_the_tokenizers_file(tmp_path, families):
    meta = prepare(write(tmp_path / "a.txt", "text"), tmp_path / "out", families["gpt2"], split=(1, 0, 0), progress=False)
    for change, message in [({"tokenizer_file": "../tokenizer.json"}, "as tokenizer_file, which must be the name of a file beside it"),
                            ({"tokenizer_file": None}, "names the tokenizer 'huggingface', but this version knows byte, gpt2; prepare")]:
        (tmp_path / "out/meta.json").write_text(json.dumps(meta | change))
        with pytest.raises(UserError, match=message):
            load_corpus(tmp_path / "out")
    (tmp_path / "out/meta.json").write_text(json.dumps(meta))
    (tmp_path / "out/tokenizer.json").unlink()
    with pytest.raises(UserError, match="out/tokenizer.json is missing, which meta.json names; prepare the text again"):
        load_corpus(tmp_path / "out").tokenizer()


def test_a_million_blanks_are_no_panic(families):
    """tiktoken's regular expressions give up on a million steps back, and take the process with them."""
    bytes_alone = {bytes([byte]): byte for byte in range(256)}
    for name in FAMILIES:
        encoding = tiktoken.Encoding("words", pat_str=build_tokenizer(families[name])._pat_str, mergeable_ranks=bytes_alone, special_tokens={})
        for text in (" " * 1_100_000, " " * 1_100_000 + "y", " \n" * 600_000 + "1"):
            assert bytes(encoding.encode_ordinary(text)) == text.encode()


def test_a_shell_can_use_one(tmp_path, families):
    write(tmp_path / "a.txt", "It is 1234.\n")
    done = subprocess.run([sys.executable, str(SCRIPT), "--input", "a.txt", "--output", "out", "--split", "1,0,0",
                           "--tokenizer", str(families["llama3"])],
                          cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert load_corpus(tmp_path / "out").tokenizer().decode(np.fromfile(tmp_path / "out/train.bin", "<u2").tolist()).startswith("It is 1234.")
