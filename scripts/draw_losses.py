"""Draws the losses of training runs: python scripts/draw_losses.py LOSSES.svg RUN.jsonl ...

Every run is a panel: its loss at each step, pale, and the mean over the last 50 steps, dark, on a
logarithmic scale.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

WIDTH, HEIGHT, MARGIN, TOP = 240, 150, 44, 24
MEAN_OVER = 50
POINTS = 1500  # of a line; more would be finer than a screen


def losses(file: Path) -> np.ndarray:
    """The loss at every step; of a step that was taken twice, the last."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    found = {line["step"]: line["learning/loss"] for line in lines}
    return np.array([found[step] for step in sorted(found)])


def running_mean(values: np.ndarray) -> np.ndarray:
    """The mean of each value and of up to 49 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - MEAN_OVER, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def panel(name: str, values: np.ndarray) -> str:
    """One run as SVG, in a box that starts at 0, 0."""
    low, high = math.log10(values.min()), math.log10(values.max())

    def at(step: int, value: float) -> str:
        right = MARGIN + step / len(values) * (WIDTH - MARGIN - 8)
        down = TOP + (high - math.log10(value)) / (high - low) * HEIGHT
        return f"{right:.1f},{down:.1f}"

    def line(series: np.ndarray, style: str) -> str:
        every = -(-len(series) // POINTS)
        points = " ".join(at(step, series[step]) for step in range(0, len(series), every))
        return f'<polyline points="{points}" fill="none" {style}/>'

    marks = [10**power * part for power in range(-3, 3) for part in (1, 2, 5)]
    shown = [mark for mark in marks if values.min() <= mark <= values.max()]
    grid = [
        f'<line x1="{MARGIN}" x2="{WIDTH - 8}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        f'<text x="{MARGIN - 6}" y="{float(y) + 4}" text-anchor="end">{mark:g}</text>'
        for mark in shown
        for y in (at(0, mark).split(",")[1],)
    ]
    return "\n".join(
        [
            f'<text x="{MARGIN}" y="14" font-weight="bold">{name}</text>',
            *grid,
            line(values, 'stroke="#9ecae1" stroke-width="0.6"'),
            line(running_mean(values), 'stroke="#08519c" stroke-width="1.6"'),
            f'<text x="{MARGIN}" y="{TOP + HEIGHT + 16}">1</text>',
            f'<text x="{WIDTH - 8}" y="{TOP + HEIGHT + 16}" text-anchor="end">'
            f"step {len(values)}</text>",
        ]
    )


def main() -> None:
    """Writes the drawing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drawing", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    panels = [
        f'<g transform="translate({number * WIDTH},0)">{panel(run.stem, losses(run))}</g>'
        for number, run in enumerate(arguments.runs)
    ]
    size = f'width="{WIDTH * len(panels)}" height="{TOP + HEIGHT + 24}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    text = "\n".join([head, background, *panels, "</svg>", ""])
    arguments.drawing.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
