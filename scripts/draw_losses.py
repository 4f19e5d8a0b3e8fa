"""Draws the losses of training runs: python scripts/draw_losses.py LOSSES.svg RUN.jsonl ...

Every run is a panel: its loss at each step, pale, and the mean over the last 50 steps, dark, on a
logarithmic scale. Needs the extra `plots`.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MEAN_OVER = 50
POINTS = 1500  # of a line; more would be finer than a screen


def losses(file: Path) -> np.ndarray:
    """Returns the loss at every step; of a step that was taken twice, the last."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    found = {line["step"]: line["learning/loss"] for line in lines}
    return np.array([found[step] for step in sorted(found)])


def running_mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each value and of up to 49 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - MEAN_OVER, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_run(axes: Axes, name: str, values: np.ndarray) -> None:
    """Draws one run."""
    steps = np.arange(1, len(values) + 1)
    every = -(-len(values) // POINTS)
    axes.semilogy(steps[::every], values[::every], color="#9ecae1", linewidth=0.6)
    axes.semilogy(steps[::every], running_mean(values)[::every], color="#08519c", linewidth=1.6)
    axes.set_title(name, fontsize="medium", fontweight="bold", loc="left")
    axes.set_xticks([1, len(values)], ["1", f"step {len(values)}"])
    axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Writes the drawing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drawing", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    figure = Figure(figsize=(3 * len(arguments.runs), 2.4), layout="constrained")
    for run, axes in zip(
        arguments.runs, figure.subplots(1, len(arguments.runs), squeeze=False)[0], strict=True
    ):
        draw_run(axes, run.stem, losses(run))
    with matplotlib.rc_context({"svg.hashsalt": "maxdiffusion", "svg.fonttype": "none"}):
        figure.savefig(arguments.drawing, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
