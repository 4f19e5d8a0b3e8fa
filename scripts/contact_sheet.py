"""Puts the frames of a video side by side: python scripts/contact_sheet.py VIDEO.mp4 SHEET.png"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from maxdiffusion.runtime.video import read_video


def contact_sheet(frames: np.ndarray, *, columns: int, zoom: int) -> Image.Image:
    """All frames in rows of `columns`, each enlarged `zoom` times, with a thin gap between them."""
    count, height, width, _ = frames.shape
    rows, gap = -(-count // columns), 4
    size = (columns * (width * zoom + gap) - gap, rows * (height * zoom + gap) - gap)
    sheet = Image.new("RGB", size, "white")
    for index, frame in enumerate(frames):
        picture = Image.fromarray(frame).resize((width * zoom, height * zoom), Image.NEAREST)
        row, column = divmod(index, columns)
        sheet.paste(picture, (column * (width * zoom + gap), row * (height * zoom + gap)))
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("video", type=Path)
    parser.add_argument("sheet", type=Path)
    parser.add_argument("--columns", type=int, default=9)
    parser.add_argument("--zoom", type=int, default=2)
    arguments = parser.parse_args()
    frames, _ = read_video(arguments.video)
    contact_sheet(frames, columns=arguments.columns, zoom=arguments.zoom).save(arguments.sheet)


if __name__ == "__main__":
    main()
