"""Imposes NCCL's rules for messages on gloo, so that what would hang on GPUs fails on CPUs.

    in order        the batches of a communicator run one after another, in the order in which they were posted
    connects        the first message of two ranks, in each direction, blocks both hosts until both have posted it
    device waits    some operation waits for the whole GPU (the first load of a kernel, freed memory), and so for every
                    posted message, even if the sender may be waiting for this rank

Every schedule runs under each rule: a few sizes in processes, many more on paper. Without the precaution in pipeline.py
against a rule, a pipeline hangs.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.harness import build, random_data, tiny
from support.pool import WorkerError

import train
from nanodomino import pipeline
from nanodomino.mesh import meta_mesh
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.placement_and_messages import message_received, timetable

PATIENCE = 4.0                           # seconds after which a message counts as lost
# (stages, microbatches) with many messages in both directions; interleaved with a last round that is not full
SIZES = dict.fromkeys(SCHEDULES, (4, 8)) | {"gpipe": (3, 4), "interleaved": (3, 8), "zb-h1": (4, 6), "zb-v": (3, 8)}


class Batch:
    """The single work that NCCL returns for a batch; it can be waited for several times."""

    def __init__(self, future):
        self.future = future

    def wait(self):
        self.future.result(PATIENCE)


class Nccl:
    """Stands in for dist.batch_isend_irecv."""

    def __init__(self, in_order=False, connects=False):
        self.thread = ThreadPoolExecutor(1 if in_order else 64)
        self.connects, self.connected, self.made = connects, set(), []

    def __enter__(self):
        self.real, dist.batch_isend_irecv = dist.batch_isend_irecv, self
        self.ahead, pipeline.ACTIONS_AHEAD["cpu"] = pipeline.ACTIONS_AHEAD["cpu"], pipeline.ACTIONS_AHEAD["cuda"]
        return self

    def __exit__(self, *error):
        dist.batch_isend_irecv, pipeline.ACTIONS_AHEAD["cpu"] = self.real, self.ahead
        self.thread.shutdown(wait=False)

    def __call__(self, operations):
        if self.connects:
            self.connect(operations)
        self.made.append(Batch(self.thread.submit(lambda: [work.wait() for work in self.real(operations)])))
        return [self.made[-1]]

    def connect(self, operations):
        """Announce this rank's ends of all new connections of the batch, then wait for the other ends."""
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        new = {(rank, operation.peer, "send") if operation.op is dist.isend else (operation.peer, rank, "receive")
               for operation in operations} - self.connected
        self.connected |= new
        for sender, receiver, end in new:
            store.set(f"{sender}-{receiver} {end}", "")
        for sender, receiver, end in new:
            other_end = "receive" if end == "send" else "send"
            store.wait([f"{sender}-{receiver} {other_end}"], timedelta(seconds=PATIENCE))


def step_rank(config, data, rules):
    """Run a training step and an evaluation under the rules; return their losses."""
    return step_under(config, data, **rules)


def step_under(config, data, in_order=False, connects=False, device_waits=False, connect_first=True, ahead=None):
    mesh, _, optimizer, stage = build(config)
    with Nccl(in_order, connects) as nccl:
        if ahead:
            pipeline.ACTIONS_AHEAD["cpu"] = ahead
        if connect_first:
            pipeline.connect(mesh, config.placement)
        if device_waits:
            for name in ("forward", "backward", "weight_backward"):
                setattr(stage, name, after_the_device(getattr(stage, name), nccl))
        result = train.train_step(1, stage, optimizer, data, config, mesh)
        return result.loss, train.evaluate(stage, data, config, mesh)


def after_the_device(work, nccl):
    """Wrap a stage's generator function: it waits for all messages that have been posted before it starts."""
    def waits(*arguments, **options):
        for batch in nccl.made:
            batch.wait()
        return (yield from work(*arguments, **options))
    return waits


def config_of(schedule):
    stages, microbatches = SIZES[schedule]
    return tiny(stages, pipeline_model_parallel_size=stages, num_layers=2 * stages, micro_batch_size=24 // microbatches,
                schedule=schedule)


@pytest.mark.parametrize("rule", [dict(in_order=True, connects=True), dict(device_waits=True)],
                         ids=lambda rule: "-".join(rule))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_stage_waits_for_ever(pool, schedule, rule):
    config = config_of(schedule)
    results = pool.run(step_rank, config, random_data(config, 1), rule, world_size=config.pp, timeout=60)
    assert len(set(results)) == 1


@pytest.mark.parametrize("schedule", [
    pytest.param(schedule, marks=[] if schedule == "paired" else pytest.mark.exhaustive) for schedule in SCHEDULES])
def test_no_stage_waits_for_ever_in_zero_2(pool, schedule):
    """There replicas wait for each other's gradients in the middle of a step."""
    config = tiny(8, pipeline_model_parallel_size=4, num_layers=8, zero_stage=2, bucket_size=1, schedule=schedule)
    results = pool.run(step_rank, config, random_data(config, 1), dict(in_order=True, connects=True), timeout=60)
    assert len(set(results)) == 1


@pytest.mark.parametrize("precaution, rule", [
    (dict(connect_first=False), dict(connects=True)),  # GPipe sends its last forward with the first gradient's receive
    (dict(ahead=3), dict(in_order=True)), (dict(ahead=3), dict(device_waits=True))],
    ids=["first-message", "in-order", "device"])
def test_without_its_precaution_a_pipeline_hangs(pool, precaution, rule):
    """Otherwise the tests above could not fail."""
    config = config_of("gpipe" if "connect_first" in precaution else "1f1b")
    with pytest.raises(WorkerError):
        pool.run(step_rank, config, random_data(config, 1), precaution | rule, world_size=config.pp, timeout=30)


# ---- on paper, for more stages than there are cores

class PaperStage:
    """A stage that computes nothing; its forward and backward yield the given numbers of times."""

    def __init__(self, forward, backward):
        self.turns = dict(forward=forward, backward=backward)

    def forward_step(self, batch, stage, hidden, chunk, training):
        yield from [None] * self.turns["forward"]
        return torch.zeros(1), None, lambda output: (output.sum(), 1)

    def backward(self, tape, gradient, on_gradients_ready, later):
        yield from [None] * self.turns["backward"]
        return torch.zeros(1)

    def weight_backward(self, tape, on_gradients_ready):
        yield


def posted_batches(table, stage, turns=((1, 1),)) -> list[list]:
    """Run pipeline.run on one stage. Return, for each batch that it posts, the (sender, receiver, number between the
    two, tag) of each message. turns: the (forward, backward) yields of stages 0, 1, ...; repeated if there are more."""
    batches, counts = [], Counter()

    def batch(operations):
        batches.append([])
        for operation in operations:
            ranks = (stage, operation.peer) if operation.op is dist.isend else (operation.peer, stage)
            batches[-1].append((*ranks, counts[ranks], operation.tag))
            counts[ranks] += 1
        return [SimpleNamespace(wait=lambda: None)]

    mesh = replace(meta_mesh(len(table.rows), 1, 1, stage), device=torch.device("cpu"))
    paper = PaperStage(*turns[stage % len(turns)])
    operation = lambda op, tensor, peer, group, tag: SimpleNamespace(op=op, peer=peer, tag=tag)  # noqa: E731
    with mock.patch.multiple(dist, P2POp=operation, batch_isend_irecv=batch):
        pipeline.run(table, paper, mesh, lambda microbatch, chunk: None, paper.forward_step, (1,), torch.float32)
    return batches


def stopped(table, turns=((1, 1),), ahead=pipeline.ACTIONS_AHEAD["cuda"]) -> list:
    """Execute the batches in the strictest way: a stage proceeds only when the partners of all messages in its batch
    have posted theirs. Return the batches at which stages wait for each other forever; empty if the schedule ends."""
    with mock.patch.dict(pipeline.ACTIONS_AHEAD, cpu=ahead):
        queues = [posted_batches(table, stage, turns) for stage in range(len(table.rows))]
    posted = [set() for _ in queues]
    while any(queues):
        for stage, queue in enumerate(queues):
            posted[stage].update(queue[0] if queue else ())
        free = [stage for stage, queue in enumerate(queues)
                if queue and all(message in posted[message[0]] and message in posted[message[1]]
                                 for message in queue[0])]
        if not free:
            return [queue[0] for queue in queues if queue]
        for stage in free:
            queues[stage].pop(0)
    return []


CHUNKS = {name: schedule.chunks[0] for name, schedule in SCHEDULES.items()}


@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 9), (3, 7), (4, 2), (4, 16), (8, 3), (8, 20), (16, 64)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_end_even_if_messages_block_both_sides(name, stages, microbatches):
    """In training and in evaluation."""
    table = timetable(name, stages, microbatches, CHUNKS[name])
    assert not stopped(table) and not stopped(table.forwards)


FORWARD_FIRST, BACKWARD_FIRST = (1, 5), (5, 1)


@pytest.mark.parametrize("turns", [[FORWARD_FIRST], [BACKWARD_FIRST], [FORWARD_FIRST, BACKWARD_FIRST],
                                   [BACKWARD_FIRST, FORWARD_FIRST],
                                   [BACKWARD_FIRST, FORWARD_FIRST, (1, 1)]], ids=range(5))
@pytest.mark.parametrize("stages, microbatches", [(2, 4), (2, 9), (4, 2), (4, 16), (5, 12)])
def test_pairs_end_whichever_half_is_done_first_on_each_stage(stages, microbatches, turns):
    """A gradient is sent at once, in a batch of its own. Hidden states wait for the end of the pair; otherwise two
    neighbours could wait for each other."""
    table = timetable("paired", stages, microbatches)
    assert not stopped(table, turns)
    for stage in range(1, stages - 1):
        most_sends = max(sum(sender == stage for sender, *_ in batch)
                         for batch in posted_batches(table, stage, turns))
        early = turns[stage % len(turns)] != FORWARD_FIRST
        pairs = any(len(action.halves) > 1 for action in table.rows[stage])
        assert most_sends == (2 if pairs and not early else 1)


@pytest.mark.parametrize("chunks, stages, microbatches", [(3, 2, 5), (3, 4, 16), (4, 3, 7), (5, 8, 17)])
def test_schedules_with_more_chunks_end(chunks, stages, microbatches):
    assert not stopped(timetable("interleaved", stages, microbatches, chunks))


def receives_when_needed(table, ahead):
    """Stands in for receives_to_post: each receive is posted right before the action that needs it."""
    return [[[message_received(half) for half in action.halves
              if (table.placement.source(stage, half) or (stage,))[0] != stage]
             for action in row] for stage, row in enumerate(table.rows)]


def test_receives_posted_only_when_needed_block_their_senders_for_ever():
    """With several chunks, stages send each other messages in both directions at once. With one, neighbours take turns,
    and a receive that is posted when needed is early enough."""
    with mock.patch.object(pipeline, "receives_to_post", receives_when_needed):
        assert {name for name in SCHEDULES if stopped(timetable(name, 4, 8, CHUNKS[name]))} == {"interleaved", "zb-v"}


@pytest.mark.parametrize("ahead", [1, 2])
def test_receives_posted_too_early_block_this_stages_sends_for_ever(ahead):
    assert all(stopped(timetable(name, 4, 8, CHUNKS[name]), ahead=ahead) for name in SCHEDULES)
