"""NCCL's rules for messages, kept on gloo, so that what would hang on GPUs fails here.

    in order        batches of a communicator are carried out one after the other, as they were made
    first message   two ranks are connected by their first message each way, which blocks both hosts until both have
    come
    device          something waits for the whole device (the first load of a kernel, memory given back): for every
                    message that has been asked for so far, also one whose sender may be waiting for us

Each is tried on every schedule, in processes for a few sizes and on paper for many; and each is shown to bite, where
pipeline.py's own precaution against it is taken away.
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
from nanodomino.schedules.placement import message_received, timetable

PATIENCE = 4.0                           # seconds after which a message counts as never coming
# stages and microbatches at which stages have much to ask of each other; interleaved ones with a round that is not full
SIZES = dict.fromkeys(SCHEDULES, (4, 8)) | {"gpipe": (3, 4), "interleaved": (3, 8), "zb-h1": (4, 6), "zb-v": (3, 8)}


class Batch:
    """NCCL's one work for all messages of a batch; it may be waited for again and again."""

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
        """All ends of the batch first, then wait for the other ends: nothing is sent before they have come."""
        store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
        new = {(me, one.peer, "send") if one.op is dist.isend else (one.peer, me, "receive")
               for one in operations} - self.connected
        self.connected |= new
        for first, last, end in new:
            store.set(f"{first}-{last} {end}", "")
        for first, last, end in new:
            store.wait([f"{first}-{last} {'receive' if end == 'send' else 'send'}"], timedelta(seconds=PATIENCE))


def step_rank(config, data, rules):
    """One training step and an evaluation under these rules, by name."""
    return step_under(config, data, **rules)


def step_under(config, data, in_order=False, connects=False, device_waits=False, meet=True, ahead=None):
    mesh, _, optimizer, stage = build(config)
    with Nccl(in_order, connects) as nccl:
        if ahead:
            pipeline.ACTIONS_AHEAD["cpu"] = ahead
        if meet:
            pipeline.connect(mesh, config.placement)
        if device_waits:
            for name in ("forward", "backward", "weight_backward"):
                setattr(stage, name, after_the_device(getattr(stage, name), nccl))
        result = train.train_step(1, stage, optimizer, data, config, mesh)
        return result.loss, train.evaluate(stage, data, config, mesh)


def after_the_device(work, nccl):
    """`work`, before which all messages that were asked for must have come and gone."""
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


@pytest.mark.parametrize("schedule", [pytest.param(one, marks=[] if one == "paired" else pytest.mark.exhaustive)
                                      for one in SCHEDULES])
def test_nor_where_replicas_wait_for_each_others_gradients_in_the_middle_of_a_step(pool, schedule):
    """ZeRO-2 does."""
    config = tiny(8, pipeline_model_parallel_size=4, num_layers=8, zero_stage=2, bucket_size=1, schedule=schedule)
    results = pool.run(step_rank, config, random_data(config, 1), dict(in_order=True, connects=True), timeout=60)
    assert len(set(results)) == 1


@pytest.mark.parametrize("precaution, rule", [
    (dict(meet=False), dict(connects=True)),           # GPipe: the last forward leaves with the ask for a gradient
    (dict(ahead=3), dict(in_order=True)), (dict(ahead=3), dict(device_waits=True))],
    ids=["first-message", "in-order", "device"])
def test_without_its_precaution_a_pipeline_hangs(pool, precaution, rule):
    """Else the test above could not fail."""
    config = config_of("gpipe" if "meet" in precaution else "1f1b")
    with pytest.raises(WorkerError):
        pool.run(step_rank, config, random_data(config, 1), precaution | rule, world_size=config.pp, timeout=30)


# ---- the same on paper, for more stages than there are cores

class Paper:
    """A stage of which nothing is left but its turns: how many a forward takes, and a backward."""

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


def exchanges(table, stage, turns=((1, 1),)) -> list[list]:
    """What each batch moves that pipeline.run makes of a schedule: (from, to, the how many-th between them, tag).
    turns: of a forward and a backward, on the stages in turn."""
    found, counts = [], Counter()

    def batch(operations):
        ways = [(stage, one.peer) if one.op is dist.isend else (one.peer, stage) for one in operations]
        found.append([])
        for way, one in zip(ways, operations):
            found[-1].append((*way, counts[way], one.tag))
            counts[way] += 1
        return [SimpleNamespace(wait=lambda: None)]

    mesh = replace(meta_mesh(len(table.rows), 1, 1, stage), device=torch.device("cpu"))
    paper = Paper(*turns[stage % len(turns)])
    operation = lambda op, tensor, peer, group, tag: SimpleNamespace(op=op, peer=peer, tag=tag)  # noqa: E731
    with mock.patch.multiple(dist, P2POp=operation, batch_isend_irecv=batch):
        pipeline.run(table, paper, mesh, lambda microbatch, chunk: None, paper.forward_step, (1,), torch.float32)
    return found


def stopped(table, turns=((1, 1),), ahead=pipeline.ACTIONS_AHEAD["cuda"]) -> list:
    """By the strictest reading: a stage goes on only when the partner of each message of its batch has made its own.
    The batches at which stages then wait for each other, and for ever."""
    with mock.patch.dict(pipeline.ACTIONS_AHEAD, cpu=ahead):
        left = [exchanges(table, stage, turns) for stage in range(len(table.rows))]
    made = [set() for _ in left]
    while any(left):
        for stage, rest in enumerate(left):
            made[stage].update(rest[0] if rest else ())
        free = [stage for stage, rest in enumerate(left)
                if rest and all(one in made[one[0]] and one in made[one[1]] for one in rest[0])]
        if not free:
            return [rest[0] for rest in left if rest]
        for stage in free:
            left[stage].pop(0)
    return []


CHUNKS = {name: schedule.chunks[0] for name, schedule in SCHEDULES.items()}


@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 9), (3, 7), (4, 2), (4, 16), (8, 3), (8, 20), (16, 64)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_batches_that_block_both_sides_come_to_an_end(name, stages, microbatches):
    """The evaluation's too."""
    table = timetable(name, stages, microbatches, CHUNKS[name])
    assert not stopped(table) and not stopped(table.forwards)


FORWARD_FIRST, BACKWARD_FIRST = (1, 5), (5, 1)


@pytest.mark.parametrize("turns", [[FORWARD_FIRST], [BACKWARD_FIRST], [FORWARD_FIRST, BACKWARD_FIRST],
                                   [BACKWARD_FIRST, FORWARD_FIRST],
                                   [BACKWARD_FIRST, FORWARD_FIRST, (1, 1)]], ids=range(5))
@pytest.mark.parametrize("stages, microbatches", [(2, 4), (2, 9), (4, 2), (4, 16), (5, 12)])
def test_whichever_half_of_a_pair_is_over_first_on_whichever_stage(stages, microbatches, turns):
    """A gradient leaves then, in a batch of its own; hidden states don't, or two neighbours would wait for each
    other's."""
    table = timetable("paired", stages, microbatches)
    assert not stopped(table, turns)
    for stage in range(1, stages - 1):
        most = max(sum(sender == stage for sender, *_ in batch) for batch in exchanges(table, stage, turns))
        early = turns[stage % len(turns)] != FORWARD_FIRST
        pairs = any(len(action.halves) > 1 for action in table.rows[stage])
        assert most == (2 if pairs and not early else 1)


@pytest.mark.parametrize("chunks, stages, microbatches", [(3, 2, 5), (3, 4, 16), (4, 3, 7), (5, 8, 17)])
def test_through_more_chunks(chunks, stages, microbatches):
    assert not stopped(timetable("interleaved", stages, microbatches, chunks))


def just_before_it_is_needed(table, ahead):
    """Instead of receives_to_post."""
    return [[[message_received(half) for half in action.halves
              if (table.placement.source(stage, half) or (stage,))[0] != stage]
             for action in row] for stage, row in enumerate(table.rows)]


def test_who_asks_only_when_a_message_is_needed_holds_up_its_sender_for_ever():
    """Where stages send each other messages both ways. With one chunk a stage it is late enough: neighbours take
    turns."""
    with mock.patch.object(pipeline, "receives_to_post", just_before_it_is_needed):
        assert {name for name in SCHEDULES if stopped(timetable(name, 4, 8, CHUNKS[name]))} == {"interleaved", "zb-v"}


@pytest.mark.parametrize("ahead", [1, 2])
def test_who_asks_too_early_holds_up_what_it_has_to_send_for_ever(ahead):
    assert all(stopped(timetable(name, 4, 8, CHUNKS[name]), ahead=ahead) for name in SCHEDULES)
