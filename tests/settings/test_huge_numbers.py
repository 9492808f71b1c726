"""A command line with a huge number: within a minute, one sentence refuses it, or the work can start."""

import importlib
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
from nanodomino.schedules.simulation import picture, receives_to_post, timetable
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name, flag_settings
from nanodomino.settings.rules import MAX_FORWARDS

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
