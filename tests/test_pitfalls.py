"""Each bug of pitfalls.py turns its check red, the code as it is turns it green, and docs/pitfalls.md says what was measured."""

import re
from pathlib import Path

import pytest
from pitfalls import DOCUMENT, GUARDED, TABLE, check, document, error_of, percent, rows_of_document, worst
from pool import WorkerError

TESTS = Path(__file__).resolve().parent
CASES = pytest.mark.parametrize("entry", TABLE, ids=lambda entry: f"{entry.number}-{entry.bug.__name__}")


@CASES
def test_the_code_as_it_is_passes(pool, entry):
    check(pool, entry, wrong=False)


@CASES
def test_put_back_it_is_found(pool, entry):
    """By an assertion of the check, and not because something broke; and what it does to the gradients is what the page says."""
    with pytest.raises((AssertionError, WorkerError)) as failure:
        check(pool, entry, wrong=True)
    if isinstance(failure.value, WorkerError):
        assert re.search(r"^(E +)?AssertionError", str(failure.value), re.MULTILINE), str(failure.value)
