"""Draws what every rank did: where its time went, and what would have to be hidden to win some of it back.

Every rank has two rows, and below the picture are the totals of recording.py:

    rank 0  compute  [ F0 ][ F1 ]////////[  B0  ][ F2 ][  B1  ]           boxes: work; hatched: somebody waits
            wires          ===         \\          ====                   bars: collectives; arrows: messages between
    rank 1  compute        \\[ F0 ][ B0 ]///[ F1 ][  B1  ]                stages

The number in a box is a microbatch's, with a prime for each of the stage's chunks before it. A pair's two halves are
boxes in turn, in a frame: B0F3.

The same recording is written twice: as an SVG to look at, and as Chrome trace JSON, which https://ui.perfetto.dev opens
with every matrix product in it, and from which pictures can be drawn anew, several above each other on one time scale:

    python -m nanodomino.timeline A.json B.json --caption "blocking" "Domino" --output both.svg
"""

import json
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist

from nanodomino.comm.trace import Event, Trace, clock_offset
from nanodomino.errors import require
from nanodomino.mesh import Mesh
from nanodomino.plot.svg import LETTER, LINE, WIDTH, box, frame, legend, line, text, tick_step, write
from nanodomino.schedules.actions import PASSES as ACTIONS
from nanodomino.timeline.recording import (MOMENTS, PASSES, WATCHED, Recording, actions, chrome_trace, find_ready,
                                           lanes, letter, messages, minus, number, spans_of, table, title, union, waits)

WIDEST, LEFT, RIGHT = 4000, 92, 16                       # pixels
COMPUTE, LANE, WIRES_ROW, SPACE = 26, 14, 80, 12         # heights; lanes get flatter where they would need more
LEGIBLE = 12                                             # the width of a box that has room for a number

# Apart for eyes that don't tell red from green, and on paper: the lightness differs too.
WORK = {"forward": "#9bd1f4", "backward": "#4fae8b", "input_backward": "#8cc63f", "weight_backward": "#dfb92f",
        "weight_gradient": "#f3df6b", "optimizer": "#c8a2d8"}
LETTERS = {one.kind: one.letter for one in ACTIONS}
WAITS = {"exposed": "#d62728", "idle": "#b5b5b5"}
WIRES = {"tp": "#e69f00", "dp": "#8496e0", "gather": "#63bccb", "embedding": "#bb9468", "world": "#9a9a9a"}
NAMES = {"exposed": "exposed communication", "idle": "idle", "tp": "sum over tp", "dp": "gradients over dp",
         "gather": "weights over dp", "embedding": "tied embedding", "world": "world's sum"}
TIP = """<marker id="tip" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="6" markerHeight="6" orient="auto">\
<path d="M0 0L6 3L0 6z" fill="#444"/></marker>
"""
HATCHED = """<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate({turn})">\
<rect width="6" height="6" fill="#fff"/><rect width="{thick}" height="6" fill="{colour}"/></pattern>"""


def arrow(x1, y1, x2, y2) -> str:
    return line(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", "#444", 'stroke-width="0.8" marker-end="url(#tip)"')


def words_of(spans) -> str:
    """Of an action: its number, or of a pair B0F3, since it has two colours."""
    halves = {event.kind: event for event in spans}
    return "".join((LETTERS[kind] if len(halves) > 1 else "") + number(event) for kind, event in halves.items())


def wire(event: Event) -> str:
    """Which of WIRES."""
    gathers_weights = event.kind == "all_gather" and event.args["group"] == "dp"
    return "gather" if gathers_weights else event.args["group"]


class Panel:
    """One recording: a title, two rows per rank, a time axis, the totals. `parts`: its SVG; `bottom`: where it ends."""

    def __init__(self, recording: Recording, top: float, scale: float):
        """scale: pixels per nanosecond."""
        self.recording, self.begin, self.scale, self.parts = recording, recording.begin, scale, []
        wires = [[event for event in events if event.kind in WATCHED] for events in recording.ranks]
        count = max([lane for events in wires for lane in lanes(events)], default=0) + 1
        self.lane = min(LANE, WIRES_ROW / count)
        self.top, self.pitch = top + 2 * LINE + 4, COMPUTE + 3 + count * self.lane + SPACE
        self.parts.append(text(8, top + LINE, recording.caption, "title"))
        bottom = self.top + self.pitch * len(wires)
        self.axis(bottom)
        for rank, events in enumerate(recording.ranks):
            y = self.top + rank * self.pitch
            self.parts += [text(8, y + 11, f"rank {rank}"), text(8, y + 25, recording.place(rank), "small pale")]
            self.compute_row(events, y)
            self.wires_row(wires[rank], y + COMPUTE + 3)
        self.arrows()
        self.bottom = self.totals(bottom + 2 * LINE + 8)

    def x(self, time) -> float:
        return LEFT + (time - self.begin) * self.scale

    def bar(self, begin, end, y, height, fill, **look):
        self.parts.append(box(self.x(begin), y, (end - begin) * self.scale, height, fill, **look))

    def fits(self, begin, end, words) -> bool:
        return (end - begin) * self.scale >= LETTER * len(words)

    def label(self, begin, end, y, words, kind="middle"):
        """In the middle, if there is room."""
        if self.fits(begin, end, words):
            self.parts.append(text(self.x((begin + end) / 2), y, words, kind))

    def compute_row(self, events, y):
        """Painted over each other: microbatches, the turns of their slices, weight gradients, waits, pairs' frames,
        numbers."""
        outer = [event for event in events if event.kind in (*PASSES, "optimizer")]
        turns = self.turns(events)
        for event in outer:
            tip = f"{title(event)}: {(event.end - event.begin) / 1e6:.2f} ms"
            self.bar(event.begin, event.end, y, COMPUTE, WORK[event.kind], tip=tip, stroke="#fff")
        for outside, begin, end, _ in turns:
            if (end - begin) * self.scale > 2:
                self.bar(begin, end, y, COMPUTE, WORK[outside.kind], stroke="#fff")
        half_a_pixel = 0.5 / self.scale
        cover = minus(spans_of(events, "weight_gradient"), spans_of(events, "weight_backward"))
        for begin, end in union(cover, half_a_pixel):
            self.bar(begin, end, y + 1, COMPUTE - 2, WORK["weight_gradient"])
        for name, spans in zip(reversed(WAITS), reversed(waits(events))):
            for begin, end in union(spans, half_a_pixel):
                self.bar(begin, end, y, COMPUTE, f"url(#{name})", stroke=WAITS[name])
        numbers = [(begin, end, words) for _, begin, end, words in turns if self.fits(begin, end, words)]
        if 3 * len(numbers) <= len(turns):                             # too few slices have room: one for all of them
            numbers = [(spans[0].begin, spans[-1].end, words_of(spans)) for spans in actions(events)]
        for spans in actions(events):
            if len(spans) > 1:
                self.bar(spans[0].begin, spans[-1].end, y, COMPUTE, "none", stroke="#1f1f1f")
        for begin, end, words in numbers:
            self.label(begin, end, y + 17, words, "halo")
            self.label(begin, end, y + 17, words)

    @staticmethod
    def turns(events) -> list[tuple]:
        """(pass, begin, end, "0a") of each slice's turn, without the wait that it begins with; nothing
        where there is one slice."""
        found, outside = [], None
        if not any(event.args["slice"] for event in events if event.kind == "resume"):
            return found
        for event in events:
            if event.kind in PASSES:
                outside = event
            elif event.kind == "resume" and outside:
                found.append((outside, event.begin, event.end, number(outside) + letter(event.args["slice"])))
            elif event.kind == "wait" and found and event.end <= found[-1][2]:
                found[-1] = (found[-1][0], event.end, *found[-1][2:])
        return found

    def wires_row(self, events, y):
        """A bar per collective, pale as long as another rank has not joined it; those below a pixel share theirs."""
        narrow = defaultdict(list)
        for event, lane in zip(events, lanes(events)):
            about, kind, colour = event.args, event.kind.replace("_", "-"), WIRES[wire(event)]
            at = y + lane * self.lane
            if (event.end - event.begin) * self.scale < 1:
                narrow[at, colour].append((event.begin, event.end))
                continue
            ready = min(max(event.begin, about["ready"]), event.end)
            tip = f"{title(event)}: {about['bytes']:,} bytes, {(event.end - ready) / 1e6:.2f} ms"
            if (ready - event.begin) * self.scale > 0.5:
                self.bar(event.begin, ready, at, self.lane - 1, colour, opacity=0.35)
            self.bar(ready, event.end, at, self.lane - 1, colour, tip=tip)
            if "slice" in about:
                piece = letter(about["slice"])
                kind = f"{kind} {piece}" if self.fits(event.begin, event.end, f"{kind} {piece}") else piece
            if self.lane >= 12:
                self.label(event.begin, event.end, at + self.lane / 2 + 3.5, kind, "middle small")
        for (at, colour), spans in narrow.items():
            for begin, end in union(spans, 0.5 / self.scale):
                self.bar(begin, end, at, self.lane - 1, colour)

    def arrows(self):
        """From the sender's compute row to the receiver's, at the sides that face each other."""
        for sender, left, receiver, arrived in messages(self.recording):
            down = receiver > sender
            y1 = self.top + sender * self.pitch + (COMPUTE if down else 0)
            y2 = self.top + receiver * self.pitch + (0 if down else COMPUTE)
            self.parts.append(arrow(self.x(left.begin), y1, self.x(arrived.begin), y2))

    def axis(self, y):
        """A tick each 1, 2 or 5 times a power of ten milliseconds, some 100 pixels apart."""
        step = tick_step(1e6 * self.scale, 80)
        for i in range(int((self.recording.end - self.begin) / 1e6 / step) + 1):
            x = LEFT + i * step * 1e6 * self.scale
            self.parts.append(line(f"M{x:.1f} {self.top - 4:.1f}V{y:.1f}", "#ddd"))
            self.parts.append(text(x, y + 14, f"{i * step:g}" + (" ms" if i == 0 else ""), "middle small"))

    def totals(self, y) -> float:
        for row in table(self.recording):
            self.parts.append(text(8, y, row[0]))
            for i, cell in enumerate(row[1:]):
                number, *share = cell.split()
                self.parts.append(text(130 + 110 * i, y, number, "end"))
                self.parts += [text(166 + 110 * i, y, words, "end small pale") for words in share]
            y += LINE
        return y


def meanings(recordings) -> list[tuple]:
    """What occurs in them, for the legend."""
    events = [event for recording in recordings for events in recording.ranks for event in events]
    kinds = {event.kind for event in events}
    wires = {wire(event) for event in events if event.kind in WATCHED}
    boxes = [(colour, "", kind.replace("_", " ")) for kind, colour in WORK.items() if kind in kinds]
    boxes += [(f"url(#{name})", colour, NAMES[name]) for name, colour in WAITS.items()]
    boxes += [(colour, "", NAMES[name]) for name, colour in WIRES.items() if name in wires]
    if wires & {"tp", "dp", "embedding"}:
        boxes.append(("#e4e4e4", "", "pale: another rank has not joined yet"))
    entries = [(partial(box, width=14, height=12, fill=fill, stroke=stroke), name) for fill, stroke, name in boxes]
    if any(map(messages, recordings)):
        entries.append((lambda x, y: arrow(x, y + 6, x + 14, y + 6), "message between stages"))
    return entries


def one_step(recording: Recording, number: int) -> Recording:
    """Of several; the caption says so."""
    require(number in recording.steps,
            f"--step {number} is not in it; try one of {', '.join(map(str, recording.steps))}")
    ranks = []
    for events in recording.ranks:
        whole = [step for step in events if step.kind == "step" and step.args["step"] == number]
        ranks.append([event for event in events if any(step.begin <= event.begin < step.end for step in whole)])
    return replace(recording, caption=f"{recording.caption} (drawn: step {number})", ranks=ranks)


def part(recording: Recording, first: float, last: float) -> Recording:
    """From `first` to `last`, milliseconds from its begin; what reaches beyond is cut there. Messages stay whole."""
    first, last = recording.begin + int(first * 1e6), recording.begin + int(last * 1e6)
    whole = {id(end) for _, left, _, arrived in messages(recording) if first <= left.begin and arrived.begin <= last
             for end in (left, arrived)}
    ranks = [[Event(event.kind, max(event.begin, first), min(event.end, last), event.args) for event in events
              if id(event) in whole or (event.kind not in MOMENTS and event.begin < last and event.end > first)]
             for events in recording.ranks]
    length = (recording.end - recording.begin) / 1e6
    require(any(ranks), f"--milliseconds must begin within the recording, which is {length:.1f} ms long; "
            f"try 0:{length / 2:.0f}")
    return replace(recording, ranks=ranks)


def legible_width(recordings) -> float:
    """Pixels for the longest of them, at which half of all microbatches have room for their number."""
    boxes = [spans[-1].end - spans[0].begin for recording in recordings for events in recording.ranks
             for spans in actions(events)]
    longest = max(recording.end - recording.begin for recording in recordings)
    return LEFT + RIGHT + longest * LEGIBLE / max(median(boxes or [longest]), 1)


def picture(recordings: list[Recording]) -> str:
    """SVG: one above the other, on one time scale. All steps are drawn if they stay legible, else the first."""
    if legible_width(recordings) > WIDEST:
        recordings = [one_step(recording, recording.steps[0]) if len(recording.steps) > 1 else recording
                      for recording in recordings]
    width = min(max(WIDTH, legible_width(recordings)), WIDEST)
    scale = (width - LEFT - RIGHT) / max(recording.end - recording.begin for recording in recordings)
    body, y = [], 0
    for recording in recordings:
        panel = Panel(recording, y, scale)
        body, y = body + panel.parts, panel.bottom
    parts, y = legend(meanings(recordings), y)
    patterns = "".join(HATCHED.format(name=name, colour=colour, turn=turn, thick=thick)
                       for (name, colour), turn, thick in zip(WAITS.items(), (45, -45), (2.2, 1)))
    return frame(width, y + 4, body + parts, TIP + patterns)


# ---- in a run, and afterwards

def gather(trace: Trace, mesh: Mesh) -> Recording | None:
    """Everybody's events on rank 0, on its clock; None elsewhere. All ranks call it together."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(((mesh.pp_rank, mesh.dp_rank, mesh.tp_rank), trace.take(clock_offset())), everyone)
    if everyone is None:
        return None
    recording = Recording("", *map(list, zip(*everyone)))
    begin = recording.begin
    for event in (event for events in recording.ranks for event in events):
        event.begin, event.end = event.begin - begin, event.end - begin
    find_ready(recording)
    first, last = recording.steps[0], recording.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    recording.caption = f"tp {mesh.tp}, pp {mesh.pp}, dp {mesh.dp}: {steps}"
    return recording


def draw_timeline(trace: Trace, mesh: Mesh, path: Path) -> str:
    """Write PATH.json and PATH.svg of all that was recorded. All ranks call it together.

    Returns, on rank 0, what to tell the user: also of a full disk, since training is worth more than its picture.
    """
    recording = gather(trace, mesh)
    if recording is None:
        return ""
    svg, trace_json, rows = path.with_suffix(".svg"), path.with_suffix(".json"), table(recording)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [f"timeline of {recording.caption}"]
    lines += ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    try:
        write(svg, picture([recording]))
        trace_json.write_text(json.dumps(chrome_trace(recording), separators=(",", ":")))
        lines.append(f"  drawn in {svg}; https://ui.perfetto.dev opens {trace_json.name} beside it")
    except OSError as error:
        lines.append(f"warning: the timeline can't be written: {error}; training goes on")
    return "\n".join(lines)
