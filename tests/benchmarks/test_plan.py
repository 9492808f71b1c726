"""bench.py plan: its tables and what it refuses. --search: its estimates are those of dry runs; the results fit, and
train.py accepts them. --published: the runs' sizes, the costs of what they did, the ratios."""

import dataclasses
import re

import pytest
from support.benchmark import here
from support.harness import tiny

import train
from benchmarks import plan, plan_search, published
from benchmarks.plan_search import estimated_bytes, estimated_seconds
from benchmarks.published import RUNS, as_megatron
from benchmarks.runner import about, bytes_text, config_of, parse, seconds_text
from nanodomino.estimate.accounts import Launch, Operation, Wait
from nanodomino.estimate.formulas import Machine, bytes_outside_torch, parameter_count
from nanodomino.estimate.rank import dry_run
from nanodomino.estimate.stages import fullest_rank_bytes, step_seconds
from nanodomino.run.session import from_command_line
from nanodomino.settings.config import Config

SMALL = ("--model gpt2 --gpus 8 --num-layers 4 --seq-length 256 --global-batch-size 16 --vocab-size 512 "
         "--columns 1").split()
H100, CLUSTER = plan.machine_of("H100"), plan.machine_of("H100", network=3200.0)
EVERY = [(paper, run) for paper, runs in RUNS.items() for run in runs]


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
    for said in ("stage 1", "tp exposed", "reach 70% of 989 TFLOP/s"):
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


# ---- --search

def config_on(gpus, **changes) -> Config:
    sizes = dict(num_layers=16, hidden_size=512, num_attention_heads=8, seq_length=512, vocab_size=512,
                 dtype="bfloat16", device="cuda", global_batch_size=32, micro_batch_size=2)
    return Config(**sizes | changes).resolve(gpus).with_vocabulary(512)


@pytest.mark.parametrize("changes", [
    dict(tensor_model_parallel_size=2), dict(hidden_size=2048, seq_length=64, global_batch_size=16),
    dict(pipeline_model_parallel_size=4, schedule="interleaved", virtual_stages=2),
    dict(pipeline_model_parallel_size=4, tensor_model_parallel_size=2, schedule="paired"),
    dict(pipeline_model_parallel_size=2, schedule="zb-v", recompute_granularity="full")], ids=str)
def test_a_step_is_estimated_as_a_dry_run_of_the_combination_says(changes):
    """The search keeps only what it has estimated well."""
    config = config_on(8, **changes)
    seconds, needed = sum(step_seconds(train, config, H100).values()), fullest_rank_bytes(train, config)
    assert estimated_seconds(config, H100)[0] == pytest.approx(seconds, rel=0.1)
    assert estimated_bytes(config) == pytest.approx(needed, rel=0.1)


@pytest.fixture
def search(capsys, monkeypatch):
    """Return a function that searches for so many results and returns (text, the rows of the table)."""
    def search(results, *flags):
        monkeypatch.setattr(plan_search, "RESULTS", results)
        _, text, record, _ = here(capsys, "plan", "--search", *flags)
        return text, record["layouts"]
    return search


FLAGS = ("--model gpt2 --gpus 4 --gpus-per-host 2 --gpu A100 --global-batch-size 16 --seq-length 512 --num-layers 2 "
         "--columns 2 --tp 2 --micro-batch-size 4").split()


def test_train_accepts_each_command_and_the_table_shows_its_layout(search):
    text, rows = search(2, *FLAGS)
    lines = text.splitlines()
    assert len(rows) == 2 and lines[-1] == rows[0]["command"]
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    first = next(number for number, line in enumerate(lines) if line.startswith("-"))
    for line, row in zip(lines[first + 1:], rows):
        assert row["bytes"] <= 0.95 * 80e9 and f"{row['mfu']:.1%}" in line
        assert line.split()[1:6] == [str(row[name]) for name in ("tp", "pp", "cp", "dp", "micro_batch_size")]
        assert seconds_text(row["step_s"]) in line and bytes_text(row["bytes"]) in line
        assert ("--sequence-parallel" in line) == row["sequence_parallel"]
        torchrun, arguments = row["command"].split(" train.py ")
        assert torchrun == ("torchrun --nnodes 2 --node_rank RANK --master_addr HOST --master_port 29500 "
                            "--nproc_per_node 2")
        config = from_command_line(arguments.split(), 4)
        assert {name: row[name] for name in about(config)} == about(config) | {"device": "cuda"}
        assert config.columns == 2 and config.seq_length == 512 and config.global_batch_size == 16
        assert config.dtype == "bfloat16" and config.vocab_size == 50257 and config.num_layers == 2


@pytest.mark.parametrize("layout", ["--pp 1 --micro-batch-size 16", "--pp 2 --micro-batch-size 4"])
def test_no_result_is_slower_than_the_same_layout_with_1f1b(capsys, search, layout):
    """Pairs hide nothing where tp is 1. Estimates of schedules differ by less than they err."""
    flags = f"--model gpt2 --num-layers 4 --gpus 8 --tp 1 --recompute-granularity none {layout}".split()
    _, (row,) = search(1, *flags)
    plain = ["--zero-stage", row["zero_stage"], "--slices", row["slices"], "--schedule", "1f1b"]
    assert row["step_s"] <= here(capsys, "plan", *flags, *plain)[2]["step_s"]


def test_a_search_in_too_little_memory_says_so_or_recomputes_where_it_must(search):
    text, rows = search(1, *"--model gpt3-13b --gpu A10 --seq-length 128 --schedule 1f1b --gpus 1".split())
    assert rows == [] and "\n" not in text
    assert text.startswith("nothing fits into the usable 22.8 GB per GPU, even with full recomputation; try more")
    _, rows = search(2, *"--model gpt2-medium --gpu A10 --gpus 2 --pp 1 --schedule 1f1b --zero-stage 1 --seq-length "
                     "2048 --max-position-embeddings 2048 --micro-batch-size 16 --global-batch-size 32".split())
    assert [(row["tp"], row["recompute_granularity"]) for row in rows] == [(2, "none"), (1, "full")]


@pytest.mark.parametrize("flags, chunks", [("interleaved --virtual-stages 2", 2), ("eager-1f1b --optimizer muon", 1)])
def test_a_search_keeps_a_given_schedule(search, flags, chunks):
    """Even if the chunks do not divide the layers, or if schedule and optimizer come from options."""
    _, rows = search(1, *f"--model nano --num-layers 6 --gpus 2 --tp 1 --pp 2 --schedule {flags}".split())
    assert [row["virtual_stages"] for row in rows] == [chunks]


def test_a_flag_is_given_even_if_its_value_is_the_default():
    """The search keeps given values, so `--ep 1` must not end in ep 8."""
    flags = parse(plan, ["plan", "--search", "--ep", "1", "--zero-stage", "1", "--no-checkpoint-in-cpu"])
    assert set(flags.given) == {"search", "expert_model_parallel_size", "zero_stage", "checkpoint_in_cpu"}


# ---- --published

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


@pytest.mark.exhaustive
def test_every_ratio_is_within_its_bounds_and_is_printed():
    text, record = published.answer(plan.machine_of)
    assert [(row["paper"], row["name"]) for row in record["rows"]] == [(paper, run.name) for paper, run in EVERY]
    for row, line in zip(record["rows"], text.splitlines()[2:]):
        assert row["ratio"] == row["predicted"] / row["published"] and 0.8 <= row["ratio"] <= 1.2
        assert line.startswith(f"{row['paper']}: {row['name']} ") and line.endswith(f" {row['ratio']:.2f}")
