"""Draws videos as rows of frames: python scripts/contact_sheet.py SHEET.png VIDEO.mp4 ...

Every row has the prompt of its video above it, if the file has one in it.
"""

import argparse
from pathlib import Path

from maxdiffusion.quality.contact_sheet import Row, draw_row, stacked
from maxdiffusion.runtime.video import read_metadata, read_video


def row_of(video: Path) -> Row:
    """Returns the frames of a file under its prompt."""
    return Row(title=read_metadata(video).get("title", ""), frames=read_video(video)[0])


def main() -> None:
    """Writes the sheet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sheet", type=Path)
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--zoom", type=int, default=1)
    arguments = parser.parse_args()
    rows = [draw_row(row_of(video), zoom=arguments.zoom) for video in arguments.videos]
    stacked(rows).save(arguments.sheet)


if __name__ == "__main__":
    main()
