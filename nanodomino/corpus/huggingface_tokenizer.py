"""A tokenizer.json of Hugging Face as a tiktoken encoding with the same ids, if it is byte-level BPE.

The file describes a chain, of which tiktoken knows the last three links:

    normalizer       text -> text       nothing, or NFC: e and an accent become é                      Qwen
    added tokens     found first        <|endoftext|>; <think>, which is not special: text may hold it
    pre_tokenizer    text -> words      one regular expression; or each digit, GPT-2's for the rest    SmolLM2
    model            word -> tokens     each byte a token, then merges, the oldest first

Hugging Face joins two neighbours if that pair is in its list, the oldest entry first. tiktoken joins any two whose
union is a token, the lowest id first, and takes a word that is a token without a look at its bytes. These are alike if

    ids grow along the list, and
    for each token: its bytes, joined tiktoken's way until two parts are left, end in a pair of the list;
    or they get stuck before, so that no merge makes it, and the file says ignore_merges.

(Until a token is made, tiktoken treats its bytes in a word as it would treat them alone: the lowest id of the word is
the lowest of them. So each join that it chooses is in the list, and of those in the list it is the oldest.)

A byte that the vocabulary lacks (SmolLM2's lacks 21: control characters, or in no UTF-8) is left out of the text, as
there; only that there its neighbours in a word may join. Gaps between the ids get tokens that no text can hold.
"""

import json
import re
import unicodedata
from itertools import combinations, product
from pathlib import Path

import tiktoken

from nanodomino.errors import UserError, require

# What lies beside a tokenizer.json and belongs to it.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json")
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
FAMILIES = "only byte-level BPE as in GPT-2, Llama 3, Qwen 2 to 3 and SmolLM2 can be used"

# Blanks up to the last one before a word. tiktoken's regular expressions give up on a million steps back, so runs of
# half a million end where they are, and those at the end need no step back at all.
BLANKS = r"\s++$|\s{1,500000}(?!\S)"

# GPT-2's way to cut text into words, with possessive quantifiers for the same reason.
GPT2_WORDS = rf"""'(?:[sdmt]|ll|ve|re)| ?\p{{L}}++| ?\p{{N}}++| ?[^\s\p{{L}}\p{{N}}]++|{BLANKS}|\s"""

# The same between digits that were cut out before: blanks in front of one end their piece of text.
GPT2_WORDS_AND_DIGITS = (r"""\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N})|"""
                         rf"{BLANKS}|\s")

# Where a long text can be cut so that both sides give the tokens of the whole, with every tokenizer: before a single
# blank, since words begin with it and never end; between a letter or digit and any blank; behind a line's end that
# has a letter, a digit or _ after it. Nowhere else in blanks: GPT-2 keeps the last one of a run for the word behind
# it, Llama 3 glues line ends to the full stop before them, SmolLM2 keeps a run whole before a digit. NFC joins
# nothing here. (The four control characters are blanks for Python only.)
SAFE_CUT = r"(?:(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[^\S\x1c-\x1f])|(?<=\S\n)(?=\w))"


def spelled_bytes() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, space as Ġ, which all its heirs have kept."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class HuggingFaceEncoding(tiktoken.Encoding):
    """tiktoken's with a normal form, an end-of-text of any name, words that are found in all text, and bytes left out.

    ranks, special: {token: id}; words: those of `special` that any text may hold."""

    def __init__(self, regex: str, ranks: dict[bytes, int], special: dict[str, int], words: set[str],
                 normal_form: str | None, end_of_text: str):
        size = 1 + max(*ranks.values(), *special.values())
        unused = sorted(set(range(size)) - set(ranks.values()) - set(special.values()))
        lacking = [bytes([byte]) for byte in range(256) if bytes([byte]) not in ranks]
        ranks = ranks | {b"\xffunused token %d" % token: token for token in unused}    # 0xff is not in UTF-8
        ranks |= {byte: size + i for i, byte in enumerate(lacking)}
        super().__init__("huggingface", pat_str=regex, mergeable_ranks=ranks, special_tokens=special)
        self.max_token_value, self.lacks_bytes = size - 1, bool(lacking)
        self.words, self.normal_form, self.end_of_text = words, normal_form, end_of_text

    @property
    def eot_token(self) -> int:
        return self._special_tokens[self.end_of_text]

    def encode_ordinary(self, text):
        return self.encode(text, disallowed_special=())

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        ids = super().encode(self.normalize(text), allowed_special=self.and_words(allowed_special),
                             disallowed_special=disallowed_special)
        return [token for token in ids if token <= self.max_token_value] if self.lacks_bytes else ids

    def encode_to_numpy(self, text, *, allowed_special=frozenset(), disallowed_special="all"):
        ids = super().encode_to_numpy(self.normalize(text), allowed_special=self.and_words(allowed_special),
                                      disallowed_special=disallowed_special)
        return ids[ids <= self.max_token_value] if self.lacks_bytes else ids

    def normalize(self, text: str) -> str:
        return unicodedata.normalize(self.normal_form, text) if self.normal_form else text

    def and_words(self, allowed):
        return allowed if allowed == "all" else self.words | allowed


def find_tokenizer(path) -> Path:
    """The tokenizer.json that a folder or file is. Raises UserError."""
    path = Path(path)
    if not path.is_dir():
        require(path.name != "tokenizer.model", f"{path} is of sentencepiece; {FAMILIES}")
        return path
    require((path / "tokenizer.json").is_file() or not (path / "tokenizer.model").is_file(),
            f"{path} has a tokenizer.model of sentencepiece and no tokenizer.json; {FAMILIES}")
    require((path / "tokenizer.json").is_file(),
            f"{path} has no tokenizer.json; save one there with AutoTokenizer's save_pretrained, or choose another "
            "folder")
    return path / "tokenizer.json"


def read_huggingface(path, eod_token: str | None = None) -> HuggingFaceEncoding:
    """The encoding of a folder or its tokenizer.json. Raises UserError."""
    path = find_tokenizer(path)
    record = read_json(path)
    try:
        check_model(path, record["model"])
        normal_form, regex = normal_form_of(path, record.get("normalizer")), words_of(path, record["pre_tokenizer"])
        special, words = added_tokens(path, record.get("added_tokens") or [])
        ranks, merges = vocabulary(path, record["model"], special)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no tokenizer of Hugging Face ({type(error).__name__}: {error}); give a folder "
                        "with a sound tokenizer.json") from None
    check_merges(path, ranks, merges, record["model"].get("ignore_merges"))
    end_of_text = find_end_of_text(path, special, eod_token)
    check_cuts(path, regex)
    encoding = HuggingFaceEncoding(regex, ranks, special, words, normal_form, end_of_text)
    sample = " \n" + "".join(map(chr, range(33, 127)))
    require(encoding.decode(encoding.encode_ordinary(sample)) == sample,
            f"{path} loses plain text, for which its vocabulary has no tokens; {FAMILIES}")
    return encoding


def read_json(path: Path) -> dict:
    try:
        record = json.loads(path.read_text("utf-8"))
        require(isinstance(record, dict), f"{path} holds no JSON object; give a folder with a sound {path.name}")
        return record
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the folder of a Hugging Face tokenizer or its "
                        "tokenizer.json") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON; give a folder with a sound {path.name}") from None


def check_model(path: Path, model: dict):
    kind = model.get("type", "BPE")                 # older files don't say
    require(kind == "BPE", f"{path} is a {kind} tokenizer; {FAMILIES}")
    for name in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        require(not model.get(name), f"{path} has {name} {model.get(name)!r}; {FAMILIES}")


def normal_form_of(path: Path, normalizer: dict | None) -> str | None:
    kind = normalizer and normalizer["type"]
    require(kind in (None, "NFC"), f"{path} normalizes text by {kind}, but NFC or nothing must be; {FAMILIES}")
    return kind


def words_of(path: Path, pre_tokenizer: dict | None) -> str:
    """The regular expression of the words."""
    sequence = pre_tokenizer and pre_tokenizer["type"] == "Sequence"
    steps = pre_tokenizer["pretokenizers"] if sequence else [pre_tokenizer]
    kinds = [step and step["type"] for step in steps]
    require(kinds in (["ByteLevel"], ["Digits", "ByteLevel"], ["Split", "ByteLevel"]),
            f"{path} cuts words by {', then '.join(map(str, kinds))}; {FAMILIES}")
    first, last = steps[0], steps[-1]
    require(not last.get("add_prefix_space", True),
            f"{path} has add_prefix_space, so a text would begin with a blank that is not there; {FAMILIES}")
    require(last.get("use_regex", True) == (kinds[0] != "Split"),
            f"{path} cuts words by {', then '.join(kinds)} with use_regex {last.get('use_regex', True)}; {FAMILIES}")
    if kinds[0] == "ByteLevel":
        return GPT2_WORDS
    if kinds[0] == "Digits":
        require(first["individual_digits"], f"{path} keeps digits together, but cuts them from their words; {FAMILIES}")
        return GPT2_WORDS_AND_DIGITS
    require("Regex" in first["pattern"] and first["behavior"] == "Isolated" and not first.get("invert"),
            f"{path} cuts words by {first['pattern']} with behavior {first['behavior']}, but must by a regular "
            f"expression and Isolated; {FAMILIES}")
    regex = ("|" + first["pattern"]["Regex"] + "|").replace(r"|\s+(?!\S)|", f"|{BLANKS}|")[1:-1]
    return rf"(?:{regex})|(?:(?!{regex})(?s:.))+"   # what it does not match is a word too


def check_cuts(path: Path, regex: str):
    """No word of an unknown regular expression may go across a safe cut."""
    kinds, blanks = ("e", "東", "1", "½", ".", "'s", "_", "🙂"), (" ", "  ", "\n", "\n\n", " \n", "\n ", "\r\n", "\t")
    texts = [left + blank + right for left, blank, right in product(kinds, blanks, kinds)]
    # With each part of a text as a token, shorter ones first, tokens are words.
    parts = {text.encode()[i:j] for text in texts for i, j in combinations(range(len(text.encode()) + 1), 2)}
    parts = sorted(parts | {bytes([byte]) for byte in range(256)}, key=len)
    try:
        words = tiktoken.Encoding("words", pat_str=regex, mergeable_ranks={part: i for i, part in enumerate(parts)},
                                  special_tokens={}).encode_ordinary
    except ValueError:
        raise UserError(f"{path} cuts words by a regular expression that tiktoken cannot read; {FAMILIES}") from None
    for text in texts:
        for cut in re.finditer(SAFE_CUT, text):
            require(words(text[:cut.end()]) + words(text[cut.end():]) == words(text),
                    f"{path} takes {text!r} for other words than its two sides from character {cut.end()}, so that "
                    f"long texts could not be cut; {FAMILIES}")


def added_tokens(path: Path, added: list[dict]) -> tuple[dict[str, int], set[str]]:
    """({token: id}, those that are not special: text may hold them)."""
    special = {token["content"]: token["id"] for token in added}
    words = {token["content"] for token in added if not token["special"]}
    for token in added:
        for name in ("lstrip", "rstrip", "single_word"):
            require(not token.get(name), f"{path} has the added token {token['content']!r} with {name}; {FAMILIES}")
    for word in sorted(words):                      # text is cut at blanks, see data/prepare.py
        require(not any(character.isspace() for character in word),
                f"{path} has the added token {word!r}, which must be special or hold no blank; {FAMILIES}")
    ordered = sorted(special)
    for one, following in zip(ordered, ordered[1:]):            # tiktoken would take either
        require(one and not following.startswith(one),
                f"{path} has an added token {one!r} that begins another, {following!r}; {FAMILIES}")
    return special, words


def vocabulary(path: Path, model: dict, special: dict[str, int]) -> tuple[dict[bytes, int], list]:
    """({token: id} without the added ones, the merges as pairs)."""
    byte_of = spelled_bytes()

    def spelled(token: str) -> bytes:
        require(all(character in byte_of for character in token),
                f"{path} has the token {token!r}, which does not spell bytes; {FAMILIES}")
        return bytes(byte_of[character] for character in token)

    ranks = {spelled(token): number for token, number in model["vocab"].items() if token not in special}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merges = [(spelled(first), spelled(second)) for first, second in merges]
    numbers = [*ranks.values(), *special.values()]
    require(not model.get("unk_token") or all(bytes([byte]) in ranks for byte in range(256)),
            f"{path} takes the unk_token {model.get('unk_token')!r} for bytes that it has no token for; {FAMILIES}")
    clashes = {token for token in special if model["vocab"].get(token, special[token]) != special[token]}
    if {type(number) for number in numbers} != {int} or min(numbers) < 0 or len(set(numbers)) < len(numbers) or clashes:
        raise ValueError("its ids must be whole numbers, and each be one token's")
    if max(numbers) > 4 * len(numbers):
        raise ValueError(f"the ids of {len(numbers)} tokens reach {max(numbers)}")
    return ranks, merges


def check_merges(path: Path, ranks: dict[bytes, int], merges: list, ignore_merges: bool | None):
    """What the module's docstring asks for."""
    require(all(token in ranks for first, second in merges for token in (first, second, first + second)),
            f"{path} has a merge without its tokens; give a folder with a sound tokenizer.json")
    order = [ranks[first + second] for first, second in merges]
    require(all(one <= following for one, following in zip(order, order[1:])),
            f"{path} has merges in another order than the ids of their tokens, which tiktoken takes for their order; "
            f"{FAMILIES}")
    listed = set(merges)
    for token in ranks:
        pair = last_pair(token, ranks) if len(token) > 1 else None
        require(pair in listed if pair else len(token) == 1 or ignore_merges,
                f"{path} has the token {token!r}, which its merges do not make; {FAMILIES}")


def last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that tiktoken comes to from a token's bytes before it joins them; None if it gets stuck."""
    parts, never = [token[i:i + 1] for i in range(len(token))], float("inf")
    while len(parts) > 2:
        numbers = [ranks.get(first + second, never) for first, second in zip(parts, parts[1:])]
        lowest = min(numbers)
        if lowest == never:
            return None
        i = numbers.index(lowest)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def find_end_of_text(path: Path, special: dict[str, int], eod_token: str | None) -> str:
    """--eod-token, else what tokenizer_config.json calls eos_token, else a name that everybody knows."""
    config = path.with_name("tokenizer_config.json")
    names = ", ".join(list(special)[:8]) or "it has none"
    if eod_token is not None:
        require(eod_token in special,
                f"{path} has no added token {eod_token!r}; give one of its own as --eod-token: {names}")
        return eod_token
    found = read_json(config).get("eos_token") if config.is_file() else None
    found = found.get("content") if isinstance(found, dict) else found
    found = found or next((name for name in ENDS_OF_TEXT if name in special), None)
    require(found, f"{path} does not say which token ends a text; name it with --eod-token, one of: {names}")
    require(found in special,
            f"{config} gives {found!r} as eos_token, which is no added token of {path.name}; name one with "
            f"--eod-token: {names}")
    return found
