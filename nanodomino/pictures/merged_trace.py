"""Merges the ranks' traces into one recording and adds up where each rank's time went.

The time of a rank's step is the sum of five parts:

    compute       forward and backward, without waiting
    optimizer     gradient norm, clipping, update
    exposed       waiting for communication in flight, with no computation to hide it
    idle          waiting for another rank that has not sent its message or joined the collective yet
    other         everything else: zeroing gradients, launching collectives, sending messages

So each wait is cut in two, at the moment when the last rank that takes part launches. Until then the waiting rank is
idle. From then on communication is exposed. Finding that moment needs the traces of all ranks, on one clock.

A sixth number, `hidden`, is not part of the sum: the time in which this rank computed while a collective was in flight.
It leaves out messages between stages, because the moment at which a message arrives is not recorded.

In a pipeline most idle time is the bubble. With 1F1B, p equal stages and m microbatches, idle / (step - idle) is close
to (p - 1)/m (2104.04473, section 2.2).
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch.distributed as dist

from nanodomino.comm.trace import Event, Trace
from nanodomino.mesh import Mesh
from nanodomino.schedules.definitions import PASSES as ACTIONS

PASSES = tuple(action.kind for action in ACTIONS)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
MOMENTS = ("send", "receive")


@dataclass
class Recording:
    """The events of all ranks on one clock, in nanoseconds since the first event."""
    caption: str
    places: list[str]            # each rank's place in the mesh, such as "stage 1, tp 0"
    ranks: list[list[Event]]     # the events of each rank


def gather(trace: Trace, mesh: Mesh) -> Recording | None:
    """Return the events of all ranks on rank 0, and None on other ranks. Every rank must call it."""
    sizes = {name: mesh.axis(axis) for name, axis in (("stage", "pp"), ("dp", "dp"), ("tp", "tp"))}
    place = ", ".join(f"{name} {index}" for name, (size, index) in sizes.items() if size > 1)
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((place, mesh.rows, trace.take()), gathered)
    if gathered is None:
        return None
    places, rows, ranks = map(list, zip(*gathered))
    events = [event for events in ranks for event in events]
    first = min(event.begin for event in events)
    for event in events:
        event.begin, event.end = event.begin - first, event.end - first
    layout = ", ".join(f"{axis} {size}" for axis in ("tp", "pp", "dp", "cp", "ep")
                       if (size := mesh.sizes.get(axis) or mesh.axis(axis)[0]) > 1)
    steps = sorted({event.args["step"] for event in events if event.kind == "step"})
    recording = Recording(f"{layout or 'one rank'}, step {', '.join(map(str, steps))}", places, ranks)
    set_ready_times(recording, rows)
    return recording


def inside(times: np.ndarray, spans) -> np.ndarray:
    """Return for each time whether it lies in a span: whether more spans have begun than have ended."""
    begins, ends = np.sort(np.array(spans).reshape(-1, 2), axis=0).T
    return np.searchsorted(begins, times, "right") > np.searchsorted(ends, times, "right")


def spans_where(times: np.ndarray, flags: np.ndarray) -> list[tuple]:
    """Return sorted and disjoint spans. flags: for each time, whether a span lies between it and the next time."""
    changes = times[np.flatnonzero(np.diff(flags, prepend=False))].tolist()
    return [*zip(changes[::2], changes[1::2])]


def difference(spans, holes) -> list[tuple]:
    """Return the parts of `spans` outside all `holes`, sorted and disjoint."""
    spans, holes = [*spans], [*holes]
    times = np.unique([*spans, *holes])
    return spans_where(times, inside(times, spans) & ~inside(times, holes))


def union(spans) -> list[tuple]:
    """Sort the spans, and merge those that overlap or touch."""
    return difference(spans, [])


def spans_of(events, *kinds) -> list[tuple]:
    return union((event.begin, event.end) for event in events if event.kind in kinds)


def actions(events) -> list[list[Event]]:
    """Return one rank's actions, each a list of events: a single forward or backward, or all turns of a pair."""
    step, turns, found, end = 0, [], [], -1
    for event in events:
        step += event.kind == "step"                           # microbatches count from 0 in each step
        if event.kind in PASSES:
            turns.append((event, (step, event.kind, event.args.get("microbatch"), event.args.get("chunk"))))
    last = {key: i for i, (_, key) in enumerate(turns)}
    for i, (event, key) in enumerate(turns):
        if i > end:                                            # no turn of the previous action follows
            found.append([])
        end = max(end, last[key])
        found[-1].append(event)
    return found


def messages(recording: Recording) -> list[tuple]:
    """Return (sender's rank, send event, receiver's rank, receive event) for every message between stages. Each step
    uses the same names, such as F0. So between two ranks the n-th send of a name belongs to its n-th receive."""
    ends = {kind: defaultdict(list) for kind in MOMENTS}
    for rank, events in enumerate(recording.ranks):
        for event in events:
            if event.kind in MOMENTS:
                pair = (rank, event.args["peer"]) if event.kind == "send" else (event.args["peer"], rank)
                ends[event.kind][(*pair, event.args["message"])].append(event)
    return [(sender, send, receiver, receive) for (sender, receiver, name), sends in ends["send"].items()
            for send, receive in zip(sends, ends["receive"][sender, receiver, name])]


def set_ready_times(recording: Recording, rows: list[dict]):
    """Set args["ready"] of each collective to the time when the last of its ranks launched it, and of each wait for a
    message to the time when the message was sent. Collectives have no names: the n-th collective of a group on one rank
    meets the n-th on the others. rows: for each rank {group: its ranks}; a group without an entry has all ranks."""
    meetings = defaultdict(list)
    for groups, events in zip(rows, recording.ranks):
        numbers = defaultdict(count)
        for event in events:
            if event.kind in COLLECTIVES:
                group = event.args["group"]
                meetings[group, tuple(groups.get(group, ())), next(numbers[group])].append(event)
    for meeting in meetings.values():
        for event in meeting:
            event.args["ready"] = max(other.begin for other in meeting)
    sent = {id(receive): send.begin for _, send, _, receive in messages(recording)}
    for events in recording.ranks:
        for event in events:
            if event.kind == "wait" and event.args["group"] == "pp":
                wait, event.args["ready"] = event, event.begin         # a wait for a send, unless a receive follows
            elif event.kind == "receive":
                wait.args["ready"] = sent.get(id(event), wait.end)


def in_flight(event: Event) -> tuple[int, int]:
    """Return the span in which a collective or an awaited message was communicated. It starts with the last rank."""
    start = max(event.begin, event.args["ready"])
    return start, max(start, event.end)


def parts(events: list[Event]) -> dict[str, list[tuple]]:
    """Return {name: spans} of one rank's steps and of their parts. The top of this file explains the names. Call
    set_ready_times() first."""
    flights, waits = defaultdict(list), defaultdict(list)
    for event in events:
        if "ready" in event.args:                              # a collective, or a wait for a message
            flights[event.args["group"]].append(in_flight(event))
        if event.kind == "wait":
            waits[event.args["group"]].append((event.begin, event.end))
    times = np.unique([time for event in events for time in (event.begin, event.end, event.args.get("ready", 0))])
    step, optimizer, work = (inside(times, spans_of(events, *kinds))
                             for kinds in (["step"], ["optimizer"], [*PASSES, "optimizer"]))
    waiting, exposed = inside(times, sum(waits.values(), [])), np.zeros(len(times), dtype=bool)
    for group, spans in waits.items():
        exposed |= inside(times, spans) & inside(times, flights[group])
    collectives = [span for group, spans in flights.items() if group != "pp" for span in spans]
    work &= ~waiting
    found = dict(step=step, compute=work & ~optimizer, optimizer=work & optimizer, exposed=exposed,
                 idle=waiting & ~exposed, other=~work & ~waiting, hidden=work & inside(times, collectives))
    return {name: spans_where(times, step & flags) for name, flags in found.items()}


def table(recording: Recording) -> list[str]:
    """Return a line per rank, below a heading, with milliseconds and their share of the step."""
    totals = [{name: sum(end - begin for begin, end in spans) for name, spans in parts(events).items()}
              for events in recording.ranks]
    return ["ms           step" + "".join(f"{name:>15}" for name in [*totals[0]][1:])] + [
        f"rank {rank:<3d}{step / 1e6:10.1f}" + "".join(f"{part / 1e6:10.1f} {part / step:4.0%}" for part in found)
        for rank, (step, *found) in enumerate(each.values() for each in totals)]


def lanes_of(events: list[Event]) -> dict[int, int]:
    """Return {id(collective): the first lane that is free when it begins}: no two collectives in a lane overlap."""
    free_from, lanes = [], {}
    for event in events:
        if event.kind in COLLECTIVES:
            lane = next((i for i, end in enumerate(free_from) if end <= event.begin), len(free_from))
            free_from[lane:lane + 1] = [event.end]
            lanes[id(event)] = lane
    return lanes


def chrome_trace(recording: Recording) -> dict:
    """Convert a recording to Chrome's Trace Event Format, in microseconds.

    Each rank becomes a process. Its events become complete events ("X") that keep all args. Each message becomes a flow
    ("s" to "f"). Collectives in flight at the same time get a thread each, because a thread's events must not overlap.
    """
    names, rows = ("group", "step", "microbatch", "chunk", "message", "site", "slice"), []
    for rank, events in enumerate(recording.ranks):
        lanes = lanes_of(events)
        rows.append(dict(ph="M", name="process_name", pid=rank, args={"name": f"rank {rank} {recording.places[rank]}"}))
        rows += [dict(ph="M", name="thread_name", pid=rank, tid=lane, args={"name": name}) for lane, name in enumerate(
            ["compute", *(f"communication {lane}" for lane in sorted({*lanes.values()}))])]
        for event in events:
            label = " ".join([event.kind, *(str(event.args[name]) for name in names if name in event.args)])
            length = 0.2 if event.kind in MOMENTS else (event.end - event.begin) / 1e3      # flows start at lengths > 0
            rows.append(dict(ph="X", name=label, cat=event.kind, pid=rank, tid=lanes.get(id(event), -1) + 1,
                             ts=event.begin / 1e3, dur=length, args=event.args))
    for number, (sender, send, receiver, receive) in enumerate(messages(recording)):
        flow = dict(name=send.args["message"], cat="message", id=number, tid=0)
        rows.append(dict(flow, ph="s", pid=sender, ts=send.begin / 1e3))
        rows.append(dict(flow, ph="f", bp="e", pid=receiver, ts=receive.begin / 1e3))
    return {"traceEvents": rows, "displayTimeUnit": "ms",
            "otherData": {"caption": recording.caption, "places": recording.places}}
