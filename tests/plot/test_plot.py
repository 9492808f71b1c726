"""loss.svg shows what metrics.jsonl holds, and a failure to draw it never ends a run."""

import json
import math
import random
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from support import ROOT
from support.harness import report_without_a_run
from support.runs import make_corpus, train_in_pool

from nanodomino.plot.curves import DOT, RESULTS, Curve, mean_around, picture, polyline, thinned, without_spikes
from nanodomino.plot.svg import ticks
import nanodomino.run.report

SHAPES = "{http://www.w3.org/2000/svg}"
SKIPPED_MARK = "v-9"     # in the path of a skipped step's mark
ENTROPIES = dict(step=0, unigram_entropy=3.2, bigram_entropy=2.4)


def texts(svg: str) -> list[str]:
    """Return the picture's texts, after checking that it is well-formed XML without nan, inf or None."""
    root = ElementTree.fromstring(svg)
    for shape in root.iter():
        for attribute, value in shape.items():
            assert not re.search(r"nan|inf|None", value), (shape.tag, attribute, value[:100])
    return [text.text for text in root.iter(SHAPES + "text")]


def step_line(step: int, loss, grad_norm=1.0, lr=1e-3, skipped=False) -> dict:
    return dict(step=step, loss=loss, grad_norm=grad_norm, lr=lr, skipped=skipped)


def curve_of(*lines) -> Curve:
    curve = Curve("a-run")
    for line in lines:
        curve.add(line)
    return curve


# ---- what train.py leaves

def test_a_run_leaves_its_curve(pool, tmp_path):
    """At a checkpoint, too. The entropies are the text's; a resumed run does not record them again."""
    run_dir, meta = tmp_path / "run", json.loads((make_corpus(tmp_path) / "meta.json").read_text())
    for steps, flags in (3, ["--eval-iters", "0"]), (8, ["--eval-interval", "4"]):
        ended = train_in_pool(pool, tmp_path, "--run-dir", run_dir, "--train-iters", steps, *flags)
        assert ended.code == 0 and "warning" not in ended.output, ended.output
        words = texts((run_dir / "loss.svg").read_text())
        assert f"unigram {meta['unigram_entropy']:.3f}" in words and f"bigram {meta['bigram_entropy']:.3f}" in words
        assert any(re.fullmatch(rf"run, {steps} steps, loss .*", word) for word in words), words
    assert (run_dir / "metrics.jsonl").read_text().count("unigram_entropy") == 1


def test_a_failure_to_draw_is_a_warning(tmp_path, capsys, monkeypatch):
    """Neither an unwritable file nor a bug."""
    report = report_without_a_run(tmp_path)
    (tmp_path / "loss.svg").mkdir()
    report.losses(1, "valid", 2.5, 8, 1)
    assert "warning: loss.svg can't be drawn: [Errno 21] Is a directory" in capsys.readouterr().out
    (tmp_path / "loss.svg").rmdir()
    monkeypatch.setattr(nanodomino.run.report, "picture", lambda curve: 1 / 0)
    report.losses(2, "valid", math.nan, 8, 1)
    assert "warning: loss.svg can't be drawn: division by zero; training continues" in capsys.readouterr().out
    monkeypatch.undo()
    report.losses(3, "valid", 2.4, 8, 1)
    assert "warning" not in capsys.readouterr().out
    assert "validation 2.400, 1.731 bits per byte" in "".join(texts((tmp_path / "loss.svg").read_text()))


# ---- from values to points

def test_the_mean_is_over_the_finite_neighbours():
    values = np.array([1.0, np.nan, 4.0, 2.0, np.nan, np.nan, np.nan, 7.0])
    around = [1.0, 2.5, 3.0, 3.0, 2.0, np.nan, 7.0, 7.0]
    assert mean_around(values, 1) == pytest.approx(around, nan_ok=True)
    assert mean_around(values, 0) == pytest.approx(values, nan_ok=True)
    assert mean_around(np.array([]), 3).size == 0


def test_each_pixel_column_keeps_its_smallest_and_largest_value():
    generator = np.random.default_rng(0)
    x, values = np.sort(generator.uniform(52, 900, 5000)), generator.normal(size=5000)
    values[generator.random(5000) < 0.3] = np.nan
    thin_x, thin = thinned(x, values, 2)
    assert len(thin_x) == len(thin) <= 2 * 425
    for column in np.unique(x // 2):
        drawn, there = thin[thin_x // 2 == column], values[x // 2 == column]
        there = there[np.isfinite(there)]
        assert sorted(drawn) == [there.min(), there.max()] if len(there) else np.isnan(drawn).all()
    assert [each.size for each in thinned(np.array([]), np.array([]), 1)] == [0, 0]


def test_nan_is_a_gap_and_a_single_point_a_dot():
    x, y = np.arange(7.0), np.array([5, 6, np.nan, 7, np.nan, 8, 9.04])
    pieces = polyline(x, y).split("M")[1:]
    assert pieces == ["0 5 1 6h0", "3 7h0", "5 8 6 9h0"]


def test_ticks_are_1_2_or_5_times_a_power_of_ten_and_as_close_as_may_be():
    generator = random.Random(0)
    for _ in range(300):
        scale, apart = 10 ** generator.uniform(-9, 12), generator.uniform(20, 100)
        found = np.array(ticks(-500 / scale, 500 / scale, scale, apart))
        step = found[1] - found[0]
        digit, power = f"{step:.0e}".split("e")
        assert digit in "125" and np.diff(found) == pytest.approx(float(f"{digit}e{power}")) and 0 in found
        assert step * scale >= apart * 0.999 and apart > step * scale / 2.5 * 0.999
        assert max(-found[0], found[-1]) * scale <= 500 < (found[-1] + step) * scale * 1.001
    assert ticks(1.2, 5, 100, 80) == [2, 3, 4, 5] and ticks(0, 20, 40, 80, least=5) == [0, 5, 10, 15, 20]


# ---- pictures

def fall(steps: int, noise=0.0, **others) -> list[dict]:
    generator = random.Random(steps)
    return [ENTROPIES] + [step_line(step, 2 + 4 / (1 + step) + noise * generator.gauss(0, 1), **others)
                           for step in range(1, steps + 1)]


def test_the_picture_says_what_it_draws():
    """A dot is a test, of which a resumed run may have several, or the only value."""
    drawn = picture(curve_of(*fall(400, 0.1), dict(step=400, valid_loss=2.5), dict(step=90, test_loss=2.9),
                              dict(step=400, test_loss=2.6)))
    words = texts(drawn)
    assert {"loss, nats per token", "gradient norm", "learning rate", "unigram 3.200", "bigram 2.400"} <= {*words}
    assert any(re.fullmatch(r"a-run, 400 steps, mean loss \S+, validation 2.500, test 2.600", word) for word in words)
    assert any("mean over 9 steps, centred" in word for word in words)
    assert SKIPPED_MARK not in drawn and drawn.count(DOT) == 2 + 1
    assert "mean" not in "".join(texts(picture(curve_of(*fall(99))))), "a short run has no mean"


def test_the_picture_in_docs_has_the_words_that_the_code_draws_today():
    """`python train.py` draws it again. It has the loss's unit, and says which steps lie above the picture."""
    like = curve_of(*fall(200), {"step": 200, "tokenizer": "byte", **dict.fromkeys(RESULTS, 2.5)})
    like.name = "nano-001"
    drawn, published = ([re.sub(r"[\d.]+", "", word) for word in texts(svg)] for svg in (
        picture(like), (ROOT / "docs" / "loss.svg").read_text()))
    assert {*drawn} == {*published} > {"loss, nats per byte"} and any("above the picture" in word for word in drawn)


def heights(svg: str) -> list[float]:
    """Return the y of all points of the lines in the loss panel, counted from the top."""
    found = re.findall(r'<path d="M([^"]*)" [^>]*url\(#loss\)', svg)
    return [float(y) for path in found for piece in path.split("M") for y in re.split(" ", piece[:-2])[1::2]]


def test_lines_lie_where_the_values_are():
    """Relative to the lines of the two entropies, whose values are known."""
    drawn = picture(curve_of(ENTROPIES, *(step_line(step, loss) for step, loss in enumerate((5.0, 4.0, 2.0), 1))))
    unigram, bigram = sorted(float(y) for y in re.findall(r'd="M\d+ ([\d.]+)H\d+" stroke="#444"', drawn))
    by_hand = [bigram + (2.4 - loss) * (bigram - unigram) / 0.8 for loss in (5.0, 4.0, 2.0)]
    assert heights(drawn) == pytest.approx(by_hand, abs=0.3)


def test_a_long_run_has_a_small_picture():
    assert len(picture(curve_of(*(step_line(step, 2 + 4 * math.exp(-step / 20_000), 1 + step % 7)
                                   for step in range(1, 100_001))))) < 150_000


def test_spikes_do_not_flatten_an_axis():
    assert without_spikes(np.array([1.0, np.nan, np.inf, *98 * [2.0], 50.0])) == [1.0, 2.0]


def test_skipped_steps_are_gaps_with_a_mark():
    lines = fall(40)
    lines[20] = step_line(20, None, None, skipped=True)
    drawn = picture(curve_of(*lines))
    assert SKIPPED_MARK in drawn
    (strong,) = re.findall(r'<path d="(M[^"]*)" [^>]*url\(#loss\)', drawn)
    assert strong.count("M") == 2


ODD = {"one step": [ENTROPIES, step_line(1, 5.5)],
       "nothing finite": [ENTROPIES] + [step_line(step, None, None, skipped=True) for step in range(1, 9)],
       "constant": [step_line(step, 0.0, 0.5, 0.0) for step in range(1, 300)],
       "NaN and Infinity": [dict(ENTROPIES, bigram_entropy=None, unigram_entropy=math.nan), step_line(1, math.nan),
                            step_line(2, math.inf, -math.inf), step_line(3, -2.0), dict(step=3, valid_loss=math.inf)],
       "up to 1e299": [step_line(step, 10.0 ** (step % 300), 10.0 ** -(step % 300)) for step in range(1, 700)],
       "few steps of many": [step_line(step, 2.0) for step in (3, 70_000, 2**31 - 1)],
       "steps twice": [step_line(step, 3.0 + step) for step in (*range(1, 400), *range(200, 500))],
       "only a test": [ENTROPIES, dict(step=0, test_loss=2.0)],
       "unknown keys and words": [dict(step_line(1, 2.0), more=[]), dict(step=2, loss="none"), dict(step=2, loss=1)]}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_have_a_valid_picture(name):
    texts(picture(curve_of(*ODD[name])))
