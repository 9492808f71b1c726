"""The number of threads on a CPU is what was faster at the start, and a resumed run keeps it. No test reads a clock."""

import contextlib
import io
import os
from unittest import mock

import pytest
import torch
from support.harness import tiny
from support.runs import TINY, main_on_rank, make_corpus

from nanodomino.run import threads
from nanodomino.run.threads import choose_threads, time_matmuls

QUIET, BUSY = (0.0019, 0.0010), (0.0019, 0.0400)       # seconds with one thread and with two


@pytest.mark.parametrize("available, variable, record, seconds, chosen, said", [
    (2, "", {}, QUIET, 2, "2 of 2 threads: four matmuls of a layer take 1.9 ms with 1 and 1 ms with 2; OMP_NUM_THREAD"),
    (2, "", {}, BUSY, 1, "1 of 2 threads: four matmuls of a layer take 1.9 ms with 1 and 40 ms with 2; "),
    (2, "", dict(cpu_threads=8, world_size=1), None, 2, "2 of 2 threads: as before in this run; OMP_NUM_THREADS=N"),
    (2, "", dict(cpu_threads=2, world_size=4), BUSY, 1, "1 of 2 threads: four"),
    (2, "2", {}, None, 2, ""), (1, "", dict(cpu_threads=8, world_size=1), None, 1, "")])
def test_the_faster_number_is_chosen(monkeypatch, capsys, available, variable, record, seconds, chosen, said):
    """Where seconds is None, nothing may be measured."""
    current = [available]
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current[-1])
    monkeypatch.setattr(torch, "set_num_threads", current.append)
    monkeypatch.setattr(threads, "time_matmuls", lambda config, numbers: {(1, 2): seconds}[numbers] or pytest.fail())
    assert choose_threads(tiny(1), torch.device("cpu"), record) == current[-1] == chosen
    printed = capsys.readouterr().err
    assert printed.startswith(said) and printed.count("\n") == bool(said)


def test_a_few_long_waits_count(monkeypatch):
    """The numbers take turns. With two threads every third timing waits, which a median would not show."""
    clock, used = [0.0], []

    def linear(x, weight):
        clock[0] += 0.002 if used[-1] == 1 else 0.050 if len(used) % 3 == 0 else 0.001

    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(threads.F, "linear", linear)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])
    one, two = time_matmuls(tiny(1), (1, 2))
    assert used == [1, 2] * (len(used) // 2) and one == pytest.approx(0.008) and two > 0.020


def train_with_two_threads(flags, seconds):
    torch.set_num_threads(2)
    with (mock.patch.object(threads, "time_matmuls", return_value=seconds),
          mock.patch.dict(os.environ, OMP_NUM_THREADS=""), contextlib.redirect_stderr(io.StringIO()) as printed):
        main_on_rank(flags, ())
    return printed.getvalue()


def test_a_resumed_run_keeps_its_number_of_threads(pool, tmp_path):
    """Another number would round sums differently, and the same layout would not give the same bits."""
    flags = [*TINY, "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run"), "--train-iters"]
    for steps, seconds, said in (("1", BUSY, "1 of 2 threads: four"), ("2", QUIET, "1 of 2 threads: as before")):
        assert said in pool.run(train_with_two_threads, [*flags, steps], seconds, world_size=1)[0]
