"""The number of threads on a CPU is what was faster at the start, and a resumed run keeps it. No test reads a clock."""

import os
from unittest import mock

import pytest
import torch
from support.harness import tiny
from support.jobs import TINY, make_corpus
from support.train_in_pool import main_on_rank

from nanodomino.run import threads
from nanodomino.run.threads import choose_threads, time_matmuls


@pytest.mark.parametrize("available, variable, earlier, seconds, chosen, said", [
    pytest.param(2, None, None, (0.0019, 0.0010), 2, "2 of 2 threads: four matmuls of a layer take 1.9 ms with 1 and "
                 "1 ms with 2; OMP_NUM_THREADS=N", id="quiet"),
    pytest.param(2, None, None, (0.0019, 0.0400), 1, "1 of 2 threads: four matmuls of a layer take 1.9 ms with 1 and "
                 "40 ms with 2; ", id="busy"),
    pytest.param(2, None, 2, None, 2, "2 of 2 threads, as before in this run; OMP_NUM_THREADS=N", id="resumed"),
    pytest.param(2, None, 8, None, 2, "2 of 2 threads, as before", id="resumed on fewer cores"),
    pytest.param(2, "2", 1, None, 2, "", id="OMP_NUM_THREADS"), pytest.param(1, None, 8, None, 1, "", id="one core")])
def test_the_faster_number_of_threads_is_chosen(monkeypatch, available, variable, earlier, seconds, chosen, said):
    """Where seconds is None, nothing may be measured."""
    lines, current = [], [available]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current[-1])
    monkeypatch.setattr(torch, "set_num_threads", current.append)
    monkeypatch.setattr(threads, "time_matmuls", lambda config, numbers: {(1, 2): seconds}[numbers] or pytest.fail())
    assert choose_threads(tiny(1), earlier, lines.append) == current[-1] == chosen
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)


def test_a_few_long_waits_count(monkeypatch):
    """The numbers take turns. With two threads every third matmul waits for 50 ms, which a median would not show."""
    clock, used = [0.0], []

    def linear(x, weight):
        assert (x.size(0), *weight.shape) == (24, 64, 16)
        clock[0] += 0.002 if used[-1] == 1 else 0.050 if len(used) % 3 == 0 else 0.001

    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(threads.F, "linear", linear)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])
    one, two = time_matmuls(tiny(1), (1, 2))
    assert used == [1, 2] * (len(used) // 2) and clock[0] < 1.0
    assert one == pytest.approx(0.008) and two > 0.020


def train_with_two_threads(flags, seconds):
    torch.set_num_threads(2)
    with mock.patch.object(threads, "time_matmuls", return_value=seconds), mock.patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        return main_on_rank(flags, ()).output


def test_a_resumed_run_keeps_its_number_of_threads(pool, tmp_path):
    """Another number would round sums differently, and the same layout would not give the same bits."""
    flags = [*TINY, "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run"), "--train-iters"]
    for steps, seconds, said in (("1", (0.1, 0.9), "1 of 2 threads: "), ("2", (0.9, 0.1), "1 of 2 threads, as before")):
        assert said in pool.run(train_with_two_threads, [*flags, steps], seconds, world_size=1)[0]
