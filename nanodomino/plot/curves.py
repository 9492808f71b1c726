"""Draws loss.svg: loss, gradient norm and learning rate of one run, or of several runs on the same axes.

    loss |\\                       pale: each step; strong: the centred mean over about 2 % of the steps
         | \\. . . . . unigram     dashed: validation; dot: test
         |  `-o__ . . bigram      dotted: the losses of models that know only how frequent each token is (unigram
         |       `--o--           entropy), or only the previous token (bigram entropy)
         +------------- step      marks on the axis: skipped steps

train.py draws it from metrics.jsonl after each validation and each checkpoint. These commands draw it again, or compare
runs, which may still be training:

    python -m nanodomino.plot runs/nano-001
    python -m nanodomino.plot runs/nano-001 runs/nano-002 --output both.svg

A long run has more steps than the picture has pixels. So each column of pixels shows only the smallest and the largest
value of its steps: no spike is lost. The axes leave out the largest 2 % of the losses and of the gradient norms, which
would flatten the rest. A loss that is NaN or infinite is null in metrics.jsonl and leaves a gap.
"""

import json
import math
from array import array
from pathlib import Path

import numpy as np

from nanodomino.errors import UserError, require
from nanodomino.files import open_regular_file
from nanodomino.plot.svg import LINE, WIDTH, frame, line, text, ticks

SERIES = ("loss", "grad_norm", "lr", "valid_loss", "test_loss")
ENTROPIES = {"unigram_entropy": "unigram", "bigram_entropy": "bigram"}
RESULTS = {"valid_loss": "validation {:.3f}", "valid_bits_per_byte": "{:.3f} bits per byte",
           "test_loss": "test {:.3f}", "test_bits_per_byte": "{:.3f} bits per byte"}
LEFT, RIGHT, GAP, HIGH, LOW = 52, 98, 30, 330, 92        # pixels: margins, gap above a panel, panel heights
PALE, STRONG = 'opacity="0.35"', 'stroke-width="2"'
DASHED, DOTTED = 'stroke-width="1.2" stroke-dasharray="5 4"', 'stroke-width="1.2" stroke-dasharray="2 3"'
DOT = 'stroke-width="7"'
INK, GRID = "#444", "#ddd"
COLOURS = ("#1f5fa8", "#ef8f00", "#111111", "#4fae8b", "#8a4b08", "#8cc8f5")   # also distinct without red and green


class Curve:
    """The values in a metrics.jsonl, which may still grow. points[name] is (steps, values), for each name in SERIES."""

    def __init__(self, path: Path):
        self.path, self.name, self.offset = path, path.resolve().parent.name, 0
        self.points = {name: (array("d"), array("d")) for name in SERIES}
        self.skipped, self.last, self.tokenizer = [], {}, None          # last: {name: the last number}

    def read_on(self) -> bool:
        """Read the lines added since the last call; return whether there were any. Raises UserError or OSError."""
        start = self.offset
        with open_regular_file(self.path) as file:
            file.seek(start)
            for row in file:
                if not row.endswith(b"\n"):                    # the run is still writing this line, or was killed
                    break
                self.offset += len(row)
                try:
                    self.add(json.loads(row))
                except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
                    raise UserError(f"{self.path} holds {str(row[:40])}, which is no JSON object with a step and "
                                    "numbers; give a run's folder, or its metrics.jsonl") from None
        return self.offset > start

    def add(self, values: dict):
        """Add the values of one line of metrics.jsonl."""
        numbers = {name: math.nan if value is None else float(value) for name, value in values.items()
                   if value is None or isinstance(value, (int, float))}
        self.last |= numbers
        for name in self.points.keys() & numbers.keys():
            self.points[name][0].append(numbers["step"])
            self.points[name][1].append(numbers[name])
        self.tokenizer = values.get("tokenizer", self.tokenizer)
        if values.get("skipped"):
            self.skipped.append(numbers["step"])

    def arrays(self, name: str) -> np.ndarray:
        """Return [2, n]: a row of steps and a row of values."""
        return np.array([np.array(column) for column in self.points[name]])


def read(run: Path) -> Curve:
    """Return the curve of a run, given its folder or its metrics.jsonl. Raises UserError or OSError."""
    curve = Curve(run / "metrics.jsonl" if run.is_dir() else run)
    curve.read_on()
    require(any(steps for steps, _ in curve.points.values()),
            f"{curve.path} holds no step yet; wait for the first step")
    return curve


def mean_around(values: np.ndarray, reach: int) -> np.ndarray:
    """Replace each value by the mean of itself and `reach` neighbours on each side. The mean leaves out values that are
    not finite. If none is finite, it is NaN."""
    if not reach or not len(values):
        return values
    finite, window = np.isfinite(values), np.ones(2 * reach + 1)
    sums, counts = (np.convolve(each, window)[reach:reach + len(values)] for each in
                    (np.where(finite, values, 0.0), finite.astype(float)))
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)


def thinned(x: np.ndarray, values: np.ndarray, pixels: float) -> tuple[np.ndarray, np.ndarray]:
    """Thin out a curve: keep only the smallest and the largest value in each column `pixels` wide. x is in pixels."""
    first = np.flatnonzero(np.diff(x // pixels, prepend=-1))
    if 2 * len(first) >= len(x):
        return x, values
    extremes = np.fmin.reduceat(values, first), np.fmax.reduceat(values, first)
    return np.repeat(x[first], 2), np.stack(extremes, axis=1).ravel()


def polyline(x: np.ndarray, y: np.ndarray) -> str:
    """Return the SVG path through the points. NaN leaves a gap; "h0" makes a point between two gaps visible."""
    points = np.stack([x, y], axis=1).round(1)
    groups = np.split(points, np.flatnonzero(np.diff(np.isfinite(y))) + 1)
    return "".join("M" + " ".join(f"{a:g} {b:g}" for a, b in group) + "h0" for group in groups
                   if len(group) and math.isfinite(group[0, 1]))


def without_spikes(values: np.ndarray) -> list[float]:
    """Return the smallest and the largest of the finite values, without the largest 2 %."""
    finite = values[np.isfinite(values)]
    return np.quantile(finite, [0, 0.98], method="higher").tolist() if len(finite) else []


class Panel:
    """A plot with its own vertical axis. svg: the elements drawn so far."""

    def __init__(self, name: str, title: str, top: float, height: float, shown):
        """Draw the axis, which spans all finite values in `shown`."""
        self.name, self.top, self.bottom = name, top, top + height
        shown = [value for value in shown if math.isfinite(value)] or [0.0]
        margin = max(0.04 * (max(shown) - min(shown)), 0.01 * abs(max(shown)), 1e-9)
        self.low, self.high = min(shown) - margin, max(shown) + margin
        self.scale = height / (self.high - self.low)
        self.svg = [f'<clipPath id="{name}"><rect x="{LEFT - 4}" y="{top}" width="{WIDTH - LEFT - RIGHT + 8}" '
                    f'height="{height}"/></clipPath>',
                    text(LEFT, top - 9, title), line(f"M{LEFT} {self.bottom}H{WIDTH - RIGHT}", "#bbb")]
        for value in ticks(self.low, self.high, self.scale, max(height / 9, 20)):
            self.svg += [line(f"M{LEFT} {self.y(value):.1f}H{WIDTH - RIGHT}", GRID),
                         text(LEFT - 6, self.y(value) + 4, f"{value:g}", "end small")]

    def y(self, values):
        """Convert values to y in pixels. Values far outside the panel are clipped to a y near it."""
        return np.clip(self.bottom - (values - self.low) * self.scale, self.top - HIGH, self.bottom + HIGH)

    def draw(self, x, values, colour: str, look: str):
        self.svg.append(line(polyline(x, self.y(values)), colour, f'{look} fill="none" stroke-linejoin="round" '
                             f'stroke-linecap="round" clip-path="url(#{self.name})"'))


def picture(curves: list[Curve]) -> str:
    """Return an SVG of all runs on one axis of steps."""
    together = {name: np.concatenate([curve.arrays(name) for curve in curves], axis=1) for name in SERIES}
    steps = np.concatenate([steps for steps, _ in together.values()])
    first = max(steps.min() - 1, 0)
    last = max(first + 1, steps.max())
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    reach = min(max(len(curve.points["loss"][0]) for curve in curves) // 100, 250)      # steps on each side of the mean
    entropies = sorted({(curve.last[name], name) for curve in curves for name in ENTROPIES
                        if math.isfinite(curve.last.get(name, math.nan))})

    marks = [*together["valid_loss"][1], *together["test_loss"][1], *(value for value, _ in entropies)]
    tokenizers = {curve.tokenizer for curve in curves} - {None}
    title = f"loss, nats per {'byte' if tokenizers == {'byte-257'} else 'token'}"
    loss = Panel("loss", title, GAP, HIGH, [*without_spikes(together["loss"][1]), *marks])
    if len(above := together["loss"][0][together["loss"][1] > loss.high]):
        loss.svg.append(text(WIDTH - RIGHT, GAP - 9, f"above the picture: {len(above)} of the steps "
                             f"{above.min():,.0f} to {above.max():,.0f}", "end small pale"))
    norm = Panel("norm", "gradient norm", loss.bottom + GAP, LOW, without_spikes(together["grad_norm"][1]))
    rate = Panel("rate", "learning rate", norm.bottom + GAP, LOW, [0.0, *together["lr"][1]])
    for value, name in entropies:
        loss.svg += [line(f"M{LEFT} {loss.y(value):.1f}H{WIDTH - RIGHT}", INK, DOTTED),
                     text(WIDTH - RIGHT + 6, loss.y(value) + 4, f"{ENTROPIES[name]} {value:.3f}", "small")]

    def across(step):
        return LEFT + (step - first) * scale

    pale = [(loss, "loss", PALE, 0), (norm, "grad_norm", PALE, 0)] if reach else []
    for panel, name, look, width in [*pale, (loss, "loss", STRONG, reach), (norm, "grad_norm", STRONG, reach),
                                     (rate, "lr", STRONG, 0), (loss, "valid_loss", DASHED, 0)]:
        for curve, colour in zip(curves, COLOURS):
            x, y = curve.arrays(name)
            panel.draw(*thinned(across(x), mean_around(y, width), max(1, 0.6 * len(curves))), colour,
                       look if len(x) > 1 else DOT)

    body, y = [], rate.bottom + 15
    for step in ticks(first, last, scale, 80, least=1):
        body += [line(f"M{across(step):.1f} {GAP}V{rate.bottom}", GRID),
                 text(across(step), y, f"{step:,.0f}", "middle small")]
    body.append(text(WIDTH - RIGHT + 30, y, "step", "small"))
    y += 15
    for curve, colour in zip(curves, COLOURS):
        for step, value in curve.arrays("test_loss").T:
            loss.draw(np.array([across(step)]), np.array([value]), colour, DOT)
        skipped = np.unique(across(np.array(curve.skipped)).round())
        y += LINE
        body += [line("".join(f"M{x:.0f} {loss.bottom}v-9" for x in skipped), colour, STRONG),
                 line(f"M8 {y - 4:.1f}h20", colour, 'stroke-width="4"'),
                 text(36, y, ", ".join(last_values(curve, reach)))]
    if len(tokenizers) > 1:
        y += LINE
        body.append(text(8, y, "the tokenizers of these runs differ: compare bits per byte, not losses per token"))
    y += LINE
    means = f"pale: each step; strong: mean over {2 * reach + 1} steps, centred; " if reach else ""
    body.append(text(8, y, f"{means}dashed: validation; dot: test, or the only value; marks on the axis: skipped steps",
                     "small pale"))
    return frame(WIDTH, y + 10, body + loss.svg + norm.svg + rate.svg)


def last_values(curve: Curve, reach: int) -> list[str]:
    """Return a run's name and last values as texts: "400 steps", "mean loss 2.310", "validation 2.504"."""
    words = [curve.name, f"{curve.last['step']:,.0f} steps"]
    if len(means := mean_around(curve.arrays("loss")[1], reach)):
        words.append(("mean " if reach else "") + f"loss {means[-1]:.3f}")
    return words + [words_for.format(curve.last[name]) for name, words_for in RESULTS.items() if name in curve.last]
