"""No tensor in flight is read or written before its wait(): these tests inspect every operation of a step.

On gloo a result that is read before its wait() is right most of the time, and on NCCL too, until a GPU is busy. Here
one rank runs alone (support/fake_world.py). Each collective and message is recorded at its launch with the memory that
it uses, and removed by wait(). In between, memory that is sent may be read; all other accesses are errors.
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
from nanodomino.comm import scatter_and_gather
from nanodomino.overlap.flight import result_of
from nanodomino.overlap.slice_ops import SliceOps
from nanodomino.pipeline import P2PCommunicator
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.zero import ZeroOptimizer

SENT, RECEIVED = "sent", "received"          # an all-reduced tensor is both; it counts as received
KINDS = {tag: kind for kind, tag in scatter_and_gather.TAGS.items()}


class InFlight(TorchDispatchMode):
    """While entered: `started` counts launches, `touched` lists operations on memory that was in flight."""

    def __init__(self):
        super().__init__()
        self.touched, self.started = Counter(), Counter()
        self.in_flight = {}                                   # a Waited -> [(name, storage, SENT or RECEIVED), ...]

    def start(self, name, work, *given):
        """given: (tensor, SENT or RECEIVED) ... -> the work, whose wait() takes them off again."""
        self.started[name] += 1
        waited = Waited(self, work)
        self.in_flight[waited] = [(name, tensor.untyped_storage(), how) for tensor, how in given]
        return waited

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "aten" and not only_views(function):
            busy = {storage._cdata: (name, how) for given in self.in_flight.values() for name, storage, how in given}
            for tensor, argument in operands(function, args, kwargs or {}):
                name, how = busy.get(tensor.untyped_storage()._cdata, (None, None))
                act = "writes to" if writes(argument) else "reads"
                if name and (how is RECEIVED or act == "writes to"):
                    self.touched[f"{function} {act} what {name} has {how}"] += 1
        return function(*args, **(kwargs or {}))


class Waited:
    def __init__(self, flights, work):
        self.flights, self.work = flights, work

    def wait(self):
        self.flights.in_flight.pop(self, None)
        self.work.wait()


@contextmanager
def watched():
    """Watch every collective and message. What they receive is zeros, so that all numbers are finite."""
    flights, sums, batches, exchanges = InFlight(), dist.all_reduce, dist.batch_isend_irecv, scatter_and_gather.exchange

    def all_reduce(tensor, *arguments, async_op=False, **options):
        work = sums(tensor, *arguments, async_op=async_op, **options)
        return flights.start("all_reduce", work, (tensor, RECEIVED)) if async_op else None

    def exchange(gives, takes, group, tag):
        return flights.start(KINDS[tag], exchanges(gives, takes, group, tag), (gives[0], SENT), (takes[0], RECEIVED))

    def messages(operations):
        for one in operations:
            if one.op is dist.irecv:
                one.tensor.zero_()
        return [flights.start(one.op.__name__, work, (one.tensor, SENT if one.op is dist.isend else RECEIVED))
                for one, work in zip(operations, batches(operations), strict=True)]

    with mock.patch.multiple(dist, all_reduce=all_reduce, batch_isend_irecv=messages), \
            mock.patch.object(scatter_and_gather, "exchange", exchange), flights:
        yield flights


def two_steps(rank, config):
    """Watch two training steps and an evaluation of this rank: the second step reads what the first one gathered."""
    data = random_data(config, 2)
    with fake_world(rank, config.world_size):
        mesh, _, optimizer, stage = build(config)
        with watched() as flights:
            skipped = [train.train_step(step, stage, optimizer, data, config, mesh).skipped for step in (1, 2)]
            train.evaluate(stage, data, config, mesh)
    assert skipped == [False, False]
    return flights


TP2 = dict(tensor_model_parallel_size=2, micro_batch_size=4, num_layers=2, dtype="bfloat16")
EIGHT = dict(TP2, num_layers=4, pipeline_model_parallel_size=2, data_parallel_size=2, global_batch_size=16)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, expert_model_parallel_size=2, moe_ffn_hidden_size=24,
               moe_shared_expert_intermediate_size=16, moe_aux_loss_coeff=0.1)
SEQUENCE_PARALLEL = dict(sequence_parallel=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("slices, columns", [
    (1, 1), (1, 2), (2, 2), (3, 1), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((2, 1), (3, 2)))])
def test_no_tensor_parallel_collective_is_touched_in_flight(slices, columns, sequence_parallel):
    """Four all-reduces per layer, slice and column, or four reduce-scatters and six all-gathers."""
    config = tiny(2, **TP2, global_batch_size=8, slices=slices, columns=columns, sequence_parallel=sequence_parallel)
    flights = two_steps(1, config)
    assert not flights.touched and not flights.in_flight
    for kind, count in (("reduce_scatter", 4), ("all_gather", 6)) if sequence_parallel else (("all_reduce", 4),):
        assert flights.started[kind] > 2 * config.microbatches * count * config.num_layers * slices * columns


@pytest.mark.parametrize("schedule, zero_stage, slices, columns", [
    *((schedule, 1, 2, 2) for schedule in SCHEDULES), ("1f1b", 0, 3, 1), ("1f1b", 2, 2, 1),
    *(pytest.param(schedule, 1, 1, 1, marks=pytest.mark.exhaustive) for schedule in ("paired", "zb-v")),
    *(pytest.param(schedule, 2, 2, 1, marks=pytest.mark.exhaustive) for schedule in SCHEDULES if schedule != "1f1b")])
@pytest.mark.parametrize("rank", [0, 7])
def test_nothing_is_touched_in_flight(rank, schedule, zero_stage, slices, columns):
    """On the first and the last stage. On a CPU receives are posted one action early, so more is in flight."""
    flights = two_steps(rank, tiny(8, **EIGHT, slices=slices, columns=columns, zero_stage=zero_stage,
                                   schedule=schedule))
    assert not flights.touched and not flights.in_flight
    assert {"all_reduce", "isend", "irecv"} <= flights.started.keys()
    assert ({"reduce_scatter", "all_gather"} <= flights.started.keys()) == (zero_stage > 0)


@pytest.mark.parametrize("tp, slices, options", [
    (1, 1, {}), (2, 2, SEQUENCE_PARALLEL), (2, 3, dict(recompute_granularity="full", schedule="zb-v"))])
def test_no_row_of_an_expert_is_touched_in_flight(tp, slices, options):
    """A layer has five all-to-alls per microbatch and slice, and three in an evaluation."""
    config = tiny(4 * tp, **EIGHT | EXPERTS | options | dict(tensor_model_parallel_size=tp), slices=slices)
    flights = two_steps(0, config)
    assert not flights.touched and not flights.in_flight
    assert flights.started["all_to_all"] == (2 * 5 + 3) * config.microbatches * slices * config.num_layers // config.pp


@pytest.mark.parametrize("slices, options, kind, count", [
    (1, {}, "reduce_scatter", 1), (2, dict(recompute_granularity="selective"), "reduce_scatter", 1),
    (2, dict(cp_comm_type="a2a"), "all_to_all", 4),
    (3, dict(cp_comm_type="a2a", recompute_granularity="full", schedule="zb-v"), "all_to_all", 6)])
def test_no_key_or_head_of_another_rank_is_touched_in_flight(slices, options, kind, count):
    """`count` of a kind per layer, microbatch and slice, and with a2a two in an evaluation."""
    config = tiny(8, **EIGHT | options | dict(tensor_model_parallel_size=1, zero_stage=0), slices=slices,
                  context_parallel_size=2)
    flights = two_steps(0, config)
    assert not flights.touched and not flights.in_flight
    count = 2 * count + (2 if kind == "all_to_all" else 0)
    assert flights.started[kind] == count * config.microbatches * slices * config.num_layers // config.pp


def test_nor_if_receives_are_posted_as_on_a_gpu():
    with mock.patch.dict(pipeline.ACTIONS_AHEAD, cpu=pipeline.ACTIONS_AHEAD["cuda"]):
        assert not two_steps(0, tiny(8, **EIGHT, slices=2, schedule="zb-v")).touched


@pytest.mark.parametrize("owner, name, options", [
    (SliceOps, "all_reduce", {}), (SliceOps, "reduce_scatter", SEQUENCE_PARALLEL),
    (SliceOps, "all_gather", SEQUENCE_PARALLEL), (SliceOps, "all_to_all", EXPERTS), (P2PCommunicator, "irecv", {}),
    (ZeroOptimizer, "reduce_scatter", {}), (ZeroOptimizer, "all_gather", {})])
def test_a_missing_wait_is_found(owner, name, options):
    """Otherwise the tests above could not fail."""
    with mock.patch.object(owner, "wait", lambda self, *given, **options: result_of(given[-1]) if owner is SliceOps
                           else None):
        flights = two_steps(0, tiny(8, **EIGHT, **options, slices=2))
    assert any(f"what {name} has received" in one for one in flights.touched), flights.touched


def test_what_is_sent_may_be_read_and_not_written_to():
    with fake_world(0, 2), watched() as flights:
        x = torch.ones(4)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])
        assert (2 * x[1:]).sum() == 6 and not flights.touched
        x[1:].add_(1)
        assert flights.touched == {"aten.add_.Tensor writes to what isend has sent": 1}
        work.wait()
        torch._foreach_add_([x], [x])
        assert flights.touched.total() == 1 and not flights.in_flight
