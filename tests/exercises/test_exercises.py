"""Each exercise's check refuses the blank, accepts the reference, and says what is wrong with typical mistakes."""

import re

import pytest
from answers import ANSWERS

from exercises import __main__ as command_line
from exercises import fake_ranks, workbook
from exercises.workbook import MINIMAL

TEXT = MINIMAL.read_text()


def with_answer(number, answer):
    """Put an answer of answers.py into the text of minimal.py."""
    if isinstance(answer, tuple):
        text = TEXT
        for old, new in zip(answer[::2], answer[1::2]):
            assert text.count(old) == 1, f"occurs {text.count(old)} times in minimal.py: {old}"
            text = text.replace(old, new)
        return text
    (source,), raised = workbook.blanks(number), f'    raise NotImplementedError("exercise {number}")'
    return workbook.replace_answer(TEXT, number, [source.replace(raised, answer.lstrip("\n"))])


def check(number, text, tmp_path):
    path = tmp_path / "minimal.py"
    path.write_text(text)
    return workbook.check(number, text, path)


@pytest.mark.parametrize("number", ANSWERS)
def test_a_check_refuses_the_blank_and_accepts_the_reference(number, tmp_path):
    blank = workbook.replace_answer(TEXT, number, workbook.blanks(number))
    assert f"{'are' if number == 2 else 'is'} still blank" in check(number, blank, tmp_path)
    assert check(number, TEXT, tmp_path) is None
    assert max(map(len, blank.splitlines())) <= 104


@pytest.mark.parametrize("number, answer, words", [
    pytest.param(number, *case, id=f"{number}-{(case[1] or 'passes').replace(' ', '-')}")
    for number, cases in ANSWERS.items() for case in cases])
def test_a_check_says_what_is_wrong(number, answer, words, tmp_path, monkeypatch):
    if words == "does not end":
        monkeypatch.setattr(fake_ranks, "LIMIT", 0.2)
    sentence = check(number, with_answer(number, answer), tmp_path)
    if words is None:
        assert sentence is None
    else:
        assert sentence is not None and words in sentence
        assert "exercises/judge.py" not in sentence and "fake_ranks.py" not in sentence


def test_the_command_line_keeps_answers(tmp_path, monkeypatch, capsys):
    """Runs all commands: an answer that passes stays, and a file whose answer does not pass is kept."""
    work = tmp_path / "minimal.py"
    monkeypatch.setattr(command_line, "WORK", work)

    def run(*arguments):
        try:
            command_line.main(arguments)
        except SystemExit as end:
            print(end.code)
        return capsys.readouterr().out

    def answer(number, body):
        raised = f'    raise NotImplementedError("exercise {number}")'
        work.write_text(work.read_text().replace(raised, body.lstrip("\n")))

    assert run("check", "7") == "Exercise 7 has not been started. Run: python -m exercises start 7\n"
    assert f"fill the blank in {work}, line" in run("start", "7")
    assert run("check", "7") == "Exercise 7: interleave is still blank.\n"
    hints = workbook.check_of(7).HINTS
    for count, sentence in enumerate([*hints, hints[0]]):
        assert run("hint", "7").startswith(f"Hint {count % len(hints) + 1} of {len(hints)}: {sentence}")
    answer(7, ANSWERS[7][0][0])
    assert run("check", "7").startswith("Exercise 7 is solved. Now read: `domino.py`")

    assert "line" in run("start", "5")
    answer(5, "    return undefined")
    place = rf"{re.escape(str(work))}, line \d+, in one_f_one_b \(rank 0\)"
    assert re.fullmatch(r"Exercise 5: NameError: name 'undefined' is not defined\n"
                        rf"    {place}\n        return undefined\n", run("check", "5"))
    status = run("status")
    assert re.search("(?m)^ 5 .* your answer does not pass$", status) and re.search("(?m)^ 7 .* solved$", status)

    text = run("start", "6")
    assert "minimal.1.py, because start replaces your answer to exercise 5, which does not pass, with the ref" in text
    assert f"To go back, copy it over {work}." in text
    assert "return undefined" in work.with_suffix(".1.py").read_text()
    states = {number: workbook.state_of(work.read_text(), number) for number in (5, 6, 7)}
    assert states == {5: "given", 6: "blank", 7: "answered"}
    answer(6, "    return unknown")
    assert "minimal.2.py, because start replaces your answer to exercise 6" in run("start", "5")
    assert "return undefined" in work.with_suffix(".1.py").read_text(), "an earlier copy stays"
    assert "return unknown" in work.with_suffix(".2.py").read_text()
    assert workbook.answer_in(TEXT, 9)[0] in run("show", "9")
    assert "minimal.3.py, because start replaces your answer to exercise 7 with a blank." in run("start", "7")
    work.write_text(f"({work.read_text()}")
    assert re.fullmatch(r"Python cannot read .*minimal.py: .*, in line \d+ or just above: correct it, or .*\.\n",
                        run("status"))


@pytest.mark.parametrize("number", ANSWERS)
def test_each_mistake_that_a_check_knows_gets_its_own_sentence(number, tmp_path):
    for sentence, patches in getattr(workbook.check_of(number), "MISTAKES", {}).items():
        assert check(number, with_answer(number, patches), tmp_path) == sentence
