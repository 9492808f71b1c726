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
from dataclasses import asdict, dataclass, fields

from nanodomino.comm.trace import Event
from nanodomino.errors import UserError, require
from nanodomino.schedules.actions import PASSES as ACTIONS

PASSES = tuple(action.kind for action in ACTIONS)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
MOMENTS = ("send", "receive")
AXES = ("stage", "dp", "tp")
# For each kind of group what its ranks have in common, as a function of the Recording and a rank's place.
SHARED = {"tp": lambda sizes, stage, dp, tp: (stage, dp), "dp": lambda sizes, stage, dp, tp: (stage, tp),
          "cp": lambda sizes, stage, dp, tp: (stage, tp, dp // sizes.cp),
          "ep": lambda sizes, stage, dp, tp: (stage, tp, dp // sizes.ep),
          "expert_dp": lambda sizes, stage, dp, tp: (stage, tp, dp % sizes.ep),
          "embedding": lambda sizes, stage, dp, tp: (dp, tp), "world": lambda sizes, stage, dp, tp: ()}


@dataclass
class Recording:
    """The events of all ranks on one clock, in nanoseconds since the first event."""
    caption: str
    places: list[tuple]          # of each rank: its index on the axes pp, dp (which includes cp) and tp of the mesh
    ranks: list[list[Event]]     # the events of each rank
    ep: int = 1                  # ep neighbours on the dp axis share the experts
    cp: int = 1                  # cp neighbours on the dp axis share the samples

    @property
    def steps(self) -> list[int]:
        return sorted({event.args["step"] for events in self.ranks for event in events if event.kind == "step"})

    @property
    def begin(self) -> int:
        return min(event.begin for events in self.ranks for event in events)

    @property
    def end(self) -> int:
        return max(event.end for events in self.ranks for event in events)

    def place(self, rank: int) -> str:
        """Return a rank's coordinates on the axes that are longer than 1, such as "stage 1, tp 0"."""
        return ", ".join(f"{axis} {index}"
                         for axis, index, all_indices in zip(AXES, self.places[rank], zip(*self.places))
                         if len(set(all_indices)) > 1)


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


def set_ready_times(recording: Recording):
    """Set args["ready"] of each collective to the time when the last of its ranks launched it, and of each wait for a
    message to the time when the message was sent.

    Collectives have no names: the n-th collective of a group on one rank meets the n-th on the others.
    """
    launched, calls = defaultdict(int), []
    for place, events in zip(recording.places, recording.ranks):
        numbers = Counter()
        for event in events:
            if event.kind in COLLECTIVES:
                group = event.args["group"]
                call = (group, *SHARED[group](recording, *place), numbers[group])
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


def waits(events: list[Event]) -> tuple[list, list]:
    """Return the spans in which one rank waited, as (exposed, idle). Call set_ready_times() first."""
    in_flight, waited, exposed = defaultdict(list), defaultdict(list), []
    for event in events:
        if event.kind in COLLECTIVES or (event.kind == "wait" and "ready" in event.args):
            in_flight[event.args["group"]].append((max(event.begin, event.args["ready"]), event.end))
        if event.kind == "wait":
            waited[event.args["group"]].append((event.begin, event.end))
    for group in waited:
        exposed += intersection(union(waited[group]), union(in_flight[group]))
    exposed = union(exposed)
    return exposed, difference(spans_of(events, "wait"), exposed)


@dataclass
class Totals:
    """Where one rank's time went, in nanoseconds. step = compute + ... + other; the top of this file explains them."""
    step: int
    compute: int
    optimizer: int
    exposed: int
    idle: int
    other: int
    hidden: int


def totals(events: list[Event]) -> Totals:
    """Add up the times of all steps of one rank. Call set_ready_times() first."""
    step = spans_of(events, "step")
    exposed, idle = (intersection(step, spans) for spans in waits(events))
    work = intersection(step, difference(spans_of(events, *PASSES, "optimizer"), spans_of(events, "wait")))
    optimizer = intersection(work, spans_of(events, "optimizer"))
    compute = difference(work, optimizer)
    in_flight = union((max(event.begin, event.args["ready"]), event.end)
                      for event in events if event.kind in COLLECTIVES)
    step, compute, optimizer, exposed, idle, hidden = (
        sum(end - begin for begin, end in spans)
        for spans in (step, compute, optimizer, exposed, idle, intersection(work, in_flight)))
    return Totals(step, compute, optimizer, exposed, idle, step - compute - optimizer - exposed - idle, hidden)


def table(recording: Recording) -> list[list[str]]:
    """Return a heading and a row per rank. A cell holds milliseconds and their share of the step: "12.3  36%"."""
    rows = [["ms"] + [field.name for field in fields(Totals)]]
    for rank, events in enumerate(recording.ranks):
        sums = asdict(totals(events))
        step = max(sums.pop("step"), 1)
        rows.append([f"rank {rank}", f"{step / 1e6:.1f}"]
                    + [f"{value / 1e6:.1f} {value / step:4.0%}" for value in sums.values()])
    return rows


# ---- Chrome trace JSON

def slice_name(index: int) -> str:
    """Return the name of a slice: "a" for slice 0, "b" for slice 1, ..."""
    return chr(ord("a") + index) if index < 26 else f"-{index}"


def microbatch_label(event: Event) -> str:
    """Return the label of a pass: microbatch 3 is "3" in chunk 0, "3'" in chunk 1, "3''" in chunk 2."""
    return str(event.args["microbatch"]) + "'" * event.args.get("chunk", 0)


def event_label(event: Event) -> str:
    """Return an event's label for a trace viewer, such as "all-reduce tp layers.3.mlp a"."""
    args = event.args
    words = [event.kind.replace("_", "-" if event.kind in COLLECTIVES else " ")]
    words += [str(args[name]) for name in ("group", "step") if name in args]
    words += [microbatch_label(event)] if "microbatch" in args else []
    words += [str(args[name]) for name in ("message", "site") if name in args]
    return " ".join(words + [slice_name(args["slice"])] if "slice" in args else words)


def assign_lanes(events: list[Event]) -> list[int]:
    """Return for each event the first lane that is free when it begins, so that no two events in a lane overlap."""
    free_from, chosen = [], []
    for event in events:
        lane = next((i for i, end in enumerate(free_from) if end <= event.begin), len(free_from))
        free_from[lane:lane + 1] = [event.end]
        chosen.append(lane)
    return chosen


def chrome_trace(recording: Recording) -> dict:
    """Convert a recording to Chrome's Trace Event Format, in microseconds.

    Each rank becomes a process. Its events become complete events ("X") that keep all args. Each message becomes a flow
    ("s" to "f"). Collectives in flight at the same time get a thread each, because a thread's events must not overlap.
    """
    rows, moment = [], 0.2                      # microseconds; a flow can't start at an event of length 0
    for rank, events in enumerate(recording.ranks):
        collectives = [event for event in events if event.kind in COLLECTIVES]
        lane_of = {id(event): lane for event, lane in zip(collectives, assign_lanes(collectives))}
        names = ["compute", "communication"]
        names += [f"communication {lane + 1}" for lane in sorted(set(lane_of.values())) if lane]
        rows.append(dict(ph="M", name="process_name", pid=rank, args={"name": f"rank {rank} {recording.place(rank)}"}))
        rows.append(dict(ph="M", name="process_sort_index", pid=rank, args={"sort_index": rank}))
        rows += [dict(ph="M", name="thread_name", pid=rank, tid=tid, args={"name": name})
                 for tid, name in enumerate(names)]
        rows += [dict(ph="X", name=event_label(event), cat=event.kind, pid=rank, tid=lane_of.get(id(event), -1) + 1,
                      ts=event.begin / 1e3, dur=moment if event.kind in MOMENTS else (event.end - event.begin) / 1e3,
                      args=event.args) for event in events]
    for number, (sender, send, receiver, receive) in enumerate(messages(recording)):
        flow = dict(name=send.args["message"], cat="message", id=number, tid=0)
        rows.append(dict(flow, ph="s", pid=sender, ts=send.begin / 1e3))
        rows.append(dict(flow, ph="f", bp="e", pid=receiver, ts=receive.begin / 1e3))
    return {"traceEvents": rows, "displayTimeUnit": "ms",
            "otherData": {"caption": recording.caption, "places": recording.places, "ep": recording.ep,
                          "cp": recording.cp}}


# The args that each kind of event must have, and the types of args.
NEEDED = {"step": ("step",), "resume": ("slice",), "wait": ("group",), **dict.fromkeys(PASSES, ("microbatch",)),
          **dict.fromkeys(MOMENTS, ("message", "peer")), **dict.fromkeys(COLLECTIVES, ("group", "bytes", "ready"))}
TYPES = {**dict.fromkeys(("step", "slice", "microbatch", "chunk", "peer", "bytes", "ready"), int),
         **dict.fromkeys(("group", "message", "site"), str)}


def is_possible(event: Event) -> bool:
    """Return whether an event's times are valid and it has all args that this package reads, with the right types."""
    kind, args = event.kind, event.args
    return (type(kind) is str and type(args) is dict and all(name in args for name in NEEDED.get(kind, ()))
            and all(type(value) is TYPES[name] for name, value in args.items() if name in TYPES)
            and args.get("slice", 0) >= 0 and 0 <= args.get("chunk", 0) < 1000
            and (kind not in COLLECTIVES or args["group"] in SHARED)
            and all(0 <= time < 2**63 for time in (event.begin, event.end))
            # Two GPU streams record the begin and the end of a collective, so its end may be the earlier time.
            and (kind != "step" or event.begin < event.end))


def from_chrome_trace(trace: dict) -> Recording:
    """Convert chrome_trace()'s result back to a recording. Raises UserError if `trace` is anything else."""
    try:
        recording = Recording(trace["otherData"]["caption"], trace["otherData"]["places"], [],
                              *(trace["otherData"].get(name, 1) for name in ("ep", "cp")))  # older files have none
        for name, size in (("ep", recording.ep), ("cp", recording.cp)):
            require(type(size) is int and size > 0, f"'{name}' must be at least 1, but is {size}")
        recording.ranks = [[] for _ in recording.places]
        require(all(list(map(type, place)) == [int] * len(AXES) for place in recording.places),
                f"each entry of 'places' must be {len(AXES)} integers")
        for row in trace["traceEvents"]:
            if row["ph"] == "X":
                begin = round(row["ts"] * 1e3)
                end = begin if row["cat"] in MOMENTS else begin + round(row["dur"] * 1e3)
                event = Event(row["cat"], begin, end, row["args"])
                require(is_possible(event), f"'{str(row)[:80]}' is not a valid event")
                recording.ranks[row["pid"]].append(event)
        require(recording.steps, "it contains no step")
        return recording
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{type(error).__name__} {error}") from None
