"""The runner of a schedule matches sends with receives, and frees activations when the schedule says so."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.harness import build, random_data, tiny, train_rank

import train
from nanodomino import pipeline
from nanodomino.mesh import meta_mesh
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import Timetable, message_received, peak_microbatches, timetable


def sent_and_received(monkeypatch, stage: int, table: Timetable, works_per_batch):
    """Exchange the messages of one stage of the second of two pipelines, without processes. Return {sent or received:
    [(peer, tag)]}, and check what the communicator waits for, holds and posts first."""
    stages = len(table.rows)
    mesh = replace(meta_mesh(stages, 2, 1, pp_rank=stage, dp_rank=1), device=torch.device("cpu"))
    posted, waited, found = [], [], dict(isend=[], irecv=[])

    def post(batch):
        posted.append(batch)
        count = works_per_batch or len(batch)
        return [SimpleNamespace(wait=partial(waited.append, (len(posted), i))) for i in range(count)]

    monkeypatch.setattr(pipeline, "dist", SimpleNamespace(
        isend="isend", irecv="irecv", batch_isend_irecv=post,
        P2POp=lambda op, tensor, peer, group, tag: SimpleNamespace(op=op, tensor=tensor, peer=peer, tag=tag)))
    messages = pipeline.P2PCommunicator(mesh, table, (2, 3), torch.float32, {})
    messages.post(0)
    for done, action in enumerate(table.rows[stage], start=1):
        for half in action.halves:
            received = messages.receive(half)
            before = list(waited)
            if (source := table.placement.source(stage, half)) and source[0] != stage:
                batch, index = next((batch, index) for batch, ops in enumerate(posted, start=1)
                                    for index, op in enumerate(ops)
                                    if (op.op, op.tag) == ("irecv", messages.tag(message_received(half))))
                assert before[-1:] == [(batch, 0 if works_per_batch else index)], "it waited for this message"
                buffers = {op.tensor.data_ptr() for ops in posted for op in ops}
                assert received.data_ptr() not in buffers, "backward keeps it, and a buffer is used again"
            messages.send_later(half, torch.full((3, 2), float(done)).t())
        count = len(waited)
        messages.post(done)
        in_flight = [tensor for _, tensor in messages.sends_in_flight]
        sends = [op.tensor for batch in posted for op in batch if op.op == "isend"]
        assert list(map(id, in_flight)) == list(map(id, sends[-stages:])), "one for each stage, whose tensors must live"
        assert waited[count:] == sorted(waited[count:]), "the oldest first"
        if sends:
            assert sends[-1].is_contiguous()
    for batch in posted:
        assert [op.op for op in batch] == sorted(op.op for op in batch), "receives first"
        for op in batch:
            found[op.op].append((op.peer // 2, op.tag))
            assert op.peer % 2 == 1, "a world rank in the same pipeline"
    return found


@pytest.mark.parametrize("works_per_batch", [None, 1], ids=["gloo", "NCCL"])
@pytest.mark.parametrize("schedule, stages", [("1f1b", 4), ("interleaved", 2), ("interleaved", 4), ("zb-v", 4)])
def test_each_message_has_one_send_and_one_receive_with_its_tag(monkeypatch, schedule, stages, works_per_batch):
    table = timetable(schedule, stages, 8, SCHEDULES[schedule].chunks[0])
    found = [sent_and_received(monkeypatch, stage, table, works_per_batch) for stage in range(stages)]
    for stage, other in [*table.placement.neighbours, *(pair[::-1] for pair in table.placement.neighbours)]:
        sent = [tag for peer, tag in found[stage]["isend"] if peer == other]
        received = [tag for peer, tag in found[other]["irecv"] if peer == stage]
        assert sent == received and len(set(sent)) == len(sent) > 0


def test_connect_opens_each_link_of_a_ring_from_both_ends(monkeypatch):
    """The whole pipeline, but not the world, runs an operation first: NCCL sets a group up with all of its ranks."""
    links = timetable("interleaved", 3, 3, 2).placement
    assert len(links.neighbours) == 3
    for stage in range(3):
        log = []
        monkeypatch.setattr(pipeline, "dist", SimpleNamespace(
            isend="isend", irecv="irecv", P2POp=lambda op, tensor, peer, group: (op, peer, group),
            all_reduce=lambda element, group: log.append(group), batch_isend_irecv=lambda ops: log.extend(ops) or []))
        pipeline.connect(replace(meta_mesh(3, 2, 1, pp_rank=stage, dp_rank=1), groups={"pp": "pipeline"}), links)
        assert log == ["pipeline", *((op, 2 * other + 1, "pipeline") for other in range(3) if other != stage
                                     for op in ("isend", "irecv"))]


def watched_rank(config, data):
    """Run one step. Return this rank's stage, the peak number of tapes that exist when a forward starts, and how many
    are left after the step."""
    mesh, _, optimizer, stage = build(config)
    tapes, peak, forward = [], 0, stage.forward

    def alive():
        gc.collect()
        return sum(tape() is not None for tape in tapes)

    def counting_forward(*arguments):
        nonlocal peak
        peak = max(peak, 1 + alive())
        output, tape = yield from forward(*arguments)
        tapes.extend(weakref.ref(piece) for piece in tape)
        return output, tape

    stage.forward = counting_forward
    train.train_step(1, stage, optimizer, data, config, mesh)
    return mesh.pp_rank, peak, alive()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_are_freed_after_their_last_use(pool, schedule):
    config = tiny(4, pipeline_model_parallel_size=4, schedule=schedule, num_layers=8)
    for pp_rank, peak, left in pool.run(watched_rank, config, random_data(config, 1), world_size=4):
        assert (peak, left) == (peak_microbatches(config.timetable.rows[pp_rank]), 0)


def test_messages_of_megabytes_do_not_deadlock(pool):
    """gloo completes a send only after its receive is posted, so a blocking order would hang."""
    config = tiny(4, pipeline_model_parallel_size=4, num_layers=8, hidden_size=64, num_attention_heads=1,
                  ffn_hidden_size=8, micro_batch_size=512, global_batch_size=2048, dtype="float32",
                  schedule="interleaved")
    outcomes = pool.run(train_rank, config, None, random_data(config, 1), 1, world_size=4)
    assert len({*outcomes[0].losses, *outcomes[3].losses}) == 1
