"""A picture of a search over tiles: one cell for each pair of block sizes, coloured by time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maxdiffusion.preflight.step_time import in_words
from maxdiffusion.preflight.tile_table import Tried

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _TOP, _BELOW = 130, 64, 170, 80, 110
_INK, _REFUSED, _BEST = (20, 20, 20), (205, 205, 205), (214, 39, 40)
# From the quickest to the slowest, light to dark; told apart with any kind of colour vision.
_SCALE = ((255, 247, 188), (254, 196, 79), (217, 95, 14), (127, 39, 4))
_SLOWEST = 2.0  # times the best from which on cells are as dark as can be


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Cells by (block_q, block_kv): of several tiles of a pair the quickest."""

    title: str
    how: str
    cells: Mapping[tuple[int, int], Tried]

    @classmethod
    def of(cls, title: str, how: str, rows: Sequence[Tried]) -> "HeatMap":
        """The map of what was tried."""
        cells: dict[tuple[int, int], Tried] = {}
        for row in sorted(rows, key=lambda row: row.seconds):
            cells.setdefault((row.block_q, row.block_kv), row)
        return cls(title=title, how=how, cells=cells)

    @property
    def queries(self) -> list[int]:
        """The rows of the picture, smallest first."""
        return sorted({block_q for block_q, _ in self.cells})

    @property
    def keys(self) -> list[int]:
        """The columns of the picture, smallest first."""
        return sorted({block_kv for _, block_kv in self.cells})

    @property
    def best(self) -> float:
        """Seconds of the quickest cell; infinite if nothing could run."""
        return min(row.seconds for row in self.cells.values())


def draw(heat_map: HeatMap, path: Path) -> None:
    """Writes the picture as PNG."""
    from PIL import Image, ImageDraw, ImageFont

    large, small = ImageFont.load_default(size=18), ImageFont.load_default(size=15)
    below = f"seconds of one attention on one device, {heat_map.how}; the best is framed"
    words = max(large.getlength(heat_map.title), small.getlength(below))
    width = max(_LEFT + len(heat_map.keys) * _CELL_WIDTH + 30, int(words) + 32, 620)
    height = _TOP + len(heat_map.queries) * _CELL_HEIGHT + _BELOW
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    pen.font = small
    pen.text((16, 14), heat_map.title, fill=_INK, font=large)
    pen.text((16, 44), below, fill=_INK)
    for cell, row in heat_map.cells.items():
        _draw_cell(pen, _corner(heat_map, cell), row, heat_map.best)
    _draw_axes(pen, heat_map)
    _draw_scale(pen, height)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def _corner(heat_map: HeatMap, cell: tuple[int, int]) -> tuple[int, int]:
    column, row = heat_map.keys.index(cell[1]), heat_map.queries.index(cell[0])
    return _LEFT + column * _CELL_WIDTH, _TOP + row * _CELL_HEIGHT


def _draw_cell(pen: "ImageDraw", corner: tuple[int, int], row: Tried, best: float) -> None:
    x, y = corner
    box = (x + 2, y + 2, x + _CELL_WIDTH - 3, y + _CELL_HEIGHT - 3)
    middle = (x + _CELL_WIDTH // 2, y + _CELL_HEIGHT // 2)
    if row.refusal:
        pen.rectangle(box, fill=_REFUSED)
        pen.text(middle, "refused", fill=_INK, anchor="mm")
        return
    slower = row.seconds / best
    colour = colour_of(slower)
    framed = slower == 1.0
    pen.rectangle(box, fill=colour, outline=_BEST if framed else None, width=4 if framed else 1)
    ink = _INK if sum(colour) > 330 else (255, 255, 255)
    second = "best" if framed else f"{slower - 1:+.0%}"
    pen.text((middle[0], middle[1] - 10), in_words(row.seconds), fill=ink, anchor="mm")
    pen.text((middle[0], middle[1] + 12), second, fill=ink, anchor="mm")


def colour_of(slower: float) -> tuple[int, int, int]:
    """The colour of a cell that takes `slower` times as long as the best."""
    share = min(1.0, (slower - 1.0) / (_SLOWEST - 1.0)) * (len(_SCALE) - 1)
    below = min(int(share), len(_SCALE) - 2)
    mix = share - below
    pairs = zip(_SCALE[below], _SCALE[below + 1], strict=True)
    red, green, blue = (round(low + (high - low) * mix) for low, high in pairs)
    return red, green, blue


def _draw_axes(pen: "ImageDraw", heat_map: HeatMap) -> None:
    bottom = _TOP + len(heat_map.queries) * _CELL_HEIGHT
    for index, keys in enumerate(heat_map.keys):
        x = _LEFT + index * _CELL_WIDTH + _CELL_WIDTH // 2
        pen.text((x, bottom + 12), f"{keys:,}", fill=_INK, anchor="mm")
    for index, queries in enumerate(heat_map.queries):
        y = _TOP + index * _CELL_HEIGHT + _CELL_HEIGHT // 2
        pen.text((_LEFT - 12, y), f"{queries:,}", fill=_INK, anchor="rm")
    middle = _LEFT + len(heat_map.keys) * _CELL_WIDTH // 2
    pen.text((middle, bottom + 34), "keys of a block (block_kv)", fill=_INK, anchor="mm")
    pen.text((16, _TOP + 8), "queries of", fill=_INK)
    pen.text((16, _TOP + 28), "a block", fill=_INK)
    pen.text((16, _TOP + 48), "(block_q)", fill=_INK)


def _draw_scale(pen: "ImageDraw", height: int) -> None:
    """What the colours mean, from the best to twice its time."""
    left, top, width = 110, height - 44, 260
    for x in range(width):
        colour = colour_of(1.0 + (_SLOWEST - 1.0) * x / width)
        pen.line((left + x, top, left + x, top + 18), fill=colour)
    pen.text((left - 10, top + 9), "best", fill=_INK, anchor="rm")
    pen.text((left + width + 10, top + 9), "twice the best or slower", fill=_INK, anchor="lm")
