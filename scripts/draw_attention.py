"""Draws what every context-parallel scheme moves; run as a script it writes docs/attention.svg.

Needs the extra `plots`.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

TARGET = Path(__file__).parent.parent / "docs" / "attention.svg"
TOKENS = HEADS = DEVICES = 4
CELL, GAP = 11, 24
GRID = TOKENS * CELL
STEP = 2 * GRID + 3 * GAP
PANEL_HEIGHT = 152
WIDTH = 40 + DEVICES * STEP
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
EMPTY, INK = "#eeeeee", "#333333"


@dataclass(frozen=True, kw_only=True)
class Link:
    """An arrow between two devices; a link above the row and one below it do not cross."""

    start: int
    stop: int
    below: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One scheme: the (token, head) parts of k and v on each device, before and in its kernel."""

    title: str
    caption: str
    before: list[set[tuple[int, int]]]
    kernel: list[set[tuple[int, int]]]
    links: list[Link]


def cells(*tokens: int, heads: range = range(HEADS)) -> set[tuple[int, int]]:
    """Returns the parts of some tokens and heads."""
    return {(token, head) for token in tokens for head in heads}


def panels() -> list[Panel]:
    """Returns the five schemes on four devices."""
    own = [cells(device) for device in range(DEVICES)]
    everything = [cells(*range(TOKENS)) for _ in range(DEVICES)]
    one_head = [cells(*range(TOKENS), heads=range(d, d + 1)) for d in range(DEVICES)]
    ring_pairs = [cells(0, 1), cells(0, 1), cells(2, 3), cells(2, 3)]
    halves = [
        {cell for cell in pair if cell[1] // 2 == device % 2}
        for device, pair in enumerate(ring_pairs)
    ]
    neighbours = [(device, device + 1) for device in range(DEVICES - 1)]
    up = [Link(start=a, stop=b) for a, b in neighbours]
    down = [Link(start=b, stop=a, below=True) for a, b in neighbours]
    trades = [Link(start=0, stop=1), Link(start=2, stop=3)]
    hops = [Link(start=0, stop=2, below=True), Link(start=3, stop=1, below=True)]
    return [
        Panel(
            title="gather (flash)",
            caption="all-gather: every device collects all keys and values",
            before=own,
            kernel=everything,
            links=up + down,
        ),
        Panel(
            title="ulysses",
            caption="all-to-all: some tokens of all heads become all tokens of some heads",
            before=own,
            kernel=one_head,
            links=up + down,
        ),
        Panel(
            title="ring",
            caption="k and v rotate in R - 1 hops; partial results are merged",
            before=own,
            kernel=own,
            links=[*up, Link(start=DEVICES - 1, stop=0, below=True)],
        ),
        Panel(
            title="ulysses x ring",
            caption="all-to-all in the pairs (0,1) and (2,3), then hops between the pairs",
            before=own,
            kernel=halves,
            links=trades + hops,
        ),
        Panel(
            title="bidirectional ring",
            caption="two opposite streams along a line; no link between its ends",
            before=own,
            kernel=own,
            links=up + down,
        ),
    ]


def draw_grid(axes: Axes, x: float, y: float, held: set[tuple[int, int]]) -> None:
    """Draws tokens down and heads across; the colour of a part is that of its token."""
    for token in range(TOKENS):
        for head in range(HEADS):
            colour = COLOURS[token] if (token, head) in held else EMPTY
            corner = (x + head * CELL, y + token * CELL)
            cell = Rectangle(corner, CELL - 1, CELL - 1, facecolor=colour, clip_on=False)
            axes.add_patch(cell)


def draw_link(axes: Axes, link: Link, y: float) -> None:
    """Draws a curve from device to device, flatter between neighbours."""
    x1, x2 = (20 + device * STEP + GRID + GAP / 2 for device in (link.start, link.stop))
    edge = y + GRID + 4 if link.below else y - 4
    bend = (8 + 5 * abs(link.stop - link.start)) / (2 * abs(x2 - x1))
    # The y axis points down: a positive bend curves upwards if the arrow points right.
    sign = 1 if (link.stop > link.start) == link.below else -1
    style = f"arc3,rad={sign * 2 * bend:.4f}"
    arrow = FancyArrowPatch(
        (x1, edge),
        (x2, edge),
        connectionstyle=style,
        arrowstyle="-|>",
        mutation_scale=8,
        color=INK,
        shrinkA=0,
        shrinkB=0,
    )
    axes.add_patch(arrow)


def draw_panel(axes: Axes, panel: Panel, top: float) -> None:
    """Draws one scheme below `top`."""
    axes.text(20, top + 16, panel.title, fontsize=10.5, fontweight="bold", color=INK)
    axes.text(20 + STEP, top + 16, panel.caption, fontsize=9, color=INK)
    y = top + 52
    for device in range(DEVICES):
        x = 20 + device * STEP
        draw_grid(axes, x, y, panel.before[device])
        axes.text(x + GRID + GAP / 2 - 6, y + GRID / 2 + 4, "\N{RIGHTWARDS ARROW}", color=INK)
        draw_grid(axes, x + GRID + GAP, y, panel.kernel[device])
        axes.text(x, y + GRID + 34, f"device {device}", fontsize=8, color=INK)
    for link in panel.links:
        draw_link(axes, link, y)


def figure() -> Figure:
    """Returns the whole picture; its units are pixels at 96 to the inch."""
    schemes = panels()
    height = 44 + PANEL_HEIGHT * len(schemes)
    drawn = Figure(figsize=(WIDTH / 96, height / 96), dpi=96)
    axes = drawn.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    note = "k, v on each device: before the collectives, and in the kernel (tokens x heads)"
    axes.text(20, 24, note, fontsize=9, color=INK)
    for index, scheme in enumerate(schemes):
        draw_panel(axes, scheme, 40 + index * PANEL_HEIGHT)
    return drawn


def drawing() -> str:
    """Returns the picture as SVG, the same bytes every time."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "maxdiffusion", "svg.fonttype": "none"}):
        figure().savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


if __name__ == "__main__":
    TARGET.write_text(drawing())
