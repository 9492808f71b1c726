"""No tensor in flight is read or written before its wait(): these tests inspect every operation of a step.

On gloo a result that is read before its wait() is right most of the time, and on NCCL too, until a GPU is busy. Here
one rank runs alone, as a dry run (nanodomino/dry_run). Each collective, message and copy to or from the host is
recorded at its launch with the memory that it uses, and removed by wait(). In between, memory that is sent may be read;
all other accesses are errors.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.fake_cuda import run_under
from support.harness import tiny

import train
from nanodomino.dry_run.accounts import KIND_OF_TAG, Accounts, Launch, Streams, Wait, arguments_of
from nanodomino.dry_run.rank import META, world_of
from nanodomino.dry_run.shapes import flatten, is_view
from nanodomino.overlap.flight import result_of
from nanodomino.overlap.slice_ops import SliceOps
from nanodomino.pipeline import P2PCommunicator
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.zero import ZeroOptimizer

SENT, RECEIVED = "sent", "received"          # an all-reduced tensor is both; it counts as received
# of c10d's operators and of copies: how each argument with tensors is used
USES = {"allreduce_": (RECEIVED,), "_reduce_scatter_base_": (RECEIVED, SENT), "_allgather_base_": (RECEIVED, SENT),
        "alltoall_base_": (RECEIVED, SENT), "send": (SENT,), "recv_": (RECEIVED,), "copy_": (RECEIVED, SENT)}


class InFlight(Accounts):
    """Counts launches in `started`. `touched` lists operations on memory that was in flight."""

    def restart(self):
        super().restart()
        self.touched, self.in_flight, self.seen = Counter(), {}, 0      # {number: [(kind, storage, SENT or RECEIVED)]}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for event in self.events[self.seen:]:
            if isinstance(event, Wait):
                self.in_flight.pop(event.number, None)
        given, before = dict(zip(arguments_of(function)[0], args)) | (kwargs or {}), len(self.events)
        only_views = is_view(function) or function is torch.ops.aten._unsafe_view.default
        if function.namespace == "aten" and not only_views:
            busy = {storage._cdata: (kind, how) for passing in (SENT, RECEIVED) for used in self.in_flight.values()
                    for kind, storage, how in used if how == passing}
            for name, value in given.items():
                for tensor in flatten([value]):
                    kind, how = busy.get(tensor.untyped_storage()._cdata, (None, None))
                    act = "writes to" if name in arguments_of(function)[1] else "reads"
                    if kind and (how is RECEIVED or act == "writes to"):
                        self.touched[f"{function} {act} what {kind} has {how}"] += 1
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for launch in self.events[before:]:
            if isinstance(launch, Launch):
                kind = launch.kind if launch.group == "pp" or launch.kind != "receive" else KIND_OF_TAG[args[3]]
                self.in_flight[launch.number] = [
                    (kind, tensor.untyped_storage(), how) for value, how in zip(args, USES[function._opname])
                    for tensor in flatten([value])]
        self.seen = len(self.events)
        return result

    @property
    def started(self) -> Counter:
        counts = Counter()
        for (_, kind), (calls, _) in self.traffic.items():
            counts[kind] += round(calls)
        return counts

    def train_step(self, step, stage, optimizer, dataset, config, mesh, on_action):
        """Watch two training steps and an evaluation: the second step reads what the first one gathered."""
        dataset.windows = config.global_batch_size
        for number in (1, 2):
            train.train_step(number, stage, optimizer, dataset, config, mesh, on_action=on_action)
        train.evaluate(stage, dataset, config, mesh)


def two_steps(rank, config):
    """Return the InFlight of two steps and an evaluation of this rank."""
    return run_under(InFlight, config, rank)[0]


TP2 = dict(device="cpu", tensor_model_parallel_size=2, micro_batch_size=4, num_layers=2, dtype="bfloat16")
EIGHT = dict(TP2, num_layers=4, pipeline_model_parallel_size=2, data_parallel_size=2, global_batch_size=16)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, expert_model_parallel_size=2, moe_ffn_hidden_size=24,
               moe_shared_expert_intermediate_size=16, moe_aux_loss_coeff=0.1)
SEQUENCE_PARALLEL = dict(sequence_parallel=True)
OFFLOAD = dict(recompute_granularity="full", checkpoint_in_cpu=True)


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
    assert {"all_reduce", "send", "receive"} <= flights.started.keys()
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


@pytest.mark.parametrize("schedule, options", [("zb-v", {}), ("1f1b", SEQUENCE_PARALLEL), ("paired", OFFLOAD)])
def test_nor_on_a_gpu(schedule, options):
    """There NCCL reduces in place, receives are posted later, and copies to and from the host are in flight as well.
    At the end the last sublayer's copies out are."""
    flights = two_steps(0, tiny(8, **EIGHT | options | dict(device="cuda"), slices=2, schedule=schedule))
    left = {kind for used in flights.in_flight.values() for kind, *_ in used}
    assert not flights.touched and left == ({"to host"} if options is OFFLOAD else set())


@pytest.mark.parametrize("owner, name, options", [
    (SliceOps, "all_reduce", {}), (SliceOps, "reduce_scatter", SEQUENCE_PARALLEL),
    (SliceOps, "all_gather", SEQUENCE_PARALLEL), (SliceOps, "all_to_all", EXPERTS), (P2PCommunicator, "receive", {}),
    (ZeroOptimizer, "reduce_scatter", {}), (ZeroOptimizer, "all_gather", {}),
    (Streams, "from host", OFFLOAD | dict(device="cuda"))])
def test_a_missing_wait_is_found(owner, name, options):
    """Otherwise the tests above could not fail."""
    with mock.patch.object(owner, "wait_event" if owner is Streams else "wait",
                           lambda self, *given, **options: result_of(given[-1]) if owner is SliceOps else None):
        flights = two_steps(0, tiny(8, **EIGHT | options, slices=2))
    assert any(f"what {name} has received" in one for one in flights.touched), flights.touched


def test_what_is_sent_may_be_read_and_not_written_to():
    with world_of(0, 2), InFlight({"pp": dist.group.WORLD}, host_counts=False) as flights:
        x = torch.ones(4, device=META)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])
        (2 * x[1:]).sum()
        assert not flights.touched
        x[1:].add_(1)
        assert flights.touched == {"aten.add_.Tensor writes to what send has sent": 1}
        work.wait()
        torch._foreach_add_([x], [x])
        assert flights.touched.total() == 1 and not flights.in_flight
