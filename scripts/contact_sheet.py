"""Draws videos as rows of frames: python scripts/contact_sheet.py SHEET.png VIDEO.mp4 ...

Every row has the prompt of its video above it, if the file has one in it. Needs pillow, which the
extra `plots` installs.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from maxdiffusion.runtime.video import read_metadata, read_video

GAP, LINE = 4, 18


def row(frames: np.ndarray, *, title: str, zoom: int) -> Image.Image:
    """Returns the frames of one video in a row, enlarged, under its title."""
    count, height, width, _ = frames.shape
    top = LINE if title else 0
    size = (count * (width * zoom + GAP) - GAP, top + height * zoom)
    picture = Image.new("RGB", size, "white")
    if title:
        font = ImageFont.load_default(size=LINE - 5)
        ImageDraw.Draw(picture).text((0, 0), title, fill="black", font=font)
    for index, frame in enumerate(frames):
        large = Image.fromarray(frame).resize(
            (width * zoom, height * zoom), Image.Resampling.NEAREST
        )
        picture.paste(large, (index * (width * zoom + GAP), top))
    return picture


def stacked(rows: list[Image.Image]) -> Image.Image:
    """Rows one below the other."""
    size = (max(one.width for one in rows), sum(one.height + GAP for one in rows) - GAP)
    sheet, at = Image.new("RGB", size, "white"), 0
    for one in rows:
        sheet.paste(one, (0, at))
        at += one.height + GAP
    return sheet


def main() -> None:
    """Writes the sheet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sheet", type=Path)
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--zoom", type=int, default=1)
    arguments = parser.parse_args()
    rows = [
        row(read_video(video)[0], title=read_metadata(video).get("title", ""), zoom=arguments.zoom)
        for video in arguments.videos
    ]
    stacked(rows).save(arguments.sheet)


if __name__ == "__main__":
    main()
