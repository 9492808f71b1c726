"""Recordings hold what happened, in the schedule's order and on one clock; each moment of a step is counted once.

    recordings of tiny runs   spans, messages and collectives against the schedule and the layers
    recordings by hand        totals to the nanosecond, and the picture
    times                     the streams that record them on a GPU, what has not ended yet, the clocks of several hosts
"""

import json
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from support import needs
from support.harness import build, random_data, tiny

import train
from nanodomino.comm.trace import Event, Trace
from nanodomino.estimate.rank import dry_run
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import message_received, message_sent
from nanodomino.pictures import drawing
from nanodomino.pictures.drawing import PURPOSES, WORK, draw_timeline, timeline
from nanodomino.pictures.merged_trace import (COLLECTIVES, MOMENTS, PASSES, Recording, actions, chrome_trace,
                                              difference, gather, parts, set_ready_times, union)


def traced(config, data, recording=True):
    """Train on the steps of `data` in a worker; return (the recording on rank 0, or this rank's events, losses)."""
    trace = Trace(recording=recording)
    mesh, _, optimizer, stage = build(config, trace=trace, warm=False)
    optimizer.trace = trace
    losses = [train.train_step(1 + step, stage, optimizer, data, config, mesh).loss for step in range(len(data.tokens))]
    return gather(trace, mesh) if recording else trace.events, losses


def record(pool, config, steps=1) -> Recording:
    return pool.run(traced, config, random_data(config, steps), world_size=config.world_size)[0][0]


def of(events, *kinds):
    return [event for event in events if event.kind in kinds]


def totals(events) -> dict[str, int]:
    return {name: sum(end - begin for begin, end in spans) for name, spans in parts(events).items()}


# ---- what is recorded

@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spans_and_messages_follow_the_schedule(pool, schedule):
    """Actions in order, pairs in turns; a message for each link to another stage; totals that add up."""
    config = tiny(3, pipeline_model_parallel_size=3, schedule=schedule, num_layers=6, global_batch_size=12)
    placement = config.placement
    for stage, (events, row) in enumerate(zip(record(pool, config).ranks, config.timetable.rows)):
        found = actions(events)
        assert [{(one.kind, one.args["microbatch"], one.args["chunk"]) for one in spans} for spans in found] == [
            {(half.kind, half.microbatch, half.chunk) for half in action.halves} for action in row]
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


TP2, CP2 = dict(tensor_model_parallel_size=2), dict(context_parallel_size=2, slices=2)


@pytest.mark.parametrize("options", [
    TP2 | dict(slices=2), TP2 | dict(columns=2), TP2 | dict(slices=2, sequence_parallel=True), CP2,
    CP2 | dict(cp_comm_type="a2a")], ids=str)
def test_collectives_and_bytes_are_those_of_a_dry_run_and_each_is_waited_for(pool, options):
    """The bytes of a reduce-scatter are those of the whole tensor, of which a rank keeps only its part."""
    config = tiny(2, micro_batch_size=4, global_batch_size=8, num_layers=2, device="cpu", **options)
    names, traffic = ("group", "slice", "site"), dry_run(train, config).traffic
    for events in record(pool, config).ranks:
        calls, sizes = Counter(), Counter()
        waits = [[event.args.get(name) for name in names] for event in of(events, "wait")]
        for event in of(events, *COLLECTIVES):
            calls[event.args["group"], event.kind] += 1
            sizes[event.args["group"], event.kind] += event.args["bytes"]
            assert event.begin < event.end or event.args["group"] == "dp", "a gather of weights may outlast its step"
            assert "site" not in event.args or [event.args[name] for name in names] in waits
        assert {key: (calls[key], sizes[key]) for key in calls} == {
            key: count for key, count in traffic.items() if key[1] in COLLECTIVES}


def test_recording_changes_no_number_and_without_it_no_event_is_kept(pool):
    config = tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, bucket_size=500)
    (on, losses), (off, others) = (zip(*pool.run(traced, config, random_data(config, 2), recording))
                                   for recording in (True, False))
    assert losses == others and on[0] and not any(off)


@pytest.fixture(scope="module")
def recording(pool):
    return record(pool, tiny(8, num_experts=4, disable_bias_linear=True, pipeline_model_parallel_size=2, slices=2,
                             data_parallel_size=4, expert_model_parallel_size=2), steps=2)


def test_a_recording_has_one_clock_on_which_collectives_meet_within_their_group(recording):
    """Each rank records as many collectives of a group as the ranks it meets. A wait ends when the last has joined."""
    assert recording.caption == "pp 2, dp 4, ep 2, step 1, 2" and recording.places[3] == "stage 0, dp 3"
    assert min(event.begin for events in recording.ranks for event in events) == 0
    for rank, events in enumerate(recording.ranks):
        assert {event.args["group"] for event in of(events, "all_to_all")} == {"ep"}
        for group, other in (("ep", rank ^ 1), ("expert_dp", rank ^ 2)):
            met = [[event for event in of(found, *COLLECTIVES) if event.args["group"] == group]
                   for found in (events, recording.ranks[other])]
            assert met[0] and [event.args["ready"] for event in met[0]] == [
                max(own.begin, others.begin) for own, others in zip(*met, strict=True)]


# ---- arithmetic, by hand

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

def drawn(*recordings):
    """Return {text: its places}, {colour: the widths of its bars in ms} and the legend's words of a timeline."""
    timeline(figure := needs("matplotlib.figure").Figure(), [*recordings])
    (axis,), words, widths = figure.axes, defaultdict(list), defaultdict(list)
    for text in axis.texts:
        words[text.get_text()].append(text.get_position())
    for bars in axis.collections:
        colour = needs("matplotlib.colors").to_hex(bars.get_facecolor()[0]) if len(bars.get_facecolor()) else "none"
        widths[colour] += [round(path.get_extents().width, 3) for path in bars.get_paths()]
    (legend,) = figure.legends
    return words, widths, {text.get_text() for text in (*legend.get_texts(), *figure.texts)}


def one_rank(*spans) -> Recording:
    """A rank that did these (kind, begin, end in milliseconds, args) in a step of 100 ms."""
    return Recording("by hand", [""], [[Event(kind, begin * 10**6, end * 10**6, about) for kind, begin, end, about in [
        ("step", 0, 100, dict(step=1)), *spans]]])


def test_the_picture_numbers_every_microbatch_and_shows_messages_and_totals():
    words, widths, legend = drawn(two_stages())
    assert len(words["0"]) == len(words["1"]) == 4                     # two forwards, two backwards each
    assert {"two stages", "rank 0\nstage 0", "rank 1\nstage 1"} <= {*words}
    assert {"exposed communication", "idle", "loss and norm, all ranks"} <= legend and "gradients over dp" not in legend
    assert widths[WORK["forward"]] == [20, 12, 15] and widths[WORK["weight_gradient"]] == [4]
    (rows,) = (text for text in words if text.startswith("ms"))
    assert "rank 0 100.0 50.0 50%" in " ".join(rows.split("\n")[1].split())
    arrows = sorted((x, place) for text, places in words.items() for x, place in places if text == "")
    assert [x for x, _ in arrows] == [10, 20, 40, 75]
    assert arrows[0][1] == arrows[1][1] < arrows[2][1] == arrows[3][1], "they leave between the rows"


def test_a_pair_is_one_frame_with_two_colours_and_both_names():
    """Its turns have no room for numbers; the next action is not taken for a part of it."""
    turns = [("forward" if i % 2 else "backward", 20 + i, 21 + i, dict(microbatch=3 if i % 2 else 0))
             for i in range(17)]
    words, widths, _ = drawn(one_rank(("forward", 0, 20, dict(microbatch=2)), *turns,
                                      ("backward", 37, 57, dict(microbatch=1))))
    assert [word for word in words if word in ("0", "1", "2", "3", "B0F3")] == ["2", "B0F3", "1"]
    assert widths["none"] == [20, 17, 20] and widths[WORK["forward"]] == [20, *8 * [1]]


def test_chunks_slices_and_the_parts_of_a_backward_are_told_apart():
    words, widths, _ = drawn(one_rank(*((kind, 20 * i, 20 * i + 20, dict(microbatch=0, chunk=int(i > 0))) for i, kind in
                                        enumerate(("forward", "forward", "input_backward", "weight_backward")))))
    assert len(words["0"]) == 1 and len(words["0'"]) == 3 and len({*WORK.values()}) == len(WORK)
    assert widths[WORK["input_backward"]] == widths[WORK["weight_backward"]] == [20]
    for slices in (2, 1):
        words, _, _ = drawn(one_rank(("backward", 0, 80, dict(microbatch=3)), *(
            ("resume", 20 * i, 20 * i + 20, dict(slice=i % slices)) for i in range(4))))
        assert [x for x, _ in words.get("a", [])] == ([10, 50] if slices == 2 else [])
        ((_, number),), (row, *_) = words["3"], [y for _, y in words["b"]] or [99]
        assert 24 < number < row - 7 and (row < 24 + 23 or slices == 1), "inside the bar, below the number"


def test_a_bar_is_pale_until_the_last_rank_has_joined():
    """A reduce-scatter and an all-gather are an all-reduce in two steps; only gathers over dp bring weights."""
    named = {("all_gather", "dp"): "weights", ("reduce_scatter", "expert_dp"): "dp", ("all_gather", "tp"): "tp",
             ("all_to_all", "ep"): "ep"}
    for (kind, group), name in named.items():
        words, widths, legend = drawn(one_rank((kind, 10, 60, dict(group=group, bytes=8, ready=30 * 10**6, slice=1))))
        assert "b" in words and {PURPOSES[name][0]} == legend & {words for words, _ in PURPOSES.values()}
        assert widths[PURPOSES[name][1]] == [20, 30]


def test_chrome_trace_holds_everything(recording):
    """On a thread, events lie within or after each other. Each message is a flow."""
    trace = json.loads(json.dumps(chrome_trace(recording)))
    complete = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert [(row["pid"], row["cat"], round(row["ts"] * 1e3), row["args"]) for row in complete] == [
        (rank, event.kind, event.begin, event.args) for rank, events in enumerate(recording.ranks) for event in events]
    assert all(round(row["dur"] * 1e3) == event.end - event.begin or event.kind in MOMENTS
               for row, event in zip(complete, sum(recording.ranks, [])))
    ends = {}
    for row in complete:
        inside = [end for end in ends.get((row["pid"], row["tid"]), []) if end > row["ts"] + 1e-3]
        assert not inside or row["ts"] + row["dur"] <= min(inside) + 1e-3, f"{row} ends after what it lies in"
        ends[row["pid"], row["tid"]] = [*inside, row["ts"] + row["dur"]]
    threads = {(row["pid"], row["tid"]): row["args"]["name"] for row in trace["traceEvents"]
               if row["name"] == "thread_name"}
    assert {*ends} <= {*threads} and threads[0, 0] == "compute" and threads[0, 1] == "communication 0"
    for kind, end in zip(MOMENTS, "sf"):
        assert {(row["pid"], row["ts"]) for row in trace["traceEvents"] if row["ph"] == end} == {
            (row["pid"], row["ts"]) for row in complete if row["cat"] == kind}


def test_rank_0_writes_both_files_and_a_full_disk_is_only_a_warning(tmp_path, monkeypatch):
    needs("matplotlib")
    monkeypatch.setattr(drawing, "gather", lambda trace, mesh: two_stages())
    said, warned = (draw_timeline(None, None, path / "trace-00000001") for path in (tmp_path, tmp_path / "missing"))
    assert said.startswith("timeline of two stages\n") and "rank 1" in said and "warning" not in said
    assert "warning: the timeline can't be drawn" in warned and "training continues" in warned and "rank 1" in warned
    assert "two stages<" in (tmp_path / "trace-00000001.svg").read_text()
    assert json.loads((tmp_path / "trace-00000001.json").read_text())["otherData"]["caption"] == "two stages"
    monkeypatch.setattr(drawing, "import_optional", lambda name, user: 1 / 0)
    assert "division by zero" in draw_timeline(None, None, tmp_path / "trace-00000002")
    assert (tmp_path / "trace-00000002.json").exists(), "Perfetto needs no matplotlib"
    monkeypatch.setattr(drawing, "gather", lambda trace, mesh: None)
    assert draw_timeline(None, None, tmp_path / "trace-00000003") == ""


# ---- times

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
    (event,) = trace.take()
    assert event.end == event.begin


def test_the_times_of_hosts_that_started_at_other_times_are_comparable(monkeypatch):
    """This host has been running 1000 s longer than its clock says. Its events are taken at the time of day."""
    right, trace = time.perf_counter_ns, Trace()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: right() + 1000 * 10**9)
    with trace.span("step", step=1):
        pass
    (event,) = trace.take()
    assert event.begin <= event.end and abs(event.end - time.time_ns()) < 300e9
