"""The pool itself: results by rank, errors that name the right rank and come quickly, hangs that end, worlds of every
size.

The tests of parallel code believe what the pool says; here the pool is tested with functions whose outcome is plain.
"""

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from support.pool import WorkerError, WorkerTimeout, pack

WORLD_SIZES = [1, 2, 4, 8]


@dataclass
class Point:
    """A test's own class travels both ways."""

    x: float
    tensor: torch.Tensor


# ------------------------------------------------------------------------------------ what the workers run


def describe_rank():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    return dist.get_rank(), dist.get_world_size(), [int(os.environ[name]) for name in names], torch.get_num_threads()


def sum_of_ranks():
    value = torch.tensor([float(dist.get_rank())], dtype=torch.float64)
    dist.all_reduce(value)
    return value


def double_point(point):
    return Point(2 * point.x, 2 * point.tensor)


def return_view_and_graph():
    parameter = torch.nn.Parameter(torch.arange(1000.0))
    transposed = torch.arange(6).reshape(2, 3).t()
    return parameter[10:12], (parameter * 2)[:2], parameter, transposed, torch.tensor(1.5).bfloat16()


def fail_on_one_rank(failing):
    if dist.get_rank() == failing:
        raise ValueError(f"rank {failing} cannot go on")
    dist.barrier()


def fail_on_one_rank_while_others_sleep(failing):
    if dist.get_rank() == failing:
        raise ValueError(f"rank {failing} cannot go on")
    time.sleep(60)


def refuse_everywhere():
    raise SystemExit("bad configuration")


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


def reduce_in_pairs():
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=pairs[dist.get_rank() // 2])
    return value.item()


def process_ids(pool):
    return [process.pid for process in pool.processes]


# ------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_results_come_by_rank_and_the_world_is_as_large_as_asked(pool, world_size):
    expected = [(rank, world_size, [rank, rank, world_size, world_size], 1) for rank in range(world_size)]
    assert pool.run(describe_rank, world_size=world_size) == expected


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_reaches_every_rank(pool, world_size):
    for value in pool.run(sum_of_ranks, world_size=world_size):
        assert value.dtype == torch.float64
        assert value.item() == world_size * (world_size - 1) / 2


def test_subgroups_work_and_leave_nothing_for_the_next_call(pool):
    for _ in range(3):
        assert pool.run(reduce_in_pairs) == [1.0, 1.0, 5.0, 5.0, 9.0, 9.0, 13.0, 13.0]


def test_arguments_and_results_of_a_tests_own_class_travel(pool):
    for point in pool.run(double_point, Point(1.5, torch.ones(2, 3)), world_size=2):
        assert point.x == 3.0 and torch.equal(point.tensor, torch.full((2, 3), 2.0))


def test_tensors_travel_without_their_storage_or_their_graph(pool):
    view, from_graph, parameter, transposed, bfloat16 = pool.run(return_view_and_graph, world_size=1)[0]
    assert torch.equal(view, torch.tensor([10.0, 11.0])) and view.untyped_storage().nbytes() == 8
    assert torch.equal(from_graph, torch.tensor([0.0, 2.0])) and not from_graph.requires_grad
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    assert torch.equal(transposed, torch.arange(6).reshape(2, 3).t())
    assert bfloat16.dtype == torch.bfloat16 and bfloat16.shape == () and bfloat16 == 1.5


def test_a_view_of_a_large_buffer_is_packed_small():
    assert len(pack(torch.zeros(1_000_000)[:4])) < 1000


def test_a_call_leaves_no_state_in_its_workers(pool):
    before = pool.run(report_process_state, world_size=2)
    drawn = pool.run(change_process_state, world_size=2)
    assert pool.run(report_process_state, world_size=2) == before
    assert before[0][0] == (torch.float32, True, 1, None)
    assert drawn[0].item() != drawn[1].item()  # ranks draw differently unless they are told to draw alike


# ------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("world_size", [2, 8])
def test_the_first_rank_to_fail_is_named_on_top(pool, world_size):
    pool.run(describe_rank)  # not to count the start
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="cannot go on") as caught:
        pool.run(fail_on_one_rank, world_size - 1, world_size=world_size)
    assert time.monotonic() - begin < 15
    assert caught.value.rank == world_size - 1
    first, trace = str(caught.value).split("\n", 1)
    assert first == f"rank {world_size - 1} of {world_size} failed in support.test_pool.fail_on_one_rank"
    assert "ValueError" in trace and 'raise ValueError(f"rank {failing}' in trace  # the line of the worker's code
    assert sorted(caught.value.failed + caught.value.unfinished) == list(range(world_size))
    assert pool.run(describe_rank, world_size=2)[1][0] == 1


def test_a_rank_that_fails_while_others_are_busy_is_reported_quickly(pool):
    pool.run(describe_rank)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 3 failed") as caught:
        pool.run(fail_on_one_rank_while_others_sleep, 1, world_size=3)
    assert time.monotonic() - begin < 15
    assert caught.value.unfinished == (0, 2)
    assert pool.run(describe_rank, world_size=2)[1][0] == 1


def test_an_error_on_all_ranks_keeps_the_workers(pool):
    pool.run(describe_rank)
    workers = process_ids(pool)
    with pytest.raises(WorkerError, match="SystemExit: bad configuration") as caught:
        pool.run(refuse_everywhere, world_size=4)
    assert sorted(caught.value.failed) == [0, 1, 2, 3]
    pool.run(describe_rank)
    assert process_ids(pool) == workers


def test_a_worker_that_dies_is_reported_with_its_exit_code(pool):
    with pytest.raises(WorkerError, match="process died, exit code 7") as caught:
        pool.run(die_on_one_rank, 1, world_size=2)
    assert caught.value.rank == 1  # though rank 0 may have reported its lost connection before
    assert len(pool.run(describe_rank)) == 8


def test_a_hang_ends_with_stacks_and_the_next_call_works(pool):
    pool.run(describe_rank)
    with pytest.raises(WorkerTimeout) as caught:
        pool.run(forget_one_receive, world_size=3, timeout=2)
    assert caught.value.unfinished == (1, 2)
    assert str(caught.value).startswith("rank 1, 2 of 3 had not finished support.test_pool.forget_one_receive after 2 "
                                        "s")
    assert str(caught.value).count("in forget_one_receive") == 2
    assert pool.processes == []
    assert [value.item() for value in pool.run(sum_of_ranks, world_size=4)] == [6.0] * 4


def test_a_call_that_cannot_be_made_is_refused_before_any_worker_sees_it(pool):
    with pytest.raises(ValueError, match="world_size 9 must lie between 1 and the pool's 8 workers"):
        pool.run(describe_rank, world_size=9)
    with pytest.raises(ValueError, match="top level of a module"):
        pool.run(lambda: None)
