"""Figures of matplotlib (extra `plots`) as SVG elements that a page embeds.

matplotlib is imported by the functions that draw; `require_matplotlib` lets a command refuse before
its work starts.
"""

import importlib.util
import io
import re
from typing import TYPE_CHECKING

from maxdiffusion.errors import Problem, ProblemsFound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinct with any kind of colour vision (Okabe and Ito).
COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#56b4e9", "#d55e00", "#f0e442", "#999999", "#000000"),
)
INSTALL = 'pip install "maxdiffusion[plots]"'


def has_matplotlib() -> bool:
    """Returns whether charts can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raises ProblemsFound if matplotlib is not installed."""
    if not has_matplotlib():
        problem = Problem(
            name="matplotlib",
            value=None,
            rule="charts need the package matplotlib, which is not installed",
            remedy=f"Install it: {INSTALL}",
        )
        raise ProblemsFound([problem])


def empty_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure; sizes are in inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def open_frame(axes: "Axes") -> None:
    """Leaves an axis at the left and at the bottom, and pale lines at the values."""
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)


def svg_of(figure: "Figure") -> str:
    """Returns a figure as an SVG element: the same bytes every time, text as text."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "maxdiffusion", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()
    # An element that a page can embed has neither prolog nor metadata, which names other hosts.
    return re.sub(r"<metadata>.*?</metadata>\s*", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
