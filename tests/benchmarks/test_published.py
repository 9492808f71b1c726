"""bench.py plan --published: the runs' sizes, the modified step times, the ratios."""

import dataclasses
import json
import re
from functools import partial

import pytest
import torch
from support.published_sizes import cluster, machine

from benchmarks import plan, published
from benchmarks.common import main, parse
from benchmarks.published import RUNS, TABLE_1
from nanodomino.analysis import expected_traffic, sizes, step_time
from nanodomino.analysis.sizes import parameter_count
from nanodomino.errors import UserError

EVERY = [(paper, run) for paper, runs in RUNS.items() for run in runs]
# How far off a prediction with the default flags may be. The last is a run with matmuls of 160 columns, which are
# assumed to be as efficient as wide ones; its other settings are not published.
BOUNDS = {("2104.04473", "TFLOP/s"): (0.98, 1.13), ("2205.05198", "s"): (0.98, 1.1),
          ("2409.15241", "x speed"): (0.98, 1.12), ("2409.15241", "% wires"): (1.15, 1.25)}


def answer():
    """Return (text, record) with the default flags."""
    flags = plan_flags()
    return published.answer(partial(plan.machine_of, flags, per_host=8), flags)


def test_a_flag_that_published_runs_do_not_use_is_refused():
    with pytest.raises(UserError, match="--published has no use for --gpus, --search; leave that out"):
        plan.processes(plan_flags("--search", "--gpus", "8"))


def plan_flags(*more):
    return parse(plan, ["plan", "--published", *more])


# ---- the runs

@pytest.mark.parametrize("paper, run", EVERY, ids=[f"{paper}-{run.name}-{run.again}-{run.figure}"
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


@pytest.mark.parametrize("run", TABLE_1, ids=lambda run: run.name)
def test_formula_3_counts_four_forwards_of_the_layers_and_three_of_the_head(run):
    """It equals this program's count of FLOPs."""
    config = run.config
    chunks = [(at, chunk) for at in map(partial(sizes.mesh_at, config), range(config.pp))
              for chunk in sizes.stage_chunks(config, at)]
    of_rank = sum(4 * (dense + attention) + 3 * head
                  for dense, head, attention in (step_time.forward_flops(config, at, chunk) for at, chunk in chunks))
    assert published.formula_3(config) == pytest.approx(config.microbatches * config.dp * config.tp * of_rank, rel=1e-3)


# ---- the time of a step

STAGES = dict(tensor_model_parallel_size=8, pipeline_model_parallel_size=2, slices=1, zero_stage=0,
              global_batch_size=16)
FAST = machine(matmul_rate=1e13, intra_host_rate=3e11, inter_host_rate=2e10, memory_rate=1e12, latency=1e-5)


@pytest.mark.parametrize("changes", [{}, dict(virtual_stages=2), dict(slices=2, micro_batch_size=2, zero_stage=1)])
def test_seconds_agree_with_a_plan(changes):
    config = cluster(32, **{**STAGES, **changes})
    assert published.seconds(config, FAST) == pytest.approx(sum(step_time.step_seconds(config, FAST).values()))


def counted(config):
    """Return a microbatch's forward FLOPs on the only stage: layers' matmuls, head's, attention's."""
    at = sizes.mesh_at(config)
    (chunk,) = sizes.stage_chunks(config, at)
    return step_time.forward_flops(config, at, chunk)


def test_flops_of_recomputed_layers_and_attention():
    config = cluster(8, **{**STAGES, "pipeline_model_parallel_size": 1})
    (dense, head, attention), one = counted(config), machine(matmul_rate=1e12)
    said = [published.seconds(config, one, costs) / config.microbatches * 1e12
            for costs in (step_time.action_costs, published.layers_again, published.attention_again)]
    all_three = 3 * (dense + head + attention)
    assert said == pytest.approx([all_three, all_three + dense + attention, all_three + attention])


@pytest.mark.parametrize("chunks", [1, 2])
def test_recomputed_layers_repeat_their_all_reduces_unhidden(chunks):
    """Two more all-reduces of X per layer of a stage."""
    config = cluster(16, **STAGES, virtual_stages=chunks)
    at, without = sizes.mesh_at(config, 1), machine(matmul_rate=1e12)
    with_wires = dataclasses.replace(without, intra_host_rate=1e12)
    sum_of_x = expected_traffic.bytes_sent("all_reduce", sizes.hidden_bytes(config), 8) / with_wires.intra_host_rate
    works = [sum(cost.compute for cost in published.layers_again(config, one, at).values())
             for one in (with_wires, without)]
    assert works[0] - works[1] == pytest.approx(2 * sum_of_x * config.num_layers / 2, rel=1e-3)


def test_blocking_adds_all_communication_to_all_compute():
    config = cluster(8, **{**STAGES, "pipeline_model_parallel_size": 1})
    at = sizes.mesh_at(config)
    one = machine(matmul_rate=1e13, intra_host_rate=1e10)
    sums = step_time.communication_seconds(config, one, at, expected_traffic.tensor_parallel_traffic(config, at))
    work = published.seconds(config, machine(matmul_rate=1e13))
    assert published.seconds(config, one, published.blocking) == pytest.approx(work + sums)
    assert published.seconds(config, one) < 0.95 * (work + sums)


def test_communication_share_and_speed_up():
    """With communication that takes half of the time, which two slices hide."""
    run = dataclasses.replace(RUNS["2409.15241"][0], vocab_size=128)
    at, slow = sizes.mesh_at(run.config), machine(matmul_rate=1e13)
    sums = expected_traffic.tensor_parallel_traffic(run.config, at)
    wire = step_time.communication_seconds(run.config, machine(intra_host_rate=1.0), at, sums)
    slow = dataclasses.replace(slow, intra_host_rate=wire / published.seconds(run.config, slow))
    assert published.wires(run, slow) == pytest.approx(50, rel=1e-3)
    assert 1.5 < published.gain(run, slow) <= 2


# ---- the answer

@pytest.mark.exhaustive
def test_every_ratio_is_within_its_bounds_and_is_printed():
    text, record = answer()
    assert [(row["paper"], row["name"]) for row in record["rows"]] == [(paper, run.name) for paper, run in EVERY]
    for row, line in zip(record["rows"], text.splitlines()[2:]):
        least, most = BOUNDS[row["paper"], row["figure"]]
        assert row["ratio"] == row["predicted"] / row["published"] and least <= row["ratio"] <= most
        assert line.startswith(f"{row['paper']}: {row['name']} ") and line.endswith(f" {row['ratio']:.2f}")


def test_megatrons_kernels_read_and_write_more():
    """Per layer 3 X and 13 X more, and 13 and 19 bytes per score of attention, which recomputation
    repeats. The forward of a GPT-2 layer moves (8 + 8/t) X anyway, so recomputing layers adds 9 X."""
    config = cluster(8, **{**STAGES, "pipeline_model_parallel_size": 1})
    at, slow = sizes.mesh_at(config), machine(elementwise_rate=1e12)
    plain = step_time.action_costs(config, slow, at)
    x, scores = sizes.hidden_bytes(config), config.num_attention_heads / 8 * config.seq_length ** 2
    for costs, moved, moved_back in ((published.megatron, 3 * x, 13 * x),
                                     (published.attention_again, 3 * x + 13 * scores, 13 * x + (19 + 13) * scores),
                                     (published.layers_again, 3 * x + 13 * scores,
                                      13 * x + (19 + 13) * scores + (3 + 9) * x)):
        found = costs(config, slow, at)
        for kind, more in (("forward", moved), ("backward", moved_back)):
            assert found[kind, 0].compute - plain[kind, 0].compute == pytest.approx(40 * more / 1e12)


def test_every_assumption_is_printed_with_its_flags_value():
    flags = plan_flags("--product-efficiency", "0.51", "--wire-efficiency", "0.73", "--latency", "21",
                       "--overlap-slowdown", "0.17")
    text = " ".join(" ".join(published.assumptions(flags)).split())
    for said in ("reach 51% of the peak", "reach 73% of these", "21 us", "takes 17% of the GPU",
                 "2048 tokens per sample, vocabulary 51,200", "2409.15241: 50,257",
                 "300 (A100) and 450 GB/s", "200 Gbit/s", "eight cards of 400 Gbit/s",
                 "formula (3)", "fp32", "float16", "not looked up: layers, widths, heads, samples, vocabulary",
                 "run_table_1.sh", "compared with 32"):
        assert said in text


def test_the_command_prints_table_assumptions_and_a_record(capsys, monkeypatch):
    """For the paper with the fewest runs."""
    monkeypatch.setattr(published, "RUNS", {"2409.15241": RUNS["2409.15241"]})
    threads = torch.get_num_threads()
    assert main(("plan",), "", ["plan", "--published"]) == 0
    torch.set_num_threads(threads)
    *text, last = capsys.readouterr().out.splitlines()
    assert len(json.loads(last)["rows"]) == 4 and "assumptions:" in text and "sources:" in text
    assert "Nothing is added for dropout" in "\n".join(text) and max(map(len, text)) < 140
