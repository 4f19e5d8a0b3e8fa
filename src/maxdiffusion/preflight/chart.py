"""Stacked bars as an SVG picture: one bar a row, its parts by what they are."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maxdiffusion.preflight.step_time import in_words

# Told apart with any kind of colour vision (Okabe and Ito).
COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#56b4e9", "#d55e00", "#f0e442", "#999999", "#000000"),
)
_LABEL, _BAR, _ROW, _TEXT = 330, 560, 30, 13


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row: what it is, and its parts in seconds."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def stacked_bars(title: str, bars: Sequence[Bar]) -> str:
    """The picture of the bars, the same parts in the same colours, with a legend below."""
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    longest = max((bar.total for bar in bars), default=0.0) or 1.0
    pieces = [_text(10, 24, title, size=16)]
    for row, bar in enumerate(bars):
        pieces += _row(bar, 40 + row * _ROW, colours, _BAR / longest)
    legend = 56 + len(bars) * _ROW
    for index, name in enumerate(names):
        y = legend + index * 20
        pieces += [_box(10, y, 14, 14, colours[name], name), _text(32, y + 12, name)]
    height = legend + len(names) * 20 + 10
    width = _LABEL + _BAR + 90
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )


def _row(bar: Bar, y: int, colours: Mapping[str, str], scale: float) -> list[str]:
    pieces = [_text(10, y + 16, bar.label)]
    x = float(_LABEL)
    for name, seconds in bar.parts.items():
        note = f"{name}: {in_words(seconds)}"
        pieces.append(_box(x, y, seconds * scale, _ROW - 8, colours[name], note))
        x += seconds * scale
    return [*pieces, _text(x + 6, y + 16, in_words(bar.total))]


def _box(x: float, y: float, width: float, height: float, colour: str, note: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{html.escape(note)}</title></rect>'
    )


def _text(x: float, y: float, words: str, *, size: int = _TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{html.escape(words)}</text>'
