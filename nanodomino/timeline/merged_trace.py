"""Merges the ranks' traces into one recording and adds up where each rank's time went.

The time of a rank's step is the sum of five parts:

    compute       forward and backward, without waiting
    optimizer     gradient norm, clipping, update
    exposed       waiting for communication in flight, with no computation to hide it
    idle          waiting for another rank that has not sent its message or joined the collective yet
    other         everything else: zeroing gradients, launching collectives, sending messages

So each wait is cut in two, at the moment when the last rank that takes part launches. Until then the waiting rank is
idle. From then on communication is exposed. Finding that moment needs the traces of all ranks, on one clock.

A sixth number, `hidden`, is not part of the sum. It is the time in which this rank computed while a collective was in
flight. Messages between stages are left out of it, because the moment at which a message arrives is not recorded.

In a pipeline most idle time is the bubble. With 1F1B, p equal stages and m microbatches, idle / (step - idle) is close
to (p - 1)/m (2104.04473, section 2.2).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from nanodomino.comm.trace import Event
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

    @property
    def steps(self) -> list[int]:
        return sorted({event.args["step"] for events in self.ranks for event in events if event.kind == "step"})

    @property
    def begin(self) -> int:
        return min(event.begin for events in self.ranks for event in events)

    @property
    def end(self) -> int:
        return max(event.end for events in self.ranks for event in events)


# ---- sets of times: sorted lists of disjoint spans (begin, end)

def union(spans, gap=0) -> list[tuple]:
    """Sort the spans, and merge those that overlap or lie at most `gap` apart."""
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def difference(spans, holes) -> list[tuple]:
    """Return the parts of `spans` outside all `holes`. Both must be sorted and disjoint, as union() returns them."""
    remaining, first = [], 0
    for begin, end in spans:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        i = first
        while i < len(holes) and holes[i][0] < end:
            if begin < holes[i][0]:
                remaining.append((begin, holes[i][0]))
            begin, i = holes[i][1], i + 1
        if begin < end:
            remaining.append((begin, end))
    return remaining


def intersection(spans, others) -> list[tuple]:
    return difference(spans, difference(spans, others))


def spans_of(events, *kinds) -> list[tuple]:
    return union((event.begin, event.end) for event in events if event.kind in kinds)


def actions(events) -> list[list[Event]]:
    """Return one rank's actions, each a list of events: a single forward or backward, or all turns of a pair."""
    step, keys, passes = 0, [], []
    for event in events:
        step += event.kind == "step"                           # microbatches count from 0 in each step
        if event.kind in PASSES:
            passes.append(event)
            keys.append((step, event.kind, event.args.get("microbatch"), event.args.get("chunk")))
    last, found, end = {key: i for i, key in enumerate(keys)}, [], -1
    for i, (event, key) in enumerate(zip(passes, keys)):
        if i > end:
            found.append([])
        end = max(end, last[key])
        found[-1].append(event)
    return found


# ---- where the time went

def messages(recording: Recording) -> list[tuple]:
    """Return (sender's rank, send event, receiver's rank, receive event) for every message between stages.

    Each step uses the same names, such as F0. So between two ranks the n-th send of a name belongs to the n-th receive
    of that name.
    """
    ends = {kind: defaultdict(list) for kind in MOMENTS}
    for rank, events in enumerate(recording.ranks):
        for event in events:
            if event.kind in MOMENTS:
                pair = (rank, event.args["peer"]) if event.kind == "send" else (event.args["peer"], rank)
                ends[event.kind][(*pair, event.args["message"])].append(event)
    return [(sender, send, receiver, receive) for (sender, receiver, name), sends in ends["send"].items()
            for send, receive in zip(sends, ends["receive"][sender, receiver, name])]


def set_ready_times(recording: Recording, groups: list[dict]):
    """Set args["ready"] of each collective to the time when the last of its ranks launched it, and of each wait for a
    message to the time when the message was sent.

    Collectives have no names: the n-th collective of a group on one rank meets the n-th on the others.
    groups: for each rank {the group's name: its ranks}; a group without an entry has all ranks
    """
    launched, calls = defaultdict(int), []
    for names, events in zip(groups, recording.ranks):
        numbers = Counter()
        for event in events:
            if event.kind in COLLECTIVES:
                group = event.args["group"]
                call = (group, names.get(group), numbers[group])
                numbers[group] += 1
                launched[call] = max(launched[call], event.begin)
                calls.append((event, call))
    for event, call in calls:
        event.args["ready"] = launched[call]
    sent = {id(receive): send.begin for _, send, _, receive in messages(recording)}
    for events in recording.ranks:
        for event in events:
            if event.kind == "wait" and event.args["group"] == "pp":
                wait, event.args["ready"] = event, event.begin         # a wait for a send, unless a receive follows
            elif event.kind == "receive":
                wait.args["ready"] = sent.get(id(event), wait.end)


def in_flight(event: Event) -> tuple[int, int]:
    """Return the span in which a collective or an awaited message was communicated. It starts with the last rank."""
    return max(event.begin, event.args["ready"]), event.end


def waits(events: list[Event]) -> tuple[list, list]:
    """Return the spans in which one rank waited, as (exposed, idle). Call set_ready_times() first."""
    communicated, waited, exposed = defaultdict(list), defaultdict(list), []
    for event in events:
        if event.kind in COLLECTIVES or (event.kind == "wait" and "ready" in event.args):
            communicated[event.args["group"]].append(in_flight(event))
        if event.kind == "wait":
            waited[event.args["group"]].append((event.begin, event.end))
    for group in waited:
        exposed += intersection(union(waited[group]), union(communicated[group]))
    exposed = union(exposed)
    return exposed, difference(spans_of(events, "wait"), exposed)


def totals(events: list[Event]) -> dict[str, int]:
    """Return where the time of one rank's steps went, in nanoseconds. The top of this file explains the names.

    Call set_ready_times() first.
    """
    step = spans_of(events, "step")
    exposed, idle = waits(events)
    work = difference(spans_of(events, *PASSES, "optimizer"), spans_of(events, "wait"))
    optimizer = intersection(work, spans_of(events, "optimizer"))
    communication = union(in_flight(event) for event in events if event.kind in COLLECTIVES)
    spans = dict(step=step, compute=difference(work, optimizer), optimizer=optimizer, exposed=exposed, idle=idle,
                 other=difference(difference(step, work), spans_of(events, "wait")),
                 hidden=intersection(work, communication))
    return {name: sum(end - begin for begin, end in intersection(step, each)) for name, each in spans.items()}


def table(recording: Recording) -> list[str]:
    """Return a line per rank, below a heading, with milliseconds and their share of the step."""
    lines = []
    for rank, sums in enumerate(map(totals, recording.ranks)):
        step, *parts = sums.values()
        lines.append(f"rank {rank:<3d}{step / 1e6:10.1f}"
                     + "".join(f"{part / 1e6:10.1f} {part / step:4.0%}" for part in parts))
    return ["ms           step" + "".join(f"{name:>15}" for name in [*sums][1:]), *lines]


# ---- Chrome trace JSON

def label(event: Event) -> str:
    """Return an event's name for a trace viewer, such as "all_reduce tp layers.3.mlp 0"."""
    names = ("group", "step", "microbatch", "chunk", "message", "site", "slice")
    return " ".join([event.kind, *(str(event.args[name]) for name in names if name in event.args)])


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
    rows, moment = [], 0.2                      # microseconds; a flow can't start at an event of length 0
    for rank, events in enumerate(recording.ranks):
        lanes = lanes_of(events)
        rows.append(dict(ph="M", name="process_name", pid=rank, args={"name": f"rank {rank} {recording.places[rank]}"}))
        rows += [dict(ph="M", name="thread_name", pid=rank, tid=lane + 1, args={"name": f"communication {lane}"})
                 for lane in {*lanes.values()}]
        rows.append(dict(ph="M", name="thread_name", pid=rank, tid=0, args={"name": "compute"}))
        rows += [dict(ph="X", name=label(event), cat=event.kind, pid=rank, tid=lanes.get(id(event), -1) + 1,
                      ts=event.begin / 1e3, dur=moment if event.kind in MOMENTS else (event.end - event.begin) / 1e3,
                      args=event.args) for event in events]
    for number, (sender, send, receiver, receive) in enumerate(messages(recording)):
        flow = dict(name=send.args["message"], cat="message", id=number, tid=0)
        rows.append(dict(flow, ph="s", pid=sender, ts=send.begin / 1e3))
        rows.append(dict(flow, ph="f", bp="e", pid=receiver, ts=receive.begin / 1e3))
    return {"traceEvents": rows, "displayTimeUnit": "ms",
            "otherData": {"caption": recording.caption, "places": recording.places}}
