"""Draws a recording (what all ranks did in the traced steps) as an SVG.

Each rank has two rows. A table below them says where each rank's time went (merged_trace.py).

    rank 0  compute        [ F0 ][ F1 ]////////[  B0  ][ F2 ][  B1  ]           boxes: compute; hatched: waiting
            communication          ===         \\          ====                   bars: collectives; arrows: messages
    rank 1  compute              \\[ F0 ][ B0 ]///[ F1 ][  B1  ]                between stages

The number in a box is the microbatch, and the colour says whether it is a forward or a backward. If a stage holds
several chunks of layers, primes tell them apart: 3' is microbatch 3 in chunk 1. A frame encloses a pair, that is, a
forward and a backward that take turns. Collectives that are in flight at the same time lie in separate lanes.

train.py also writes each recording as Chrome trace JSON. https://ui.perfetto.dev opens the file and shows every matmul.
This command draws several such files above each other, on one time scale:

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
from nanodomino.files import write_file
from nanodomino.mesh import Mesh
from nanodomino.plot.svg import LETTER, LINE, WIDTH, box, frame, legend, line, text, tick_step
from nanodomino.schedules.actions import PASSES as ACTIONS
from nanodomino.timeline.merged_trace import (COLLECTIVES, PASSES, Recording, actions, assign_lanes,
                                              chrome_trace, difference, event_label, messages, microbatch_label,
                                              set_ready_times, slice_name, spans_of, table, union, waits)

WIDEST, LEFT, RIGHT = 4000, 92, 16                       # pixels: the widest picture, and its margins
COMPUTE, LANE, LANES, SPACE = 26, 14, 80, 12             # heights: compute row, lane, all lanes, gap below
LEGIBLE = 12                                             # the narrowest box with room for a number

# The colours also differ in lightness, so colour-blind readers and grey prints can tell them apart.
WORK = {"forward": "#9bd1f4", "backward": "#4fae8b", "input_backward": "#8cc63f", "weight_backward": "#dfb92f",
        "weight_gradient": "#f3df6b", "optimizer": "#c8a2d8"}
LETTERS = {action.kind: action.letter for action in ACTIONS}
WAITS = {"exposed": "#d62728", "idle": "#b5b5b5"}
PURPOSES = {"tp": "#e69f00", "cp": "#6f9a3e", "ep": "#d0759c", "dp": "#8496e0", "gather": "#63bccb",
            "embedding": "#bb9468", "world": "#9a9a9a"}
NAMES = {"exposed": "exposed communication", "idle": "idle", "tp": "activations over tp",
         "cp": "attention over cp", "ep": "rows for experts over ep", "dp": "gradients over dp",
         "gather": "weights over dp", "embedding": "word embedding", "world": "loss and norm, all ranks"}
TIP = """<marker id="tip" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="6" markerHeight="6" orient="auto">\
<path d="M0 0L6 3L0 6z" fill="#444"/></marker>
"""
HATCHED = """<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate({turn})">\
<rect width="6" height="6" fill="#fff"/><rect width="{thick}" height="6" fill="{colour}"/></pattern>"""


def arrow(x1, y1, x2, y2) -> str:
    return line(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", "#444", 'stroke-width="0.8" marker-end="url(#tip)"')


def action_label(spans) -> str:
    """Return "3" for a pass of microbatch 3, whose colour shows its kind; "B0F3" for a pair, which has two colours."""
    halves = {event.kind: event for event in spans}
    return "".join((LETTERS[kind] if len(halves) > 1 else "") + microbatch_label(event)
                   for kind, event in halves.items())


def longest(spans, default) -> tuple:
    return max(spans, key=lambda span: span[1] - span[0], default=default)


def purpose(event: Event) -> str:
    """Return what a collective is for, as a key of PURPOSES. The experts' gradients over expert_dp are gradients too.
    """
    group = event.args["group"].removeprefix("expert_")
    return "gather" if event.kind == "all_gather" and group == "dp" else group


class Panel:
    """Draws one recording: a title, two rows per rank, a time axis and the table of totals.

    svg: the elements drawn so far. bottom: the y below the panel.
    """

    def __init__(self, recording: Recording, top: float, scale: float):
        """Draw everything. top: the y of the upper edge; scale: pixels per nanosecond."""
        self.recording, self.begin, self.scale, self.svg = recording, recording.begin, scale, []
        collectives = [[event for event in events if event.kind in COLLECTIVES] for events in recording.ranks]
        count = max([lane for events in collectives for lane in assign_lanes(events)], default=0) + 1
        self.lane = min(LANE, LANES / count)
        self.top, self.pitch = top + 2 * LINE + 4, COMPUTE + 3 + count * self.lane + SPACE
        self.svg.append(text(8, top + LINE, recording.caption, "title"))
        bottom = self.top + self.pitch * len(collectives)
        self.axis(bottom)
        for rank, events in enumerate(recording.ranks):
            y = self.top + rank * self.pitch
            self.svg += [text(8, y + 11, f"rank {rank}"), text(8, y + 25, recording.place(rank), "small pale")]
            self.compute_row(events, y)
            self.communication_row(collectives[rank], y + COMPUTE + 3)
        self.arrows()
        self.bottom = self.totals(bottom + 2 * LINE + 8)

    def x(self, time) -> float:
        return LEFT + (time - self.begin) * self.scale

    def bar(self, begin, end, y, height, fill, **look):
        self.svg.append(box(self.x(begin), y, (end - begin) * self.scale, height, fill, **look))

    def fits(self, begin, end, words) -> bool:
        return (end - begin) * self.scale >= LETTER * len(words)

    def label(self, begin, end, y, words, kind="middle"):
        """Write the words in the middle of a span, if there is room."""
        if self.fits(begin, end, words):
            self.svg.append(text(self.x((begin + end) / 2), y, words, kind))

    def compute_row(self, events, y):
        """Draw, from back to front: passes, slices' turns in them, weight gradients, waits, pairs' frames, numbers."""
        outer = [event for event in events if event.kind in (*PASSES, "optimizer")]
        turns = self.turns(events)
        for event in outer:
            tip = f"{event_label(event)}: {(event.end - event.begin) / 1e6:.2f} ms"
            self.bar(event.begin, event.end, y, COMPUTE, WORK[event.kind], tip=tip, stroke="#fff")
        for enclosing, begin, end, _ in turns:
            if (end - begin) * self.scale > 2:
                self.bar(begin, end, y, COMPUTE, WORK[enclosing.kind], stroke="#fff")
        half_a_pixel = 0.5 / self.scale
        deferred = difference(spans_of(events, "weight_gradient"), spans_of(events, "weight_backward"))
        for begin, end in union(deferred, half_a_pixel):
            self.bar(begin, end, y + 1, COMPUTE - 2, WORK["weight_gradient"])
        for name, spans in zip(reversed(WAITS), reversed(waits(events))):
            for begin, end in union(spans, half_a_pixel):
                self.bar(begin, end, y, COMPUTE, f"url(#{name})", stroke=WAITS[name])
        numbers = [(begin, end, words) for _, begin, end, words in turns if self.fits(begin, end, words)]
        if 3 * len(numbers) <= len(turns):                             # too few turns have room: one number per action
            numbers = []
            idle = union((event.begin, event.end) for event in events
                         if event.kind == "wait" and event.args["group"] == "pp")
            for spans in actions(events):                              # a number must not stand in a wait for a message
                whole = spans[0].begin, spans[-1].end
                numbers.append((*longest(difference([whole], idle), default=whole), action_label(spans)))
        for spans in actions(events):
            if len(spans) > 1:
                self.bar(spans[0].begin, spans[-1].end, y, COMPUTE, "none", stroke="#1f1f1f")
        for begin, end, words in numbers:
            self.label(begin, end, y + 17, words, "halo")
            self.label(begin, end, y + 17, words)

    @staticmethod
    def turns(events) -> list[tuple]:
        """Return (pass, begin, end, label) for each turn of a slice. Label "0b" is the second slice of microbatch 0.

        A turn that starts with a wait begins after that wait. With a single slice the list is empty.
        """
        found, enclosing = [], None
        if not any(event.args["slice"] for event in events if event.kind == "resume"):
            return found
        for event in events:
            if event.kind in PASSES:
                enclosing = event
            elif event.kind == "resume" and enclosing:
                label = microbatch_label(enclosing) + slice_name(event.args["slice"])
                found.append((enclosing, event.begin, event.end, label))
            elif event.kind == "wait" and found and event.end <= found[-1][2]:
                found[-1] = (found[-1][0], event.end, *found[-1][2:])
        return found

    def communication_row(self, events, y):
        """Draw a bar per collective, pale until the last rank has joined. Bars narrower than a pixel are merged."""
        narrow = defaultdict(list)
        for event, lane in zip(events, assign_lanes(events)):
            args, kind, colour = event.args, event.kind.replace("_", "-"), PURPOSES[purpose(event)]
            top = y + lane * self.lane
            if (event.end - event.begin) * self.scale < 1:
                narrow[top, colour].append((event.begin, event.end))
                continue
            ready = min(max(event.begin, args["ready"]), event.end)
            tip = f"{event_label(event)}: {args['bytes']:,} bytes, {(event.end - ready) / 1e6:.2f} ms"
            if (ready - event.begin) * self.scale > 0.5:
                self.bar(event.begin, ready, top, self.lane - 1, colour, opacity=0.35)
            self.bar(ready, event.end, top, self.lane - 1, colour, tip=tip)
            if "slice" in args:
                label = slice_name(args["slice"])
                kind = f"{kind} {label}" if self.fits(event.begin, event.end, f"{kind} {label}") else label
            if self.lane >= 12:
                self.label(event.begin, event.end, top + self.lane / 2 + 3.5, kind, "middle small")
        for (top, colour), spans in narrow.items():
            for begin, end in union(spans, 0.5 / self.scale):
                self.bar(begin, end, top, self.lane - 1, colour)

    def arrows(self):
        """Draw an arrow for each message. It spans the gap between the sender's and the receiver's compute rows."""
        for sender, send, receiver, receive in messages(self.recording):
            down = receiver > sender
            y1 = self.top + sender * self.pitch + (COMPUTE if down else 0)
            y2 = self.top + receiver * self.pitch + (0 if down else COMPUTE)
            self.svg.append(arrow(self.x(send.begin), y1, self.x(receive.begin), y2))

    def axis(self, y):
        step = tick_step(1e6 * self.scale, 80)
        for i in range(int((self.recording.end - self.begin) / 1e6 / step) + 1):
            x = LEFT + i * step * 1e6 * self.scale
            self.svg.append(line(f"M{x:.1f} {self.top - 4:.1f}V{y:.1f}", "#ddd"))
            self.svg.append(text(x, y + 14, f"{i * step:g}" + (" ms" if i == 0 else ""), "middle small"))

    def totals(self, y) -> float:
        for row in table(self.recording):
            self.svg.append(text(8, y, row[0]))
            for i, cell in enumerate(row[1:]):
                number, *share = cell.split()
                self.svg.append(text(130 + 110 * i, y, number, "end"))
                self.svg += [text(166 + 110 * i, y, words, "end small pale") for words in share]
            y += LINE
        return y


def legend_entries(recordings) -> list[tuple]:
    """Return a (sample, name) pair for each colour and sign in the recordings, for svg.legend()."""
    events = [event for recording in recordings for events in recording.ranks for event in events]
    kinds = {event.kind for event in events}
    purposes = {purpose(event) for event in events if event.kind in COLLECTIVES}
    boxes = [(colour, "", kind.replace("_", " ")) for kind, colour in WORK.items() if kind in kinds]
    boxes += [(f"url(#{name})", colour, NAMES[name]) for name, colour in WAITS.items()]
    boxes += [(colour, "", NAMES[name]) for name, colour in PURPOSES.items() if name in purposes]
    if purposes & {"tp", "cp", "ep", "dp", "embedding"}:
        boxes.append(("#e4e4e4", "", "pale: waiting for the last rank to join"))
    entries = [(partial(box, width=14, height=12, fill=fill, stroke=stroke), name) for fill, stroke, name in boxes]
    if any(map(messages, recordings)):
        entries.append((lambda x, y: arrow(x, y + 6, x + 14, y + 6), "message between stages"))
    return entries


def select_step(recording: Recording, number: int) -> Recording:
    """Return one step of a recording, and name the step in the caption. Raises UserError if it was not recorded."""
    require(number in recording.steps,
            f"--step {number} is not in the recording; try one of {', '.join(map(str, recording.steps))}")
    ranks = []
    for events in recording.ranks:
        selected = [step for step in events if step.kind == "step" and step.args["step"] == number]
        ranks.append([event for event in events if any(step.begin <= event.begin < step.end for step in selected)])
    return replace(recording, caption=f"{recording.caption} (drawn: step {number})", ranks=ranks)


def legible_width(recordings) -> float:
    """Return how wide the picture must be, in pixels, so that half of all actions have room for their label."""
    boxes = [spans[-1].end - spans[0].begin for recording in recordings for events in recording.ranks
             for spans in actions(events)]
    longest = max(recording.end - recording.begin for recording in recordings)
    return LEFT + RIGHT + longest * LEGIBLE / max(median(boxes or [longest]), 1)


def picture(recordings: list[Recording]) -> str:
    """Return an SVG of the recordings above each other, on one time scale.

    If all steps don't fit legibly, only the first step of each recording is drawn.
    """
    if legible_width(recordings) > WIDEST:
        recordings = [select_step(recording, recording.steps[0]) if len(recording.steps) > 1 else recording
                      for recording in recordings]
    width = min(max(WIDTH, legible_width(recordings)), WIDEST)
    scale = (width - LEFT - RIGHT) / max(recording.end - recording.begin for recording in recordings)
    body, y = [], 0
    for recording in recordings:
        panel = Panel(recording, y, scale)
        body, y = body + panel.svg, panel.bottom
    parts, y = legend(legend_entries(recordings), y)
    patterns = "".join(HATCHED.format(name=name, colour=colour, turn=turn, thick=thick)
                       for (name, colour), turn, thick in zip(WAITS.items(), (45, -45), (2.2, 1)))
    return frame(width, y + 4, body + parts, TIP + patterns)


# ---- during a run

def gather(trace: Trace, mesh: Mesh) -> Recording | None:
    """On rank 0, return the events of all ranks; on other ranks, return None. Every rank must call it.

    The times are on rank 0's clock, counted from the first event.
    """
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(((mesh.pp_rank, mesh.axis("dp")[1], mesh.tp_rank), trace.take(clock_offset())), gathered)
    if gathered is None:
        return None
    recording = Recording("", *map(list, zip(*gathered)), mesh.ep, mesh.cp)
    begin = recording.begin
    for event in (event for events in recording.ranks for event in events):
        event.begin, event.end = event.begin - begin, event.end - begin
    set_ready_times(recording)
    first, last = recording.steps[0], recording.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    more = "".join(f", {axis} {size}" for axis, size in (("cp", mesh.cp), ("ep", mesh.ep)) if size > 1)
    recording.caption = f"tp {mesh.tp}, pp {mesh.pp}, dp {mesh.dp}{more}: {steps}"
    return recording


def draw_timeline(trace: Trace, mesh: Mesh, path: Path) -> str:
    """Write what was recorded to PATH.json and PATH.svg. Every rank must call it.

    Returns on rank 0 the text to print, with the table of totals, and on other ranks "". An error in writing, such as a
    full disk, becomes a warning in the text, so that training continues.
    """
    recording = gather(trace, mesh)
    if recording is None:
        return ""
    svg, trace_json, rows = path.with_suffix(".svg"), path.with_suffix(".json"), table(recording)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [f"timeline of {recording.caption}"]
    lines += ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    try:
        write_file(svg, picture([recording]).encode())
        write_file(trace_json, json.dumps(chrome_trace(recording), separators=(",", ":")).encode())
        lines.append(f"  drawn in {svg}; https://ui.perfetto.dev opens {trace_json.name} in the same folder")
    except OSError as error:
        lines.append(f"warning: the timeline can't be written: {error}; training continues")
    return "\n".join(lines)
