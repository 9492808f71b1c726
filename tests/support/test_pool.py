"""What the pool does when a rank fails, dies or hangs. All other tests show what it does when none does."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from support.pool import WorkerError


def sum_of_ranks():
    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value)
    return value.item()


def fail_on_one_rank(failing):
    if dist.get_rank() == failing:
        raise ValueError(f"rank {failing} cannot go on")
    sleep()


def sleep():
    time.sleep(600)


def die_on_one_rank(dying):
    if dist.get_rank() == dying:
        os._exit(7)
    dist.barrier()


def forget_one_receive():
    if dist.get_rank() != 0:
        dist.recv(torch.zeros(1), src=0)


def test_the_first_rank_to_fail_is_named_on_top_at_once_and_the_next_call_works(pool):
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_on_one_rank, 2, world_size=4, timeout=500)
    assert time.monotonic() - start < 400                             # it takes a second, on an idle machine
    first, trace = str(caught.value).split("\n", 1)
    assert first == "rank 2 of 4 failed in support.test_pool.fail_on_one_rank"
    assert "ValueError: rank 2 cannot go on" in trace and 'raise ValueError(f"rank {failing}' in trace
    assert pool.run(sum_of_ranks, world_size=2) == [1, 1]


def test_a_worker_that_dies_is_reported_with_its_exit_code(pool):
    """On top, although rank 0 may have reported its lost connection before."""
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 failed .*\n\nthe process died, exit code 7"):
        pool.run(die_on_one_rank, 1, world_size=2)
    assert pool.run(sum_of_ranks) == [28] * 8


def test_a_hang_ends_and_the_next_call_works(pool, monkeypatch):
    with pytest.raises(WorkerError, match="in forget_one_receive\n.*\n(.*\n)*.*Timed out waiting 5000ms"):
        pool.run(forget_one_receive, world_size=3, timeout=5)
    monkeypatch.setattr("support.pool.GRACE", 0.5)                     # nothing is reported while it sleeps
    with pytest.raises(WorkerError, match=r"^rank 0 of 1 had not finished support.test_pool.sleep and was killed"):
        pool.run(sleep, world_size=1, timeout=3)
    assert pool.run(sum_of_ranks, world_size=4) == [6] * 4
