"""Charts and heat maps, drawn with matplotlib from the extra `plots`.

- `stacked_bars`: a ranking of steps, in parts, as SVG; `ranking_page` embeds it in an HTML page
- `line_chart`: seconds over the batch size, a line for each attention, as SVG
- `HeatMap`: the tiles of a search by block_q and block_kv, as PNG
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from maxdiffusion.costs.step_time import format_seconds, label
from maxdiffusion.preflight.tiles import Tried
from maxdiffusion.runtime.charts import COLOURS, empty_figure, open_frame, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the fastest to the slowest tile, light to dark; readable without colour.
_HEAT = ("#fff7bc", "#fec44f", "#d95f0e", "#7f2704")
_REFUSED, _BEST = "#cdcdcd", "#d62728"
_SLOWEST = 2.0  # cells this many times slower than the best, or more, have the darkest colour


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a ranking: its label, and its parts in seconds."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(self.parts.values())


def stacked_bars(title: str, bars: Sequence[Bar]) -> str:
    """Returns an SVG of horizontal bars; the same parts have the same colours."""
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    figure = empty_figure(11, 1.2 + 0.4 * len(bars) + 0.22 * len(names))
    axes = figure.add_subplot()
    rows = range(len(bars))
    starts = [0.0] * len(bars)
    for index, name in enumerate(names):
        widths = [bar.parts.get(name, 0.0) for bar in bars]
        colour = COLOURS[index % len(COLOURS)]
        axes.barh(rows, widths, left=starts, color=colour, label=label(name), gid=f"part {name}")
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for row, bar in zip(rows, bars, strict=True):
        axes.text(bar.total, row, f" {format_seconds(bar.total)}", va="center")
    axes.set_yticks(rows, [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max((bar.total for bar in bars), default=1.0))
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.legend(loc="outside lower left", ncols=1, frameon=False)
    return svg_of(figure)


@dataclass(frozen=True, kw_only=True)
class RankingRow:
    """One bar with the bound of its step and further columns of the table."""

    bar: Bar
    bound: float
    facts: Mapping[str, str] = field(default_factory=dict)


_STYLE = """
body { font-family: sans-serif; margin: 2em; color: #141414; }
table { border-collapse: collapse; margin-top: 1.5em; }
th, td { padding: 0.35em 0.9em; border-bottom: 1px solid #d0d0d0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


def ranking_page(title: str, rows: Sequence[RankingRow]) -> str:
    """Returns a self-contained HTML page with the chart and a table of the rows, in their order."""
    facts = list(dict.fromkeys(name for row in rows for name in row.facts))
    parts = list(dict.fromkeys(name for row in rows for name in row.bar.parts))
    heads = ["", "seconds per step", "bound", "of the bound's speed", *facts, *map(label, parts)]
    lines = [_cells("th", heads), *(_cells("td", _page_row(row, facts, parts)) for row in rows)]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"{stacked_bars(title, [row.bar for row in rows])}<table>\n{''.join(lines)}</table>\n"
        "<p>The parts of a step do not overlap; they add up to its seconds.</p>\n"
        "</body></html>\n"
    )


def _page_row(row: RankingRow, facts: Sequence[str], parts: Sequence[str]) -> list[str]:
    total = row.bar.total
    figures = [format_seconds(total), format_seconds(row.bound), f"{row.bound / total:.1%}"]
    seconds = [
        format_seconds(row.bar.parts[name]) if name in row.bar.parts else "" for name in parts
    ]
    return [row.bar.label, *figures, *(row.facts.get(name, "") for name in facts), *seconds]


def _cells(kind: str, words: Sequence[str]) -> str:
    cells = "".join(f"<{kind}>{html.escape(word)}</{kind}>" for word in words)
    return f"<tr>{cells}</tr>\n"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart: its label, and its (x, y) points from left to right."""

    label: str
    points: Sequence[tuple[int, float]]


def line_chart(title: str, lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Returns an SVG of lines over whole numbers, with the legend in the order of their ends."""
    figure = empty_figure(9.5, 4.5)
    axes = figure.add_subplot()
    ticks = sorted({x for line in lines for x, _ in line.points})
    for index, line in enumerate(lines):
        across = [ticks.index(x) for x, _ in line.points]
        values = [y for _, y in line.points]
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(across, values, marker="o", color=colour, label=line.label, gid=f"line {index}")
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    open_frame(axes)
    axes.set_title(title)
    handles, labels = axes.get_legend_handles_labels()
    # Lines without points come last.
    order = sorted(range(len(lines)), key=lambda index: -_last(lines[index]))
    figure.legend(
        [handles[index] for index in order],
        [labels[index] for index in order],
        loc="outside right upper",
        frameon=False,
    )
    return svg_of(figure)


def _last(line: Line) -> float:
    return line.points[-1][1] if line.points else 0.0


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Tiles by (block_q, block_kv): of several with the same pair the fastest."""

    title: str
    how: str
    cells: Mapping[tuple[int, int], Tried]

    @classmethod
    def of(cls, title: str, how: str, rows: Sequence[Tried]) -> "HeatMap":
        """Returns the map of the tiles that were tried."""
        cells: dict[tuple[int, int], Tried] = {}
        for row in sorted(rows, key=lambda row: row.seconds):
            cells.setdefault((row.block_q, row.block_kv), row)
        return cls(title=title, how=how, cells=cells)

    @property
    def block_qs(self) -> list[int]:
        """Returns the rows of the picture, smallest first."""
        return sorted({block_q for block_q, _ in self.cells})

    @property
    def block_kvs(self) -> list[int]:
        """Returns the columns of the picture, smallest first."""
        return sorted({block_kv for _, block_kv in self.cells})

    @property
    def best(self) -> float:
        """Returns the seconds of the fastest tile; infinite if none can run."""
        return min(row.seconds for row in self.cells.values())

    def draw(self, path: Path) -> None:
        """Writes the picture as PNG."""
        columns, rows = self.block_kvs, self.block_qs
        figure = empty_figure(max(7.0, 2.5 + 1.3 * len(columns)), 2.2 + 0.7 * len(rows))
        axes = figure.add_subplot()
        self._draw_cells(figure, axes)
        axes.set_xticks(range(len(columns)), [f"{size:,}" for size in columns])
        axes.set_yticks(range(len(rows)), [f"{size:,}" for size in rows])
        axes.set_xlabel("keys of a block (block_kv)")
        axes.set_ylabel("queries of a block (block_q)")
        axes.set_title(f"seconds of one attention on one device, {self.how}", fontsize="small")
        figure.suptitle(self.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)

    def _draw_cells(self, figure: "Figure", axes: "Axes") -> None:
        import numpy as np
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.patches import Rectangle

        columns, rows = self.block_kvs, self.block_qs
        slower = np.full((len(rows), len(columns)), np.nan)
        for (block_q, block_kv), tried in self.cells.items():
            row, column = rows.index(block_q), columns.index(block_kv)
            ratio = tried.seconds / self.best
            if tried.refusal:
                axes.text(column, row, "refused", ha="center", va="center")
                continue
            slower[row, column] = ratio
            note = "best" if ratio == 1.0 else f"{ratio - 1:+.0%}"
            colour = "white" if ratio > 1.6 else "black"
            words = f"{format_seconds(tried.seconds)}\n{note}"
            axes.text(column, row, words, ha="center", va="center", color=colour)
            if ratio == 1.0:
                frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, ec=_BEST, lw=3)
                axes.add_patch(frame)
        colours = LinearSegmentedColormap.from_list("heat", _HEAT).with_extremes(bad=_REFUSED)
        image = axes.imshow(slower, cmap=colours, vmin=1.0, vmax=_SLOWEST, aspect="auto")
        bar = figure.colorbar(image, ax=axes, ticks=[1.0, _SLOWEST])
        bar.ax.set_yticklabels(["best", "twice the best\nor slower"])
