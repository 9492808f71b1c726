"""No tensor in flight is read or written before its wait(): these tests inspect every operation of a step.

On gloo a result that is read before its wait() is right most of the time, and on NCCL too, until a GPU is busy. Here
one rank runs alone, as a dry run (nanodomino/estimate). Each collective, message and copy to or from the host is
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
from nanodomino.estimate.accounts import KIND_OF_TAG, Accounts, Launch, Streams, Wait, arguments_of, flatten, is_view
from nanodomino.estimate.rank import META, world_of
from nanodomino.overlap.slices import SliceOps, result_of
from nanodomino.pipeline import P2PCommunicator
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.zero import ZeroOptimizer


SENT, RECEIVED = "sent", "received"          # an all-reduced tensor is both; it counts as received
# of c10d's operators and of copies: how each argument with tensors is used
USES = {"allreduce_": (RECEIVED,), "_reduce_scatter_base_": (RECEIVED, SENT), "_allgather_base_": (RECEIVED, SENT),
        "alltoall_base_": (RECEIVED, SENT), "send": (SENT,), "recv_": (RECEIVED,), "copy_": (RECEIVED, SENT)}


class InFlight(Accounts):
    """Lists in `touched` operations on memory that was in flight."""

    def restart(self):
        super().restart()
        self.touched, self.in_flight, self.seen = Counter(), {}, 0      # {number: [(kind, storage, SENT or RECEIVED)]}
        self.message_storages, self.buffers = {}, []    # buffers: how many storages have been used by messages so far

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
                if launch.group == "pp":                # holding a storage keeps its number from being used again
                    self.message_storages |= {used._cdata: used for _, used, _ in self.in_flight[launch.number]}
        self.seen = len(self.events)
        return result

    def train_step(self, step, stage, optimizer, dataset, config, mesh, on_action):
        """Watch two training steps and an evaluation: the second step reads what the first one gathered."""
        dataset.windows = config.global_batch_size
        for number in (1, 2):
            train.train_step(number, stage, optimizer, dataset, config, mesh, on_action=on_action)
            self.buffers.append(len(self.message_storages))
        train.evaluate(stage, dataset, config, mesh)
        self.buffers.append(len(self.message_storages))


EIGHT = dict(device="cpu", tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=4,
             global_batch_size=16, num_layers=4, dtype="bfloat16", slices=2)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, expert_model_parallel_size=2, moe_ffn_hidden_size=24,
               moe_shared_expert_intermediate_size=16, moe_aux_loss_coeff=0.1)
CONTEXT = dict(context_parallel_size=2, tensor_model_parallel_size=1, zero_stage=0)
SEQUENCE_PARALLEL, FULL = dict(sequence_parallel=True), dict(recompute_granularity="full")
ON_GPU = dict(device="cuda")
OFFLOAD = ON_GPU | FULL | dict(checkpoint_in_cpu=True)


@pytest.mark.parametrize("kind, options", [
    ("all_reduce", dict(zero_stage=0, slices=3)), ("reduce_scatter", dict(zero_stage=2)),
    ("all_reduce", dict(slices=1)), ("all_reduce", dict(slices=1, columns=2)),
    ("all_gather", SEQUENCE_PARALLEL | dict(columns=2)), ("reduce_scatter", SEQUENCE_PARALLEL | dict(slices=3)),
    ("all_to_all", EXPERTS | dict(tensor_model_parallel_size=1, micro_batch_size=2)),
    ("all_to_all", EXPERTS | SEQUENCE_PARALLEL),
    ("all_to_all", EXPERTS | FULL | dict(schedule="zb-v", slices=3)),
    ("reduce_scatter", CONTEXT | dict(slices=1)), ("reduce_scatter", CONTEXT | dict(recompute_granularity="selective")),
    ("all_to_all", CONTEXT | dict(cp_comm_type="a2a")),
    ("all_to_all", CONTEXT | FULL | dict(cp_comm_type="a2a", schedule="zb-v", slices=3)),
    ("reduce_scatter", ON_GPU | dict(schedule="zb-v")), ("all_gather", ON_GPU | SEQUENCE_PARALLEL)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value))
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 7])
def test_nothing_is_touched_in_flight(rank, kind, options):
    """On the first and the last stage. On a CPU receives are posted one action early, so more is in flight. On a GPU
    NCCL reduces in place. Messages between stages use no new memory after the first step."""
    flights, _ = run_under(InFlight, tiny(8, **EIGHT | options), rank)
    assert not flights.touched and not flights.in_flight
    assert {kind, "send", "receive"} <= {each for _, each in flights.traffic}
    assert 0 < flights.buffers[0] == flights.buffers[-1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 7])
def test_no_schedule_touches_what_is_in_flight(rank, schedule):
    test_nothing_is_touched_in_flight(rank, "all_gather", dict(schedule=schedule, columns=2))


@pytest.mark.parametrize("schedule", ["paired", "gpipe", "zb-v"])
def test_no_copy_to_or_from_the_host_is_touched_in_flight(schedule):
    """At the end, the last sublayer's copies to the host are in flight."""
    flights, _ = run_under(InFlight, tiny(8, **EIGHT | OFFLOAD | dict(schedule=schedule)))
    assert not flights.touched
    assert {kind for used in flights.in_flight.values() for kind, *_ in used} == {"to host"}


@pytest.mark.parametrize("owner, name, options", [
    (SliceOps, "all_reduce", {}), (SliceOps, "reduce_scatter", SEQUENCE_PARALLEL),
    (SliceOps, "all_gather", SEQUENCE_PARALLEL), (SliceOps, "all_to_all", EXPERTS), (P2PCommunicator, "receive", {}),
    (ZeroOptimizer, "reduce_scatter", {}), (ZeroOptimizer, "all_gather", {}), (Streams, "from host", OFFLOAD)])
def test_a_missing_wait_is_found(owner, name, options):
    """Otherwise the tests above could not fail."""
    with mock.patch.object(owner, "wait_event" if owner is Streams else "wait",
                           lambda self, *given, **options: result_of(given[-1]) if owner is SliceOps else None):
        flights, _ = run_under(InFlight, tiny(8, **EIGHT | options))
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
