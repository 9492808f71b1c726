"""bench.py plan --search: its estimates are those of dry runs; the results fit, and train.py accepts them."""

import pytest
from support.benchmark import here

import train
from benchmarks import plan, plan_search
from benchmarks.plan_search import estimated_bytes, estimated_seconds
from benchmarks.runner import about, bytes_text, parse, seconds_text
from nanodomino.estimate.stages import fullest_rank_bytes, step_seconds
from nanodomino.run.session import from_command_line
from nanodomino.settings.config import Config


H100 = plan.machine_of("H100")


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


# ---- the command

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


def test_a_search_in_too_little_memory_says_so(search):
    text, rows = search(1, *"--model gpt3-13b --gpu A10 --seq-length 128 --schedule 1f1b --gpus 1".split())
    assert rows == [] and "\n" not in text
    assert text.startswith("nothing fits into the usable 22.8 GB per GPU, even with full recomputation; try more")


@pytest.mark.parametrize("flags, chunks", [("interleaved --virtual-stages 2", 2), ("eager-1f1b --optimizer muon", 1)])
def test_a_search_keeps_a_given_schedule(search, flags, chunks):
    """Even if the chunks do not divide the layers, or if schedule and optimizer come from options."""
    _, rows = search(1, *f"--model nano --num-layers 6 --gpus 2 --tp 1 --pp 2 --schedule {flags}".split())
    assert [row["virtual_stages"] for row in rows] == [chunks]


def test_a_flag_is_given_even_if_its_value_is_the_default():
    """The search keeps given values, so `--ep 1` must not end in ep 8."""
    flags = parse(plan, ["plan", "--search", "--ep", "1", "--zero-stage", "1", "--no-checkpoint-in-cpu"])
    assert set(flags.given) == {"search", "expert_model_parallel_size", "zero_stage", "checkpoint_in_cpu"}
