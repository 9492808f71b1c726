"""The curve of a run, or of several on the same axes: loss, gradient norm and learning rate over the steps.

    loss |:
         | \\:                       pale, dots here: each step
         |. .\\. . . . . unigram     strong: the mean over the steps around it, some 2 % of all, 501 at most
         |  . \\_ :                  o: validation
         |. . . .`.o_.__._ bigram   dotted: what a model reaches that knows how often tokens come (unigram), and one
         |         :  `---o-        that sees a single token back (bigram)
         +---------------- steps

train.py leaves it as loss.svg in the run's folder, anew at each validation and checkpoint, and

    python -m nanodomino.plot runs/nano-001                                        draws it again
    python -m nanodomino.plot runs/nano-001 runs/nano-002 --output both.svg        compares, also while they train

All comes from metrics.jsonl, also the yardsticks, which depend on the text; config.json tells in what runs differ.

A picture has some 800 columns of pixels, a run may have 100,000 steps. Of the steps that share a column the least and
the largest value are drawn, so no spike is lost, and the file stays small. The largest 2 % of the losses do not widen
their axis: a line may leave at the top, where training begins far above all the rest. What is not finite, null in the
file, is a gap.
"""

import json
import math
from array import array
from functools import partial
from pathlib import Path

import numpy as np

from nanodomino.config.config import Config
from nanodomino.config.setting import MAX_INT, flag_settings, names_affecting
from nanodomino.errors import UserError, require
from nanodomino.plot.svg import LETTER, LINE, WIDTH, frame, legend, line, text, tick_step

SERIES = ("loss", "grad_norm", "lr", "valid_loss", "test_loss")
YARDSTICKS = {"unigram_entropy": "unigram", "bigram_entropy": "bigram"}
HUGE = 1e9               # what is larger is drawn as this: a sum of such values still has digits for the others
LEFT, RIGHT = 52, 98                                     # pixels beside the panels
LOSS, SMALL, BETWEEN = 330, 92, 30                       # heights: of the panels, of the space above each
COLUMNS = {"step": 716, "loss": 796, "validation": 888, "test": 968}           # of the table: where they end
SKIPPED, APART = 9, 28                                   # the height of a skipped step's mark; between validations
PALE, STRONG = 'opacity="0.35"', 'stroke-width="2"'
DASHED, DOTTED = 'stroke-width="1.2" stroke-dasharray="5 4"', 'stroke-width="1.2" stroke-dasharray="2 3"'
INK, GRID, DOT = "#444", "#ddd", "m-1.5 0a1.5 1.5 0 0 0 3 0a1.5 1.5 0 0 0 -3 0"

# Apart for eyes that don't tell red from green too; so six runs at most.
COLOURS = ("#1f5fa8", "#ef8f00", "#111111", "#4fae8b", "#8a4b08", "#8cc8f5")


# ---- what a run has left

class Curve:
    """What a metrics.jsonl tells. It may grow meanwhile: read_on() reads what has come since."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.parent.resolve().name if path.name == "metrics.jsonl" else path.name
        self.offset, self.lines = 0, 0
        self.series = {name: (array("d"), array("d")) for name in SERIES}      # steps, values
        self.skipped, self.yardsticks = array("d"), {}

    def read_on(self) -> bool:
        """Whether there is something new. Raises UserError, OSError."""
        before = self.offset
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for row in file:
                if not row.endswith(b"\n"):                    # half a line: just being written, or its run was killed
                    break
                self.offset, self.lines = self.offset + len(row), self.lines + 1
                try:
                    self.add(json.loads(row))
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    raise UserError(f"{self.path} is no metrics.jsonl: line {self.lines} is no object with a step and "
                                    "numbers; give a run's folder, or its metrics.jsonl") from None
        return self.offset > before

    def add(self, values: dict):
        """Of one line; raises almost anything if it is not one of report.py's."""
        step = values["step"]
        if not (isinstance(step, int) and 0 <= step <= MAX_INT):
            raise ValueError
        for name, (steps, numbers) in self.series.items():
            if name in values:
                steps.append(step)
                numbers.append(bounded(values[name]))
        for name in YARDSTICKS.keys() & values.keys():
            self.yardsticks[name] = bounded(values[name])
        if values.get("skipped"):
            self.skipped.append(step)

    def arrays(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        steps, values = self.series[name]
        return np.array(steps), np.array(values)


def bounded(value: float | None) -> float:
    return math.nan if value is None else min(max(value, -HUGE), HUGE)


def read(run: Path) -> tuple[Curve, dict]:
    """A run's folder, or its metrics.jsonl -> its curve, and its settings if they are there. Raises UserError."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    curve = Curve(path)
    try:
        curve.read_on()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); give a run's folder, or its metrics.jsonl") from None
    require(any(steps for steps, _ in curve.series.values()), f"{path} holds no step yet; wait for the first")
    try:
        settings = json.loads((path.parent / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        settings = None                                        # copied without it, or just being written
    return curve, settings if isinstance(settings, dict) else {}


def differences(settings: list[dict]) -> list[list[str]]:
    """For each run what is not the same in all that tell, such as ["lr 0.008", "tp 2"]."""
    short = {one.name: one.metadata["alias"].strip("-") for one in flag_settings(Config) if one.metadata["alias"]}
    known, of_one_start = [one for one in settings if one], names_affecting(Config, "launch")
    told = [name for name in dict.fromkeys(name for one in known for name in one)
            if name not in of_one_start and any(one.get(name) != known[0].get(name) for one in known)]
    return [[f"{short.get(name, name)} {one[name]:g}" if isinstance(one[name], float)
             else f"{short.get(name, name)} {one[name]}" for name in told if name in one] for one in settings]


# ---- values to points

def mean_around(values: np.ndarray, reach: int) -> np.ndarray:
    """Of each value and up to `reach` neighbours on each side, as far as they are finite; NaN where none is."""
    finite = np.isfinite(values)
    sums, counts = (np.concatenate([[0], np.cumsum(one)]) for one in (np.where(finite, values, 0), finite))
    here = np.arange(len(values))
    first, end = np.maximum(here - reach, 0), np.minimum(here + reach + 1, len(values))
    count = counts[end] - counts[first]
    return np.where(count, (sums[end] - sums[first]) / np.maximum(count, 1), np.nan)


def thinned(x: np.ndarray, values: np.ndarray, pixels: float) -> tuple[np.ndarray, np.ndarray]:
    """Of the points that share a column of so many pixels the least and the largest value, at the column's first and
    last point, or the other way round where they fall."""
    if not len(x):
        return x, values
    first = np.flatnonzero(np.diff((x / pixels).astype(int), prepend=-1))
    last = np.append(first[1:], len(x)) - 1
    least, largest = np.fmin.reduceat(values, first), np.fmax.reduceat(values, first)
    rises = values[first] <= values[last]
    ends = [np.where(rises, least, largest), np.where(rises, largest, least)]
    return np.stack([x[first], x[last]], axis=1).ravel(), np.stack(ends, axis=1).ravel()


def polyline(x: np.ndarray, y: np.ndarray) -> str:
    """Through all points. NaN is a gap, a point between two gaps a dot."""
    pieces, before = [], None
    for point in zip(x.round(1).tolist(), y.round(1).tolist()):
        if math.isnan(point[1]):
            before = None
        elif point != before:
            pieces += [] if before else [[]]
            pieces[-1].append("{:g} {:g}".format(*point))
            before = point
    return "".join(f"M{' '.join(piece)}{DOT if len(piece) == 1 else ''}" for piece in pieces)


# ---- the parts of a picture

class Panel:
    """A rectangle with an axis of its own on the left. `parts`: its SVG."""

    def __init__(self, name: str, top: float, height: float, values, marks=(), left_out=0.0, logarithmic=False):
        """The axis spans all finite values, but for this part of them, the largest, and all finite marks."""
        self.name, self.top, self.bottom, self.logarithmic = name, top, top + height, logarithmic
        values = self.along(values)[np.isfinite(self.along(values))]
        ends = [mark for mark in marks if math.isfinite(mark)]
        ends += np.quantile(values, [0, 1 - left_out], method="higher").tolist() if len(values) else []
        ends = ends or [0.0]
        room = max(0.04 * (max(ends) - min(ends)), 0.2 if logarithmic else max(0.01 * abs(max(ends)), 1e-9))
        self.low, self.high = min(ends) - room, max(ends) + room
        self.scale = height / (self.high - self.low)
        self.parts = [line(f"M{LEFT} {self.bottom}H{WIDTH - RIGHT}", "#bbb")]
        for value in self.ticks():
            y = float(self.y(value))
            self.parts += [line(f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", GRID),
                           text(LEFT - 6, y + 4, f"{value:g}", "end small")]

    def along(self, values):
        """Where they are on the axis; what is not above 0 is nowhere on a logarithmic one."""
        return np.log10(np.where(np.asarray(values) > 0, values, np.nan)) if self.logarithmic else np.asarray(values)

    def y(self, values):
        """Pixels; of what is far outside, just outside."""
        y = self.bottom - (self.along(values) - self.low) * self.scale
        return np.clip(y, self.top - SMALL, self.bottom + SMALL)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            step = tick_step(self.scale, max((self.bottom - self.top) / 9, 20))
            return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        factors = (1, 2, 5) if self.scale * math.log10(2) >= 12 else (1,)
        powers = range(math.floor(self.low), math.ceil(self.high), math.ceil(12 / self.scale))
        return [factor * 10.0 ** power for power in powers for factor in factors
                if self.low <= power + math.log10(factor) <= self.high]

    def draw(self, x, values, colour: str, look: str):
        self.parts.append(line(polyline(x, self.y(values)), colour, f'{look} fill="none" stroke-linejoin="round" '
                               f'stroke-linecap="round" clip-path="url(#{self.name})"'))

    def clip(self) -> str:
        """What draw() paints ends at the rectangle, with room for a dot on its side."""
        return (f'<clipPath id="{self.name}"><rect x="{LEFT - 4}" y="{self.top}" width="{WIDTH - LEFT - RIGHT + 8}" '
                f'height="{self.bottom - self.top}"/></clipPath>')


def circle(x, y, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="#fff" stroke="{colour}" stroke-width="1.6"/>'


def diamond(x, y, colour: str) -> str:
    return f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z" fill="{colour}" stroke="#fff"/>'


def marks_of(curve: Curve, colour: str, across, panel: Panel) -> list[str]:
    """What is drawn of a run beside lines: skipped steps; of validations and tests those that have room."""
    strokes = [f"M{x:.0f} {panel.bottom}v{-SKIPPED}" for x in np.unique(across(np.array(curve.skipped)).round())]
    parts = [line(" ".join(strokes), colour, STRONG)] if strokes else []
    for name, mark in (("valid_loss", circle), ("test_loss", diamond)):
        (steps, values), free = curve.arrays(name), math.inf
        for x, y in reversed(list(zip(across(steps).tolist(), panel.y(values).tolist()))):
            if math.isfinite(y) and x <= free:
                parts.append(mark(x, y, colour))
                free = x - APART
    return parts


def steps_axis(first: float, last: float, scale: float, top: float, bottom: float) -> list[str]:
    """A tick each 1, 2 or 5 times a power of ten steps, down all panels."""
    step, parts = max(round(tick_step(scale, 80)), 1), []
    for value in range(math.ceil(first / step) * step, int(last) + 1, step):
        x = LEFT + (value - first) * scale
        parts += [line(f"M{x:.1f} {top:.1f}V{bottom:.1f}", GRID), text(x, bottom + 15, f"{value:,}", "middle small")]
    return [*parts, text(WIDTH - RIGHT + 30, bottom + 15, "step", "small")]


def yardsticks(curves: list[Curve], panel: Panel) -> list[str]:
    """A line for each, named on its right; in a run's colour where others have another text, or don't tell."""
    parts, free = [], -math.inf
    found = {(value, name) for curve in curves for name, value in curve.yardsticks.items() if math.isfinite(value)}
    for value, name in sorted(found, reverse=True):
        owners = [colour for curve, colour in zip(curves, COLOURS) if curve.yardsticks.get(name) == value]
        y = float(panel.y(value))
        free = max(y + 4, free + 14)
        parts.append(line(f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", INK if len(owners) == len(curves) else owners[0], DOTTED))
        parts.append(text(WIDTH - RIGHT + 6, free, f"{YARDSTICKS[name]} {number(value)}", "small"))
    return parts


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if abs(value) < 1e4 else f"{value:.2g}"


def fitting(words: list[str], room: float) -> str:
    """As many as fit into so many pixels; dots for the others."""
    kept, said = len(words), ", ".join(words)
    while kept and LETTER * len(said) > room:
        kept -= 1
        said = ", ".join([*words[:kept], "..."])
    return said


def table(curves: list[Curve], words: list[list[str]], reach: int, y: float) -> tuple[list[str], float]:
    """A row for each run: its colour, its name, as many of its words as fit, its last numbers -> (SVG, where it
    ends)."""
    parts = [text(x, y, "mean loss" if reach and name == "loss" else name, "end small pale")
             for name, x in COLUMNS.items()]
    for curve, colour, more in zip(curves, COLOURS, words):
        y += LINE
        name = curve.name if len(curve.name) <= 40 else "..." + curve.name[-37:]
        x = 36 + LETTER * len(name) + 14
        parts += [line(f"M8 {y - 4:.1f}h20", colour, 'stroke-width="4"'), text(36, y, name)]
        parts += [text(x, y, fitting(more, COLUMNS["step"] - 60 - x), "pale")] if more else []
        each, *others = (curve.arrays(name)[1] for name in ("loss", "valid_loss", "test_loss"))
        last = [one[-1] if len(one) else math.nan for one in (mean_around(each, reach), *others)]
        steps = max(steps[-1] for steps, _ in curve.series.values() if steps)
        parts += [text(x, y, words, "end") for x, words in zip(COLUMNS.values(), (f"{steps:,.0f}", *map(number, last)))]
    return parts, y + LINE


def meanings(curves: list[Curve], reach: int) -> list[tuple]:
    """What occurs in them, for the legend."""
    def stroke(look, x, y):
        return line(f"M{x:.1f} {y + 6:.1f}h14", INK, look)

    entries = [(partial(stroke, STRONG), f"mean over {2 * reach + 1} steps, centred" if reach else "each step")]
    if reach:
        entries.insert(0, (partial(stroke, PALE), "each step"))
    if any(curve.series["valid_loss"][0] for curve in curves):
        entries.append((lambda x, y: stroke(DASHED, x, y) + circle(x + 7, y + 6, INK), "validation"))
    if any(curve.series["test_loss"][0] for curve in curves):
        entries.append((lambda x, y: diamond(x + 7, y + 6, INK), "test"))
    if any(curve.skipped for curve in curves):
        entries.append((lambda x, y: line(f"M{x + 7:.1f} {y + 11:.1f}v{-SKIPPED}", INK, STRONG), "skipped step"))
    return entries


def picture(curves: list[Curve], words: list[list[str]] | None = None) -> str:
    """SVG: all runs over one axis of steps. words: of each, for the table, such as the settings in which it differs."""
    data = {name: [curve.arrays(name) for curve in curves] for name in SERIES}
    values = {name: np.concatenate([one for _, one in pairs]) for name, pairs in data.items()}
    all_steps = np.concatenate([steps for pairs in data.values() for steps, _ in pairs])
    first = max(all_steps.min() - 1, 0)
    last = max(all_steps.max(), first + 1)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    reach = min(max(len(steps) for steps, _ in data["loss"]) // 100, 250)

    marks = [*values["valid_loss"].tolist(), *values["test_loss"].tolist(),
             *(value for curve in curves for value in curve.yardsticks.values())]
    loss = Panel("loss", BETWEEN, LOSS, values["loss"], marks, left_out=0.02)
    norm = Panel("norm", loss.bottom + BETWEEN, SMALL, values["grad_norm"], logarithmic=True)
    rate = Panel("rate", norm.bottom + BETWEEN, SMALL, values["lr"], marks=[0.0])

    def across(steps):
        return LEFT + (steps - first) * scale

    def draw(panel, name, reach, look):
        """The more runs, the wider the columns: so their points together stay few."""
        for (steps, numbers), colour in zip(data[name], COLOURS):
            x, y = thinned(across(steps), mean_around(numbers, reach), max(1, 0.6 * len(curves)))
            panel.draw(x, y, colour, look)

    loss.parts += yardsticks(curves, loss)
    for panel, name in ((loss, "loss"), (norm, "grad_norm")):
        if reach:
            draw(panel, name, 0, PALE)
        draw(panel, name, reach, STRONG)
    draw(rate, "lr", 0, STRONG)
    draw(loss, "valid_loss", 0, DASHED)
    for curve, colour in zip(curves, COLOURS):
        loss.parts += marks_of(curve, colour, across, loss)

    numbers, y = table(curves, words or [[]] * len(curves), reach, rate.bottom + 46)
    explained, y = legend(meanings(curves, reach), y - 4)
    body = [*steps_axis(first, last, scale, loss.top, rate.bottom), *loss.parts, *norm.parts, *rate.parts,
            text(LEFT, loss.top - 9, "loss, nats per token", "title"),
            text(LEFT, norm.top - 9, "gradient norm, logarithmic"), text(LEFT, rate.top - 9, "learning rate")]
    return frame(WIDTH, y + 6, body + numbers + explained, "".join(panel.clip() for panel in (loss, norm, rate)))
