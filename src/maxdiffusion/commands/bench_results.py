"""Results of a benchmark: a line of JSON for each case, a table, and a picture."""

import html
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion.preflight.chart import COLOURS
from maxdiffusion.runtime.problems import Problem, ProblemsFound

LEFT, TOP, WIDTH, HEIGHT, LEGEND = 80, 76, 460, 300, 330
TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: an attention (or name:UxR) and how many videos are made at once."""

    attention: str
    videos: int

    def __post_init__(self) -> None:
        if self.videos < 1:
            raise ValueError(f"videos={self.videos}: must be at least 1")

    @property
    def key(self) -> str:
        """What makes two cases of a job the same."""
        return f"{self.attention} b{self.videos}"

    @property
    def title(self) -> str:
        """The case in words."""
        return f"{self.attention}, {self.videos} at once"


class Results:
    """The lines of one job in a file, which may hold those of others too.

    `job` tells runs apart: its config, devices and versions. A run that was cut short goes on
    where it stopped; what was half written is measured again.
    """

    def __init__(self, path: Path, job: str):
        self._path = path
        self._job = job

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of this job, the latest of each case."""
        return [*{line["key"]: line for line in self._read()}.values()]

    def finished(self) -> Iterator[str]:
        """The keys of the cases that are measured."""
        yield from (line["key"] for line in self.lines())

    def add(self, case: Case, line: dict[str, Any]) -> None:
        """Appends the line of a case, and sees to it that it is on the disk."""
        named = {"job": self._job, "key": case.key, "attention": case.attention}
        text = json.dumps(named | {"videos": case.videos} | line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # After a line that was cut short, begin a new one.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            gap = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(gap + text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if not isinstance(line, dict):
                rule, remedy = "is not a file of results", "Name another file"
                value = str(self._path)
                raise ProblemsFound(
                    [Problem(name="results", value=value, rule=rule, remedy=remedy)]
                )
            if line.get("job") == self._job:
                yield line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Seconds per step and video, a row for each attention, a column for each batch size."""
    attentions, batches = axes(lines)
    width = max((len(name) for name in attentions), default=0) + 2
    measured = {(line["attention"], line["videos"]): line for line in lines}
    head = f"{'s per step and video':{max(width, 22)}}" + "".join(f"{f'b{b}':>12}" for b in batches)
    rows = [head, "-" * len(head)]
    for name in attentions:
        cells = "".join(f"{cell(measured.get((name, batch))):>12}" for batch in batches)
        rows.append(f"{name:{max(width, 22)}}{cells}")
    refusals = [f"{line['key']}: {line['refusal']}" for line in lines if line["refusal"]]
    return "\n".join([*rows, *refusals])


def cell(line: dict[str, Any] | None) -> str:
    """One measurement in the table."""
    if line is None:
        return ""
    return "refused" if line["refusal"] else f"{line['seconds_per_video_step']:.4g}"


def axes(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """The attentions in their order, and the batch sizes from small to large."""
    attentions = dict.fromkeys(line["attention"] for line in lines)
    return [*attentions], sorted({line["videos"] for line in lines})


def picture(title: str, lines: Sequence[dict[str, Any]]) -> str:
    """An SVG of seconds per step and video over the batch size, a line for each attention."""
    attentions, batches = axes(lines)
    values = {
        (line["attention"], line["videos"]): line["seconds_per_video_step"]
        for line in lines
        if not line["refusal"]
    }
    top = round_number(max(values.values(), default=1.0) / TICKS) * TICKS
    width, height = LEFT + WIDTH + LEGEND, TOP + HEIGHT + 60
    pieces = [_text(20, 26, title, size=16), *_frame(batches, top)]
    # In the order in which the lines end, so that the eye finds them.
    ends = sorted(attentions, key=lambda name: -values.get((name, batches[-1]), top))
    for index, name in enumerate(attentions):
        colour = COLOURS[index % len(COLOURS)]
        spots = [
            (_across(position, len(batches)), _down(values[name, batch], top))
            for position, batch in enumerate(batches)
            if (name, batch) in values
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        pieces.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        pieces += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in spots]
        y = TOP + 14 + 20 * ends.index(name)
        x = LEFT + WIDTH + 30
        pieces.append(f'<rect x="{x}" y="{y - 10}" width="14" height="12" fill="{colour}"/>')
        last = values.get((name, batches[-1]))
        note = "refused" if last is None else f"{last:.3g} s"
        note = f"{note} at {batches[-1]}"
        pieces.append(_text(x + 22, y, f"{name} ({note})"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )


def _frame(batches: Sequence[int], top: float) -> list[str]:
    """Axes, their numbers and names."""
    pieces = []
    for part in range(TICKS + 1):
        value = top * part / TICKS
        y = _down(value, top)
        ends = f'x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"'
        pieces += [f'<line {ends} stroke="#dddddd"/>', _text(20, y + 4, f"{value:.3g}")]
    for position, batch in enumerate(batches):
        pieces.append(_text(_across(position, len(batches)) - 4, TOP + HEIGHT + 22, str(batch)))
    pieces.append(_text(LEFT + WIDTH / 2 - 44, TOP + HEIGHT + 46, "videos at once"))
    return [*pieces, _text(20, TOP - 22, "seconds per step and video")]


def round_number(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= least)


def _across(position: int, count: int) -> float:
    return LEFT + WIDTH * (position + 0.5) / count


def _down(value: float, top: float) -> float:
    return TOP + HEIGHT * (1 - value / top)


def _text(x: float, y: float, words: str, *, size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{html.escape(words)}</text>'
