"""loss.svg shows what metrics.jsonl holds, and a failure to draw it never ends a run."""

import json
import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support import ROOT, needs
from support.harness import report_without_a_run
from support.runs import PATIENCE, make_corpus, train_in_pool

import nanodomino.run.report
from nanodomino.pictures.__main__ import main
from nanodomino.pictures.drawing import loss_curve, read_metrics, svg

FIGURE = needs("matplotlib.figure").Figure
ENTROPIES = dict(step=0, unigram_entropy=3.2, bigram_entropy=2.4)
SHAPES = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    """Return the picture's texts, after checking that it is well-formed XML without nan, inf or None."""
    root = ElementTree.fromstring(picture)
    for shape in root.iter():
        for attribute, value in shape.items():
            assert not re.search(r"\b(nan|inf|None)\b", value), (shape.tag, attribute, value[:100])
    return [text.text for text in root.iter(SHAPES + "text")]


def step_line(step: int, loss, grad_norm=1.0, lr=1e-3, skipped=False) -> dict:
    return dict(step=step, loss=loss, grad_norm=grad_norm, lr=lr, skipped=skipped)


def fall(steps: int) -> list[dict]:
    return [ENTROPIES] + [step_line(step, 2 + 4 / (1 + step)) for step in range(1, steps + 1)]


def run_of(folder: Path, *lines) -> Path:
    """Make a run's folder with these lines in metrics.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def drawn(*runs):
    """Return the loss panel, the other panels and the figure of a loss curve."""
    loss_curve(figure := FIGURE(), [*runs])
    loss, *others = figure.axes
    return loss, others, figure


def points(line) -> list[tuple]:
    return [*zip(*map(list, line.get_data()))]


# ---- what train.py leaves

def test_a_run_leaves_its_curve(pool, tmp_path):
    """Also without a checkpoint before its last step. A resumed run does not record the entropies again."""
    run_dir, meta = tmp_path / "run", json.loads((make_corpus(tmp_path) / "meta.json").read_text())
    for steps, flags in (3, ["--eval-iters", "0"]), (8, ["--eval-interval", "4"]):
        ended = train_in_pool(pool, tmp_path, "--run-dir", run_dir, "--train-iters", steps, *flags)
        assert ended.code == 0 and "warning" not in ended.output and "matplotlib" not in ended.output, ended.output
        words = texts((run_dir / "loss.svg").read_text())
        assert f"unigram {meta['unigram_entropy']:.3f}" in words and f"bigram {meta['bigram_entropy']:.3f}" in words
    assert any(re.fullmatch(r"run(, (validation|test) \S+, bits per byte \S+){2}", word) for word in words)
    assert (run_dir / "metrics.jsonl").read_text().count("unigram_entropy") == 1


def test_a_failure_to_draw_is_a_warning_and_without_matplotlib_the_end_says_which_command_draws(
        tmp_path, capsys, monkeypatch):
    """Neither an unwritable file nor a bug nor a missing package ends a run."""
    def said(act, *arguments):
        act(*arguments)
        return capsys.readouterr().out

    report = report_without_a_run(tmp_path)
    (tmp_path / "loss.svg").mkdir()
    assert "warning: loss.svg can't be written ([Errno 21] Is a directory" in said(report.draw_curve)
    (tmp_path / "loss.svg").rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(nanodomino.run.report, "svg", lambda *drawing: 1 / 0)
        assert "warning: loss.svg can't be written (division by zero); training continues" in said(report.draw_curve)
        patch.setattr(nanodomino.run.report, "find_spec", lambda name: None)
        assert "matplotlib" not in said(report.draw_curve) and not (tmp_path / "loss.svg").exists()
        assert ("the loss curve is not drawn, because matplotlib is not installed; after pip install matplotlib, "
                f"python -m nanodomino.pictures {tmp_path} draws it\n") in said(report.end, 3, 1.0)
    report.losses(3, "valid", 2.4, 8, 1)
    assert "warning" not in said(report.end, 3, 1.0)
    assert "validation 2.400, bits per byte 1.731" in "".join(texts((tmp_path / "loss.svg").read_text()))
    (tmp_path / "loss.svg").unlink()
    report.draw_curve(pause=60.0)
    assert not (tmp_path / "loss.svg").exists(), "a picture was drawn just now"
    report.drawn_at -= 60.0
    report.draw_curve(pause=60.0)
    assert (tmp_path / "loss.svg").exists()


def test_the_command_draws_several_runs_without_a_screen_and_training_starts_without_matplotlib(
        fork_server, tmp_path, monkeypatch, capsys):
    """Drawing changes no signal's handler. The same run always becomes the same file."""
    assert not any(re.search("^(from|import) matplotlib", path.read_text(), re.MULTILINE)
                   for path in (ROOT / "nanodomino").rglob("*.py"))
    (tmp_path / "script.py").write_text(
        "import signal, sys, train\n"
        "handlers = [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "from nanodomino.pictures.__main__ import main\n"
        "main()\n"
        "assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n")
    for name in ("a", "b"):
        run_of(tmp_path / name, *fall(120), dict(step=120, valid_loss=2.5))
    ended = fork_server.launch(str(tmp_path / "script.py"), [(["a"], {})], tmp_path, PATIENCE)
    assert ended.code == 0 and ended.output.endswith("drawn in a/loss.svg\n"), ended.output
    monkeypatch.chdir(tmp_path)
    for flags, path in (([], "loss.svg"), (["--output", "c.svg"], "c.svg")):
        monkeypatch.setattr(sys, "argv", ["pictures", "a", "b", *flags])
        main()
        assert capsys.readouterr().out.endswith(f"drawn in {path}\n")
        assert {"a, validation 2.500", "b, validation 2.500"} <= {*texts((tmp_path / path).read_text())}
    assert (tmp_path / "a/loss.svg").read_text() == svg(loss_curve, [tmp_path / "a"])


# ---- from metrics.jsonl to points

def test_half_a_line_and_a_number_of_400_digits_are_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 5, "loss": 1%s}\n{"step": 6, "loss": 2}\n{"ste' % (400 * b"0"))
    steps, losses = read_metrics(tmp_path)["loss"]
    assert [*steps] == [5, 6] and np.isnan(losses[0]) and losses[1] == 2


def test_the_picture_shows_each_value(tmp_path):
    """A skipped step is a gap in the loss, and a mark."""
    lines = fall(400)
    lines[20] = step_line(20, None, None, skipped=True)
    loss, (norm, rate), figure = drawn(run_of(tmp_path / "a-run", *lines, dict(step=400, valid_loss=2.5),
                                              dict(step=90, test_loss=2.9), dict(step=400, test_loss=2.6)))
    pale, strong, valid, test, skipped, *levels = loss.lines
    assert points(pale)[0] == (1, 4.0) and math.isnan(points(pale)[19][1]) and len(points(pale)) == 400
    for step, around in ((1, range(1, 6)), (50, range(46, 55)), (20, [*range(16, 20), *range(21, 25)])):
        mean = sum(2 + 4 / (1 + number) for number in around) / len(around)
        assert points(strong)[step - 1] == (step, pytest.approx(mean)), "the centred mean of finite neighbours"
    assert points(valid) == [(400, 2.5)] and points(test) == [(90, 2.9), (400, 2.6)] and points(skipped)[0][0] == 20
    assert sorted(line.get_ydata()[0] for line in levels) == [2.4, 3.2]
    assert points(rate.lines[0]) == [(step, math.nan if step == 20.5 else 1e-3) for step in range(1, 401)]
    assert figure.legends[0].get_texts()[0].get_text() == "a-run, validation 2.500, test 2.600"
    assert len(drawn(run_of(tmp_path / "short", *fall(99)))[0].lines) == 6, "a short run has no mean"


def test_spikes_do_not_flatten_an_axis_that_shows_all_losses_of_validation(tmp_path):
    lines = [step_line(step, 50.0 if step == 7 else 2.0 + step / 100) for step in range(1, 101)]
    loss, _, _ = drawn(run_of(tmp_path / "run", *lines, dict(step=100, valid_loss=9.0)))
    low, high = loss.get_ylim()
    assert 1.5 < low < 2.01 and 9 < high < 10


ODD = {"one step": [ENTROPIES, step_line(1, 5.5)],
       "nothing finite": [ENTROPIES] + [step_line(step, None, None, skipped=True) for step in range(1, 9)],
       "constant": [step_line(step, 0.0, 0.5, 0.0) for step in range(1, 300)],
       "NaN and Infinity": [dict(ENTROPIES, bigram_entropy=None, unigram_entropy=math.nan), step_line(1, math.nan),
                            step_line(2, math.inf, -math.inf), step_line(3, -2.0), dict(step=3, valid_loss=math.inf)],
       "up to 1e299": [step_line(step, 10.0 ** (step % 300), 10.0 ** -(step % 300)) for step in range(1, 700)],
       "few steps of many": [step_line(step, 2.0) for step in (3, 70_000, 2**31 - 1)],
       "a long run": [step_line(step, 2 + math.sin(step * step)) for step in range(1, 30_001)],
       "steps twice": [step_line(step, 3.0 + step) for step in (*range(1, 400), *range(200, 500))],
       "only a test": [ENTROPIES, dict(step=0, test_loss=2.0)], "nothing": [], "other words": [dict(step=1, more=[])]}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_have_a_valid_and_small_picture(tmp_path, name):
    picture = svg(loss_curve, [run_of(tmp_path / "$a_b\x1b", *ODD[name])])
    texts(picture)
    assert len(picture) < 400_000
