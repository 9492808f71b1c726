"""bench.py plan: its tables, what it proposes, and what it refuses."""

import dataclasses
import re

import pytest
from support.benchmark import here
from support.harness import tiny

import train
from benchmarks import plan
from benchmarks.runner import config_of, parse
from nanodomino.estimate.formulas import Machine, bytes_outside_torch, parameter_count
from nanodomino.estimate.rank import dry_run


SMALL = ("--model gpt2 --gpus 8 --num-layers 4 --seq-length 256 --global-batch-size 16 --vocab-size 512 "
         "--columns 1").split()


@pytest.mark.parametrize("model, parameters", [
    ("gpt3-13b", 12_853_386_240), ("llama3-8b", 8_030_261_248), ("smollm2-135m", 134_515_008)])
def test_a_preset_with_its_published_vocabulary_has_the_published_number_of_parameters(model, parameters):
    """A plan for --model llama3-8b must not count GPT-2's vocabulary."""
    flags = parse(plan, ["plan", "--model", model, "--gpus", "1", "--tp", "1", "--pp", "1"])
    plan.processes(flags)
    assert parameter_count(config_of(flags, 1)) == parameters


def test_a_gpu_reaches_the_rates_of_its_data_sheet_times_the_efficiencies():
    """400 Gbit/s are 50 GB/s."""
    assert plan.machine_of("H100", network=400.0, per_host=4) == Machine(
        matmul_rate=989e12 * 0.7, intra_host_rate=450e9 * 0.8, inter_host_rate=50e9 * 0.8, latency=15e-6,
        ranks_per_host=4, memory_rate=3.35e12 * 0.8, host_copy_rate=64e9 * 0.8, overlap_slowdown=0.18, peak=989e12,
        multiprocessors=132)


def test_a_plan_has_the_bytes_of_a_whole_dry_run(capsys):
    """Both stages; the plan itself runs only a few layers and microbatches."""
    layout = ["--tp", "2", "--pp", "2", "--num-layers", "12"]
    code, text, record, _ = here(capsys, "plan", *SMALL, *layout)
    assert code == 0 and record["fits"] is True and sum(record["parts_s"].values()) == pytest.approx(record["step_s"])
    flags = parse(plan, ["plan", *SMALL, *layout])
    plan.processes(flags)
    config = config_of(flags, 8)
    for stage, need in enumerate(record["memory"]):
        run = dry_run(train, config, 4 * stage)
        assert {name: need[name] for name in run.state} == run.state
        assert need["activations"] == pytest.approx(run.activations, rel=0.01)
    for said in ("stage 1", "tp exposed", "(p - 1)/m of the ideal time in 1F1B", "reach 70% of 989 TFLOP/s"):
        assert said in text


def test_nccl_has_buffers_for_each_ring_and_each_neighbour():
    """tp and the world have 24 channels, the others 16: dp, tied embeddings, the pipeline's ring and its one neighbour.
    """
    config = tiny(8, **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 2), device="cuda")
    assert bytes_outside_torch(config, 0) == 512 * 2**20 + 12 * 2**20 * (24 + 24 + 24 + 16 + 16 + 16)
    assert bytes_outside_torch(dataclasses.replace(config, device="cpu"), 0) == 0


def test_a_third_of_fp8s_matmuls_takes_twice_as_long_if_weight_gradients_are_outside(capsys):
    flags = [*SMALL, "--hidden-size", 4096, "--num-attention-heads", 32, "--fp8-format", "e4m3"]
    inside, outside = (here(capsys, "plan", *flags, flag)[2]["parts_s"]["matmuls"]
                       for flag in ("--fp8-wgrad", "--no-fp8-wgrad"))
    assert outside / inside == pytest.approx(4 / 3, rel=0.1)


@pytest.mark.parametrize("flags, terms", [
    (["--tp", 4, "--pp", 1, "--micro-batch-size", 16, "--gpu", "A100"], "activations [0-9.]+ GB and "),
    (["--tp", 8, "--pp", 1, "--zero-stage", 0, "--gpu", "A10"], "optimizer [0-9.]+ GB and gradients")])
def test_a_plan_that_does_not_fit_says_why(capsys, flags, terms):
    code, text, record, _ = here(capsys, "plan", *flags)
    assert code == 0 and record["fits"] is False
    most = max(sum(need.values()) for need in record["memory"])
    told = re.search(rf"fit: stage \d needs [\d.]+ GB, ([\d.]+) GB too much; the largest terms are {terms}", text)
    assert float(told[1]) == pytest.approx((most - record["usable_bytes"]) / 1e9, rel=0.01)
