"""Each exercise's check refuses the blank, accepts the reference, and says what is wrong with typical mistakes."""

import json
import re
import subprocess
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from answers import ANSWERS

from benchmarks import memory
from benchmarks.runner import parse
from exercises import __main__ as command_line, beyond, fake_ranks, grade, workbook
from exercises.predict import TASKS
from nanodomino.comm.world import LaunchInfo
from nanodomino.options.router import Router
from nanodomino.schedules.definitions import SCHEDULES


def with_answer(number, answer):
    """Put an answer of answers.py into the text of the exercise's file."""
    text = workbook.source_of(number).read_text()
    if isinstance(answer, tuple):
        for old, new in zip(answer[::2], answer[1::2]):
            assert text.count(old) == 1, f"occurs {text.count(old)} times in the reference: {old}"
            text = text.replace(old, new)
        return text
    (source,), raised = workbook.blanks(number), f'    raise NotImplementedError("exercise {number}")'
    return workbook.replace_answer(text, number, [source.replace(raised, answer.lstrip("\n"))])


def check(number, text, tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(text)
    return workbook.check(number, text, path)


@pytest.mark.parametrize("number", ANSWERS)
def test_a_check_refuses_the_blank_and_accepts_the_reference(number, tmp_path):
    text = workbook.source_of(number).read_text()
    blank = workbook.replace_answer(text, number, workbook.blanks(number))
    assert check(number, blank, tmp_path).startswith("still blank: ")
    assert check(number, text, tmp_path) is None
    assert max(map(len, blank.splitlines())) <= 120


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
    """Runs all commands: other answers stay, and an answer that is replaced is kept in a copy."""
    work = tmp_path / "minimal.py"
    monkeypatch.setattr(workbook, "WORK", tmp_path)

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
    assert run("check", "7") == "Exercise 7: still blank: interleave.\n"
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

    run("start", "6")
    states = {number: workbook.state_of(work.read_text(), number) for number in (4, 5, 6, 7)}
    assert states == {4: "given", 5: "answered", 6: "blank", 7: "answered"}
    for copy, answered in enumerate(("undefined", "unknown"), 1):
        assert f"minimal.{copy}.py. To go back, copy it over {work}." in run("start", "5")
        answer(5, "    return unknown")
        assert f"return {answered}" in work.with_suffix(f".{copy}.py").read_text()
    assert f"fill the blank in {tmp_path / 'beyond.py'}, line" in run("start", "11")
    assert re.search("(?m)^11 .* blank$", run("status"))
    work.write_bytes(b"# \xe9\n" + work.read_bytes())
    assert "minimal.py: 'utf-8' codec can't decode byte 0xe9" in run("status")


@pytest.mark.parametrize("number", ANSWERS)
def test_each_mistake_that_a_check_knows_gets_its_own_sentence(number, tmp_path):
    for sentence, patches in getattr(workbook.check_of(number), "MISTAKES", {}).items():
        assert check(number, with_answer(number, patches), tmp_path) == sentence


@pytest.mark.parametrize("stages, m, chunks", [(2, 4, 2), (3, 6, 3), (4, 8, 2)])
def test_the_schedules_of_beyond_are_those_of_the_system(stages, m, chunks):
    def text(action):
        kind, i, *more = action
        return f"B{i}F{more[0]}" if kind == "BF" else f"{kind}{i}" + "'" * sum(more)

    for stage in range(stages):
        for found, schedule in ((beyond.interleaved(stage, stages, m, chunks), "interleaved"),
                                (beyond.paired(stage, stages, m), "paired")):
            assert [text(action) for action in found] == [
                str(action) for action in SCHEDULES[schedule].actions(stage, stages, m, chunks)]


def test_the_balance_loss_of_beyond_is_that_of_the_system():
    logits = torch.randn(4, 6, 5, dtype=torch.float64)
    router = SimpleNamespace(
        scores=lambda logits: logits.softmax(-1), softmax=True, topk=2, sample_parts=1, config=SimpleNamespace(
            moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.0))
    experts = logits.topk(2).indices
    module = workbook.load()
    (ours,) = fake_ranks.World(1).run(lambda: module.balance_loss(logits.softmax(-1), experts, (0,), 24))
    torch.testing.assert_close(ours, Router.loss(router, logits, Router.choices(router, logits, experts).result()) / 24)


def test_rows_of_beyond_are_parts_of_an_all_reduce():
    """Both embeddings and both ways to sum addends give what one process computes."""
    module, words, tokens = workbook.load(), torch.randn(8, 3), torch.tensor([[0, 5, 5, 7], [2, 5, 1, 1]])

    def rank_program():
        group, rank = module.dist.new_group([0, 1]), module.dist.get_rank()
        own = words.chunk(2)[rank].clone().requires_grad_()
        output = module.EmbedWords.apply(own, tokens, group)
        sums = module.GatherRows.apply(module.ScatterSum.apply(words * (rank + 1), group), group)
        return output.detach(), torch.autograd.grad(output.sin().sum(), own)[0], sums

    outputs, gradients, sums = zip(*fake_ranks.World(2).run(rank_program))
    right = (whole := words.clone().requires_grad_())[tokens]
    right.sin().sum().backward()
    torch.testing.assert_close([*outputs, torch.cat(gradients), *sums], [right] * 2 + [whole.grad] + [3 * words] * 2)


def test_a_folder_of_answers_is_graded(tmp_path, monkeypatch, capsys):
    """Right, wrong, crashing and endless answers."""
    blank = "def interleave(generators):\n"
    for name, body in {"ann": ANSWERS[7][0][0], "bob": "    1 / 0", "cat": "    __import__('os')._exit(0)"}.items():
        (tmp_path / f"{name}.py").write_text(blank + body.lstrip("\n"))
    (tmp_path / "hal").mkdir()
    (tmp_path / "ida.py").write_bytes(b"# \xe9")
    command_line.main(["grade", str(tmp_path)])
    graded = json.loads((tmp_path / "grades.json").read_text())
    assert {name: {number: record["result"] for number, record in found.items()} for name, found in graded.items()} == {
        "ann": {"7": "solved"}, "bob": {"7": "wrong"}, "cat": {"7": "wrong"}, "hal": {},
        "ida": dict.fromkeys(map(str, workbook.CHECKS), "wrong")}
    printed = capsys.readouterr().out
    assert re.search(r"(?m)^bob +(\. +){6}x +(\. +){9}0 solved$", printed) and "\nhal, no file: there is no " in printed
    assert printed.startswith("ann: 1 solved\nbob: 0 solved\n") and "ida.py: 'utf-8' codec can't decode" in printed
    assert "ZeroDivisionError" in graded["bob"]["7"]["sentence"]
    (tmp_path / "dan.py").write_text(f"{blank}    __import__('time').sleep(600)")
    monkeypatch.setattr(grade, "LIMIT", 0.5)
    assert grade.results_of(tmp_path / "dan.py")[7]["result"] == "time limit"


@cache
def dry_bench(*command):
    """Stand in for bench.py memory: return a dry run's counts, to which test_bench.py proves those of a step equal."""
    launch = LaunchInfo(world_size=2)
    config = memory.config_for(parse(memory, command[2:]), launch)
    runs = [memory.dry_run(memory.train, config, rank) for rank in range(2)]
    return subprocess.CompletedProcess(command, 0, json.dumps(memory.report(config, runs, runs)[1]), "")


def test_a_prediction_is_compared_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **options: dry_bench(*command))
    with pytest.raises(SystemExit, match="must be a positive number, but is nan; correct it"):
        command_line.main(["predict", "bytes", "nan"])
    command_line.main(["predict", "bytes"])
    command_line.main(["predict", "bytes", "1e7"])
    command_line.main(["predict", "bytes", f"{18 * 16384 * 8}"])
    question, _, *_, reason = TASKS["bytes"]
    assert re.search(f"{re.escape(question)}(?s:.*)You are not right(?s:.*)You are right.*\n{re.escape(reason)}\n",
                     capsys.readouterr().out)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, number", [
    ("bytes", 18 * 16384 * 8), ("bubble", 0.2), ("exposed", 1.67), ("memory", 12 * 834304)])
def test_the_reason_predicts_what_is_measured(name, number, capsys, monkeypatch):
    """Bytes and memory are exact. The others are times, which other programs on this machine can change by any amount:
    then only the verdict must fit the number measured on a tiny model."""
    question, command, *rest = TASKS[name]
    tiny = {"bubble": "--num-layers 4 --hidden-size 32 --seq-length 16 --repeats 1",
            "exposed": "--num-layers 1 --hidden-size 32 --seq-length 16 --microbatches 2 --repeats 1"}.get(name, "")
    monkeypatch.setitem(TASKS, name, (question, f"{command} {tiny}", *rest))
    try:
        command_line.main(["predict", name, str(number)])
    except SystemExit as end:
        assert name in ("bubble", "exposed") and "too noisy" in str(end)
        return
    output = capsys.readouterr().out
    measured = float(re.search("measured: ([0-9.,e+-]+)[.] You", output)[1].replace(",", ""))
    right = abs(number / measured - 1) <= TASKS[name][3]
    assert right or name in ("bubble", "exposed")
    assert ("You are right" in output and TASKS[name][-1] in output) == right
