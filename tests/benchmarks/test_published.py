"""bench.py plan --published: the runs' sizes, the costs of what they did, the ratios."""

import dataclasses
import re

import pytest

from benchmarks import plan, published
from benchmarks.published import RUNS, as_megatron, seconds
from nanodomino.estimate.formulas import parameter_count
from nanodomino.estimate.accounts import Launch, Operation, Wait

EVERY = [(paper, run) for paper, runs in RUNS.items() for run in runs]


MACHINE = plan.machine_of("H100", 3200.0)


@pytest.mark.parametrize("paper, run", EVERY, ids=[f"{paper}-{run.name}-{run.recomputed}-{run.figure}"
                                                   for paper, run in EVERY])
def test_each_run_has_the_parameter_count_of_its_name(paper, run):
    """To as many digits, and within 1 % if there are three; replicas are whole."""
    number, unit = re.fullmatch(r"([\d.]+)([BT])", run.name).groups()
    said, count = float(number), parameter_count(run.config) / {"B": 1e9, "T": 1e12}[unit]
    assert f"{count:.{len(number.partition('.')[2])}f}" == number
    assert len(number.replace(".", "")) < 3 or count == pytest.approx(said, rel=0.01)
    config = run.config
    assert config.tp * config.pp * config.dp == run.gpus
    assert config.num_layers % (config.pp * config.virtual_stages) == 0
    assert config.microbatches % config.pp == 0 and config.slices == 1 and config.zero_stage == 0


def test_stored_scores_are_multiplied_whole_and_read_and_written():
    """A causal kernel skips half of the scores. 4 d and 8 d FLOPs of a score, 13 and 19 bytes."""
    scores, size = 3 * published.SEQ_LENGTH ** 2, 64
    run = dataclasses.make_dataclass("Run", ["events"], frozen=True)((
        Operation("attention", 1, 2 * scores * size, (size,)),
        Operation("attention backward", 1, 5 * scores * size, (size,)), Launch("tp", "all_reduce", 8, 1),
        Launch("dp", "all_reduce", 8, 2)))
    events = as_megatron(run, stores_scores=True, blocks=True).events
    assert [event.kind for event in events[:8]] == ["matmul"] * 2 + ["memory"] + ["matmul"] * 4 + ["memory"]
    assert sum(event.flops for event in events[:8]) == 12 * scores * size
    assert [event.bytes for event in events[:8] if event.kind == "memory"] == [13 * scores, 19 * scores]
    assert events[0].shape == (3, published.SEQ_LENGTH, published.SEQ_LENGTH, size)
    assert events[8:] == [Launch("tp", "all_reduce", 8, 1), Wait(1), Launch("dp", "all_reduce", 8, 2)]
    assert as_megatron(run, stores_scores=False, blocks=False).events == list(run.events)


def test_recomputed_layers_repeat_their_forward():
    """A backward takes about two forwards, so a step takes about a third longer."""
    run = RUNS["2409.15241"][0]
    stored, layers = (dataclasses.replace(run, recomputed=what) for what in ("attention", "layers"))
    free = dataclasses.replace(MACHINE, intra_host_rate=1e30, latency=0.0)
    plain, again = seconds(stored, free), seconds(layers, free)
    assert 1.15 * plain < again < 1.4 * plain
    assert seconds(layers, MACHINE, blocks=True) > seconds(layers, MACHINE) > again


def test_communication_share_and_speed_up():
    """With communication that takes as long as everything else, most of which two slices hide."""
    run, rate = RUNS["2409.15241"][0], MACHINE.intra_host_rate
    free = seconds(run, dataclasses.replace(MACHINE, intra_host_rate=1e30, latency=0.0))
    wire = (seconds(run, dataclasses.replace(MACHINE, latency=0.0), blocks=True) - free) * rate
    slow = dataclasses.replace(MACHINE, intra_host_rate=wire / free, latency=0.0)
    assert published.wires(run, slow) == pytest.approx(50, rel=0.01) and 1.5 < published.gain(run, slow) <= 2


@pytest.mark.exhaustive
def test_every_ratio_is_within_its_bounds_and_is_printed():
    text, record = published.answer(plan.machine_of)
    assert [(row["paper"], row["name"]) for row in record["rows"]] == [(paper, run.name) for paper, run in EVERY]
    for row, line in zip(record["rows"], text.splitlines()[2:]):
        assert row["ratio"] == row["predicted"] / row["published"] and 0.8 <= row["ratio"] <= 1.2
        assert line.startswith(f"{row['paper']}: {row['name']} ") and line.endswith(f" {row['ratio']:.2f}")
