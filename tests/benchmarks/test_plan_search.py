"""bench.py plan --search: the results are those of trying every combination; they fit, and train.py accepts them."""

import dataclasses
import itertools
import json
import math
import re
from contextlib import suppress

import pytest
import torch
from support.published_sizes import machine

from benchmarks import plan, plan_changes, plan_search
from benchmarks.common import bytes_text, layout_of as layout_of_row, main, parse, seconds_text
from benchmarks.plan_changes import fullest_gpu_bytes
from benchmarks.plan_search import Search, lower_bound
from nanodomino.analysis import expected_memory, step_time
from nanodomino.config.config import Config
from nanodomino.errors import UserError
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.run.command_line import from_command_line
from nanodomino.schedules.definitions import SCHEDULES

SMALL = dict(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=256, dtype="bfloat16",
             global_batch_size=4, device="cuda", bucket_size=4096)
# A machine on which wires, messages, reductions and copies each take about as long as the matmuls.
SLOW = machine(matmul_rate=1e12, intra_host_rate=3e9, inter_host_rate=1e9, latency=1e-6, ranks_per_host=2,
               memory_rate=1e11, host_copy_rate=1e10, elementwise_rate=3e10, overlap_slowdown=0.2)


@pytest.fixture(autouse=True)
def without_nccls_buffers(monkeypatch):
    """They are hundreds of megabytes, so the differences between small models would not show."""
    monkeypatch.setattr(expected_memory, "CONNECTION_BYTES", 0)
    plan_search.memory_needed.cache_clear()
    yield
    plan_search.memory_needed.cache_clear()


def every_combination(fixed: dict):
    """Yield every Config of SMALL on four GPUs that the rules accept, with settings in `fixed` as they are there."""
    choices = {"tensor_model_parallel_size": (1, 2, 4), "pipeline_model_parallel_size": (1, 2, 4),
               "micro_batch_size": (1, 2, 4), "slices": (1, 2), "columns": (1, 2, 4),
               "sequence_parallel": (False, True), "zero_stage": (0, 1, 2), "recompute_granularity": GRANULARITIES,
               "checkpoint_in_cpu": (False, True)}
    if "num_experts" in fixed:
        choices["expert_model_parallel_size"] = (1, 2, 4)
    if fixed.get("seq_length", 0) >= 2 * plan_changes.LONG:
        choices |= {"context_parallel_size": (1, 2, 4), "cp_comm_type": ("all_gather", "a2a")}
    chunks = [(name, count) for name, schedule in SCHEDULES.items() for count in (1, 2, 4) if count in schedule.chunks]
    for (name, count), *values in itertools.product(chunks, *((fixed[name],) if name in fixed else of
                                                              for name, of in choices.items())):
        settings = dict(zip(choices, values)) | {"schedule": name, "virtual_stages": count}
        if all(fixed.get(key, value) == value for key, value in settings.items()):
            with suppress(UserError):
                yield Config(**SMALL | settings | fixed).resolve(4)


def layout_of(config):
    return config.tp, config.pp, config.cp, config.micro_batch_size


@pytest.mark.parametrize("fixed", [
    dict(schedule="1f1b", virtual_stages=1, columns=1, checkpoint_in_cpu=False, tensor_model_parallel_size=2),
    dict(recompute_granularity="none", checkpoint_in_cpu=False, slices=1, columns=1, sequence_parallel=False,
         zero_stage=1),
    dict(num_experts=4, moe_layer_freq=3, disable_bias_linear=True, schedule="1f1b", virtual_stages=1, columns=1,
         recompute_granularity="none", checkpoint_in_cpu=False, sequence_parallel=False),
    dict(seq_length=128, schedule="1f1b", virtual_stages=1, columns=1, recompute_granularity="none",
         checkpoint_in_cpu=False, zero_stage=1),
    pytest.param({}, marks=pytest.mark.exhaustive)], ids=["options", "schedules", "experts", "context", "everything"])
def test_the_search_finds_what_trying_every_combination_finds(fixed, monkeypatch):
    """With four sizes of memory: all combinations fit, half of them, a tenth, one. It simulates only some of them."""
    monkeypatch.setattr(plan_changes, "LONG", 32)              # tokens of a sample that a rank keeps
    every = [(config, fullest_gpu_bytes(config), sum(step_time.step_seconds(config, SLOW).values()))
             for config in every_combination(fixed)]
    sizes = sorted(size for _, size, _ in every)
    results = 8 if "seq_length" in fixed else 5                # one of the eight exchanges heads
    for usable in (sizes[-1], sizes[len(sizes) // 2], sizes[len(sizes) // 10], sizes[0]):
        best = {}
        for config, size, seconds in every:
            if size <= usable:
                best[layout_of(config)] = min(best.get(layout_of(config), math.inf), seconds)
        search = Search(Config(**SMALL | fixed), 4, fixed, SLOW, usable)
        found = search.run(results)
        assert results <= search.counts["simulated"] < len(every) / 4 or usable < sizes[-1]
        assert [seconds for seconds, _ in found] == pytest.approx(sorted(best.values())[:results], rel=1e-9)
        for seconds, config in found:
            assert config == config.resolve(4) and fullest_gpu_bytes(config) <= usable
            assert seconds == sum(step_time.step_seconds(config, SLOW).values()) == pytest.approx(
                best[layout_of(config)], rel=1e-9)
            assert all(getattr(config, name) == value for name, value in fixed.items())


@pytest.mark.parametrize("schedule, chunks", [(name, count) for name, schedule in SCHEDULES.items()
                                              for count in (1, 2, 4) if count in schedule.chunks])
def test_no_step_is_faster_than_its_lower_bound(schedule, chunks):
    """On equal stages of 1F1B the bound has (p - 1)(F + B) of waiting, so without messages it is the time itself."""
    for (tp, pp), size, granularity in itertools.product([(1, 4), (2, 2), (4, 1)], (1, 2), ("none", "full")):
        config = Config(**SMALL, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, micro_batch_size=size,
                        schedule=schedule, virtual_stages=chunks, recompute_granularity=granularity,
                        checkpoint_in_cpu=granularity == "full")
        if config.num_layers >= pp * chunks:
            config = config.resolve(4)
            seconds = sum(step_time.step_seconds(config, SLOW).values())
            assert 0.3 * seconds < lower_bound(config, SLOW) <= seconds * (1 + 1e-9)
    if schedule == "1f1b":
        config = dataclasses.replace(Config(**SMALL, tensor_model_parallel_size=1, pipeline_model_parallel_size=4),
                                     vocab_size=1, make_vocab_size_divisible_by=1).resolve(4)
        fast = machine(matmul_rate=1e12)
        assert lower_bound(config, fast) == pytest.approx(sum(step_time.step_seconds(config, fast).values()), rel=1e-3)


def test_a_bound_tells_stages_with_wide_experts_from_others():
    """Layers 0, 3 and 6 have experts, so the third of four stages has none."""
    config = Config(**SMALL | dict(num_layers=8, num_experts=4, moe_layer_freq=3, moe_ffn_hidden_size=2048),
                    disable_bias_linear=True, tensor_model_parallel_size=1, pipeline_model_parallel_size=4).resolve(4)
    fast = machine(matmul_rate=1e12)
    assert lower_bound(config, fast) <= sum(step_time.step_seconds(config, fast).values()) * (1 + 1e-9)


def test_a_bound_holds_for_all_further_choices():
    """From tp and pp to the simulation. With fast wires, sequence parallelism is faster: it divides the norms."""
    fast = dataclasses.replace(SLOW, intra_host_rate=1e12, inter_host_rate=1e12, latency=0.0)
    fixed = dict(columns=1, micro_batch_size=2, tensor_model_parallel_size=4, zero_stage=1)
    entries, results = list(Search(Config(**SMALL | fixed), 4, fixed, fast, math.inf).layouts()), 0
    while entries:
        bound, config, choose_next = entries.pop()
        further = list(choose_next(config)) if choose_next else []
        assert all(seconds >= bound * (1 - 1e-9) for seconds, *_ in further)
        entries += further
        results += choose_next is None
    assert results >= 16


# ---- the command

FLAGS = ("--model gpt2 --gpus 8 --gpus-per-host 4 --gpu A100 --global-batch-size 16 --seq-length 512 --num-layers 2 "
         "--columns 2").split()


def bench(capsys, *arguments):
    """Run bench.py plan --search in this process and return (text before the last line, record)."""
    threads = torch.get_num_threads()
    assert main(("plan",), "", ["plan", "--search", *map(str, arguments)]) == 0
    torch.set_num_threads(threads)
    *text, last = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(last)


def test_train_accepts_each_command_and_the_table_shows_its_layout(capsys):
    """And each share of its step."""
    text, record = bench(capsys, *FLAGS)
    rows, lines = record["layouts"], text.splitlines()
    assert len(rows) == 10 and lines[-1] == rows[0]["command"]
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    first = next(number for number, line in enumerate(lines) if line.startswith("--"))
    for line, row in zip(lines[first + 1:], rows):
        assert sum(row["parts_s"].values()) == pytest.approx(row["step_s"]) and row["bytes"] <= record["usable_bytes"]
        used, *shares = (float(share) for share in re.findall(r"([\d.]+)%", line))
        assert sum(shares) == pytest.approx(100, abs=0.5) and used == pytest.approx(100 * row["mfu"], abs=0.06)
        assert line.split()[1:6] == [str(row[name]) for name in ("tp", "pp", "cp", "dp", "micro_batch_size")]
        assert seconds_text(row["step_s"]) in line and bytes_text(row["bytes"]) in line
        assert ("--sequence-parallel" in line) == row["sequence_parallel"]
        torchrun, arguments = row["command"].split(" train.py ")
        assert torchrun == ("torchrun --nnodes 2 --node_rank RANK --master_addr HOST --master_port 29500 "
                            "--nproc_per_node 4")
        config = from_command_line(arguments.split(), 8)
        assert layout_of_row(config) == {name: row[name] for name in layout_of_row(config)}
        assert config.columns == 2 and config.seq_length == 512 and config.global_batch_size == 16
        assert config.dtype == "bfloat16" and config.vocab_size == 50257 and config.num_layers == 2


def test_a_search_in_too_little_memory_says_what_would_be_enough(capsys):
    flags = "--model gpt3-13b --num-layers 4 --gpu A10 --seq-length 128 --schedule 1f1b".split()
    text, record = bench(capsys, *flags, "--gpus", 1)
    assert record["layouts"] == [] and "\n" not in text
    least, gpus = re.fullmatch(r"nothing fits into the usable 22.8 GB per GPU: the least memory found is ([\d.]+) GB, "
                               r"with --tensor-model-parallel-size 1 .*; try --gpus (\d+)", text).groups()
    assert 22.8 < float(least) < 35 and gpus == "2"
    assert bench(capsys, *flags, "--gpus", gpus)[1]["layouts"]
    assert "--checkpoint-in-cpu" in text
    assert "--checkpoint-in-cpu" not in bench(capsys, *flags, "--gpus", 1, "--recompute-granularity", "none")[0]


def test_a_search_keeps_a_given_number_of_chunks_that_does_not_divide_the_layers(capsys):
    flags = "--model nano --num-layers 6 --gpus 2 --tp 1 --pp 2 --schedule interleaved --virtual-stages 2".split()
    assert [row["virtual_stages"] for row in bench(capsys, *flags)[1]["layouts"][:1]] == [2]


def test_a_flag_is_given_even_if_its_value_is_the_default():
    """The search keeps given values, so `--ep 1` must not end in ep 8."""
    flags = parse(plan, ["plan", "--search", "--ep", "1", "--zero-stage", "1", "--no-checkpoint-in-cpu"])
    assert set(flags.given) == {"search", "expert_model_parallel_size", "zero_stage", "checkpoint_in_cpu"}


@pytest.mark.parametrize("flags, words", [
    (["--gpu", "here"], "--search needs a --gpu of A100"), (["--dtype", "float32"], "needs --dtype bfloat16"),
    (["--gpus", "6", "--tp", "4"], "no layout for --gpus 6 obeys the rules together with the given flags; the first "
     "that was tried breaks this one: world size 6 must equal tensor x pipeline x data parallel = 4 x 1 x 1"),
    (["--model", "nano-moe", "--ep", "3"], "expert-model-parallel-size 3 must divide num-experts 8"),
    (["--ep", "2"], "--expert-model-parallel-size 2 needs --num-experts to have an effect"),
    (["--checkpoint-in-cpu", "--recompute-granularity", "selective"],
     "--checkpoint-in-cpu needs --recompute-granularity full to have an effect")])
def test_a_search_that_cannot_start_is_refused(capsys, flags, words):
    assert main(("plan",), "", ["plan", "--search", *flags]) == 2
    assert words in capsys.readouterr().err
