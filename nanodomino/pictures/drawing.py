"""Draws the two pictures of a run with matplotlib: the loss curve, and the timeline of traced steps.

The loss curve shows the metrics.jsonl of one run or several. NaN and infinity leave a gap. The axes leave out the
largest 2 % of the losses and of the gradient norms, which would flatten the rest.

    loss |\\                       pale: each step; strong: the centred mean over about 2 % of the steps
         | \\. . . . . unigram     dashed: validation; square: test
         |  `-o__ . . bigram      dotted: the losses of models that know only how frequent each token is (unigram
         |       `--o--           entropy), or only the previous token (bigram entropy)
         +------------- step      marks on the axis: skipped steps

The timeline has two rows per rank. A table below them says where each rank's time went (merged_trace.py).

    rank 0  compute        [ F0 ][ F1 ]////////[  B0  ][ F2 ][  B1  ]           boxes: compute; hatched: waiting
            communication          ===         \\          ====                   bars: collectives; arrows: messages
    rank 1  compute              \\[ F0 ][ B0 ]///[ F1 ][  B1  ]                between stages

A letter shows where a slice computes, and which slice a collective belongs to. A frame encloses a pair: a forward and a
backward that take turns. Collectives that are in flight at the same time lie in separate lanes.

matplotlib is imported when a picture is drawn, so a run trains without it. Lengths are in points, 1/72 inch.
"""

import io
import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np

from nanodomino.comm.trace import Trace
from nanodomino.errors import import_optional
from nanodomino.files import open_regular_file, write_file
from nanodomino.mesh import Mesh
from nanodomino.pictures.merged_trace import (COLLECTIVES, Recording, actions, chrome_trace, gather, in_flight,
                                              lanes_of, messages, parts, spans_of, table)
from nanodomino.schedules.definitions import PASSES

WIDTH, INK = 750, "#444"                                 # a browser shows a picture 1000 pixels wide
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "nanodomino", "text.parse_math": False, "hatch.linewidth": 1,
         "path.simplify_threshold": 0.5, "font.size": 8, "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
         "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#999", "axes.titlelocation": "left",
         "axes.titlesize": 9, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#ddd", "legend.frameon": False}


def svg(draw, *arguments) -> str:
    """Return what draw(figure, *arguments) draws as an SVG: the same text for the same picture. Raises UserError
    without matplotlib. (Not with pyplot, which would look for a screen.)"""
    matplotlib, file = import_optional("matplotlib.figure", "a picture"), io.BytesIO()
    import_optional("matplotlib.style", "a picture")
    with matplotlib.style.context(["default", STYLE]):
        draw(figure := matplotlib.figure.Figure((WIDTH / 72, 1)), *arguments)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue().decode()


# ---- the loss curve

PANELS = {"loss": "loss, nats per token", "grad_norm": "gradient norm", "lr": "learning rate"}
ENTROPIES = {"unigram_entropy": "unigram", "bigram_entropy": "bigram"}
RESULTS = {"valid_loss": "validation", "valid_bits_per_byte": "bits per byte", "test_loss": "test",
           "test_bits_per_byte": "bits per byte"}


def read_metrics(run: Path) -> dict[str, np.ndarray]:
    """Return {name: [2, n]} of a run's metrics.jsonl: a row of steps, and a row of values, which are NaN where they are
    not finite. Leaves out a line that is still being written."""
    lines, decode = [], json.JSONDecoder(parse_int=float).decode         # float() would refuse an int of 400 digits
    with open_regular_file(run / "metrics.jsonl") as file, suppress(ValueError):
        lines.extend(decode(line.decode()) for line in file)
    points = {name: np.array([(line["step"], line[name]) for line in lines if name in line], dtype=float)
              for name in (*PANELS, *ENTROPIES, *RESULTS, "skipped")}
    return {name: np.where(np.isfinite(found), found, np.nan).reshape(-1, 2).T for name, found in points.items()}


def mean_around(values: np.ndarray, reach: int) -> np.ndarray:
    """Replace each value by the mean of itself and `reach` neighbours on each side, without those that are NaN."""
    sums, counts = (np.convolve(each, np.ones(2 * reach + 1))[reach:reach + len(values)]
                    for each in (np.nan_to_num(values), np.isfinite(values)))
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)


def loss_curve(figure, runs: list[Path]):
    """Draw loss, gradient norm and learning rate of the runs in these folders. Raises OSError."""
    below = 58 + 12 * len(runs)
    figure.set_figheight((404 + below) / 72)
    panels = figure.subplots(3, sharex=True, height_ratios=(10, 3, 3))
    figure.subplots_adjust(0.055, below / (404 + below), 0.89, 0.96, hspace=0.25)
    shown, levels, legend, loss = {name: [] for name in PANELS}, set(), {}, panels[0]
    for number, run in enumerate(runs):
        metrics, colour = read_metrics(run), f"C{number % 10}"
        reach = min(metrics["loss"].shape[1] // 100, 250)      # steps on each side of the mean
        for axis, name, width, share in zip(panels, PANELS, (reach, reach, 0), (0.98, 0.98, 1)):
            steps, values = metrics[name]
            finite = np.sort(values[np.isfinite(values)])
            shown[name] += [*finite[:1], *finite[round(share * len(finite)) - 1:][:1]]
            if width:
                axis.plot(steps, values, color=colour, alpha=0.35, linewidth=1)
                values = mean_around(values, width)
            (line,) = axis.plot(steps, values, "." * (len(steps) < 30) + "-", color=colour)
        for name, look in (("valid_loss", "o--"), ("test_loss", "s")):
            loss.plot(*metrics[name], look, color=colour, markersize=3.5, linewidth=1)
            shown["loss"] += metrics[name][1].tolist()
        skipped = metrics["skipped"][0][metrics["skipped"][1] > 0]
        loss.plot(skipped, 0 * skipped + 0.015, "|", color=colour, transform=loss.get_xaxis_transform())
        levels |= {(words, value) for name, words in ENTROPIES.items() for value in metrics[name][1, -1:]}
        last = [f"{words} {metrics[name][1, -1]:.3f}" for name, words in RESULTS.items() if metrics[name].size]
        legend[line] = ", ".join([repr(str(run) if runs[1:] else run.resolve().name)[1:-1], *last])
    for words, value in sorted(levels):
        loss.axhline(value, color=INK, linestyle=":", linewidth=1)
        loss.text(1.01, value, f"{words} {value:.3f}", transform=loss.get_yaxis_transform(), va="center")
        shown["loss"].append(value)
    for axis, (name, words) in zip(panels, PANELS.items()):
        finite = [value for value in shown[name] if np.isfinite(value)] or [0.0, 1.0]
        margin = max(0.04 * (max(finite) - min(finite)), 0.01 * abs(max(finite)), 1e-9)
        axis.set(title=words, ylim=(min(finite) - margin, max(finite) + margin))
    axis.set_xlabel("step", loc="right")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_major_formatter("{x:g}")
    figure.legend(legend.keys(), legend.values(), loc="lower left", bbox_to_anchor=(0, 0.03))
    figure.text(0.0105, 0.012, "pale: each step; strong: mean over about 2 % of the steps, centred; dashed: "
                "validation; square: test; marks on the axis: skipped steps", color="#666")


# ---- the timeline

LEFT, ACROSS, BELOW = 88, WIDTH - 102, 50                # the margins left of and below the rows; the rows' width
COMPUTE, LANE, LANES, SPACE = 23, 10, 70, 9              # heights: compute row, lane, all lanes, gap below
# The colours also differ in lightness, so colour-blind readers and grey prints can tell them apart.
WORK = {"forward": "#9bd1f4", "backward": "#4fae8b", "weight_gradient": "#f3df6b", "input_backward": "#8cc63f",
        "weight_backward": "#dfb92f", "optimizer": "#c8a2d8"}
WAITS = {"exposed": ("exposed communication", "#d62728", "////"), "idle": ("idle", "#b5b5b5", "\\\\\\")}
PURPOSES = {"tp": ("activations over tp", "#e69f00"), "cp": ("attention over cp", "#6f9a3e"),
            "ep": ("rows for experts over ep", "#d0759c"), "dp": ("gradients over dp", "#8496e0"),
            "weights": ("weights over dp", "#63bccb"), "embedding": ("word embedding", "#bb9468"),
            "world": ("loss and norm, all ranks", "#9a9a9a")}
SIGNS = {"step": "pale: waiting for the last rank to join; 0, 1, ...: microbatches",
         "chunk": "0', 1', ...: in the stage's second chunk of layers", "slice": "a, b, ...: slices of a microbatch",
         "message": "arrows: messages between stages"}   # {an argument of events: what its sign means}
LETTERS = {action.kind: action.letter for action in PASSES}


def timeline(figure, recordings: list[Recording]):
    """Draw the recordings below each other, on one time scale, and a legend of the colours and signs in them."""
    y, events = 0, [event for recording in recordings for events in recording.ranks for event in events]
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, max(event.end for event in events) / 1e6))
    for recording in recordings:
        y = draw_recording(axis, recording, y)
    axis.axis("off")
    axis.set(ylim=(y, 0), position=(LEFT / WIDTH, BELOW / (y + BELOW), ACROSS / WIDTH, y / (y + BELOW)))
    figure.set_figheight((y + BELOW) / 72)
    handles = {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="lower left", bbox_to_anchor=(0, 14 / (y + BELOW)), ncols=5)
    signs = [words for name, words in SIGNS.items() if any(event.args.get(name) for event in events)]
    figure.text(0.0105, 6 / (y + BELOW), "; ".join(signs))


def draw_recording(axis, recording: Recording, y: float) -> float:
    """Draw a recording below y, with its time axis and its table, and return the y below these."""
    scale = ACROSS / axis.get_xlim()[1]                        # points per millisecond
    sliced = any(event.args.get("slice") for events in recording.ranks for event in events)
    lanes = [lanes_of(events) for events in recording.ranks]
    count = 1 + max(lane for found in lanes for lane in (0, *found.values()))
    height = min(LANE, LANES / count)
    tops = [y + 24 + rank * (COMPUTE + 2 + count * height + SPACE) for rank in range(len(lanes) + 1)]

    def bars(spans, y, height, colour, label=None, linewidth=0, **look):
        if spans := [(begin / 1e6, (end - begin) / 1e6) for begin, end in spans]:
            axis.broken_barh(spans, (y, height), facecolor=colour, label=label, linewidth=linewidth, **look)

    def write(begin, end, y, words, **look):
        """Write words in the middle of a span, if there is room."""
        if (end - begin) / 1e6 * scale > 5 * len(words):
            axis.text((begin + end) / 2e6, y, words, ha="center", va="center_baseline", **look)

    axis.text(0, y + 18, recording.caption, fontsize=9)
    for time in axis.get_xticks()[:-1]:
        axis.plot([time, time], [tops[0] - 3, tops[-1]], color="#ddd", linewidth=0.8, zorder=0)
        axis.text(time, tops[-1] + 9, f"{time:g} ms", ha="center")
    rows = "\n".join(table(recording)).replace(" ", "\xa0")    # a browser would merge spaces
    axis.text(0, tops[-1] + 14, rows, family="monospace", fontsize=7, va="top")
    for rank, (events, place, y) in enumerate(zip(recording.ranks, recording.places, tops)):
        axis.text(-5 / scale, y + COMPUTE / 2, f"rank {rank}\n{place}", fontsize=7, ha="right", va="center")
        for kind, colour in WORK.items():
            bars(spans_of(events, kind), y, COMPUTE, colour, kind.replace("_", " "))
        for part, (words, colour, hatch) in WAITS.items():
            bars(parts(events)[part], y, COMPUTE, "white", words, 0.5, edgecolor=colour, hatch=hatch)
        for spans in actions(events):
            begin, end, halves = spans[0].begin, spans[-1].end, {event.kind: event.args for event in spans}
            bars([(begin, end)], y, COMPUTE, "none", linewidth=0.7, edgecolor=INK if len(halves) > 1 else "white")
            words = "".join(LETTERS[kind] * (len(halves) > 1) + str(half["microbatch"]) + "'" * half.get("chunk", 0)
                            for kind, half in halves.items())
            write(begin, end, y + (7 if sliced else COMPUTE / 2), words,
                  bbox=dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none", alpha=0.7))
        flights = defaultdict(list)
        for event in events:
            middle = y + 17
            if event.kind in COLLECTIVES:
                top, group = y + COMPUTE + 2 + height * lanes[rank][id(event)], event.args["group"]
                purpose = "weights" if (group, event.kind) == ("dp", "all_gather") else group.removeprefix("expert_")
                flights[purpose, top].append(event)
                middle = top + height / 2
            if sliced and "slice" in event.args and event.kind in ("resume", *COLLECTIVES):
                write(event.begin, event.end, middle, chr(ord("a") + event.args["slice"]), fontsize=min(7, height))
        for (purpose, top), found in flights.items():
            words, colour = PURPOSES[purpose]
            bars([(event.begin, in_flight(event)[0]) for event in found], top, height - 1, colour, alpha=0.35)
            bars(map(in_flight, found), top, height - 1, colour, words)
    for sender, send, receiver, receive in messages(recording):
        axis.annotate("", (receive.begin / 1e6, tops[receiver] + COMPUTE * (receiver < sender)),
                      (send.begin / 1e6, tops[sender] + COMPUTE * (sender < receiver)),
                      arrowprops=dict(arrowstyle="-|>", mutation_scale=6, shrinkA=0, shrinkB=0, lw=0.6, color=INK))
    return tops[-1] + 26 + 9 * len(lanes)


def draw_timeline(trace: Trace, mesh: Mesh, path: Path) -> str:
    """Write what was recorded to PATH.json and PATH.svg. Every rank must call it. Returns the text to print, with the
    table of totals, and "" on other ranks than rank 0. Errors, such as a full disk, become a warning in the text."""
    recording = gather(trace, mesh)
    if recording is None:
        return ""
    lines = [f"timeline of {recording.caption}", *(f"  {row}" for row in table(recording))]
    try:
        write_file(path.with_suffix(".json"), json.dumps(chrome_trace(recording), separators=(",", ":")).encode())
        lines.append(f"  https://ui.perfetto.dev opens {path}.json")
        write_file(path.with_suffix(".svg"), svg(timeline, [recording]).encode())
        lines.append(f"  drawn in {path}.svg")
    except Exception as error:
        lines.append(f"warning: the timeline can't be drawn: {error}; training continues")
    return "\n".join(lines)
