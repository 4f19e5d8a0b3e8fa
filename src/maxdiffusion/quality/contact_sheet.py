"""Contact sheets: videos as rows of frames under their titles, one below the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

GAP, LINE = 4, 18
MOST_COLUMNS = 9
WIDEST = 160
"""Pixels of a frame in a sheet of many rows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The frames of one video and its title; an empty title takes no space."""

    title: str
    frames: UInt8[np.ndarray, "F Y X 3"]


def draw_row(row: Row, *, zoom: float = 1) -> Image.Image:
    """Returns the frames of one video in a row, under its title."""
    count, height, width, _ = row.frames.shape
    size = (round(width * zoom), round(height * zoom))
    top = LINE if row.title else 0
    picture = Image.new("RGB", (count * (size[0] + GAP) - GAP, top + size[1]), "white")
    if row.title:
        font = ImageFont.load_default(size=LINE - 5)
        ImageDraw.Draw(picture).text((0, 0), row.title, fill="black", font=font)
    resample = Image.Resampling.NEAREST if zoom >= 1 else Image.Resampling.LANCZOS
    for index, frame in enumerate(row.frames):
        scaled = Image.fromarray(frame).resize(size, resample)
        picture.paste(scaled, (index * (size[0] + GAP), top))
    return picture


def stacked(rows: Sequence[Image.Image]) -> Image.Image:
    """Returns pictures one below the other."""
    size = (max(one.width for one in rows), sum(one.height + GAP for one in rows) - GAP)
    sheet, at = Image.new("RGB", size, "white"), 0
    for one in rows:
        sheet.paste(one, (0, at))
        at += one.height + GAP
    return sheet


def side_by_side(columns: Sequence[Image.Image]) -> Image.Image:
    """Returns pictures next to each other."""
    size = (
        sum(one.width + 4 * GAP for one in columns) - 4 * GAP,
        max(one.height for one in columns),
    )
    sheet, at = Image.new("RGB", size, "white"), 0
    for one in columns:
        sheet.paste(one, (at, 0))
        at += one.width + 4 * GAP
    return sheet


def thinned(row: Row, most: int = MOST_COLUMNS) -> Row:
    """Returns the row with at most this many frames, evenly spaced from first to last."""
    count = len(row.frames)
    if count <= most:
        return row
    chosen = np.linspace(0, count - 1, most).round().astype(int)
    return Row(title=row.title, frames=row.frames[chosen])


def sheet_zoom(width: int) -> float:
    """Returns the zoom of frames of this width: large ones shrink, small ones grow by a whole."""
    return WIDEST / width if width > WIDEST else max(1, WIDEST // width)
