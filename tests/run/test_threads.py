"""The number of threads on a CPU is one if the cores are busy, and a resumed run keeps it."""

import contextlib
import io
import os
from unittest import mock

import pytest
import torch
from support.runs import TINY, main_on_rank, make_corpus

from nanodomino.run.determinism import choose_threads


@pytest.mark.parametrize("available, variable, record, load, chosen, said", [
    (2, "", {}, 1.5, 2, "2 of 2 threads: the load average is 1.5 on 2 cores; OMP_NUM_THREADS=N"),
    (2, "", None, 1.6, 1, "1 of 2 threads: the load average is 1.6 on 2 cores; "),
    (2, "", dict(cpu_threads=8), 9.0, 2, "2 of 2 threads: as before in this run; OMP_NUM_THREADS=N"),
    (2, "2", {}, 9.0, 2, ""), (1, "", dict(cpu_threads=8), 0.0, 1, "")])
def test_busy_cores_have_one_thread(monkeypatch, capsys, available, variable, record, load, chosen, said):
    current = [available]
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current[-1])
    monkeypatch.setattr(torch, "set_num_threads", current.append)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert choose_threads(torch.device("cpu"), record) == current[-1] == chosen
    printed = capsys.readouterr().err
    assert printed.startswith(said) and printed.count("\n") == bool(said)


def train_with_two_threads(flags, load):
    torch.set_num_threads(2)
    with (mock.patch.object(os, "getloadavg", return_value=(load, 0.0, 0.0)),
          mock.patch.dict(os.environ, OMP_NUM_THREADS=""), contextlib.redirect_stderr(io.StringIO()) as printed):
        main_on_rank(flags, ())
    return printed.getvalue()


def test_a_resumed_run_keeps_its_number_of_threads(pool, tmp_path):
    """Another number would round sums differently, and the same layout would not give the same bits."""
    flags = [*TINY, "--data-path", str(make_corpus(tmp_path)), "--run-dir", str(tmp_path / "run"), "--train-iters"]
    for steps, load, said in (("1", 1000.0, "1 of 2 threads: the load"), ("2", 0.0, "1 of 2 threads: as before")):
        assert said in pool.run(train_with_two_threads, [*flags, steps], load, world_size=1)[0]
