"""bench.py plan."""

import dataclasses
import json
import re

import pytest
import torch
from support.published_sizes import cluster, machine

import train
from benchmarks import memory, plan
from benchmarks.common import config_of, main, parse, seconds_text
from nanodomino.analysis import expected_memory, sizes, step_time
from nanodomino.analysis.formulas import parameter_count
from nanodomino.config.config import Config
from nanodomino.domino import Domino
from nanodomino.mesh import make_mesh
from nanodomino.schedules.definitions import SCHEDULES, Schedule
from nanodomino.zero import ZeroOptimizer

ACTIVATIONS, PEAK = 1e-3, 0.01
TIME = 4.0               # a factor: on a machine that others use too
TP8 = dict(tensor_model_parallel_size=8)


@pytest.mark.parametrize("model, parameters", [
    ("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200), ("gpt3-13b", 12_853_386_240), ("llama2-7b", 6_738_415_616),
    ("llama3-8b", 8_030_261_248), ("llama3.2-1b", 1_235_814_400), ("qwen2.5-0.5b", 494_032_768),
    ("qwen3-0.6b", 596_049_920), ("smollm2-135m", 134_515_008)])
def test_a_preset_with_its_published_vocabulary_has_the_published_number_of_parameters(model, parameters):
    """A plan for --model llama3-8b must not count GPT-2's vocabulary."""
    flags = parse(plan, ["plan", "--model", model, "--gpus", "1", "--tp", "1", "--pp", "1"])
    plan.processes(flags)
    assert parameter_count(config_of(flags, 1)) == parameters


def reality_rank(config):
    mesh = make_mesh(config.pp, config.dp, config.tp, torch.device("cpu"))
    model = train.model_builder(config, mesh)
    optimizer, stage = ZeroOptimizer(model, config, mesh), Domino(model, config.slices, config.columns)
    return plan.run_here(config, mesh, optimizer, stage, repeats=5)


@pytest.mark.parametrize("world_size, tp, pp, dtype", [
    (4, 2, 2, "float32"),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((1, 1, 1, "float32"), (8, 2, 2, "bfloat16")))])
def test_plan_against_reality(pool, world_size, tp, pp, dtype):
    """Bytes are exact, activations within 0.1 %, the peak within 8 %, a step's time within a factor of 4."""
    config = Config(num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=500,
                    micro_batch_size=4, global_batch_size=8 * world_size // (tp * pp), tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp, dtype=dtype, device="cpu").resolve(world_size)
    found = pool.run(reality_rank, config, world_size=world_size)[0]
    assert found["comm_exact"]
    errors = found["memory_errors"]
    assert [errors[name] for name in memory.STATE] == [0.0, 0.0, 0.0]
    assert errors["activations"] <= ACTIVATIONS and errors["peak"] <= PEAK
    assert 1 / TIME <= min(found["measured_s"]) / min(found["predicted_s"]) <= TIME      # the least: what noise leaves


# ---- as a person runs them

def bench(capsys, *arguments):
    """Run bench.py in this process and return (exit code, text before the last line, record, stderr)."""
    threads = torch.get_num_threads()
    code = main(("plan",), "", [str(one) for one in arguments])
    torch.set_num_threads(threads)
    printed, error = capsys.readouterr()
    *text, last = printed.splitlines() or [""]
    return code, "\n".join(text), json.loads(last or "{}"), error


def test_bench_plan_of_gpt3_13b_on_64_gpus(capsys):
    code, text, record, _ = bench(capsys, "plan", "--model", "gpt3-13b", "--gpus", 64, "--tp", 8, "--pp", 4,
                                  "--global-batch-size", 256, "--columns", 1)
    assert code == 0 and record["fits"] is True and record["parameters"] == 12_853_386_240
    assert record["bubble"] == pytest.approx(3 / 128, rel=0.1) and 0.2 < record["mfu"] < 0.6
    assert sum(record["parts_s"].values()) == pytest.approx(record["step_s"])
    assert all(set(need) == set(plan.MEMORY_TERMS) for need in record["memory"]) and len(record["memory"]) == 4
    for said in ("stage 3", "tp: layers forward", "dp: weights", "(p - 1)/m of the ideal time in 1F1B",
                 "--columns 2 would", "--product-efficiency", "--schedule paired would take"):
        assert said in text


def test_a_gpu_reaches_the_rates_of_its_data_sheet_times_the_efficiencies():
    """400 Gbit/s are 50 GB/s."""
    flags = parse(plan, ["plan", "--product-efficiency", "0.5", "--wire-efficiency", "0.75", "--latency", "20",
                         "--overlap-slowdown", "0.25"])
    assert plan.machine_of(flags, "H100", network=400.0, per_host=4) == step_time.Machine(
        matmul_rate=989e12 * 0.5, intra_host_rate=450e9 * 0.75, inter_host_rate=50e9 * 0.75, latency=20 * 1e-6,
        ranks_per_host=4, memory_rate=3.35e12 * 0.75, host_copy_rate=64e9 * 0.75, elementwise_rate=3.35e12 * 0.75,
        overlap_slowdown=0.25)


def test_a_plan_proposes_the_fastest_schedule_that_fits(capsys):
    """With fast links, few microbatches and many stages it is a zero-bubble schedule, and then none is better."""
    flags = ["--gpus", 8, "--tp", 1, "--pp", 8, "--num-layers", 32, "--global-batch-size", 16, "--vocab-size", 128]
    _, text, before, _ = bench(capsys, "plan", *flags)
    told = re.search(r"(--schedule \S+(?: --virtual-stages \d+)?) would take ([\d.]+ m?s) per step", text)
    assert "zb-v" in told[1] and before["schedule"] == "1f1b"
    _, text, after, _ = bench(capsys, "plan", *flags, *told[1].split())
    assert after["step_s"] < 0.9 * before["step_s"] and "would take" not in text
    assert seconds_text(after["step_s"]) == told[2] and after["virtual_stages"] == 2
    assert "zb-v with 2 chunks per stage" in text


def test_a_plan_considers_a_newly_added_schedule(capsys, monkeypatch):
    """From its line in SCHEDULES: here GPipe with the backwards in reverse order."""
    def last_in_first_out(stage, stages, microbatches, chunks=1):
        actions = SCHEDULES["gpipe"].actions(stage, stages, microbatches)
        return actions[:microbatches] + actions[:microbatches - 1:-1]

    monkeypatch.setitem(SCHEDULES, "lifo", Schedule(last_in_first_out))
    config = dataclasses.replace(cluster(4, pipeline_model_parallel_size=4, global_batch_size=6), schedule="lifo")
    assert expected_memory.microbatches_in_flight(config, sizes.mesh_at(config, 3)) == 6
    assert any({"schedule": "lifo"} in changes
               for changes in plan.other_schedules(dataclasses.replace(config, schedule="1f1b")))
    assert step_time.step_seconds(config, machine(matmul_rate=1e12))["bubble"] > 0


def test_a_smaller_micro_batch_with_fewer_slices_is_among_the_remedies():
    """With two slices, a micro batch of one sample alone would be impossible."""
    config = cluster(8, **TP8, micro_batch_size=4, slices=2)
    assert {"micro_batch_size": 1} in plan.remedies(config)
    assert [plan.changed(config, {"micro_batch_size": size}).slices for size in (2, 1)] == [2, 1]


@pytest.mark.parametrize("flags, reason, remedy", [
    (["--tp", 4, "--pp", 1, "--micro-batch-size", 16, "--gpu", "A100"], "activations", "--recompute-granularity full"),
    (["--tp", 8, "--pp", 1, "--zero-stage", 0, "--gpu", "A10"], "optimizer", "--zero-stage 1"),
    (["--tp", 1, "--pp", 1], "gradients", "--pipeline-model-parallel-size 2"),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
        (["--tp", 2, "--pp", 1, "--micro-batch-size", 8, "--gpu", "A100"], "activations", "--micro-batch-size 1"),
        (["--tp", 4, "--pp", 1, "--micro-batch-size", 16, "--gpu", "A100", "--recompute-granularity", "selective"],
         "activations", "--recompute-granularity full --checkpoint-in-cpu"),
        (["--tp", 8, "--pp", 1, "--gpus", 8, "--micro-batch-size", 16], "activations", "--sequence-parallel"),
        (["--tp", 8, "--pp", 4, "--schedule", "gpipe"], "activations", "--schedule 1f1b"),
        (["--tp", 4, "--pp", 1, "--gpu", "A10"], "gradients", "--zero-stage 2"),
        (["--tp", 8, "--pp", 1, "--gpus", 8, "--gpu", "A10"], "optimizer", "--gpus 32")))])
def test_a_plan_that_does_not_fit_says_why_and_what_helps(capsys, flags, reason, remedy):
    code, text, record, _ = bench(capsys, "plan", *flags)
    assert code == 0 and record["fits"] is False
    most = max(sum(need.values()) for need in record["memory"])
    told = re.search(r"does not fit: stage \d needs [\d.]+ GB, ([\d.]+) GB too much; the largest terms are (\w+)", text)
    assert float(told[1]) == pytest.approx((most - record["usable_bytes"]) / 1e9, rel=0.01) and told[2] == reason
    assert f"would fit with {remedy}" in text or f"or {remedy}" in text
    assert bench(capsys, "plan", *flags, *remedy.split())[2]["fits"] is True


@pytest.mark.parametrize("arguments, words", [
    (["plan", "--gpus", 63, "--tp", 8, "--pp", 4], "world size 63 must equal tensor x pipeline x data parallel"),
    (["plan", "--gpu", "abacus"], "invalid choice: 'abacus'"),
    (["plan", "--reserve", 2], "--reserve must be from 0 to 0.9, but is 2.0"),
    (["plan", "--dtype", "float32"], "--gpu H100 needs --dtype bfloat16 or float16"),
    (["plan", "--gpu", "A100", "--fp8-format", "hybrid"], "--fp8-format needs a GPU with fp8"),
    (["plan", "--fp8-format", "hybrid", "--seq-length", "1000"], "seq-length 1000 must be divisible by 16"),
    (["plan", "--checkpoint-in-cpu"], "--checkpoint-in-cpu needs --recompute-granularity full")])
def test_wrong_flags_are_refused_in_one_sentence(capsys, arguments, words):
    code, text, record, error = bench(capsys, *arguments)
    assert code == 2 and not text and not record
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
