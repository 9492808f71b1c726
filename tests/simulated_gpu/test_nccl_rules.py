"""Imposes NCCL's rules for messages on pipeline.run, so that what would hang on GPUs fails on CPUs.

    in order        the batches of a communicator run one after another, in the order in which they were posted
    device waits    some operation waits for the whole GPU (the first load of a kernel, freed memory), and so for every
                    posted message, even if the sender may be waiting for this rank
    connects        the first message of two ranks, in each direction, blocks both hosts until both have posted it

Every stage runs pipeline.run alone and on paper: nothing is computed, and the batches of messages that it posts are
written down. Then they are carried out in the strictest way: a stage proceeds only when its batch is done, which covers
the first two rules. Without the precaution in pipeline.py against a rule, a pipeline hangs.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exactness import test_layouts
from support.fake_world import fake_world
from support.harness import build, tiny

from benchmarks.gpu import FEATURES
from benchmarks.runner import Training, with_mesh
from nanodomino import pipeline
from nanodomino.mesh import meta_mesh
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import message_received, timetable

CHUNKS = {name: schedule.chunks[0] for name, schedule in SCHEDULES.items()}


class PaperStage:
    """A stage that computes nothing; its forward and backward yield the given numbers of times."""

    def __init__(self, forward, backward):
        self.turns, self.message_buffers = dict(forward=forward, backward=backward), {}

    def forward_step(self, batch, stage, hidden, chunk, training):
        yield from [None] * self.turns["forward"]
        return torch.zeros(1), None, lambda output: (output.sum(), 1)

    def backward(self, tape, gradient, on_gradients_ready, later, loss_scale):
        yield from [None] * self.turns["backward"]
        return torch.zeros(1)

    def weight_backward(self, tape, on_gradients_ready):
        yield


@contextmanager
def on_paper(stages, stage):
    """Yield (mesh, batches). For each message of a batch that the stage posts: (sender, receiver, number between the
    two, tag)."""
    batches, counts = [], Counter()

    def batch(operations):
        batches.append([])
        for operation in operations:
            ranks = (stage, operation.peer) if operation.op is dist.isend else (operation.peer, stage)
            batches[-1].append((*ranks, counts[ranks], operation.tag))
            counts[ranks] += 1
        return [SimpleNamespace(wait=lambda: None)]

    operation = lambda op, tensor, peer, group, tag=0: SimpleNamespace(op=op, peer=peer, tag=tag)  # noqa: E731
    with mock.patch.multiple(dist, P2POp=operation, batch_isend_irecv=batch, all_reduce=mock.Mock()):
        yield replace(meta_mesh(stages, 1, 1, stage), device=torch.device("cpu")), batches


def posted_batches(table, stage, turns=((1, 1),)) -> list[list]:
    """Return the batches that pipeline.run posts. turns: the (forward, backward) yields of stages 0, 1, ...; repeated
    if there are more."""
    paper = PaperStage(*turns[stage % len(turns)])
    with on_paper(len(table.rows), stage) as (mesh, batches):
        pipeline.run(table, paper, mesh, lambda microbatch, chunk: None, paper.forward_step, (1,), torch.float32)
    return batches


def stopped(table, turns=((1, 1),), ahead=pipeline.ACTIONS_AHEAD["cuda"], connected=True) -> list:
    """Execute the batches: a stage proceeds only when the partners of all messages in its batch have posted theirs.
    Return the batches at which stages wait for each other forever; empty if the schedule ends.

    connected: False: a batch with a first message between two stages is posted only when both have come to theirs.
    """
    with mock.patch.dict(pipeline.ACTIONS_AHEAD, cpu=ahead):
        queues = [posted_batches(table, stage, turns) for stage in range(len(table.rows))]
    posted, arrived = [set() for _ in queues], set()
    while any(queues):
        arrived |= {(message[:2], stage) for stage, queue in enumerate(queues) if queue for message in queue[0]}
        for stage, queue in enumerate(queues):
            if queue and (connected or all((message[:2], end) in arrived for message in queue[0]
                                           for end in message[:2])):
                posted[stage].update(queue[0])
        free = [stage for stage, queue in enumerate(queues)
                if queue and all(message in posted[message[0]] and message in posted[message[1]]
                                 for message in queue[0])]
        if not free:
            return [queue[0] for queue in queues if queue]
        for stage in free:
            queues[stage].pop(0)
    return []


@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 9), (3, 7), (4, 2), (4, 16), (8, 3), (8, 20), (16, 64)])
@pytest.mark.parametrize("name, chunks", [*CHUNKS.items(), ("interleaved", 3), ("interleaved", 4)])
def test_no_stage_waits_for_ever(name, chunks, stages, microbatches):
    """In training and in evaluation. connect() has connected all pairs of stages, in each direction that is used."""
    table = timetable(name, stages, microbatches, chunks)
    assert not stopped(table) and not stopped(table.forwards)
    with on_paper(stages, 0) as (mesh, connections):
        pipeline.connect(mesh, table.placement)
    posted, connected = ({message[:2] for batch in batches for message in batch}
                         for batches in (posted_batches(table, 0), connections))
    assert posted <= connected


def test_every_pipeline_that_tests_and_benchmarks_build_ends():
    settings = [(case.values[0], case.values[1]) for case in test_layouts.CASES] + [
        (8, dict(global_batch_size=64, micro_batch_size=4, num_layers=4) | more) for more in FEATURES.values()]
    configs = {(config.schedule, config.pp, config.virtual_stages, config.microbatches): config
               for config in (tiny(world_size, **options) for world_size, options in settings)}
    assert not [key for key, config in configs.items() if config.pp > 1 and (
        stopped(config.timetable) or stopped(config.timetable.forwards))]


@pytest.mark.parametrize("builder", [
    build, lambda config: Training(*with_mesh(config, torch.device("cpu")))], ids=["tests", "benchmarks"])
def test_who_builds_a_pipeline_connects_its_stages_before_the_first_step(builder):
    config = tiny(2, pipeline_model_parallel_size=2)
    with fake_world(0, 2), mock.patch.object(pipeline, "connect") as connect:
        builder(config)
    assert connect.call_args.args[1] == config.placement


@pytest.mark.parametrize("precaution", [dict(connected=False), *(dict(ahead=ahead) for ahead in (1, 2, 3))], ids=str)
def test_without_its_precaution_a_pipeline_hangs(precaution):
    """A receive that is posted early blocks this stage's sends. Without connect(), a stage that sends its last forward
    together with the receive of the first gradient, as in GPipe, never sends it."""
    names = ["gpipe"] if "connected" in precaution else SCHEDULES
    assert all(stopped(timetable(name, 4, 8, CHUNKS[name]), **precaution) for name in names)


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
