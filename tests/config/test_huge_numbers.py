"""A command line with a huge number: within seconds, one sentence refuses it, or the work can start."""

import importlib
import time
from argparse import ArgumentParser

import pytest
import torch

import bench
from benchmarks.common import MOST_PROCESSES, parse
from nanodomino.analysis import expected_memory, sizes, step_time
from nanodomino.analysis.step_time import Machine, require_memory
from nanodomino.comm.world import LaunchInfo
from nanodomino.config.config import Config
from nanodomino.config.rules import MAX_FORWARDS, largest_divisor
from nanodomino.config.setting import flag_name, flag_settings
from nanodomino.errors import UserError
from nanodomino.run.command_line import from_command_line
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement_and_messages import timetable
from nanodomino.schedules.simulation import picture, receives_to_post

HUGE = (10**6, 10**9, 10**12)
LIMIT = 5.0              # seconds of this process, so that the load of the machine does not count
MACHINE = Machine(1e12, 1e10, 1e9, 1e-5, 2, 1e12)
PEAKS = (expected_memory.microbatches_in_flight, expected_memory.peak_tape_bytes, expected_memory.peak_host_bytes,
         expected_memory.peak_message_bytes, expected_memory.tape_and_receive_bytes)


def start_training(arguments: list[str]):
    """Do what train.py computes from the sizes alone before its first step."""
    device = torch.device("cpu")
    config = from_command_line(arguments, 1).with_vocabulary(256).with_device(device)
    require_memory(config, device, 1)
    receives_to_post(config.timetable)
    picture(config.schedule, config.pp, config.microbatches, config.virtual_stages)
    step_time.step_seconds(config, MACHINE)


def start_benchmark(arguments: list[str]):
    """Do what bench.py does before it starts processes. A plan starts none: make the whole plan."""
    question = importlib.import_module(f"benchmarks.{arguments[0]}")
    flags = parse(question, arguments)
    assert question.processes(flags) <= MOST_PROCESSES
    if arguments[0] == "plan":
        question.answer(flags, LaunchInfo())


def check(start, *command_lines: list[str]):
    for arguments in command_lines:
        timetable.cache_clear()
        before = time.process_time()
        try:
            start(arguments)
        except UserError:
            pass
        assert time.process_time() - before < LIMIT, arguments


def flags_of(question: str) -> list[str]:
    """Return the flags of a question that take an integer."""
    parser = ArgumentParser()
    importlib.import_module(f"benchmarks.{question}").add_flags(parser)
    return [action.option_strings[0] for action in parser._actions if action.type is int]


@pytest.mark.parametrize("sections", [
    ("The model", "The layout"), pytest.param(("The training", "The run"), marks=pytest.mark.exhaustive)])
def test_train_with_one_huge_number_is_refused_or_starts_within_seconds(sections):
    check(start_training, *([flag_name(setting.name), str(number)] for setting in flag_settings(Config, *sections)
                            if setting.type is int for number in HUGE))


def test_train_with_a_huge_batch_is_refused_or_starts_within_seconds():
    most = MAX_FORWARDS * Config(model="nano").resolve(1).micro_batch_size
    check(start_training, *(["--global-batch-size", str(number)] for number in (most, *HUGE)))


@pytest.mark.parametrize("question", sorted({*bench.QUESTIONS} - {"plan"}))
def test_a_benchmark_with_one_huge_number_is_refused_or_starts_within_seconds(question):
    check(start_benchmark, *([question, flag, str(number)] for flag in flags_of(question) for number in HUGE))


@pytest.mark.parametrize("flag", [
    flag if flag == "--global-batch-size" else pytest.param(flag, marks=pytest.mark.exhaustive)
    for flag in flags_of("plan")])
def test_a_plan_with_one_huge_number_is_refused_or_made_within_seconds(flag):
    check(start_benchmark, *(["plan", flag, str(number)] for number in HUGE))


@pytest.mark.parametrize("arguments, sentence", [
    (["--global-batch-size", "4000000", "--micro-batch-size", "1"],
     "at most 65536 / (pipeline-model-parallel-size 1 x virtual-stages 1) = 65536 microbatches per replica, but "
     "global-batch-size 4000000 / (micro-batch-size 1 x data parallel 1) is 4000000; try --global-batch-size 65536"),
    (["--num-layers", "1000000"], "--num-layers must be at least 1 and at most 4096, but is 1000000"),
    (["--hidden-size", "1000000"], "would need at least")])
def test_the_sentence_has_the_rule_and_the_numbers(arguments, sentence):
    with pytest.raises(UserError) as refusal:
        start_training(arguments)
    assert sentence in str(refusal.value)


def test_a_benchmark_starts_no_million_processes():
    with pytest.raises(UserError, match="at most 64 processes, but these flags need 1000000; lower --tp, --pp or --dp"):
        start_benchmark(["zero", "--dp", "1000000"])


def many_microbatches(name: str, pp: int, chunks: int, microbatches: int, **options) -> Config:
    return Config(num_layers=pp * chunks + 1, micro_batch_size=2, global_batch_size=4 * microbatches, schedule=name,
                  pipeline_model_parallel_size=pp, virtual_stages=chunks, data_parallel_size=2,
                  **options).resolve(2 * pp).with_vocabulary(256)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_peaks_of_many_microbatches_equal_those_counted_in_the_whole_timetable(name, pp):
    """The formulas count few microbatches and extrapolate."""
    for chunks in {SCHEDULES[name].chunks[0], min(SCHEDULES[name].chunks[-1], 3)}:
        for slices, extra in ((1, 1), (2, pp // 2)):
            config = many_microbatches(name, pp, chunks, 13 * pp + extra, slices=slices)
            for mesh in (sizes.mesh_at(config, stage) for stage in {0, pp // 2, pp - 1}):
                for peak in PEAKS:
                    assert peak(config, mesh) == peak.__wrapped__(config, mesh), peak.__name__


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_time_of_many_microbatches_is_that_of_the_whole_simulation(name):
    config = many_microbatches(name, 3, SCHEDULES[name].chunks[0], 200)
    few, whole = (sum(seconds(config, MACHINE).values())
                  for seconds in (step_time.step_seconds, step_time.step_seconds.__wrapped__))
    assert few == pytest.approx(whole, rel=0.01)


def test_the_largest_divisor_of_a_large_prime_is_found_at_once():
    assert [largest_divisor(number, limit) for number, limit in ((12, 5), (12, 12), (7, 6), (1, 0))] == [4, 12, 1, None]
    check(lambda _: largest_divisor(2**31 - 1, 2**30), [])
