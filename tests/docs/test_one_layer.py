"""docs/one-layer.md shows the calls of a run, and its text names the steps that launch and wait."""

import re
from types import SimpleNamespace

import pytest
import torch
from support.benchmark import ask

from benchmarks.calls import PAGE, SIZES, record, replace_tables
from benchmarks.runner import config_of, with_mesh


def tables_of_this_rank():
    return record(*with_mesh(config_of(SimpleNamespace(), 2, **SIZES), torch.device("cpu")))


def test_the_page_shows_the_calls_of_a_run(pool):
    """`python bench.py calls --write` brings the tables up to date."""
    page = PAGE.read_text()
    assert page == replace_tables(page, pool.run(tables_of_this_rank, world_size=2)[0])
    words = " ".join(page.split())
    assert re.findall(r"all-reduce[\w ]* starts in step ([\d.]+)\.", words) == re.findall(
        r"^\| ([\d.]+) \|.*\*The all-reduce starts", page, re.MULTILINE)
    assert re.findall(r"Step (\d) hands over|waits in step (\d)", words) == [("4", ""), ("", "7")]
    assert re.findall(r"^\| ([\d.]+) \|.*\*Here the slice waits", page, re.MULTILINE) == ["4", "7"]


@pytest.mark.exhaustive
def test_bench_prints_the_calls():
    assert ask("calls")["slices"] == 2
