"""Draws a recording (what all ranks did in the traced steps) as an SVG.

Each rank has two rows. A table below them says where each rank's time went (merged_trace.py).

    rank 0  compute        [ F0 ][ F1 ]////////[  B0  ][ F2 ][  B1  ]           boxes: compute; hatched: waiting
            communication          ===         \\          ====                   bars: collectives; arrows: messages
    rank 1  compute              \\[ F0 ][ B0 ]///[ F1 ][  B1  ]                between stages

The legend explains colours, numbers and letters. A letter shows where a slice computes, and which slice a collective
belongs to. A frame encloses a pair: a forward and a backward that take turns. Collectives that are in flight at the
same time lie in separate lanes.

train.py also writes each recording as Chrome trace JSON. https://ui.perfetto.dev opens the file and shows every matmul.
"""

import json
from pathlib import Path

import torch.distributed as dist

from nanodomino.comm.trace import Event, Trace, clock_offset
from nanodomino.files import write_file
from nanodomino.mesh import Mesh
from nanodomino.plot.svg import LETTER, LINE, WIDTH, box, frame, line, text, ticks
from nanodomino.schedules.definitions import PASSES as ACTIONS
from nanodomino.timeline.merged_trace import (COLLECTIVES, PASSES, Recording, actions, chrome_trace, difference,
                                              in_flight, lanes_of, messages, set_ready_times, spans_of, table, union,
                                              waits)

LEFT, RIGHT = 92, 16                                     # pixels: margins
COMPUTE, LANE, LANES, SPACE = 26, 14, 80, 12             # heights: compute row, lane, all lanes, gap below
GROUPS = ("tp", "dp", "cp", "ep", "expert_dp", "embedding")

# The colours also differ in lightness, so colour-blind readers and grey prints can tell them apart.
WORK = {"forward": "#9bd1f4", "backward": "#4fae8b", "input_backward": "#8cc63f", "weight_backward": "#dfb92f",
        "weight_gradient": "#f3df6b", "optimizer": "#c8a2d8"}
WAITS = {"idle": "#b5b5b5", "exposed": "#d62728"}
PURPOSES = {"activations over tp": "#e69f00", "attention over cp": "#6f9a3e", "rows for experts over ep": "#d0759c",
            "gradients over dp": "#8496e0", "weights over dp": "#63bccb", "word embedding": "#bb9468",
            "loss and norm, all ranks": "#9a9a9a"}
PURPOSE_OF = dict(zip(("tp", "cp", "ep", "dp", "weights", "embedding", "world"), PURPOSES))
LETTERS = {action.kind: action.letter for action in ACTIONS}
SIGNS = {"send": "message between stages", "forward": "0, 1, ...: microbatches",
         "chunk": "0', 1', ...: in the stage's second chunk of layers", "slice": "a, b, ...: slices of a microbatch"}
DEFINITIONS = """<marker id="tip" viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="6" markerHeight="6" orient="auto">\
<path d="M0 0L6 3L0 6z" fill="#444"/></marker>
""" + "".join(f"""<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate({turn})"><rect width="6" height="6" fill="#fff"/>\
<rect width="{thick}" height="6" fill="{WAITS[name]}"/></pattern>""" for name, turn, thick in (
    ("exposed", 45, 2.2), ("idle", -45, 1)))


def arrow(x1, y1, x2, y2) -> str:
    return line(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", "#444", 'stroke-width="0.8" marker-end="url(#tip)"')


def microbatch_label(event: Event) -> str:
    """Return the label of a pass: microbatch 3 is "3" in chunk 0, "3'" in chunk 1, "3''" in chunk 2."""
    return str(event.args["microbatch"]) + "'" * event.args.get("chunk", 0)


def action_label(spans) -> str:
    """Return "3" for a pass of microbatch 3, whose colour shows its kind; "B0F3" for a pair, which has two colours."""
    halves = {event.kind: event for event in spans}
    return "".join((LETTERS[kind] if len(halves) > 1 else "") + microbatch_label(event)
                   for kind, event in halves.items())


def purpose(event: Event) -> str:
    """Return what a collective is for, as a key of PURPOSES. Gradients over expert_dp are gradients, too."""
    group = event.args["group"].removeprefix("expert_")
    return PURPOSE_OF["weights" if event.kind == "all_gather" and group == "dp" else group]


class Panel:
    """Draws one recording: a title, two rows per rank, a time axis and the table of totals.

    svg: the elements drawn so far. bottom: the y below the panel.
    """

    def __init__(self, recording: Recording, top: float, scale: float):
        """Draw everything. top: the y of the upper edge; scale: pixels per nanosecond."""
        self.begin, self.scale = recording.begin, scale
        self.sliced = any(event.args.get("slice") for events in recording.ranks for event in events)
        lanes = [lanes_of(events) for events in recording.ranks]
        count = max((lane for found in lanes for lane in found.values()), default=0) + 1
        self.lane = min(LANE, LANES / count)
        first, pitch = top + 2 * LINE + 4, COMPUTE + 3 + count * self.lane + SPACE
        bottom = first + pitch * len(lanes)
        self.svg = [text(8, top + LINE, recording.caption, "title")]
        for i, milliseconds in enumerate(ticks(0, (recording.end - self.begin) / 1e6, 1e6 * scale, 80)):
            x = LEFT + milliseconds * 1e6 * scale
            self.svg += [line(f"M{x:.1f} {first - 4:.1f}V{bottom:.1f}", "#ddd"),
                         text(x, bottom + 14, f"{milliseconds:g}" + " ms" * (i == 0), "middle small")]
        for rank, events in enumerate(recording.ranks):
            y = first + rank * pitch
            self.svg += [text(8, y + 11, f"rank {rank}"), text(8, y + 25, recording.places[rank], "small pale")]
            self.compute_row(events, y)
            self.communication_row(events, lanes[rank], y + COMPUTE + 3)
        for sender, send, receiver, receive in messages(recording):
            leaves, arrives = (COMPUTE, 0) if receiver > sender else (0, COMPUTE)
            self.svg.append(arrow(self.x(send.begin), first + sender * pitch + leaves,
                                  self.x(receive.begin), first + receiver * pitch + arrives))
        y = bottom + LINE + 8
        for row in table(recording):
            y += LINE
            self.svg.append(text(8, y, row, "fixed"))
        self.bottom = y + LINE

    def x(self, time) -> float:
        return LEFT + (time - self.begin) * self.scale

    def bar(self, begin, end, y, height, fill, **look):
        self.svg.append(box(self.x(begin), y, (end - begin) * self.scale, height, fill, **look))

    def write(self, begin, end, y, words, *styles):
        """Write words in the middle of a span, once in each style, if there is room."""
        if (end - begin) * self.scale >= LETTER * len(words):
            self.svg += [text(self.x((begin + end) / 2), y, words, style) for style in styles]

    def write_slice(self, event, y):
        """Write a in an event of slice 0, b in one of slice 1, ..., if there are several slices."""
        if self.sliced and "slice" in event.args:
            self.write(event.begin, event.end, y, chr(ord("a") + event.args["slice"]), "middle small")

    def compute_row(self, events, y):
        """Draw, from back to front: passes, weight gradients, waits, slices' letters, pairs' frames, numbers."""
        for event in events:
            if event.kind in (*PASSES, "optimizer"):
                self.bar(event.begin, event.end, y, COMPUTE, WORK[event.kind], stroke="#fff")
        half_a_pixel = 0.5 / self.scale
        deferred = difference(spans_of(events, "weight_gradient"), spans_of(events, "weight_backward"))
        for begin, end in union(deferred, half_a_pixel):
            self.bar(begin, end, y + 1, COMPUTE - 2, WORK["weight_gradient"])
        for name, spans in zip(("exposed", "idle"), waits(events)):
            for begin, end in union(spans, half_a_pixel):
                self.bar(begin, end, y, COMPUTE, f"url(#{name})", stroke=WAITS[name])
        for event in events:
            if event.kind == "resume":
                self.write_slice(event, y + 23)
        for spans in actions(events):
            begin, end = spans[0].begin, spans[-1].end
            if len(spans) > 1:
                self.bar(begin, end, y, COMPUTE, "none", stroke="#1f1f1f")
            self.write(begin, end, y + 13, action_label(spans), "halo", "middle")

    def communication_row(self, events, lanes, y):
        """Draw a bar per collective, pale until the last rank has joined, with the letter of its slice."""
        for event in events:
            if event.kind in COLLECTIVES:
                top, colour = y + lanes[id(event)] * self.lane, PURPOSES[purpose(event)]
                if event.args["ready"] > event.begin:
                    self.bar(event.begin, event.args["ready"], top, self.lane - 1, colour, opacity=0.35)
                self.bar(*in_flight(event), top, self.lane - 1, colour)
                if self.lane == LANE:
                    self.write_slice(event, top + LANE / 2 + 3.5)


def legend(recordings, y) -> tuple[list[str], float]:
    """Return (elements, the y below them) of a legend of each colour and sign in the recordings."""
    events = [event for recording in recordings for events in recording.ranks for event in events]
    present = {event.kind for event in events} | {purpose(event) for event in events if event.kind in COLLECTIVES}
    present |= {name for name in ("chunk", "slice") if any(event.args.get(name) for event in events)}
    entries = [(name, colour) for name, colour in (WORK | PURPOSES).items() if name in present]
    entries += [("exposed communication", "url(#exposed)"), ("idle", "url(#idle)"),
                ("pale: waiting for the last rank to join", "#e4e4e4")]
    entries += [(words, None) for kind, words in SIGNS.items() if kind in present]
    elements, x = [], 8
    for name, fill in entries:
        if x + 19 + LETTER * len(name) > WIDTH:
            x, y = 8, y + LINE
        elements += [box(x, y, 14, 12, fill, stroke="#888")] if fill else [
            arrow(x, y + 6, x + 14, y + 6)] if name == SIGNS["send"] else []
        elements.append(text(x + 19, y + 10.5, name.replace("_", " ")))
        x += 31 + LETTER * len(name)
    return elements, y + LINE


def picture(recordings: list[Recording]) -> str:
    """Return an SVG of the recordings above each other, on one time scale."""
    scale = (WIDTH - LEFT - RIGHT) / max(recording.end - recording.begin for recording in recordings)
    body, y = [], 0
    for recording in recordings:
        panel = Panel(recording, y, scale)
        body, y = body + panel.svg, panel.bottom
    parts, y = legend(recordings, y)
    return frame(WIDTH, y + 4, body + parts, DEFINITIONS)


# ---- during a run

def gather(trace: Trace, mesh: Mesh) -> Recording | None:
    """Return the events of all ranks on rank 0, and None on other ranks. Every rank must call it. The times are on rank
    0's clock, counted from the first event."""
    sizes = {name: mesh.axis(axis) for name, axis in (("stage", "pp"), ("dp", "dp"), ("tp", "tp"))}
    place = ", ".join(f"{name} {index}" for name, (size, index) in sizes.items() if size > 1)
    groups = {name: tuple(mesh.rows[name]) for name in GROUPS if name in mesh.groups}
    gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((place, groups, trace.take(clock_offset())), gathered)
    if gathered is None:
        return None
    places, groups, ranks = map(list, zip(*gathered))
    recording = Recording("", places, ranks)
    begin = recording.begin
    for event in (event for events in ranks for event in events):
        event.begin, event.end = event.begin - begin, event.end - begin
    set_ready_times(recording, groups)
    layout = ", ".join(f"{axis} {size}" for axis in ("tp", "pp", "dp", "cp", "ep")
                       if (size := mesh.sizes.get(axis) or mesh.axis(axis)[0]) > 1)
    recording.caption = f"{layout or 'one rank'}, step {', '.join(map(str, recording.steps))}"
    return recording


def draw_timeline(trace: Trace, mesh: Mesh, path: Path) -> str:
    """Write what was recorded to PATH.json and PATH.svg. Every rank must call it.

    Returns on rank 0 the text to print, with the table of totals, and on other ranks "". An error in writing, such as a
    full disk, becomes a warning in the text, so that training continues.
    """
    recording = gather(trace, mesh)
    if recording is None:
        return ""
    svg, trace_json = path.with_suffix(".svg"), path.with_suffix(".json")
    lines = [f"timeline of {recording.caption}", *(f"  {row}" for row in table(recording))]
    try:
        write_file(svg, picture([recording]).encode())
        write_file(trace_json, json.dumps(chrome_trace(recording), separators=(",", ":")).encode())
        lines.append(f"  drawn in {svg}; https://ui.perfetto.dev opens {trace_json.name} in the same folder")
    except OSError as error:
        lines.append(f"warning: the timeline can't be written: {error}; training continues")
    return "\n".join(lines)
