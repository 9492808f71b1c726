"""bench.py pipeline and zero: equal work on all sides, consistent figures, formulas. The sizes are tiny: the tests
check the arithmetic around the times, not the times."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.benchmark import ask, within
from support.harness import tiny

import train
from benchmarks import pipeline, zero
from benchmarks.runner import parse
from nanodomino.comm.trace import Event
from nanodomino.errors import UserError
from nanodomino.estimate.rank import dry_run
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import bubble, simulate, step_time, timetable


TINY = ["--num-layers", "2", "--hidden-size", "32", "--seq-length", "16", "--device", "cpu"]


# ---- pipeline

@pytest.mark.exhaustive
def test_pipeline():
    record = ask("pipeline", *TINY, "--num-layers", "4", "--microbatches", "2", "4", "--repeats", "2")
    rows = {(row["microbatches"], row["schedule"]): row for row in record["rows"]}
    assert set(rows) == {(m, schedule) for m in (2, 4) for schedule in SCHEDULES}
    for (_, schedule), row in rows.items():
        assert 0 < row["idle_spread"][0] < 1 and within(row["idle"], row["idle_spread"])
        assert 0 < row["step_s"] < 60 and within(row["of_1f1b"], row["of_1f1b_spread"])
        assert ("speed_spread" in row) == (schedule in pipeline.TORCH_CLASSES)
        assert 0 < row["simulated"] < 1 and row["simulated_of_1f1b"] > 0
        assert schedule != "1f1b" or row["of_1f1b"] == row["simulated_of_1f1b"] == 1
        assert 5 < row["loss"] < 7, "of 256 words drawn at random"


def worked(row) -> dict:
    """Return what a stage would record if each action took exactly its simulated time."""
    found = {}
    for action, begin, end in row:
        found.setdefault((action.kind, action.halves[0].chunk), []).append(end - begin)
    return found


@pytest.mark.parametrize("work", [(1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.5)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_idle_time_without_delays_is_the_simulations(schedule, work):
    """With unequal stages the slowest determines the step."""
    m, p = 6, len(work)
    plan = timetable(schedule, p, m, SCHEDULES[schedule].chunks[0])
    rows = simulate(plan, lambda stage, action: action.length * work[stage])
    found = pipeline.idle(plan, [step_time(rows)] * 2, [[worked(row) for row in rows]] * 2)
    assert found["idle"].value == pytest.approx(found["simulated"]) and found["simulated_step_s"] == step_time(rows)
    if len(set(work)) == 1:
        assert found["simulated"] == pytest.approx(bubble(rows) / (1 + bubble(rows)))


def test_waits_are_not_part_of_an_actions_duration():
    """A pair's turns are one action."""
    def event(kind, begin, end, microbatch=0):
        return Event(kind, begin * 10**9, end * 10**9, dict(microbatch=microbatch, chunk=0))

    events = [event("forward", 0, 3), event("wait", 1, 2), event("backward", 4, 5), event("forward", 5, 7, 1),
              event("backward", 7, 8), event("backward", 9, 11, 1), event("wait", 8, 10)]
    assert pipeline.work_of(events) == {("forward", 0): [2.0], ("pair", 0): [4.0], ("backward", 0): [1.0]}


# ---- zero

@pytest.mark.exhaustive
def test_zero():
    wider = [*TINY, "--hidden-size", "256", "--microbatches", "2"]       # so that padding hardly counts
    record = ask("zero", *wider, "--repeats", "2")
    sides = record["sides"]
    assert list(sides) == ["zero-1", "zero-0", "zero-2", "ddp-zero", "fsdp2-keep"]
    assert record["microbatches"] == 2
    for side, expected in zip(sides.values(), (12, 16, 10, 12, 8)):
        # A rank may own a parameter more than another.
        assert side["bytes_per_parameter"] == pytest.approx(expected, rel=0.2)
        assert within(side["step_over_zero_1"], side["step_over_zero_1_spread"])
    # Of nanodomino's own sides, to the byte
    zero.processes(flags := parse(zero, ["zero", *wider]))
    for stage in (0, 1, 2):
        run = dry_run(train, replace(flags.config, zero_stage=stage, device="cpu"))
        assert sides[f"zero-{stage}"]["state_bytes"] == sum(run.state.values())


class Side:
    """A side with this loss and this gradient."""

    def __init__(self, loss, gradient, placement=""):
        self.step, self.gradients = lambda: loss, lambda: [torch.tensor([gradient])]
        self.config = SimpleNamespace(placement=placement)


@pytest.mark.parametrize("other", [(5.01, 3.0), (5.0, 3.01)])
def test_pipeline_refuses_to_compare_different_work(other):
    """Gradients may differ between placements of the layers."""
    sides = {("1f1b", "domino"): Side(5.0, 3.0), ("zb-v", "domino"): Side(5.0, 2.0, "folded")}
    pipeline.check_same_work(tiny(dtype="float32"), sides)
    with pytest.raises(UserError, match="of 1f1b torch are .* those of 1f1b domino"):
        pipeline.check_same_work(tiny(dtype="float32"), sides | {("1f1b", "torch"): Side(*other)})
