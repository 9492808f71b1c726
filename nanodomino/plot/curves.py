"""Draws loss.svg: loss, gradient norm and learning rate of a run.

    loss |\\                       pale: each step; strong: the centred mean over about 2 % of the steps
         | \\. . . . . unigram     dashed: validation; dot: test
         |  `-o__ . . bigram      dotted: the losses of models that know only how frequent each token is (unigram
         |       `--o--           entropy), or only the previous token (bigram entropy)
         +------------- step      marks on the axis: skipped steps

A long run has more steps than the picture has pixels. So each column of pixels shows only the smallest and the largest
value of its steps: no spike is lost. The axes leave out the largest 2 % of the losses and of the gradient norms, which
would flatten the rest. A loss that is NaN or infinite is null in metrics.jsonl and leaves a gap.
"""

import math
from array import array

import numpy as np

from nanodomino.plot.svg import WIDTH, frame, line, text, ticks

SERIES = ("loss", "grad_norm", "lr", "valid_loss", "test_loss")
ENTROPIES = {"unigram_entropy": "unigram", "bigram_entropy": "bigram"}
RESULTS = {"valid_loss": "validation {:.3f}", "valid_bits_per_byte": "{:.3f} bits per byte",
           "test_loss": "test {:.3f}", "test_bits_per_byte": "{:.3f} bits per byte"}
LEFT, RIGHT, GAP, HIGH, LOW = 52, 98, 30, 330, 92        # pixels: margins, gap above a panel, panel heights
PALE, STRONG = 'opacity="0.35"', 'stroke-width="2"'
DASHED, DOTTED = 'stroke-width="1.2" stroke-dasharray="5 4"', 'stroke-width="1.2" stroke-dasharray="2 3"'
DOT = 'stroke-width="7"'
COLOUR, INK, GRID = "#1f5fa8", "#444", "#ddd"


class Curve:
    """The values of a run. points[name] is (steps, values), for each name in SERIES."""

    def __init__(self, name: str):
        self.name, self.points = name, {series: (array("d"), array("d")) for series in SERIES}
        self.skipped, self.last, self.tokenizer = [], {}, None          # last: {name: the last number}

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

    def draw(self, x, values, look: str):
        self.svg.append(line(polyline(x, self.y(values)), COLOUR, f'{look} fill="none" stroke-linejoin="round" '
                             f'stroke-linecap="round" clip-path="url(#{self.name})"'))


def picture(curve: Curve) -> str:
    """Return an SVG of the curve, which must hold a step."""
    steps = np.concatenate([steps for steps, _ in curve.points.values()])
    first = max(steps.min() - 1, 0)
    last = max(first + 1, steps.max())
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    reach = min(len(curve.points["loss"][0]) // 100, 250)      # steps on each side of the mean
    entropies = sorted((curve.last[name], name) for name in ENTROPIES
                       if math.isfinite(curve.last.get(name, math.nan)))

    marks = [*curve.points["valid_loss"][1], *curve.points["test_loss"][1], *(value for value, _ in entropies)]
    at, losses = curve.arrays("loss")
    loss = Panel("loss", f"loss, nats per {'byte' if curve.tokenizer == 'byte' else 'token'}", GAP, HIGH,
                 [*without_spikes(losses), *marks])
    if len(above := at[losses > loss.high]):
        loss.svg.append(text(WIDTH - RIGHT, GAP - 9, f"above the picture: {len(above)} of the steps "
                             f"{above.min():,.0f} to {above.max():,.0f}", "end small pale"))
    norm = Panel("norm", "gradient norm", loss.bottom + GAP, LOW, without_spikes(curve.arrays("grad_norm")[1]))
    rate = Panel("rate", "learning rate", norm.bottom + GAP, LOW, [0.0, *curve.points["lr"][1]])
    for value, name in entropies:
        loss.svg += [line(f"M{LEFT} {loss.y(value):.1f}H{WIDTH - RIGHT}", INK, DOTTED),
                     text(WIDTH - RIGHT + 6, loss.y(value) + 4, f"{ENTROPIES[name]} {value:.3f}", "small")]

    def across(step):
        return LEFT + (step - first) * scale

    pale = [(loss, "loss", PALE, 0), (norm, "grad_norm", PALE, 0)] if reach else []
    for panel, name, look, width in [*pale, (loss, "loss", STRONG, reach), (norm, "grad_norm", STRONG, reach),
                                     (rate, "lr", STRONG, 0), (loss, "valid_loss", DASHED, 0)]:
        x, y = curve.arrays(name)
        panel.draw(*thinned(across(x), mean_around(y, width), 1), look if len(x) > 1 else DOT)
    for step, value in curve.arrays("test_loss").T:
        loss.draw(np.array([across(step)]), np.array([value]), DOT)

    body, y = [], rate.bottom + 15
    for step in ticks(first, last, scale, 80, least=1):
        body += [line(f"M{across(step):.1f} {GAP}V{rate.bottom}", GRID),
                 text(across(step), y, f"{step:,.0f}", "middle small")]
    skipped = np.unique(across(np.array(curve.skipped)).round())
    means = f"pale: each step; strong: mean over {2 * reach + 1} steps, centred; " if reach else ""
    body += [text(WIDTH - RIGHT + 30, y, "step", "small"),
             line("".join(f"M{x:.0f} {loss.bottom}v-9" for x in skipped), COLOUR, STRONG),
             line(f"M8 {y + 29}h20", COLOUR, 'stroke-width="4"'),
             text(36, y + 33, ", ".join(last_values(curve, reach))),
             text(8, y + 51, f"{means}dashed: validation; dot: test, or the only value; marks on the axis: skipped "
                             "steps", "small pale")]
    return frame(WIDTH, y + 61, body + loss.svg + norm.svg + rate.svg)


def last_values(curve: Curve, reach: int) -> list[str]:
    """Return a run's name and last values as texts: "400 steps", "mean loss 2.310", "validation 2.504"."""
    words = [curve.name, f"{curve.last['step']:,.0f} steps"]
    if len(means := mean_around(curve.arrays("loss")[1], reach)):
        words.append(("mean " if reach else "") + f"loss {means[-1]:.3f}")
    return words + [words_for.format(curve.last[name]) for name, words_for in RESULTS.items() if name in curve.last]
