"""A command line with a huge number: within a minute, one sentence refuses it, or the work can start."""

import importlib
import time
from argparse import ArgumentParser

import pytest
import torch
from benchmarks.runner import MOST_PROCESSES, parse

import bench
import train
from nanodomino.comm.world import LaunchInfo
from nanodomino.errors import UserError
from nanodomino.estimate.stages import require_memory
from nanodomino.run.session import from_command_line
from nanodomino.schedules.simulation import picture, receives_to_post, timetable
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name, flag_settings
from nanodomino.settings.rules import MAX_FORWARDS

HUGE = (10**6, 10**9)
LIMIT = 60.0         # seconds of this process, so that the load of the machine does not count: the slowest takes 11
SETTINGS = [flag_name(setting.name) for setting in flag_settings(Config, "The model", "The layout", "The training")
            if setting.type is int]


def start_training(arguments: list[str]):
    """Do what train.py computes from the sizes alone before its first step."""
    device = torch.device("cpu")
    config = from_command_line(arguments, 1).with_vocabulary(256).with_device(device)
    require_memory(train, config, device, 1)
    receives_to_post(config.timetable)
    picture(config.schedule, config.pp, config.microbatches, config.virtual_stages)


def start_benchmark(arguments: list[str]):
    """Do what bench.py does before it starts processes. A plan starts none: make the whole plan."""
    question = importlib.import_module(f"benchmarks.{arguments[0]}")
    flags = parse(question, arguments)
    assert question.processes(flags) <= MOST_PROCESSES
    if arguments[0] == "plan":
        question.answer(flags, LaunchInfo())


def check(start, command_lines):
    for arguments in command_lines:
        timetable.cache_clear()
        before = time.process_time()
        try:
            start(arguments)
        except UserError:
            pass
        assert time.process_time() - before < LIMIT, arguments


def test_train_with_one_huge_number_is_refused_or_starts_within_a_minute():
    most = MAX_FORWARDS * Config(model="nano").resolve(1).micro_batch_size
    check(start_training, [["--global-batch-size", str(most)],
                           *([flag, str(number)] for flag in SETTINGS for number in HUGE)])


@pytest.mark.parametrize("question", [
    question if question != "plan" else pytest.param(question, marks=pytest.mark.exhaustive)
    for question in bench.QUESTIONS])
def test_a_benchmark_with_one_huge_number_is_refused_or_starts_within_a_minute(question):
    """All questions check settings in the same way, so only two try them all. Each tries the flags of its own."""
    parser = ArgumentParser()
    importlib.import_module(f"benchmarks.{question}").add_flags(parser)
    flags = [action.option_strings[0] for action in parser._actions if action.type is int]
    flags = [flag for flag in flags if flag not in SETTINGS or question in ("memory", "plan")]
    check(start_benchmark, ([question, flag, str(number)] for flag in flags for number in HUGE))
