"""Curves over the steps of a run, as SVG elements of its report.

A curve of many points is drawn as the means of up to `POINTS` groups of neighbours, over a pale
band from the least to the largest value of each group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from maxdiffusion.runtime.charts import COLOURS, empty_figure, open_frame, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 300
LEGEND_ROWS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Values over steps, with a label."""

    label: str
    steps: np.ndarray
    values: np.ndarray

    def __post_init__(self) -> None:
        if self.steps.shape != self.values.shape or self.steps.ndim != 1 or not self.steps.size:
            raise ValueError(
                f"curve {self.label!r}: needs as many values as steps, and one or more"
            )

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
    """A curve by groups of neighbouring points."""

    steps: np.ndarray
    means: np.ndarray
    least: np.ndarray
    most: np.ndarray

    def draw(self, axes: "Axes", label: str, colour: str) -> None:
        """Draws the band and the means; a single point is a dot."""
        if np.any(self.most > self.least):
            axes.fill_between(self.steps, self.least, self.most, color=colour, alpha=0.15, lw=0)
        marker = "o" if self.steps.size == 1 else ""
        axes.plot(self.steps, self.means, color=colour, lw=1.5, marker=marker, label=label)


def curve_chart(curves: Sequence[Curve], *, logarithmic: bool = False) -> str:
    """Returns a chart of curves over steps, with a legend where there are several.

    The axis of values is logarithmic only where all of them are above 0.
    """
    grouped = [curve.grouped() for curve in curves]
    rows = -(-len(curves) // LEGEND_ROWS) if len(curves) > 1 else 0
    figure = empty_figure(6.4, 2.6 + 0.18 * rows)
    axes = figure.add_subplot()
    if logarithmic and all(float(one.least.min()) > 0 for one in grouped):
        _logarithmic(axes)
    for number, (curve, one) in enumerate(zip(curves, grouped, strict=True)):
        one.draw(axes, curve.label, COLOURS[number % len(COLOURS)])
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    open_frame(axes)
    if len(curves) > 1:
        figure.legend(loc="outside upper left", ncols=LEGEND_ROWS, frameon=False, fontsize="small")
    return svg_of(figure)


def _logarithmic(axes: "Axes") -> None:
    """Makes the axis of values logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
