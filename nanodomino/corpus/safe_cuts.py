"""Cuts a long text into pieces that, encoded one by one, give the token ids of the whole text.

Encoding takes some 60 bytes of memory per byte of text, and a document may have gigabytes. So it is encoded in pieces.
A cut is safe if no word spans it, where a word is what byte-pair encoding (BPE) merges within. The text that a cut's
pattern matches, if any, belongs to neither piece.
"""

import re
from collections.abc import Callable, Iterator
from itertools import product

# A cut is safe before a single space, because a word may begin with a space but never ends with one; between a letter
# or digit and any whitespace; and after a newline, if a letter, a digit or _ follows. It is not safe at other
# whitespace: GPT-2 gives the last character of a run of whitespace to the word after the run, Llama 3 joins newlines to
# the full stop before them, and SmolLM2 does not split a run before a digit. Unicode normalization never joins text
# across these cuts. (Python counts the characters 1c to 1f as whitespace, the tokenizers do not.)
SAFE_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[^\S\x1c-\x1f])|(?<=\S\n)(?=\w)")

# For a tokenizer that puts a space before a text unless it begins with one: the next piece must begin with one.
BEFORE_SPACE = re.compile(r"(?<=\w)(?= \w)")

# For a tokenizer that puts a space before every text, as Llama 2's does: the next piece must not have its own.
INSTEAD_OF_SPACE = re.compile(r"(?<=\w) (?=\w)")

CHARACTERS = ("e", "東", "1", "½", ".", "'s", "_", "🙂")
WHITESPACE = (" ", "  ", "\n", "\n\n", " \n", "\n ", "\r\n", "\t")


def find_safe_cut(words: Callable[[str], list[str]]) -> re.Pattern | None:
    """Return the first of the three patterns whose cuts never change words(text), the words of a text; None if there is
    none."""
    texts = [left + between + right for left, between, right in product(CHARACTERS, WHITESPACE, CHARACTERS)]
    for pattern in (SAFE_CUT, BEFORE_SPACE, INSTEAD_OF_SPACE):
        if all(words(text[:cut.start()]) + words(text[cut.end():]) == words(text)
               for text in texts for cut in pattern.finditer(text)):
            return pattern
    return None


def pieces(text: str, safe_cut: re.Pattern, size: int, longest: int) -> Iterator[str]:
    """Cut text at the first safe cut after each `size` characters; after `longest` characters without one, anywhere."""
    start = 0
    while len(text) - start > size:
        cut = safe_cut.search(text, start + size, start + longest)
        end, next_start = cut.span() if cut else 2 * (start + longest,)
        yield text[start:end]
        start = next_start
    if start < len(text):
        yield text[start:]
