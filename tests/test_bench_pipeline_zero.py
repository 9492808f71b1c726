"""bench.py pipeline and zero: the same work on all sides, and figures that fit together and to the formulas.

The sizes are tiny: what is tested is the arithmetic around the times, not the times.
"""

from dataclasses import replace

import pytest
import torch
from harness import tiny
from test_bench import ask, within

from bench import QUESTIONS
from benchmarks import pipeline, zero
from nanodomino import formulas
from nanodomino.settings import UserError
from benchmarks.common import main, parse

TINY = ["--num-layers", "2", "--hidden-size", "32", "--seq-length", "16", "--device", "cpu"]


# ---- pipeline

def test_pipeline_compares_three_sides_with_two_schedules():
    record = ask("pipeline", *TINY, "--microbatches", "2", "3", "--repeats", "2")
    rows = {(row["microbatches"], row["schedule"], row["side"]): row for row in record["rows"]}
    assert set(rows) == {(m, schedule, side) for m in (2, 3) for schedule in ("1f1b", "gpipe")
                         for side in ("domino", "runner", "torch")}
    for (m, schedule, side), row in rows.items():
        assert row["formula"] == 1 / (m + 1) and row["formula_of_ideal"] == 1 / m
        assert 0 < row["idle_spread"][0] < 1 and within(row["idle"], row["idle_spread"])
        assert len(row["idle_of_stages"]) == 2 and 1 <= row["imbalance"] < 2
        assert 0 < row["step_s"] < 60 and within(row["speed"], row["speed_spread"])
        assert side != "torch" or row["speed"] == 1
        assert 5 < row["loss"] < 7, "of 256 words drawn at random"
    for schedule in ("1f1b", "gpipe"):
        for side in ("domino", "runner"):
            least = record[f"speed_{schedule}_{side}"]
            assert least in [rows[m, schedule, side]["speed"] for m in (2, 3)]
            assert all(least is None or rows[m, schedule, side]["speed"] in (None, least)
                       or rows[m, schedule, side]["speed"] > least for m in (2, 3))


@pytest.mark.parametrize("work", [(1.0, 1.0), (1.0, 1.0, 1.0, 1.0), (1.0, 3.0), (2.0, 1.0, 1.5)])
def test_idle_time_is_the_formulas_where_stages_work_without_delay(work):
    """Of even stages the bubble's own; of uneven ones the step is as long as the slowest stage makes it."""
    m, p = 6, len(work)
    config = tiny(p, pipeline_model_parallel_size=p, num_layers=p, global_batch_size=m * 3)
    step = sum(work) + (m - 1) * max(work)
    found = pipeline.idle(config, [step, step], [[m * one, m * one] for one in work])
    assert found["idle"].value == pytest.approx(found["uneven"])
    assert found["idle_of_stages"] == pytest.approx([1 - m * one / step for one in work])
    assert found["imbalance"] == pytest.approx(max(work) * p / sum(work))
    if len(set(work)) == 1:
        assert found["idle"].value == pytest.approx(found["formula"]) == (p - 1) / (m + p - 1)
        assert found["idle_of_ideal"] == pytest.approx(found["formula_of_ideal"]) == (p - 1) / m


class Side:
    """Finds this loss and this gradient."""

    def __init__(self, loss, gradient):
        self.step, self.gradients = lambda: loss, lambda: [torch.tensor([gradient])]


@pytest.mark.parametrize("other", [(5.01, 3.0), (5.0, 3.01), (float("nan"), 3.0), (5.0, float("nan"))])
def test_pipeline_refuses_to_compare_different_work(monkeypatch, other):
    monkeypatch.setattr(pipeline, "gathered", lambda value: [value])
    sides = {("1f1b", "domino"): Side(5.0, 3.0), ("1f1b", "torch"): Side(*other)}
    with pytest.raises(UserError, match="1f1b torch and 1f1b domino do different work"):
        pipeline.check_same_work(tiny(dtype="float32"), sides)


# ---- zero

@pytest.mark.exhaustive
def test_zero_compares_five_ways_to_train_the_same():
    wider = [*TINY, "--hidden-size", "256"]                   # 19 MB of state: resident memory must show it
    record = ask("zero", *wider, "--repeats", "2")
    sides = record["sides"]
    assert set(sides) == {"zero-1", "zero-0", "ddp-zero", "ddp", "fsdp2"}
    assert [sides[name]["formula"] for name in ("zero-1", "zero-0", "ddp-zero", "ddp", "fsdp2")] == [12, 16, 12, 16, 8]
    for side in sides.values():
        assert side["losses"] == pytest.approx(sides["ddp"]["losses"], rel=1e-4)
        assert side["losses"][-1] < side["losses"][0] < 7, "the steps must train"
        # A rank may own a parameter more than another.
        assert side["bytes_per_parameter"] == pytest.approx(side["formula"], rel=0.2)
        assert side["bytes_per_parameter"] == side["state_bytes"] / record["parameters"]
        assert 0 < side["step_s"] < 60 and side["peak_bytes"] > side["state_bytes"] / 2
        assert within(side["step_over_zero_1"], side["spread"])
    assert sides["zero-1"]["step_over_zero_1"] == 1
    assert record["speed_over_ddp_zero"] == sides["ddp-zero"]["step_over_zero_1"]
    # Of nanodomino's own sides, to the byte: the padding and AdamW's counts of steps are in the formula.
    config = zero.config_for(parse(zero, ["zero", *wider]))
    for stage in (0, 1):
        expected = formulas.state_bytes(replace(config, zero_stage=stage), formulas.place(config))
        assert sides[f"zero-{stage}"]["state_bytes"] == sum(expected.values())


def test_storages_are_counted_once():
    whole = torch.zeros(100)
    assert zero.counted_bytes([whole, whole[10:20], whole.view(10, 10).t(), torch.zeros(5, dtype=torch.int64)]) == 440


@pytest.mark.parametrize("dtype, expected", [("float32", [10, 16, 10, 16, 4]), ("bfloat16", [9, 18, 10, 16, 4])])
def test_formulas_of_a_parameters_bytes(dtype, expected):
    config = tiny(4, data_parallel_size=4, dtype=dtype)
    assert [zero.formula_bytes(name, config) for name in zero.ABOUT] == expected


@pytest.mark.parametrize("losses", [[5.0, 4.8], [5.0, float("nan")]])
def test_zero_refuses_to_compare_different_work(losses):
    with pytest.raises(UserError, match="can't be compared"):
        zero.check_same_work(tiny(dtype="float32"), {"zero-1": losses, "ddp": [5.0, 4.9]})


# ---- bad input

@pytest.mark.parametrize("arguments, rule", [
    (["pipeline", "--pp", "1"], "--pp must be at least 2"),
    (["pipeline", "--microbatches", "8", "1"], "--microbatches must be at least --pp 2"),
    (["pipeline", "--pp", "16", "--microbatches", "16"], "num-layers 8 must be at least"),
    (["pipeline", "--hidden-size", "100"], "hidden-size 100 must be divisible by num-attention-heads 8"),
    (["pipeline", "--schedule", "gpipe"], "unrecognized arguments: --schedule gpipe"),
    (["zero", "--dp", "1"], "--dp must be at least 2"),
    (["zero", "--dp", "0"], "--dp must be at least 2"),
    (["zero", "--num-layers", "0"], "--num-layers must be at least 1"),
])
def test_a_mistake_is_one_sentence_and_exit_code_2(capsys, arguments, rule):
    assert main(QUESTIONS, "", arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and rule in err
