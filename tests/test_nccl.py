"""NCCL's rules for messages, kept on gloo, so that what would hang on GPUs fails here.

    in order        batches of a communicator are carried out one after the other, as they were made
    first message   two ranks are connected by their first message each way, which blocks both hosts until both have come
    device          something waits for the whole device (the first load of a kernel, memory given back): for every
                    message that has been asked for so far, also one whose sender may be waiting for us

Each is tried on every schedule; and each is shown to bite, where pipeline.py's own precaution against it is taken away.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import build, random_data, tiny
from pool import WorkerError

import train
from nanodomino import pipeline
from nanodomino.mesh import mesh_on_paper
from nanodomino.schedules import SCHEDULES

PATIENCE = 4.0                           # seconds after which a message counts as never coming
SIZES = [(2, 8), (3, 8), (4, 2), (4, 8)]


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
        self.ahead, pipeline.AHEAD["cpu"] = pipeline.AHEAD["cpu"], pipeline.AHEAD["cuda"]
        return self

    def __exit__(self, *error):
        dist.batch_isend_irecv, pipeline.AHEAD["cpu"] = self.real, self.ahead
        self.thread.shutdown(wait=False)

    def __call__(self, operations):
        if self.connects:
            self.connect(operations)
        self.made.append(Batch(self.thread.submit(lambda: [work.wait() for work in self.real(operations)])))
        return [self.made[-1]]

    def connect(self, operations):
        """All ends of the batch first, then wait for the other ends: nothing is sent before they have come."""
        store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
        new = {(me, one.peer, "send") if one.op is dist.isend else (one.peer, me, "receive") for one in operations} - self.connected
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
            pipeline.AHEAD["cpu"] = ahead
        if meet:
            pipeline.connect(mesh)
        if device_waits:
            for name in ("forward", "backward"):
                setattr(stage, name, after_the_device(getattr(stage, name), nccl))
        result = train.train_step(1, stage, optimizer, data, config, mesh)
        return result.loss, train.evaluate(stage, data, config, mesh)


def after_the_device(work, nccl):
    """`work`, before which all messages that were asked for must have come and gone."""
    def waits(*arguments, **options):
        for batch in nccl.made:
            batch.wait()
        return work(*arguments, **options)
    return waits


def config_of(schedule, stages, microbatches):
    return tiny(stages, pipeline_model_parallel_size=stages, num_layers=stages, micro_batch_size=24 // microbatches, schedule=schedule)


@pytest.mark.parametrize("rule", [dict(in_order=True), dict(connects=True), dict(device_waits=True),
                                  dict(in_order=True, connects=True, device_waits=True)], ids=lambda rule: "-".join(rule))
@pytest.mark.parametrize("stages, microbatches", SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_stage_waits_for_ever(pool, schedule, stages, microbatches, rule):
    config = config_of(schedule, stages, microbatches)
    results = pool.run(step_rank, config, random_data(config, 1), rule, world_size=stages, timeout=60)
    assert len(set(results)) == 1


@pytest.mark.parametrize("precaution, rule", [
    (dict(meet=False), dict(connects=True)),           # GPipe: the last forward leaves with the ask for a gradient
    (dict(ahead=3), dict(in_order=True)), (dict(ahead=3), dict(device_waits=True))], ids=["first-message", "in-order", "device"])
def test_without_its_precaution_a_pipeline_hangs(pool, precaution, rule):
    """Else the test above could not fail."""
    config = config_of("gpipe" if "meet" in precaution else "1f1b", 4, 8)
    with pytest.raises(WorkerError):
        pool.run(step_rank, config, random_data(config, 1), precaution | rule, world_size=4, timeout=30)


# ---- the same on paper, for more stages than there are cores

def batches(name, stage, stages, microbatches) -> list[set]:
    """What each exchange of a stage moves: (microbatch and kind, from, to)."""
    mail, actions = pipeline.Mail(mesh_on_paper(stages, 1, 1, stage), [], None, None), SCHEDULES[name](stage, stages, microbatches)
    found = []
    for done in range(len(actions) + 1):
        batch = set()
        if done and mail.target(actions[done - 1]) is not None:
            batch.add((actions[done - 1], stage, mail.target(actions[done - 1])))
        if done < len(actions) and mail.source(actions[done]) is not None:
            batch.add((actions[done], mail.source(actions[done]), stage))
        found.append(batch)
    return found


@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 9), (3, 7), (4, 2), (4, 16), (8, 3), (8, 32), (16, 64)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_exchanges_that_block_both_sides_come_to_an_end(name, stages, microbatches):
    """The strictest reading: a stage goes on only when the partner of each message of its exchange has made its own."""
    left = [batches(name, stage, stages, microbatches) for stage in range(stages)]
    made = [set() for _ in range(stages)]
    while any(left):
        for stage in range(stages):
            made[stage] |= left[stage][0] if left[stage] else set()
        free = [stage for stage in range(stages) if left[stage] and
                all(message in made[first if last == stage else last] for message in left[stage][0] for _, first, last in [message])]
        assert free, f"stages wait for each other: {[sorted(map(str, rest[0])) for rest in left if rest]}"
        for stage in free:
            left[stage].pop(0)
