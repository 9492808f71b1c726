"""Recordings hold what happened, in the schedule's order and on one clock; each moment of a step is counted once.

    recordings of tiny runs   spans, messages and collectives against the schedule and the layers
    recordings by hand        totals to the nanosecond, and the picture
"""

import json
import random
import re
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.harness import build, random_data, tiny

import nanodomino.comm.trace
import train
from benchmarks.timeline import PICTURES
from nanodomino.comm.trace import Event, Trace, clock_offset
from nanodomino.estimate.rank import dry_run
from nanodomino.mesh import meta_mesh
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import message_received, message_sent
from nanodomino.timeline.draw import PURPOSES, WORK, draw_timeline, gather, microbatch_label, picture
from nanodomino.timeline.merged_trace import (COLLECTIVES, MOMENTS, PASSES, Recording, actions, chrome_trace,
                                              difference, intersection, lanes_of, set_ready_times,
                                              totals, union)


def traced(config, data, steps, recording=True):
    """Train `steps` steps in a worker; return (the recording on rank 0, losses, this rank's weights)."""
    trace = Trace(recording=recording)
    mesh, model, optimizer, stage = build(config, trace=trace)
    optimizer.trace = trace
    losses = [train.train_step(step, stage, optimizer, data, config, mesh).loss for step in range(1, steps + 1)]
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if not recording:
        return trace.events, losses, weights
    return gather(trace, mesh), losses, weights


def record(pool, world_size, steps=1, **changes) -> Recording:
    config = tiny(world_size, **changes)
    return pool.run(traced, config, random_data(config, steps), steps, world_size=world_size)[0][0]


def test_on_a_gpu_each_groups_collectives_end_in_a_stream_of_their_own(monkeypatch):
    """One stream per group; training's stream must not wait for communication that it overlaps."""
    entered, log, made = ["training's"], defaultdict(list), count()

    @contextmanager
    def enter(stream):
        entered.append(stream)
        yield
        entered.pop()

    def work(name):
        """Return a fake NCCL work: waiting for it makes the current stream wait."""
        wait = SimpleNamespace(wait=lambda: log[entered[-1]].append(f"wait for {name}"))
        return SimpleNamespace(wait=wait.wait, get_future=lambda: wait)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(made))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(
        record=lambda: log[entered[-1]].append("mark")))
    trace = Trace(torch.device("cuda", 0))
    for name in ("first", "second"):
        for group in ("tp", "dp", "world"):
            trace.watch("all_reduce", work(f"{name} of {group}"), group=group, bytes=8)
    assert log == {"training's": 6 * ["mark"], **{i: [f"wait for first of {group}", "mark",
                                                      f"wait for second of {group}", "mark"]
                                                  for i, group in enumerate(("tp", "dp", "world"))}}
    assert all(event.end for event in trace.events)


def test_what_has_not_ended_when_the_events_are_taken_ends_where_it_began():
    """gloo notes a collective's end in a thread of its own, which may run later than the wait."""
    trace, future = Trace(), torch.futures.Future()
    trace.watch("all_reduce", SimpleNamespace(get_future=lambda: future), group="tp", bytes=8)
    (event,) = trace.take(offset=5)
    assert event.end == event.begin


def of(events, *kinds):
    return [event for event in events if event.kind in kinds]


# ---- what is recorded

@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spans_and_messages_follow_the_schedule(pool, schedule):
    """Actions in order, pairs in turns; a message for each link to another stage; totals that add up."""
    config = tiny(3, pipeline_model_parallel_size=3, schedule=schedule, num_layers=6, global_batch_size=12)
    recording = pool.run(traced, config, random_data(config, 1), 1, world_size=3)[0][0]
    placement = config.placement
    for stage, (events, row) in enumerate(zip(recording.ranks, config.timetable.rows)):
        found = actions(events)
        assert [{(one.kind, microbatch_label(one)) for one in spans} for spans in found] == [
            {(half.kind, str(half)[1:]) for half in action.halves} for action in row]
        assert all((len(spans) > 2) == (action.kind == "pair") for spans, action in zip(found, row))
        passes = of(events, *PASSES)
        assert all(one.end <= other.begin for one, other in zip(passes, passes[1:]))
        halves = [half for action in row for half in action.halves]
        expected = {"send": [(given[0], str(given[1])) for half in halves
                             if (given := message_sent(placement, stage, half))],
                    "receive": [(source[0], str(message_received(half))) for half in halves
                                if (source := placement.source(stage, half))]}
        for kind in MOMENTS:
            told = [(event.args["peer"], event.args["message"]) for event in of(events, kind)]
            assert told == [one for one in expected[kind] if one[0] != stage]
        waited_for = [event.args["microbatch"] for event in of(events, "wait") if "microbatch" in event.args]
        assert waited_for == [int(event.args["message"][1:].strip("'")) for event in of(events, "receive")]
        worked = difference(*(union((one.begin, one.end) for one in each) for each in (passes, of(events, "wait"))))
        assert totals(events)["compute"] == sum(end - begin for begin, end in worked)


@pytest.mark.parametrize("slices, columns", [(2, 1), (1, 2)])
def test_collectives_of_tensor_parallelism(pool, slices, columns):
    """The number of collectives at each site is Domino's, and each is waited for."""
    recording = record(pool, 2, tensor_model_parallel_size=2, slices=slices, columns=columns, micro_batch_size=4,
                       global_batch_size=8, num_layers=2)
    microbatches, names = 2, ("group", "slice", "site")
    for events in recording.ranks:
        sums = [event for event in of(events, *COLLECTIVES) if event.args["group"] == "tp"]
        sites = {"embedding": 1, "cross_entropy": 2, "head": columns}
        sites |= {f"layers.{i}.{name}": 2 * columns for i in range(2) for name in ("attention", "mlp")}
        assert Counter(event.args["site"] for event in sums) == {
            site: count * slices * microbatches for site, count in sites.items()}
        waits = [[event.args.get(name) for name in names] for event in of(events, "wait")]
        assert all([event.args[name] for name in names] in waits for event in sums)
        assert all(event.begin < event.end and event.args["bytes"] > 0 for event in sums)


def test_the_bytes_of_a_traced_step_are_those_of_a_dry_run(pool):
    """Also those of a reduce-scatter, of which a rank keeps only its part."""
    options = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True,
                   slices=2, micro_batch_size=4, global_batch_size=8, device="cpu")
    recording, config = record(pool, 4, **options), tiny(4, **options)
    for rank, events in enumerate(recording.ranks):
        found = Counter()
        for event in of(events, *COLLECTIVES):
            found[event.args["group"], event.kind] += event.args["bytes"]
        expected = dry_run(train, config, rank).traffic
        assert found == {key: size for key, (_, size) in expected.items() if key[1] in COLLECTIVES}


EVERYTHING = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, micro_batch_size=2,
                  global_batch_size=8)


@pytest.fixture(scope="module")
def recording(pool):
    """Two steps with tp 2, pp 2, dp 2 and two slices."""
    return record(pool, 8, steps=2, **EVERYTHING)


def test_every_step_is_the_sum_of_its_parts(recording):
    assert recording.steps == [1, 2] and len(recording.ranks) == 8 and recording.begin == 0
    for events in recording.ranks:
        sums = totals(events)
        assert min(sums.values()) >= 0 and sums["compute"] > 0 and sums["optimizer"] > 0 and sums["exposed"] > 0
        assert sums["step"] == sum(event.end - event.begin for event in of(events, "step"))
        assert sums["step"] == sum(sums[name] for name in ("compute", "optimizer", "exposed", "idle", "other"))


def test_recording_changes_no_number(pool):
    """And with recording off, no events are kept."""
    config = tiny(8, **EVERYTHING, bucket_size=500)
    data = random_data(config, 2)
    on = pool.run(traced, config, data, 2)
    off = pool.run(traced, config, data, 2, False)
    for (_, losses, weights), (events, other_losses, other_weights) in zip(on, off):
        assert events == [] and losses == other_losses
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


# ---- one clock

def gathered_with_wrong_clocks(seconds):
    """Measure the offset in a worker whose clock is rank x seconds ahead, and gather a step. Rank 0's first and last
    answer to each rank take 0.2 s."""
    right, send, sent, trace = time.perf_counter_ns, dist.send, Counter(), Trace()

    def sometimes_slow(tensor, peer):
        sent[peer] += 1
        if dist.get_rank() == 0 and sent[peer] in (1, nanodomino.comm.trace.ROUND_TRIPS):
            time.sleep(0.2)
        send(tensor, peer)

    try:
        time.perf_counter_ns = lambda: right() + int(dist.get_rank() * seconds * 1e9)
        dist.send = sometimes_slow
        dist.barrier()
        with trace.span("step", step=1):
            pass
        return clock_offset(), gather(trace, meta_mesh(1, 3, 1, dp_rank=dist.get_rank()))
    finally:
        time.perf_counter_ns, dist.send = right, send


def test_clocks_are_aligned_with_rank_0s_by_the_quickest_round_trip(pool):
    """One that is slow in one direction is off by half of its delay. Steps that began within seconds stay so."""
    offsets, (recording, *others) = zip(*pool.run(gathered_with_wrong_clocks, 1000.0, world_size=3))
    assert offsets == pytest.approx([0, -1000e9, -2000e9], abs=50e6)
    assert others == [None, None]
    assert all(0 <= events[0].begin <= events[0].end < 300e9 for events in recording.ranks)


# ---- arithmetic, by hand

def test_intervals_are_sets():
    generator = random.Random(0)
    for _ in range(200):
        one, other = ([sorted(generator.sample(range(40), 2)) for _ in range(generator.randrange(6))] for _ in range(2))
        merged = union(map(tuple, one)), union(map(tuple, other))
        a, b, *sets = [{point for begin, end in spans for point in range(begin, end)} for spans in
                       (one, other, *merged, difference(*merged), intersection(*merged))]
        assert sets == [a, b, a - b, a & b]
    assert union([(0, 1), (2, 3), (6, 7)], gap=1) == [(0, 3), (6, 7)]


def test_a_collective_lies_in_the_first_free_lane():
    events = [Event("all_reduce", begin, end, {}) for begin, end in ((0, 5), (3, 9), (5, 8))]
    assert [*lanes_of(events).values()] == [0, 1, 0]


def two_stages() -> Recording:
    """One step in ms: stage 0 runs F0, F1, waits, B0, B1; stage 1 F0, B0, F1, B1 with all-reduces over tp in flight."""
    def event(kind, begin, end, **about):
        return Event(kind, begin * 10**6, end * 10**6, about)

    stage_0 = [event("step", 0, 100, step=7),
               event("forward", 0, 10, microbatch=0), event("send", 10, 10, message="F0", peer=1, bytes=8),
               event("forward", 10, 20, microbatch=1), event("send", 20, 20, message="F1", peer=1, bytes=8),
               event("wait", 20, 42, group="pp", microbatch=0), event("receive", 42, 42, message="B0", peer=1),
               event("backward", 42, 60, microbatch=0),
               event("wait", 60, 80, group="pp", microbatch=1), event("receive", 80, 80, message="B1", peer=1),
               event("backward", 80, 92, microbatch=1),
               event("optimizer", 92, 94), event("all_reduce", 94, 96, group="world", bytes=32),
               event("wait", 94, 97, group="world"), event("optimizer", 98, 100)]
    stage_1 = [event("step", 1, 99, step=7),
               event("wait", 1, 12, group="pp", microbatch=0), event("receive", 12, 12, message="F0", peer=0),
               event("forward", 12, 24, microbatch=0), event("all_reduce", 14, 22, group="tp", bytes=4),
               event("wait", 18, 22, group="tp"),
               event("backward", 24, 40, microbatch=0), event("weight_gradient", 26, 30, slice=0),
               event("send", 40, 40, message="B0", peer=0, bytes=8),
               event("wait", 40, 45, group="pp", microbatch=1), event("receive", 45, 45, message="F1", peer=0),
               event("forward", 45, 60, microbatch=1), event("backward", 60, 75, microbatch=1),
               event("send", 75, 75, message="B1", peer=0, bytes=8),
               event("all_reduce", 80, 96, group="world", bytes=32), event("wait", 80, 96, group="world"),
               event("optimizer", 96, 99)]
    recording = Recording("two stages", ["stage 0", "stage 1"], [stage_0, stage_1])
    set_ready_times(recording, [dict(tp=(0,)), dict(tp=(1,))])
    return recording


def test_totals_to_the_nanosecond():
    """A wait is idle until the message is sent or the last rank has joined, and exposed after that."""
    stage_0, stage_1 = map(totals, two_stages().ranks)
    # waits: 20-40 until B0 left, 2 on the wires; 60-75 until B1 left, 5; the world's sum: 94-96 wires, 96-97 after them
    assert stage_0 == {name: value * 10**6 for name, value in dict(
        step=100, compute=50, optimizer=4, exposed=2 + 5 + 2, idle=20 + 15 + 1, other=1, hidden=0).items()}
    # waits: 1-10 until F0 left, 2; the sum 18-22; F1 had long left: 5; the world's sum: 80-94 for rank 0, 2
    assert stage_1 == {name: value * 10**6 for name, value in dict(
        step=98, compute=8 + 16 + 15 + 15, optimizer=3, exposed=2 + 4 + 5 + 2, idle=9 + 14, other=5,
        hidden=4).items()}


def test_waiting_for_a_late_rank_is_not_hidden_communication():
    """Rank 0 launches an all-reduce at 10 and computes until 45; rank 1 joins at 30 and computes on; it ends at 50.
    Half a backward is work, too."""
    late = Recording("late", ["tp 0", "tp 1"], [
        [Event("step", 0, 60, {"step": 1}), Event("input_backward", 0, 52, {"microbatch": 0}),
         Event("all_reduce", joins, 50, {"group": "tp", "bytes": 8}), Event("wait", computes, 52, {"group": "tp"})]
        for joins, computes in ((10, 45), (30, 51))])
    set_ready_times(late, [{}, {}])
    assert [(sums["hidden"], sums["exposed"], sums["compute"]) for sums in map(totals, late.ranks)] == [
        (45 - 30, 50 - 45, 45), (50 - 30, 0, 51)]


# ---- what is written

def texts(svg) -> list[str]:
    """Return the texts of a well-formed picture; texts with a halo count once."""
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")
            if element.get("class") != "halo"]


def drawn(*spans) -> tuple[list[str], str]:
    """Draw a rank that did these (kind, begin, end in milliseconds, args) in a step of 100 ms; return (texts, SVG)."""
    events = [Event(kind, begin * 10**6, end * 10**6, about)
              for kind, begin, end, about in [("step", 0, 100, dict(step=1)), *spans]]
    svg = picture([Recording("by hand", [""], [events])])
    return texts(svg), svg


def test_the_picture_numbers_every_microbatch_and_shows_messages_and_totals():
    svg = picture([two_stages()])
    words = texts(svg)
    assert Counter(words)["0"] == Counter(words)["1"] == 4                         # two forwards, two backwards each
    assert {"two stages", "rank 0", "rank 1", "stage 0", "stage 1", "exposed communication",
            "loss and norm, all ranks"} <= {*words} and "gradients over dp" not in words
    assert any(re.match("rank 0 +100.0 +50.0  50%", word) for word in words)
    rank_0, rank_1 = (float(y) for y in re.findall(r'y="(\S+)">rank \d<', svg))
    arrows = re.findall(r'd="M\S+ (\S+)L\S+ (\S+)" stroke="#444"', svg)
    lengths = [round(float(end) - float(begin)) for begin, end in arrows]
    short = round(rank_1 - rank_0) - 26                                            # between the rows, not across them
    assert lengths == [short, short, -short, -short, 0], "the last one is the legend's"
    places = re.findall(r'<text (x="\S+" y="\S+" class="middle"|x="\S+" y="\S+">)', svg)
    assert len({*places}) == len(places), "no text covers another; the legend takes two lines"


def legend_words(svg) -> set[str]:
    """Return a picture's texts without numbers, except short ones, which are drawn only where there is room."""
    return {words for text in texts(svg) if re.search("[a-z]{2}", words := re.sub(r"[-\d., %]+", " ", text))}


@pytest.mark.parametrize("name", [path.stem.partition("-")[2] for path in (ROOT / "docs").glob("timeline-*.svg")])
def test_a_picture_in_docs_has_the_words_that_the_code_draws_today(pool, name):
    """`bench.py timeline` draws it again."""
    small = dict(hidden_size=16, seq_length=8)
    recordings = [replace(record(pool, 2, **settings | small), caption=caption)
                  for caption, settings in PICTURES[name].items()]
    assert legend_words(picture(recordings)) == legend_words((ROOT / "docs" / f"timeline-{name}.svg").read_text())


def test_recordings_share_one_scale():
    one, two = two_stages(), two_stages()
    one.caption, two.ranks[0][0].end = "1 < 2 & so on", 2 * 10**8

    def widths(*recordings):
        return set(re.findall(rf'width="([\d.]+)" height="26.0" fill="{WORK["forward"]}"', picture([*recordings])))

    assert "1 < 2 & so on" in texts(picture([one, two])) and widths(two) == widths(one, two) != widths(one)


def test_a_pair_is_one_frame_with_two_colours_and_both_names():
    """Its turns have no room for numbers; the next action is not taken for a part of it."""
    turns = [("forward" if i % 2 else "backward", 20 + i, 21 + i, dict(microbatch=3 if i % 2 else 0))
             for i in range(17)]
    words, svg = drawn(("forward", 0, 20, dict(microbatch=2)), *turns, ("backward", 37, 57, dict(microbatch=1)))
    assert [word for word in words if word in ("0", "1", "2", "3", "B0F3")] == ["2", "B0F3", "1"]
    assert svg.count(WORK["forward"]) == 1 + 8 + 1 and svg.count(WORK["backward"]) == 9 + 1 + 1      # and the legend
    assert svg.count('fill="none" stroke="#1f1f1f"') == 1


def test_chunks_slices_and_the_parts_of_a_backward_are_told_apart():
    """A weight backward consists of weight gradients and keeps its own colour."""
    words, svg = drawn(*[(kind, 20 * i, 20 * i + 20, dict(microbatch=0, chunk=int(i > 0))) for i, kind in enumerate(
        ("forward", "forward", "input_backward", "weight_backward"))], ("weight_gradient", 62, 70, dict(slice=0)))
    assert [word for word in words if word.strip("'") == "0"] == ["0", "0'", "0'", "0'"]
    assert [svg.count(WORK[kind]) for kind in ("forward", "input_backward", "weight_backward")] == [3, 2, 2]
    assert svg.count(WORK["weight_gradient"]) == 1, "only in the legend" and len(set(WORK.values())) == len(WORK)
    for slices in (2, 1):
        words, svg = drawn(("backward", 0, 80, dict(microbatch=3)), ("weight_gradient", 5, 9, dict(slice=0)),
                           *[("resume", 20 * i, 20 * i + 20, dict(slice=i % slices)) for i in range(4)])
        assert [word for word in words if word in ("a", "b")] == 2 * ["a", "b"] * (slices == 2) and "3" in words
        assert svg.count(WORK["weight_gradient"]) == 1 + 1


def test_a_bar_is_pale_until_the_last_rank_has_joined():
    """A reduce-scatter and an all-gather are an all-reduce in two steps; only gathers over dp bring weights."""
    named = {("all_gather", "dp"): "weights over dp", ("reduce_scatter", "expert_dp"): "gradients over dp",
             ("all_gather", "tp"): "activations over tp", ("all_to_all", "ep"): "rows for experts over ep"}
    for (kind, group), name in named.items():
        words, svg = drawn((kind, 10, 60, dict(group=group, bytes=8, ready=30 * 10**6, slice=1)))
        assert name in words and "b" in words and len({*words} & {*PURPOSES}) == 1
        widths = [float(width) for width in re.findall(rf'width="([\d.]+)" height="13.0" fill="{PURPOSES[name]}"', svg)]
        assert widths == pytest.approx([20 * 8.92, 30 * 8.92], abs=0.1)


def test_all_to_alls_meet_within_ep_and_gradients_of_experts_over_expert_dp(pool):
    """Each rank records as many collectives of a group as the ranks it meets. A wait ends when the last has joined."""
    recording = record(pool, 4, num_experts=4, disable_bias_linear=True, data_parallel_size=4, num_layers=2,
                       expert_model_parallel_size=2, slices=2, zero_stage=1)
    assert recording.caption == "dp 4, ep 2, step 1" and recording.places[3] == "dp 3"
    for rank, events in enumerate(recording.ranks):
        assert {event.args["group"] for event in of(events, "all_to_all")} == {"ep"}
        for group, other in (("ep", rank ^ 1), ("expert_dp", rank ^ 2)):
            met = [[event for event in found if event.args.get("group") == group and event.kind in COLLECTIVES]
                   for found in (events, recording.ranks[other])]
            assert met[0] and [event.args["ready"] for event in met[0]] == [
                max(own.begin, others.begin) for own, others in zip(*met, strict=True)]


def test_chrome_trace_holds_everything(recording):
    """On a thread, events lie within or after each other. Each message is a flow."""
    trace = json.loads(json.dumps(chrome_trace(recording)))
    complete = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert [(row["pid"], row["cat"], round(row["ts"] * 1e3), row["args"]) for row in complete] == [
        (rank, event.kind, event.begin, event.args) for rank, events in enumerate(recording.ranks) for event in events]
    assert all(round(row["dur"] * 1e3) == event.end - event.begin or event.kind in MOMENTS
               for row, event in zip(complete, sum(recording.ranks, [])))
    open_until = {}
    for row in complete:
        assert row["name"] and row["ts"] + row["dur"] <= recording.end / 1e3 + 1
        ends = open_until.setdefault((row["pid"], row["tid"]), [])
        while ends and ends[-1] <= row["ts"] + 1e-3:
            ends.pop()
        assert not ends or row["ts"] + row["dur"] <= ends[-1] + 1e-3, f"{row} ends after what it lies in"
        ends.append(row["ts"] + row["dur"])
    threads = {(row["pid"], row["tid"]): row["args"]["name"] for row in trace["traceEvents"]
               if row["name"] == "thread_name"}
    assert set(open_until) <= set(threads) and threads[0, 0] == "compute" and threads[0, 1] == "communication 0"
    for kind, end in zip(MOMENTS, "sf"):
        assert {(row["pid"], row["ts"]) for row in trace["traceEvents"] if row["ph"] == end} == {
            (row["pid"], row["ts"]) for row in complete if row["cat"] == kind}


def draw(folder):
    """Return what draw_timeline says in a worker: with a writable and with an unwritable path."""
    config = tiny(2, tensor_model_parallel_size=2)
    trace = Trace()
    mesh, _, optimizer, stage = build(config, trace=trace)
    said = []
    for path in (Path(folder) / "trace-00000001", Path(folder) / "missing" / "trace-00000001"):
        train.train_step(1, stage, optimizer, random_data(config, 1), config, mesh)
        said.append(draw_timeline(trace, mesh, path))
    return said


def test_rank_0_writes_both_files_and_a_full_disk_is_only_a_warning(pool, tmp_path):
    (said, warned), others = pool.run(draw, str(tmp_path), world_size=2)
    assert others == ["", ""]
    assert said.startswith("timeline of tp 2, step 1\n") and "rank 1" in said and "warning" not in said
    assert "warning: the timeline can't be written" in warned and "training continues" in warned and "rank 1" in warned
    assert "tp 2, step 1" in texts((tmp_path / "trace-00000001.svg").read_text())
    assert json.loads((tmp_path / "trace-00000001.json").read_text())["otherData"]["caption"] == "tp 2, step 1"
