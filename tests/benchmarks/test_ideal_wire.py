"""How much of the communication the schedules hide, on a wire that costs no processor time and a clock that counts
multiplications: the figures are the same on every machine."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.benchmark import here
from support.harness import tiny

from benchmarks.ideal_wire import IdealStage, MatmulClock, Wire, log_of, start_ideal_world
from benchmarks.overlap import RATIOS, floor
from nanodomino import minimal
from nanodomino.comm.collectives import all_gather, reduce_scatter

SIZES = dict(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, seq_length=16,
             micro_batch_size=8, global_batch_size=64)


@contextmanager
def ideal_world(start=start_ideal_world, **arguments):
    """Yield what start(clock=..., **arguments) returns, and count the multiplications of the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with MatmulClock() as clock:
            yield start(clock=clock, **arguments)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def stage_of(**changes):
    settings = SIZES | dict(tensor_model_parallel_size=2, slices=2, dtype="float32") | changes
    ranks = settings["tensor_model_parallel_size"] * settings.get("data_parallel_size", 1)
    return ideal_world(IdealStage, config=tiny(ranks, **settings))


def test_a_wire_carries_one_message_after_another_in_each_direction():
    now = 0.0
    wire = Wire(bandwidth=10.0, latency=0.5, clock=lambda: now)
    first, second = wire.carry(20, "out"), wire.carry(10, "out", "in")
    assert (first.done, second.done, wire.carry(10, "in").done) == (2.5, 3.5, 4.5)
    first.wait()
    assert (wire.waited, wire.now()) == (2.5, 2.5)
    now = 3.0
    second.wait()                                                       # has arrived during the work
    assert (wire.waited, wire.now()) == (2.5, 5.5)


def test_each_collective_takes_the_time_of_its_ring():
    with ideal_world(ranks=4) as wire:
        wire.bandwidth, tensor, times = 100.0, torch.ones(400, dtype=torch.uint8), []
        for launch in (lambda: dist.all_reduce(tensor, async_op=True),
                       lambda: reduce_scatter(tensor, dist.group.WORLD)[0],
                       lambda: all_gather(tensor, tensor[:100], dist.group.WORLD)):
            begin = wire.now()
            launch().wait()
            times.append(wire.now() - begin)
    assert times == pytest.approx([6.0, 3.0, 3.0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_replayed_log_waits_as_long_as_the_step_itself(sequence_parallel):
    with stage_of(sequence_parallel=sequence_parallel) as stage:
        step = stage.alternatives()["domino"]
        log = log_of(stage.wire, step)
        for ratio, latency in ((0.7, 0.0), (1.3, log.work / 500)):
            stage.wire.bandwidth, stage.wire.latency = log.sent / (ratio * log.work), latency
            waited = stage.wire.waited
            log_of(stage.wire, step)
            waited = stage.wire.waited - waited
            assert log.bound(ratio, latency) == pytest.approx((log.work + waited) / (log.work * max(1, ratio)))
            assert waited > 0


def test_the_bench_prints_its_table(capsys):
    _, _, record, _ = here(capsys, *("overlap --ideal-wire --num-layers 2 --hidden-size 32 --seq-length 8 "
                                     "--microbatches 3 --repeats 1").split())
    assert set(record["bound_ratio"]) == {"one slice", "domino", "columns", "paired", "interleaved", "zb-v"}
    assert all(figure is None or figure > 0.95 for figures in record["bound_ratio"].values()
               for figure in figures.values())
    assert record["bytes"] == 3 * 4 * 8 * 8 * ((4 * 2 + 2) * 32 + 3)     # an all-reduce at tp 2 sends each byte once


@pytest.mark.parametrize("changes, latency, domino, paired", [
    ({}, 0, 0.07, 1.075), ({"tensor_model_parallel_size": 8}, 0.05, 0.075, 1.08),
    ({"sequence_parallel": True}, 0, 0.115, 1.11),
    (dict(num_experts=8, moe_ffn_hidden_size=64, disable_bias_linear=True, swiglu=True, num_layers=6, seq_length=32,
          tensor_model_parallel_size=1, expert_model_parallel_size=2, data_parallel_size=2), 0, 0.05, 1.06)], ids=str)
def test_the_schedules_hide_the_communication(changes, latency, domino, paired):
    """domino: how far its bound may lie above the floor; paired: the bound of the schedule `paired`. latency: as a part
    of a matmul. The counts of the experts' rows do not wait behind the rows."""
    with stage_of(**changes) as stage:
        alternatives = stage.alternatives()
        logs = {name: log_of(stage.wire, alternatives[name]) for name in ("forward", "one slice", "domino", "paired")}
    whole = logs["domino"]
    assert logs["one slice"].work == pytest.approx(whole.work) and logs["one slice"].sent == whole.sent
    shares = logs["forward"].work / whole.work, logs["forward"].sent / whole.sent
    assert shares[0] == pytest.approx(1 / 3, rel=2e-3)
    if "num_experts" in changes:                              # all-to-alls, layers, microbatches, tokens x topk / ep
        assert whole.sent == pytest.approx(4 * 6 * 4 * 8 * 32 * 2 / 2 * 64 * 4, rel=0.01)
    latency *= whole.work / (8 * 2 * 4 * 2 * 6)               # microbatches, slices, layers, sublayers, matmuls
    for ratio in RATIOS:
        assert 0.999 < whole.bound(ratio, latency) - floor(ratio, *shares) + 1 < 1 + domino
        assert 0.999 < logs["paired"].bound(ratio, latency) < paired
    assert logs["one slice"].bound(1.0, latency) > 1.4


def test_minimal_hides_as_much_as_domino():
    sizes = minimal.Sizes(layers=4, hidden=64, heads=8, seq_length=16, global_batch=64, micro_batch=8)
    with stage_of() as stage:
        domino = log_of(stage.wire, stage.alternatives()["domino"])
    text = torch.arange(64 * 16 + 1).remainder(50).numpy()
    with ideal_world(ranks=2) as wire:
        grid = minimal.make_grid(2, 1, 1, torch.device("cpu"))
        stage = minimal.make_model(sizes, grid, vocab=50, slices=2)
        log = log_of(wire, lambda: minimal.run_pipeline(stage, text, 0))
    assert log.work == pytest.approx(domino.work, rel=0.05)            # its head multiplies by the padding rows, too
    for ratio in RATIOS:
        assert log.bound(ratio) < 1.05 * domino.bound(ratio)
