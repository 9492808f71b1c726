"""Cuts a long text into chunks that, encoded one by one, give the token ids of the whole text.

Encoding takes some 60 bytes of memory per byte of text, and a document may have gigabytes. So it is encoded in chunks.
A tokenizer splits a text into words, and byte-pair encoding (BPE) merges only within a word. So a cut between two words
is safe. The regular expressions below match at safe cuts. One of them matches a space, which the cut removes.
"""

import re
from collections.abc import Callable, Iterator
from itertools import product

# For most tokenizers a cut is safe
#   - before a single space, because a word may begin with a space but never ends with one;
#   - between an ASCII letter or digit and any whitespace;
#   - after a single newline, if a letter, a digit or _ follows.
# Other cuts in whitespace are not safe. GPT-2 gives the last character of a run of whitespace to the next word. Llama 3
# joins newlines to the full stop before them. SmolLM2 does not split a run of whitespace before a digit. Unicode
# normalization never joins text across these cuts. (Python counts the characters 1c to 1f as whitespace, the tokenizers
# do not.)
SAFE_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[^\S\x1c-\x1f])|(?<=\S\n)(?=\w)")

# For a tokenizer that adds a space to a text that does not begin with one: the next chunk must begin with a space.
BEFORE_SPACE = re.compile(r"(?<=\w)(?= \w)")

# For a tokenizer that adds a space to every text, as Llama 2's does: the cut removes the space that it will add.
INSTEAD_OF_SPACE = re.compile(r"(?<=\w) (?=\w)")

# find_safe_cut() tests its patterns on all texts of the form CHARACTERS + WHITESPACE + CHARACTERS.
CHARACTERS = ("e", "東", "1", "½", ".", "'s", "_", "🙂")
WHITESPACE = (" ", "  ", "\n", "\n\n", " \n", "\n ", "\r\n", "\t")


def find_safe_cut(words: Callable[[str], list[str]]) -> re.Pattern | None:
    """Return the first of the three patterns whose cuts never change the words of a text, or None.

    words(text): splits a text into words as the tokenizer does.
    """
    texts = [left + between + right for left, between, right in product(CHARACTERS, WHITESPACE, CHARACTERS)]
    for pattern in (SAFE_CUT, BEFORE_SPACE, INSTEAD_OF_SPACE):
        if all(words(text[:cut.start()]) + words(text[cut.end():]) == words(text)
               for text in texts for cut in pattern.finditer(text)):
            return pattern
    return None


def split_at_safe_cuts(text: str, safe_cut: re.Pattern, size: int, longest: int) -> Iterator[str]:
    """Yield the text in chunks. A chunk ends at the first safe cut after `size` characters, else after `longest`."""
    start = 0
    while len(text) - start > size:
        cut = safe_cut.search(text, start + size, start + longest)
        end, next_start = cut.span() if cut else 2 * (start + longest,)
        yield text[start:end]
        start = next_start
    if start < len(text):
        yield text[start:]
