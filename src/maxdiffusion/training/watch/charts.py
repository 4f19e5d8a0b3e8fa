"""Line charts as SVG elements, which an HTML page embeds; drawn without any library.

A line of many points is drawn as the means of up to `POINTS` groups of neighbours, over a pale band
from the least to the largest value of each group.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 32  # margins
POINTS = 300
# Distinct with any kind of colour vision (Okabe and Ito), and dark enough for lines on white.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31"),
    *("#999999", "#5254a3"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """Values over steps, with a label."""

    label: str
    steps: np.ndarray
    values: np.ndarray

    def __post_init__(self) -> None:
        if self.steps.shape != self.values.shape or self.steps.ndim != 1 or not self.steps.size:
            raise ValueError(f"line {self.label!r}: needs as many values as steps, and one or more")

    def grouped(self) -> "Grouped":
        """Returns the means, least and largest values of groups of neighbours."""
        groups = np.array_split(np.arange(self.steps.size), min(POINTS, self.steps.size))
        values = [self.values[group] for group in groups]
        return Grouped(
            steps=np.array([self.steps[group].mean() for group in groups]),
            means=np.array([one.mean() for one in values]),
            least=np.array([one.min() for one in values]),
            most=np.array([one.max() for one in values]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """A line by groups of neighbouring points."""

    steps: np.ndarray
    means: np.ndarray
    least: np.ndarray
    most: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values and the pixels that it is drawn on; logarithmic or even."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: np.ndarray | float) -> np.ndarray:
        """Returns the pixels of values."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low)
        return np.asarray(self.start + share * (self.end - self.start))

    def _scaled(self, value: np.ndarray | float) -> np.ndarray:
        return np.asarray(np.log10(value) if self.logarithmic else value, np.float64)

    def ticks(self, most: int = 6) -> list[float]:
        """Returns round values within the range."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = -(-(last - first) // most)  # powers of ten
            for factors in ((1, 2, 5), (1,)):
                powers = range(-(-first // every) * every, last + 1, every)
                found = [factor * 10.0**power for power in powers for factor in factors]
                found = [one for one in found if self.low <= one <= self.high]
                if 2 <= len(found) <= most + 2:
                    return found
        size = (self.high - self.low) / most
        unit = 10.0 ** math.floor(math.log10(size))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= size)
        first = math.ceil(self.low / step)
        return [step * number for number in range(first, math.floor(self.high / step) + 1)]


def span(values: Sequence[np.ndarray], *, logarithmic: bool) -> tuple[float, float]:
    """Returns the range of an axis: all values and a little more."""
    low, high = (float(f([f(one) for one in values])) for f in (np.min, np.max))
    if logarithmic:
        return low / 1.05, high * 1.05
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def line_chart(title: str, lines: Sequence[Line], *, logarithmic: bool = False) -> str:
    """Returns a chart of one or more lines over steps, as an SVG element with a legend.

    An axis is logarithmic only where all values are above 0.
    """
    if not lines:
        raise ValueError(f"chart {title!r}: needs a line")
    grouped = [line.grouped() for line in lines]
    logarithmic = logarithmic and all(float(one.least.min()) > 0 for one in grouped)
    ends = [end for one in grouped for end in (one.least, one.most)]
    low, high = span(ends, logarithmic=logarithmic)
    first = min(float(line.steps.min()) for line in lines)
    last = max(float(line.steps.max()) for line in lines)
    down = Axis(low=low, high=high, start=HEIGHT - BOTTOM, end=TOP, logarithmic=logarithmic)
    along = Axis(low=first, high=max(last, first + 1), start=LEFT, end=WIDTH - RIGHT)
    parts = [*_frame(along, down)]
    for number, one in enumerate(grouped):
        parts += _drawn(one, along, down, COLOURS[number % len(COLOURS)])
    body = "\n".join(parts)
    label = html.escape(f"{title}, steps {first:g} to {last:g}")
    return (
        f'{_legend(lines)}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n'
        f"{body}\n</svg>"
    )


def _frame(along: Axis, down: Axis) -> list[str]:
    """Returns grid lines and labels of both axes."""
    parts = []
    for tick in down.ticks():
        y = f"{float(down.at(tick)):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick:.4g}</text>')
    for tick in along.ticks():
        if tick == int(tick):
            x = f"{float(along.at(tick)):.1f}"
            parts.append(
                f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:.0f}</text>'
            )
    bottom = HEIGHT - BOTTOM
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    return parts


def _drawn(one: Grouped, along: Axis, down: Axis, colour: str) -> list[str]:
    """Returns the band and the means of a line; a single point is a dot."""
    x, y = along.at(one.steps), down.at(one.means)
    if x.size == 1:
        return [f'<circle cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="3" fill="{colour}"/>']
    parts = []
    if np.any(one.most > one.least):
        edge = [*zip(x, down.at(one.most), strict=True)]
        edge += [*zip(x, down.at(one.least), strict=True)][::-1]
        parts.append(f'<polygon points="{_points(edge)}" fill="{colour}" opacity="0.15"/>')
    line = _points([*zip(x, y, strict=True)])
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return parts


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) == 1:
        return ""
    entries = (
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>'
        f"{html.escape(line.label)}</span>"
        for number, line in enumerate(lines)
    )
    return f'<p class="legend">{"".join(entries)}</p>'
