"""The pool itself: results by rank, errors that name the right rank and come quickly, hangs that end.

The tests of parallel code believe what the pool says; here the pool is tested with functions whose outcome is plain.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist

from support.pool import WorkerError, pack


# ---- what the workers run

def describe_rank():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    value = torch.tensor([float(dist.get_rank())], dtype=torch.float64)
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), [int(os.environ[name]) for name in names], value.item()


def return_view_and_graph():
    parameter = torch.nn.Parameter(torch.arange(1000.0))
    transposed = torch.arange(6).reshape(2, 3).t()
    return parameter[10:12], (parameter * 2)[:2], parameter, transposed, torch.tensor(1.5).bfloat16()


def fail_on_one_rank(failing, others):
    if dist.get_rank() == failing:
        raise ValueError(f"rank {failing} cannot go on")
    others()


def sleep():
    time.sleep(60)


def die_on_one_rank(dying):
    if dist.get_rank() == dying:
        os._exit(7)
    dist.barrier()


def forget_one_receive():
    if dist.get_rank() != 0:
        dist.recv(torch.zeros(1), src=0)


def change_process_state():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["LEFT_BY_A_TEST"] = "1"
    return torch.rand(1)


def report_process_state():
    left = os.environ.get("LEFT_BY_A_TEST")
    state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), left
    return state, torch.rand(1).item(), os.getpid()


# ---- what comes back

@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_results_come_by_rank_and_the_world_is_as_large_as_asked(pool, world_size):
    total = world_size * (world_size - 1) / 2
    expected = [(rank, world_size, [rank, rank, world_size, world_size], total) for rank in range(world_size)]
    assert pool.run(describe_rank, world_size=world_size) == expected


def test_tensors_travel_without_their_storage_or_their_graph(pool):
    view, from_graph, parameter, transposed, bfloat16 = pool.run(return_view_and_graph, world_size=1)[0]
    assert torch.equal(view, torch.tensor([10.0, 11.0])) and len(pack(torch.zeros(1_000_000)[:4])) < 1000
    assert torch.equal(from_graph, torch.tensor([0.0, 2.0])) and not from_graph.requires_grad
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    assert torch.equal(transposed, torch.arange(6).reshape(2, 3).t())
    assert bfloat16.dtype == torch.bfloat16 and bfloat16.shape == () and bfloat16 == 1.5


def test_a_call_leaves_no_state_in_its_workers(pool):
    before = pool.run(report_process_state, world_size=2)
    drawn = pool.run(change_process_state, world_size=2)
    assert pool.run(report_process_state, world_size=2) == before
    assert before[0][0] == (torch.float32, True, 1, None)
    assert drawn[0].item() != drawn[1].item()  # ranks draw differently unless they are told to draw alike


# ---- what goes wrong

@pytest.mark.parametrize("others", [dist.barrier, sleep])
def test_the_first_rank_to_fail_is_named_on_top_at_once_and_the_next_call_works(pool, others):
    """Whether the others wait for it or are busy."""
    pool.run(describe_rank)                                           # not to count the start
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_on_one_rank, 2, others, world_size=4)
    assert time.monotonic() - start < 30
    first, trace = str(caught.value).split("\n", 1)
    assert first == "rank 2 of 4 failed in support.test_pool.fail_on_one_rank"
    assert "ValueError: rank 2 cannot go on" in trace and 'raise ValueError(f"rank {failing}' in trace
    assert ("had not finished" in trace) == (others is sleep)
    assert pool.run(describe_rank, world_size=2)[1][0] == 1


def test_a_worker_that_dies_is_reported_with_its_exit_code(pool):
    """On top, although rank 0 may have reported its lost connection before."""
    with pytest.raises(WorkerError, match=r"^rank 1 of 2 failed .*\n\nthe process died, exit code 7"):
        pool.run(die_on_one_rank, 1, world_size=2)
    assert len(pool.run(describe_rank)) == 8


def test_a_hang_ends_and_the_next_call_works(pool):
    with pytest.raises(WorkerError, match="in forget_one_receive\n.*\n(.*\n)*.*Timed out waiting 2000ms"):
        pool.run(forget_one_receive, world_size=3, timeout=2)
    with pytest.raises(WorkerError, match=r"^rank 0 of 1 had not finished support.test_pool.sleep and was killed"):
        pool.run(sleep, world_size=1, timeout=1)
    assert len(pool.run(describe_rank, world_size=4)) == 4
