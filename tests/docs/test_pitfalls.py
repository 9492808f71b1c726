"""Each bug in pitfalls.py is found by its check, the code without it passes, and docs/pitfalls.md is up to date."""

import re

import pitfalls
import pytest
from pitfalls import DOCUMENT, ROOT, applies, row_of, rows_of_document, section
from support.harness import judge, worst
from support.pitfall_runner import CHECKED, END, LONG, TABLE, measure, pool_with_bug
from support.pool import WorkerError


def name_of(entry):
    return f"{entry.number}-{entry.bug.__name__}"


def right_side(entry):
    """Return what the run without the bug depends on. Entries that share it need only one such run."""
    options = tuple(sorted(entry.options.items()))
    return entry.world_size, options, entry.runner, entry.drawn, entry.conditions, entry.straight, entry.check


@pytest.mark.parametrize("entry", [
    # by default one in eight
    pytest.param(entry, id=name_of(entry), marks=[] if entry.number % 8 == 6 else pytest.mark.exhaustive)
    for entry in {right_side(entry): entry for entry in TABLE}.values()])
def test_the_code_as_it_is_passes(pool, entry):
    if entry.check:
        entry.check(pool_with_bug(pool, entry, wrong=False))
    else:
        judge(*measure(pool, entry, wrong=False, steps=CHECKED))


@pytest.mark.parametrize("entry", TABLE, ids=name_of)
def test_put_back_it_is_found_and_does_what_the_page_says(pool, entry):
    """The check must fail by an assertion, not because something else broke."""
    if entry.check:
        with pytest.raises((AssertionError, WorkerError)) as failure:
            entry.check(pool_with_bug(pool, entry, wrong=True))
        assert isinstance(failure.value, AssertionError) or re.search(r"^AssertionError", str(failure.value),
                                                                      re.MULTILINE), str(failure.value)
    else:
        right, found = measure(pool, entry, wrong=True, steps=CHECKED)
        with pytest.raises(AssertionError):
            judge(right, found)
        *_, right_norm, wrong_norm, gradient = cells(rows_of_document()[entry.number])
        *_, right_now, wrong_now, gradient_now = cells(row_of(entry, right, found, (0.0, 0.0)))
        assert (float(right_norm), float(wrong_norm)) == pytest.approx((float(right_now), float(wrong_now)), rel=0.01,
                                                                       nan_ok=True)
        if named := re.search(r"`(.*)`, ([\d.]+) %", gradient):            # now another tensor may be as far off
            error, _ = worst(*({named[1]: side.gradients[-1][named[1]]} for side in (found, right)))
            assert 100 * error == pytest.approx(float(named[2]), rel=0.1)
        else:
            assert numbers_of(gradient) == pytest.approx(numbers_of(gradient_now), rel=0.1)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def numbers_of(text: str) -> list[float]:
    """Return the decimal numbers in a text; numbers in parameter names are integers."""
    return [float(number) for number in re.findall(r"\d+\.\d+(?:e-\d+)?", text)]


@pytest.mark.table
def test_the_page_has_a_row_and_a_lesson_for_each_bug():
    """`python tests/pitfalls.py --write` writes the rows again."""
    rows, page = rows_of_document(), " ".join(DOCUMENT.read_text().split())
    assert list(rows) == [entry.number for entry in TABLE]
    losses = [[float(cell) for cell in cells(row)[3:5]] for row in rows.values()]
    for words in (f"Here {len(TABLE)} such bugs", f"step {CHECKED}, and the error",
                  f"In {sum(wrong < right for right, wrong in losses)} of {len(TABLE)} rows",
                  f"steps {LONG - END + 1} to {LONG}"):
        assert words in page
    for entry in TABLE:
        assert cells(rows[entry.number])[1:3] == [entry.title, applies(entry)]
        assert " ".join(section(entry).split()).startswith(f"**{entry.number}. {entry.title}.** ")


@pytest.mark.table
def test_what_prevents_a_bug_is_there():
    """Each guard names files and, after each file, what is in it: Class.method and function must be defined there."""
    for entry in TABLE:
        text = None
        for word in re.findall("`([^`]+)`", section(entry).rpartition("(")[2]):
            if word.endswith(".py"):
                text = (ROOT / word).read_text()
            elif "." in word:
                assert all(re.search(rf"^ *(class|def) {part}\b", text, re.MULTILINE) for part in word.split(".")), word
            else:
                assert re.search(rf"\b{word}\b", text), f"{entry.number}: {word}"
        assert text, f"{entry.number} names no file"


def test_the_command_shows_right_and_wrong_side_by_side(pool, capsys):
    (entry,) = [entry for entry in TABLE if entry.bug.__name__ == "not_divided"]
    pitfalls.show(pool, entry, steps=2)
    shown = capsys.readouterr().out
    right, wrong = (float(number) for number in re.search(r"\n   1 +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+) ",
                                                          shown).groups())
    assert wrong / right == pytest.approx(entry.config.microbatches) and "layers." in shown
    pitfalls.main(["--list"])
    assert len(capsys.readouterr().out.splitlines()) == len(TABLE)
