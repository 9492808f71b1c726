"""Where every rank's time went: the ranks' recordings come together, on one clock, and are added up.

trace.py records, rank by rank. A rank's step is the sum of five parts, no moment of which counts twice:

    compute       inside a forward, a backward or a half of one, and not waiting
    optimizer     norm, clipping, update
    exposed       waits for the wires: communication that nothing hid
    idle          waits for another rank, which has not yet sent its message, or not yet joined the sum
    other         between all of these: zeroed gradients, launches, messages that leave

    compute + optimizer + exposed + idle + other = step

So every wait is cut in two, at the moment when all that it needs is on the wires: until then somebody is late, from
then on the wires are slow. Only a look at all ranks can tell, and only on one clock. A sixth number is no part of the
sum: `hidden` is the time in which a collective travelled while this rank computed, communication that cost nothing.
(Of a message between stages nobody sees when it arrives, only when it is taken: it counts where it is waited for.)

A rank may be late in any group, so idle time is not a pipeline's alone. In a pipeline most of it is, and there
idle / (step - idle) is nearly the bubble: the idle time of a schedule as a part of its ideal time, in which a stage is
busy, (p - 1)/m for 1F1B on equal stages (2104.04473, section 2.2).

A recording is kept as Chrome trace JSON; timeline.py draws it.
"""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, fields

from nanodomino.comm.trace import Event
from nanodomino.errors import UserError, require
from nanodomino.schedules.actions import PASSES as ACTIONS

PASSES = tuple(one.kind for one in ACTIONS)
WATCHED = ("all_reduce", "reduce_scatter", "all_gather")
MOMENTS = ("send", "receive")
AXES = ("stage", "dp", "tp")
SHARED = {"tp": (0, 1), "dp": (0, 2), "embedding": (1, 2), "world": ()}     # of the axes, what a group's members share


@dataclass
class Recording:
    """caption: what was run; places[rank]: its (pp_rank, dp_rank, tp_rank); ranks[rank]: its events, in nanoseconds of
    one clock that begins with the first of them."""
    caption: str
    places: list[tuple]
    ranks: list[list[Event]]

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
        """On those axes that are longer than 1."""
        return ", ".join(f"{axis} {here}" for axis, here, all_ in zip(AXES, self.places[rank], zip(*self.places))
                         if len(set(all_)) > 1)


# ---- intervals: lists of (begin, end), sorted, apart from each other

def union(spans, gap=0) -> list[tuple]:
    """All of it once. Pieces at most `gap` apart become one."""
    pieces = []
    for begin, end in sorted(spans):
        if pieces and begin <= pieces[-1][1] + gap:
            pieces[-1] = (pieces[-1][0], max(pieces[-1][1], end))
        elif end > begin:
            pieces.append((begin, end))
    return pieces


def minus(spans, holes) -> list[tuple]:
    """What of the spans lies in none of the holes; both are unions."""
    pieces, first = [], 0
    for begin, end in spans:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        i = first
        while i < len(holes) and holes[i][0] < end:
            if begin < holes[i][0]:
                pieces.append((begin, holes[i][0]))
            begin, i = holes[i][1], i + 1
        if begin < end:
            pieces.append((begin, end))
    return pieces


def common(spans, others) -> list[tuple]:
    """What lies in both."""
    return minus(spans, minus(spans, others))


def spans_of(events, *kinds) -> list[tuple]:
    return union((event.begin, event.end) for event in events if event.kind in kinds)


def actions(events) -> list[list[Event]]:
    """The passes of one rank, action by action. A pair's two are many spans in turn, one for each turn."""
    step, keys, passes = 0, [], []
    for event in events:
        step += event.kind == "step"                           # each has the same microbatches
        if event.kind in PASSES:
            passes.append(event)
            keys.append((step, event.kind, event.args.get("microbatch"), event.args.get("chunk")))
    last, found, end = {key: place for place, key in enumerate(keys)}, [], -1
    for place, (event, key) in enumerate(zip(passes, keys)):
        if place > end:
            found.append([])
        end = max(end, last[key])
        found[-1].append(event)
    return found


# ---- where the time went

def messages(recording: Recording) -> list[tuple]:
    """(sender, its event, receiver, its event) of every message between stages: the n-th of a name that a rank sends to
    another is the n-th of that name that the other receives from it."""
    ends = {kind: defaultdict(list) for kind in MOMENTS}
    for rank, events in enumerate(recording.ranks):
        for event in events:
            if event.kind in MOMENTS:
                pair = (rank, event.args["peer"]) if event.kind == "send" else (event.args["peer"], rank)
                ends[event.kind][(*pair, event.args["message"])].append(event)
    return [(sender, left, receiver, arrived) for (sender, receiver, name), sent in ends["send"].items()
            for left, arrived in zip(sent, ends["receive"][sender, receiver, name])]


def find_ready(recording: Recording):
    """Note in each collective, and in each wait for a message, when it was `ready`: everybody whose part it needs had
    put that on the wires. The n-th collective of a group is the n-th on all its members."""
    launched, calls = defaultdict(int), []
    for place, events in zip(recording.places, recording.ranks):
        numbers = Counter()
        for event in events:
            if event.kind in WATCHED:
                group = event.args["group"]
                call = (group, *(place[axis] for axis in SHARED[group]), numbers[group])
                numbers[group] += 1
                launched[call] = max(launched[call], event.begin)
                calls.append((event, call))
    for event, call in calls:
        event.args["ready"] = launched[call]
    sent = {id(arrived): left.begin for _, left, _, arrived in messages(recording)}
    for events in recording.ranks:
        for event in events:
            if event.kind == "wait" and event.args["group"] == "pp":
                wait, event.args["ready"] = event, event.begin        # for a message of its own to leave, or:
            elif event.kind == "receive":                              # right after the wait for it
                wait.args["ready"] = sent.get(id(event), wait.end)


def waits(events: list[Event]) -> tuple[list, list]:
    """(exposed, idle) of one rank, after find_ready()."""
    travelling, waited, exposed = defaultdict(list), defaultdict(list), []
    for event in events:
        if event.kind in WATCHED or (event.kind == "wait" and "ready" in event.args):
            travelling[event.args["group"]].append((max(event.begin, event.args["ready"]), event.end))
        if event.kind == "wait":
            waited[event.args["group"]].append((event.begin, event.end))
    for group in waited:
        exposed += common(union(waited[group]), union(travelling[group]))
    exposed = union(exposed)
    return exposed, minus(spans_of(events, "wait"), exposed)


@dataclass
class Totals:
    """Nanoseconds of one rank; the module's docstring defines them. step = the sum of the next five."""
    step: int
    compute: int
    optimizer: int
    exposed: int
    idle: int
    other: int
    hidden: int


def totals(events: list[Event]) -> Totals:
    """Of all steps in one rank's events, after find_ready()."""
    step = spans_of(events, "step")
    exposed, idle = (common(step, waited) for waited in waits(events))
    work = common(step, minus(spans_of(events, *PASSES, "optimizer"), spans_of(events, "wait")))
    optimizer = common(work, spans_of(events, "optimizer"))
    compute = minus(work, optimizer)
    wires = union((max(event.begin, event.args["ready"]), event.end) for event in events if event.kind in WATCHED)
    step, compute, optimizer, exposed, idle, hidden = (
        sum(end - begin for begin, end in spans)
        for spans in (step, compute, optimizer, exposed, idle, common(work, wires)))
    return Totals(step, compute, optimizer, exposed, idle, step - compute - optimizer - exposed - idle, hidden)


def table(recording: Recording) -> list[list[str]]:
    """A head, and a row per rank: milliseconds, each but the first with its part of the step."""
    rows = [["ms"] + [field.name for field in fields(Totals)]]
    for rank, events in enumerate(recording.ranks):
        sums = asdict(totals(events))
        step = max(sums.pop("step"), 1)
        rows.append([f"rank {rank}", f"{step / 1e6:.1f}"]
                    + [f"{value / 1e6:.1f} {value / step:4.0%}" for value in sums.values()])
    return rows


# ---- Chrome trace JSON

def letter(index: int) -> str:
    """Of a slice: a, b, ..."""
    return chr(ord("a") + index) if index < 26 else f"-{index}"


def number(event: Event) -> str:
    """Of a pass's microbatch, in the chunk that schedules.py's primes tell: 3, 3', 3''."""
    return str(event.args["microbatch"]) + "'" * event.args.get("chunk", 0)


def title(event: Event) -> str:
    """What a person reads on an event."""
    about = event.args
    words = [event.kind.replace("_", "-" if event.kind in WATCHED else " ")]
    words += [str(about[name]) for name in ("group", "step") if name in about]
    words += [number(event)] if "microbatch" in about else []
    words += [str(about[name]) for name in ("message", "site") if name in about]
    return " ".join(words + [letter(about["slice"])] if "slice" in about else words)


def lanes(events: list[Event]) -> list[int]:
    """For each of these events the first lane that is free when it begins."""
    free_from, chosen = [], []
    for event in events:
        lane = next((i for i, end in enumerate(free_from) if end <= event.begin), len(free_from))
        free_from[lane:lane + 1] = [event.end]
        chosen.append(lane)
    return chosen


def chrome_trace(recording: Recording) -> dict:
    """The Trace Event Format: a process per rank, microseconds; complete events (X), whose arguments are all that was
    recorded, and a flow (s, f) for each message. Collectives in flight together need a thread each: "wires 2", ..."""
    rows, moment = [], 0.2                      # a moment is drawn that long, or no flow could begin there
    for rank, events in enumerate(recording.ranks):
        watched = [event for event in events if event.kind in WATCHED]
        lane_of = {id(event): lane for event, lane in zip(watched, lanes(watched))}
        names = ["compute", "wires"] + [f"wires {lane + 1}" for lane in sorted(set(lane_of.values())) if lane]
        rows.append(dict(ph="M", name="process_name", pid=rank, args={"name": f"rank {rank} {recording.place(rank)}"}))
        rows.append(dict(ph="M", name="process_sort_index", pid=rank, args={"sort_index": rank}))
        rows += [dict(ph="M", name="thread_name", pid=rank, tid=tid, args={"name": name})
                 for tid, name in enumerate(names)]
        rows += [dict(ph="X", name=title(event), cat=event.kind, pid=rank, tid=lane_of.get(id(event), -1) + 1,
                      ts=event.begin / 1e3, dur=moment if event.kind in MOMENTS else (event.end - event.begin) / 1e3,
                      args=event.args) for event in events]
    for number, (sender, left, receiver, arrived) in enumerate(messages(recording)):
        flow = dict(name=left.args["message"], cat="message", id=number, tid=0)
        rows.append(dict(flow, ph="s", pid=sender, ts=left.begin / 1e3))
        rows.append(dict(flow, ph="f", bp="e", pid=receiver, ts=arrived.begin / 1e3))
    return {"traceEvents": rows, "displayTimeUnit": "ms",
            "otherData": {"caption": recording.caption, "places": recording.places}}


# What must be told about an event of a kind, and of which type it is wherever it is told.
NEEDED = {"step": ("step",), "resume": ("slice",), "wait": ("group",), **dict.fromkeys(PASSES, ("microbatch",)),
          **dict.fromkeys(MOMENTS, ("message", "peer")), **dict.fromkeys(WATCHED, ("group", "bytes", "ready"))}
TYPES = {**dict.fromkeys(("step", "slice", "microbatch", "chunk", "peer", "bytes", "ready"), int),
         **dict.fromkeys(("group", "message", "site"), str)}


def is_possible(event: Event) -> bool:
    """Whether it has its place in time, and all is told about it that whoever adds up or draws it asks for."""
    kind, about = event.kind, event.args
    return (type(kind) is str and type(about) is dict and all(name in about for name in NEEDED.get(kind, ()))
            and all(type(value) is TYPES[name] for name, value in about.items() if name in TYPES)
            and about.get("slice", 0) >= 0 and 0 <= about.get("chunk", 0) < 1000
            and (kind not in WATCHED or about["group"] in SHARED)
            and all(0 <= time < 2**63 for time in (event.begin, event.end))
            and (kind != "step" or event.begin < event.end))   # on a GPU a sum may end before the mark at its begin


def from_chrome_trace(trace: dict) -> Recording:
    """The way back. Raises UserError if chrome_trace() did not make it."""
    try:
        recording = Recording(trace["otherData"]["caption"], trace["otherData"]["places"], [])
        recording.ranks = [[] for _ in recording.places]
        require(all(list(map(type, place)) == [int] * len(AXES) for place in recording.places),
                f"each place must be {len(AXES)} whole numbers")
        for row in trace["traceEvents"]:
            if row["ph"] == "X":
                begin = round(row["ts"] * 1e3)
                end = begin if row["cat"] in MOMENTS else begin + round(row["dur"] * 1e3)
                event = Event(row["cat"], begin, end, row["args"])
                require(is_possible(event), f"'{str(row)[:80]}' is no event")
                recording.ranks[row["pid"]].append(event)
        require(recording.steps, "no step is in it")
        return recording
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{type(error).__name__} {error}") from None
