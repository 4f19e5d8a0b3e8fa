"""A ranking as an HTML page that needs nothing else: bars stacked by what they are, a table."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from maxdiffusion.preflight.chart import Bar, stacked_bars
from maxdiffusion.preflight.step_time import in_words

_STYLE = """
body { font-family: sans-serif; margin: 2em; color: #141414; }
table { border-collapse: collapse; margin-top: 1.5em; }
th, td { padding: 0.35em 0.9em; border-bottom: 1px solid #d0d0d0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True, kw_only=True)
class PageRow:
    """One bar with the bound of its step and whatever else a table should show."""

    bar: Bar
    bound: float
    facts: Mapping[str, str] = field(default_factory=dict)


def page(title: str, rows: Sequence[PageRow]) -> str:
    """The page of the rows, in their order."""
    names = list(dict.fromkeys(name for row in rows for name in row.facts))
    heads = ["", "seconds per step", "bound", "of the bound's speed", *names]
    lines = [_cells("th", heads), *(_cells("td", _row(row, names)) for row in rows)]
    picture = stacked_bars(title, [row.bar for row in rows])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"{picture}<table>\n{''.join(lines)}</table>\n"
        "<p>Every bar is a sum of parts that do not overlap; point at a part for its time.</p>\n"
        "</body></html>\n"
    )


def _row(row: PageRow, names: Sequence[str]) -> list[str]:
    total = row.bar.total
    figures = [in_words(total), in_words(row.bound), f"{row.bound / total:.1%}"]
    return [row.bar.label, *figures, *(row.facts.get(name, "") for name in names)]


def _cells(kind: str, words: Sequence[str]) -> str:
    cells = "".join(f"<{kind}>{html.escape(word)}</{kind}>" for word in words)
    return f"<tr>{cells}</tr>\n"
