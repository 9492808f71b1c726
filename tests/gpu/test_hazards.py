"""Nothing that is on the wires is read or written before its wait(): every operation of a step is looked at.

On gloo a sum that is used too early is right most of the time, and on NCCL too, until a GPU is busy. Here one rank runs
alone (support/fake_world.py), each collective and message is put on record when it starts, by the memory that it was
given, and taken off by wait(). What is sent may be read meanwhile, and no more.
"""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.fake_world import fake_world, only_views, operands, writes
from support.harness import build, random_data, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanodomino import pipeline
from nanodomino.comm import collectives
from nanodomino.overlap.flight import result_of
from nanodomino.overlap.slice_ops import SliceOps
from nanodomino.pipeline import P2PCommunicator
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.zero import ZeroOptimizer

SENT, RECEIVED = "sent", "received"          # a sum is both, and is on record as received
KINDS = {tag: kind for kind, tag in collectives.TAGS.items()}


class Wires(TorchDispatchMode):
    """While entered: `started` counts what went on the wires, `touched` what operations did to memory that is there."""

    def __init__(self):
        super().__init__()
        self.touched, self.started = Counter(), Counter()
        self.under_way = {}                                   # a Waited -> [(name, storage, SENT or RECEIVED), ...]

    def start(self, name, work, *given):
        """given: (tensor, SENT or RECEIVED) ... -> the work, whose wait() takes them off again."""
        self.started[name] += 1
        waited = Waited(self, work)
        self.under_way[waited] = [(name, tensor.untyped_storage(), how) for tensor, how in given]
        return waited

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "aten" and not only_views(function):
            busy = {storage._cdata: (name, how) for given in self.under_way.values() for name, storage, how in given}
            for tensor, argument in operands(function, args, kwargs or {}):
                name, how = busy.get(tensor.untyped_storage()._cdata, (None, None))
                act = "writes to" if writes(argument) else "reads"
                if name and (how is RECEIVED or act == "writes to"):
                    self.touched[f"{function} {act} what {name} has {how}"] += 1
        return function(*args, **(kwargs or {}))


class Waited:
    def __init__(self, wires, work):
        self.wires, self.work = wires, work

    def wait(self):
        self.wires.under_way.pop(self, None)
        self.work.wait()


@contextmanager
def watched():
    """Every collective and message from here on. What would arrive is zeros, so that all numbers are finite."""
    wires, sums, batches, exchanges = Wires(), dist.all_reduce, dist.batch_isend_irecv, collectives.exchange

    def all_reduce(tensor, *arguments, async_op=False, **options):
        work = sums(tensor, *arguments, async_op=async_op, **options)
        return wires.start("all_reduce", work, (tensor, RECEIVED)) if async_op else None

    def exchange(gives, takes, group, tag):
        return wires.start(KINDS[tag], exchanges(gives, takes, group, tag), (gives[0], SENT), (takes[0], RECEIVED))

    def messages(operations):
        for one in operations:
            if one.op is dist.irecv:
                one.tensor.zero_()
        return [wires.start(one.op.__name__, work, (one.tensor, SENT if one.op is dist.isend else RECEIVED))
                for one, work in zip(operations, batches(operations), strict=True)]

    with mock.patch.multiple(dist, all_reduce=all_reduce, batch_isend_irecv=messages), \
            mock.patch.object(collectives, "exchange", exchange), wires:
        yield wires


def two_steps(rank, config):
    """The Wires of two training steps and an evaluation of this rank: the second reads what the first has gathered."""
    data = random_data(config, 2)
    with fake_world(rank, config.world_size):
        mesh, _, optimizer, stage = build(config)
        with watched() as wires:
            skipped = [train.train_step(step, stage, optimizer, data, config, mesh).skipped for step in (1, 2)]
            train.evaluate(stage, data, config, mesh)
    assert skipped == [False, False]
    return wires


TP2 = dict(tensor_model_parallel_size=2, micro_batch_size=4, num_layers=2, dtype="bfloat16")
EIGHT = dict(TP2, num_layers=4, pipeline_model_parallel_size=2, data_parallel_size=2, global_batch_size=24)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("slices, columns", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_no_sum_is_touched_while_it_travels(slices, columns, sequence_parallel):
    """Four a layer, for each slice and column, in each of two steps' microbatches; or four scatters and six gathers."""
    config = tiny(2, **TP2, global_batch_size=8, slices=slices, columns=columns, sequence_parallel=sequence_parallel)
    wires = two_steps(1, config)
    assert not wires.touched and not wires.under_way
    for kind, count in (("reduce_scatter", 4), ("all_gather", 6)) if sequence_parallel else (("all_reduce", 4),):
        assert wires.started[kind] > 2 * config.microbatches * count * config.num_layers * slices * columns


@pytest.mark.parametrize("schedule, zero_stage, slices, columns", [
    *((schedule, 1, 2, 2) for schedule in SCHEDULES), ("paired", 1, 1, 1), ("zb-v", 1, 1, 1), ("1f1b", 0, 3, 1),
    ("1f1b", 2, 2, 1),
    *(pytest.param(schedule, 2, 2, 1, marks=pytest.mark.exhaustive) for schedule in SCHEDULES if schedule != "1f1b")])
@pytest.mark.parametrize("rank", [0, 7])
def test_nothing_is_touched_while_it_travels(rank, schedule, zero_stage, slices, columns):
    """First and last stage; on a CPU inputs are asked for an action ahead, the more may be under way."""
    wires = two_steps(rank, tiny(8, **EIGHT, slices=slices, columns=columns, zero_stage=zero_stage, schedule=schedule))
    assert not wires.touched and not wires.under_way
    assert {"all_reduce", "isend", "irecv"} <= wires.started.keys()
    assert ({"reduce_scatter", "all_gather"} <= wires.started.keys()) == (zero_stage > 0)


def test_nor_where_inputs_are_asked_for_as_on_a_gpu():
    with mock.patch.dict(pipeline.ACTIONS_AHEAD, cpu=pipeline.ACTIONS_AHEAD["cuda"]):
        assert not two_steps(0, tiny(8, **EIGHT, slices=2, schedule="zb-v")).touched


@pytest.mark.parametrize("owner, name, sequence_parallel", [
    (SliceOps, "all_reduce", False), (SliceOps, "reduce_scatter", True), (SliceOps, "all_gather", True),
    (P2PCommunicator, "irecv", False), (ZeroOptimizer, "reduce_scatter", False), (ZeroOptimizer, "all_gather", False)])
def test_whoever_does_not_wait_is_found(owner, name, sequence_parallel):
    """Else the tests above could not fail."""
    with mock.patch.object(owner, "wait", lambda self, *given, **options: result_of(given[-1]) if owner is SliceOps
                           else None):
        wires = two_steps(0, tiny(8, **EIGHT, slices=2, sequence_parallel=sequence_parallel))
    assert any(f"what {name} has received" in one for one in wires.touched), wires.touched


def test_what_is_sent_may_be_read_and_not_written_to():
    with fake_world(0, 2), watched() as wires:
        x = torch.ones(4)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])
        assert (2 * x[1:]).sum() == 6 and not wires.touched
        x[1:].add_(1)
        assert wires.touched == {"aten.add_.Tensor writes to what isend has sent": 1}
        work.wait()
        torch._foreach_add_([x], [x])
        assert wires.touched.total() == 1 and not wires.under_way
