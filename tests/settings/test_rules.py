"""A command line that breaks a rule of the settings is refused in one sentence with the rule, the numbers and a fix.

There is a row for each rule: (processes, flags, parts of the sentence).
"""

import importlib
import shlex
import time
from argparse import ArgumentParser
from contextlib import suppress

import pytest
import torch
from benchmarks.runner import MOST_PROCESSES, parse

import bench
import train
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError
from nanodomino.estimate.stages import require_memory
from nanodomino.run.session import from_command_line
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import picture, receives_to_post, timetable
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name, flag_settings
from nanodomino.settings.presets import PRESETS
from nanodomino.settings.rules import MAX_FORWARDS


def settle(flags, processes):
    """Do what a launch does with its flags before it reads a file. The vocabulary is that of bytes."""
    return from_command_line(shlex.split(flags), processes).with_vocabulary(257)


MOE = "--num-experts 6 --disable-bias-linear"
HELP = "--help lists every flag"
TABLE = [
    # the layout
    (8, "--tp 2 --pp 2 --dp 4", "world size 8 must equal", "2 x 2 x 4 = 16; use 16 processes (GPUs)"),
    (4, "--cp 3 --seq-length 12", "data parallel = 1 x 3 x 1 x 1 = 3", "--tp, --cp, --pp, --dp"),
    (4, "--pp 4 --num-layers 7 --schedule zb-v", "num-layers 7 must be at least",
     "try --num-layers 8 or a smaller --pp"),
    (2, "--schedule 1f1b --virtual-stages 2", "virtual-stages must be from 1 to 1 with schedule 1f1b, but is 2",
     "try --virtual-stages 1, or another --schedule"),
    # divisibility
    (1, "--hidden-size 4", "hidden-size 4 must be divisible by num-attention-heads 8; try --hidden-size 8, or give"),
    (4, "--tp 4 --num-attention-heads 6", "heads 6", "tensor-model-parallel-size 4; try --tp 1, 2, 3, 6"),
    (1, "--num-query-groups 3", "heads 8 must be divisible by num-query-groups 3; try --num-query-groups 1, 2, 4, 8"),
    (4, "--tp 4 --num-query-groups 2", "num-query-groups 2", "tensor-model-parallel-size 4; try --tp 1, 2"),
    (4, "--tp 4 --ffn-hidden-size 10", "ffn-hidden-size 10", "size 4; try --tp 1, 2, 5, 10"),
    (4, f"{MOE} --tp 4 --moe-ffn-hidden-size 10", "moe-ffn-hidden-size 10 must be divisible by", "try --tp 1, 2, 5"),
    (4, "--tp 4 --make-vocab-size-divisible-by 1", "of 257", "size 4", "try --make-vocab-size-divisible-by 512"),
    (1, "--position-embedding-type rope --kv-channels 5", "RoPE must rotate an even number", "try --kv-channels 6"),
    (1, "--position-embedding-type rope --kv-channels 7 --rotary-percent 0.5", "from 2 to 7, but rotary-percent 0.5",
     "try --kv-channels 8 --rotary-percent 1"),
    (4, "--tp 4 --pp 1 --sequence-parallel --seq-length 126", "seq-length 126 must be divisible", "--seq-length 128"),
    (8, "--cp 2 --tp 4 --pp 1 --sequence-parallel --seq-length 12", "seq-length 12", "here 8; try --seq-length 16"),
    (2, "--cp 2 --seq-length 6", "seq-length 6 must be divisible by 2 cp", "here 4; try --seq-length 8"),
    (4, "--cp 4 --cp-comm-type a2a --num-attention-heads 2", "must be divisible by tp x cp = 1 x 4 = 4",
     "try --cp-comm-type all_gather"),
    (3, "--pp 1", "global-batch-size 16", "4 x 3 = 12; try --global-batch-size 24"),
    # experts, depths, fp8
    (4, f"{MOE} --dp 4 --ep 3", "expert-model-parallel-size 3 must divide num-experts 6", "4 x 1; try --ep 1, 2"),
    (1, f"{MOE} --moe-router-topk 7", "moe-router-topk 7 must be at most num-experts 6; try --moe-router-topk 6"),
    (1, f"{MOE} --moe-router-topk 1", "moe-router-topk must be at least 2", "add --moe-router-pre-softmax"),
    (1, "--num-experts 6", "experts have no biases, so --num-experts needs --disable-bias-linear; add it"),
    (1, "--mtp-num-layers 8 --seq-length 8", "mtp-num-layers 8 must be below seq-length 8", "try --mtp-num-layers 7"),
    (1, "--fp8-format hybrid --num-layers 2 --first-last-layers-bf16", "num-layers 2 must be at least 3 with --first"),
    (1, "--fp8-format hybrid --dtype float64", "adds up in fp32, so --dtype must not be float64; try --bf16"),
    # sizes
    (2, "--pp 2 --schedule interleaved --virtual-stages 2 --micro-batch-size 1 --global-batch-size 16385",
     "16385 microbatches per replica", "virtual-stages 2) = 16384; try --global-batch-size 16384"),
    (1, "--micro-batch-size 65 --global-batch-size 65 --seq-length 1048576 --max-position-embeddings 1048576",
     "micro-batch-size 65 x seq-length 1048576 must be at most 67108864 tokens; lower one of them"),
    (4, "--micro-batch-size 1 --slices 2", "slices 2 must be at most micro-batch-size 1", "--columns"),
    (1, "--seq-length 64 --max-position-embeddings 63", "seq-length 64", "try --max-position-embeddings 64"),
    (4, "--vocab-size 256", "vocabulary of 257 tokens is larger than the model's of 256;", "at least --vocab-size 257"),
    (1, "--micro-batch-size 65537", "--micro-batch-size must be at least 1 and at most 65536, but is 65537"),
    (1, "--adam-beta1 1", "--adam-beta1 must be at least 0 and below 1, but is 1.0"),
    (1, "--adam-eps 0", "--adam-eps must be above 0 and at most 3.40282e+38, but is 0.0"),
    (1, "--adam-eps 1e39", "at most 3.40282e+38, but is 1e+39"),
    (1, "--lr-warmup-fraction 1.01", "--lr-warmup-fraction must be at least 0 and at most 1, but is 1.01"),
    (1, "--seq-length 0", "--seq-length must be at least 1 and at most 2147483647, but is 0"),
    (1, "--min-lr 1", "min-lr 1.0 must be at most lr 0.004", "lower --min-lr, or leave it out"),
    (1, "--fp16 --min-loss-scale 65536", "min-loss-scale 65536 must be at most initial-loss-scale 32768",
     "try --min-loss-scale 32768"),
    (1, "--trace 5:2", "--trace must be FIRST:LAST", "<= --train-iters 200, but is 5:2;", "try --trace 10:12"),
    (1, "--trace 5:201", "--trace must be FIRST:LAST", "but is 5:201;"), (1, "--trace 5", "FIRST:LAST", "but is 5;"),
    # flags without effect
    (1, "--bf16 --fp16", "argument --fp16: not allowed with argument --bf16; "),
    (1, "--rotary-base 500000", "--rotary-base 500000.0 needs --position-embedding-type rope to have an effect",
     "change that, or leave out --rotary-base"),
    (1, "--cp-comm-type a2a", "--cp-comm-type a2a needs --cp above 1 to have an effect"),
    (1, "--ep 1 --moe-layer-freq 2", "--moe-layer-freq 2 needs --num-experts to have an effect"),
    (1, "--fp16 --loss-scale 8 --loss-scale-window 9", "needs no --loss-scale to have an effect"),
    (1, "--lr-decay-style constant --min-lr 0", "--min-lr 0.0 needs --lr-decay-style cosine or linear"),
    (1, "--position-embedding-type none --reset-position-ids", "needs --position-embedding-type rope or learned"),
    (1, "--top-k 5 --sample-tokens 0", "--top-k 5 needs --sample-tokens above 0 to have an effect"),
    (1, "--model nano-moe --ffn-hidden-size 48 --moe-ffn-hidden-size 16", "--ffn-hidden-size 48 has no effect"),
    (1, "--load run --init-method-std 0.1", "--init-method-std 0.1 needs no --load"),
    (1, "--finetune", "--finetune needs a checkpoint to take the weights from", "add --load FOLDER"),
    # names
    (1, "--model gpt5", "--model: invalid choice: 'gpt5'", "gpt2-xl", HELP),
    (4, "--schedule zigzag", "--schedule", "'zigzag'", *SCHEDULES),
    (4, "--tensor-parallel 2", "unrecognized arguments: --tensor-parallel 2", HELP),
    (1, "--num-layer 3", "--num-layer 3", HELP), (1, "gpt2", "gpt2", HELP),
    (1, "--seq-length", "--seq-length: expected one argument", HELP)]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[1][:60])
def test_a_broken_rule_is_refused_with_the_rule_the_numbers_and_a_fix(row):
    processes, flags, *says = row
    with pytest.raises(UserError) as error:
        settle(flags, processes)
    sentence = str(error.value)
    assert all(part in sentence for part in says) and "\n" not in sentence, sentence
    assert any(fix in sentence for fix in ("; ", "(choose from", "must be")), f"no fix: {sentence}"


@pytest.mark.parametrize("processes, flags", [
    (1, ""), (4, ""), (8, "--tp 8 --slices 4"), (8, "--pp 8"), (8, "--dp 2"), (8, "--tp 1 --pp 1 --dp 8"),
    (1, "--slices 4"), (1, "--columns 96"), (1, "--fp16 --loss-scale 8"), (1, "--vocab-size 300"), (1, "--trace 5:5"),
    (1, "--seed 2147483647"), (1, "--eval-iters 0 --sample-tokens 0 --seed 0 --clip-grad 0 --lr 0"),
    (1, "--rotary-base 10000 --no-sequence-parallel --muon-momentum 0.95"),    # the defaults
    (1, "--lr-warmup-fraction 1 --layernorm-epsilon 1")])
def test_what_breaks_no_rule_is_accepted(processes, flags):
    settle(flags, processes)


@pytest.mark.parametrize("content, says", [
    (b'{"lr": "fast"}', "--config text.txt gives 'fast' as lr, but must give a value of type float; correct it"),
    (b'{"lr": true}', "gives True as lr, but must give a value of type float"),
    (b'{"num_layers": 2.5}', "gives 2.5 as num_layers, but must give a value of type int"),
    (b'{"given": 5, "min_lr": 0.1}', "gives 5 as given, but must give a value of type list"),
    (b'{"given": [1]}', "gives [1] as given, but must give a value of type list of names; correct it"),
    (b'{"layers": 3}', "settings that this version does not know (layers); correct the names"),
    (b"[1]", "must hold one JSON object"), (b"{", "can't be read"), (b"\xff", "can't be read"),
    (b"[" * 99999, "text.txt can't be read")], ids=lambda value: str(value)[:30])
def test_a_file_of_settings_is_refused_with_its_name(tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError) as error:
        settle("--config text.txt", 1)
    assert says in str(error.value) and "text.txt" in str(error.value) and "; " in str(error.value), error.value


@pytest.mark.parametrize("type, values", [
    (int, ("-1", "1" + 30 * "0", "", "1.5", "1e3", "nan")),    # 10^30 would overflow deep inside the run
    (float, ("nan", "inf", "-inf", "-1", "1e400", "", "high")),      # NaN compares false with everything
    (str, ("",))])                                             # `--data-path "$DATA"` with DATA unset
def test_no_value_may_be_negative_infinite_empty_or_of_another_type(type, values):
    """For every flag of Config, also future ones."""
    for setting in flag_settings(Config):
        for value in values if setting.type is type else ():
            with pytest.raises(UserError, match=flag_name(setting.name)) as error:
                from_command_line([f"{flag_name(setting.name)}={value}"], 1)
            shown = repr(value) if type is str or value in ("", "high") else value.removeprefix("1e400") or "inf"
            assert shown in str(error.value), error.value


# ---- the default layout

@pytest.mark.parametrize("model", PRESETS)
def test_up_to_eight_processes_have_a_default_layout(model):
    """The default tp divides the query groups, such as the 3 of smollm2-135m and the 25 of gpt2-xl."""
    for processes in range(1, 9):
        config = Config(model=model).resolve(processes)
        assert config.tp * config.pp * config.dp == processes and config.num_query_groups % config.tp == 0


@pytest.mark.parametrize("processes, ep, layout", [(2, 2, (1, 1, 2)), (8, 2, (2, 2, 2)), (8, 4, (2, 1, 4)),
                                                   (8, 8, (1, 1, 8)), (16, 2, (2, 2, 4))])
def test_the_default_layout_has_as_many_replicas_as_share_the_experts(processes, ep, layout):
    config = Config(model="nano-moe", expert_model_parallel_size=ep, given=("expert_model_parallel_size",)).resolve(
        processes)
    assert (config.tp, config.pp, config.dp) == layout


# ---- huge numbers: within a minute, one sentence refuses them, or the work can start

LIMIT = 60.0         # seconds of this process, so that the load of the machine does not count: the slowest takes 11
SETTINGS = [flag_name(setting.name) for setting in flag_settings(Config, "The model", "The layout", "The training")
            if setting.type is int]
MOST_SAMPLES = MAX_FORWARDS * Config(model="nano").resolve(1).micro_batch_size


def start(command: str, arguments: list[str]):
    """Do what train.py computes from the sizes alone before its first step, or bench.py before it starts processes. A
    plan starts none: make the whole plan."""
    if command == "train":
        config = from_command_line(arguments, 1).with_vocabulary(256).with_device(torch.device("cpu"))
        require_memory(train, config, torch.device("cpu"), 1)
        receives_to_post(config.timetable)
        picture(config.schedule, config.pp, config.microbatches, config.virtual_stages)
    else:
        question = importlib.import_module(f"benchmarks.{command}")
        flags = parse(question, [command, *arguments])
        assert question.processes(flags) <= MOST_PROCESSES
        if command == "plan":
            question.answer(flags, LaunchInfo())


@pytest.mark.parametrize("command, number", [
    pytest.param(command, number, marks=pytest.mark.exhaustive if number < 10**9 or command == "plan" else [])
    for command in ("train", *bench.QUESTIONS) for number in (10**9, 10**6)])
def test_one_huge_number_is_refused_or_the_work_starts_within_a_minute(command, number):
    """All questions check settings in the same way, so only a plan tries them all. Each tries the flags of its own."""
    flags = SETTINGS
    if command != "train":
        importlib.import_module(f"benchmarks.{command}").add_flags(parser := ArgumentParser())
        flags = [action.option_strings[0] for action in parser._actions if action.type is int]
        flags = [flag for flag in flags if flag not in SETTINGS or command == "plan"]
    accepted = [["--global-batch-size", str(MOST_SAMPLES)]] if (command, number) == ("train", 10**6) else []
    for arguments in accepted + [[flag, str(number)] for flag in flags]:
        timetable.cache_clear()
        before = time.process_time()
        with suppress(UserError):
            start(command, arguments)
        assert time.process_time() - before < LIMIT, arguments
