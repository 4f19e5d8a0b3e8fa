"""The report of a run: one HTML file with charts, made from the lines that the run wrote.

    metrics.jsonl, metrics.events.jsonl -> metrics.html

The page needs no other file and no network: charts (extra `plots`) are SVG in it, sample
videos are embedded.
"""

import base64
import html
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxdiffusion.errors import RunFailed
from maxdiffusion.runtime.charts import INSTALL, has_matplotlib
from maxdiffusion.runtime.files import (
    as_path,
    read_json_lines,
    replacing,
    size_in_bytes,
    writing,
)
from maxdiffusion.training.metrics import events_file
from maxdiffusion.training.watch.charts import Curve, curve_chart

logger = logging.getLogger(__name__)
SHOWN_SAMPLES = 4
LARGEST_SAMPLE = 4_000_000  # bytes; larger videos are named, not embedded
MEAN_OF = 50  # steps at the start and at the end that the table compares
Rows = Sequence[Mapping[str, Any]]


def write_report(metrics: Path, *, about: str = "", ended: str = "") -> Path | None:
    """Writes the report next to the metrics; returns its path, or None if there is no room."""
    steps, events = read_json_lines(metrics), read_json_lines(events_file(metrics))
    target = metrics.with_suffix(".html")
    try:
        with writing("the report", target.parent), replacing(target) as unfinished:
            page = Report(steps=steps, events=events, about=about, ended=ended).page()
            unfinished.write_text(page, encoding="utf-8")
    except RunFailed as error:  # the run itself is whole
        logger.warning(str(error))
        return None
    logger.info(f"wrote {target}")
    return target


@dataclass(frozen=True, kw_only=True)
class Report:
    """The lines of a run, its start-up report, and how it ended (empty: after its last step)."""

    steps: Rows
    events: Rows
    about: str = ""
    ended: str = ""

    def page(self) -> str:
        """Returns the page."""
        sections = [*self._summary(), *self._charts(), *self._samples()]
        if self.about:
            sections.append(f"<h2>Start-up report</h2><pre>{html.escape(self.about)}</pre>")
        return PAGE.format(style=STYLE, body="\n".join(sections))

    def _summary(self) -> Iterator[str]:
        last = self.steps[-1]["step"] if self.steps else 0
        yield f"<h1>Training, {last} steps</h1>"
        if self.ended:
            yield f'<p class="warning">{html.escape(self.ended)}</p>'
        for event in self.events:
            if "warning" in event:
                yield f'<p class="warning">{html.escape(event["warning"])}</p>'
        if self.steps:
            yield _table(self._figures())

    def _figures(self) -> Iterator[tuple[str, str]]:
        """Yields the rows of the table."""
        for part, rows in by_part(self.steps).items():
            losses = [row["learning/loss"] for row in rows]
            named = f"loss of {part}" if part else "loss"
            count = min(MEAN_OF, -(-len(losses) // 2))
            yield (
                f"{named}, mean of the first and of the last {count} steps",
                f"{np.mean(losses[:count]):.4f}, {np.mean(losses[-count:]):.4f}",
            )
        held_out = [event["eval/loss"] for event in self.events if "eval/loss" in event]
        if held_out:
            text = f"{held_out[0]:.4f}, {held_out[-1]:.4f} (lowest {min(held_out):.4f})"
            yield "held-out loss, first and last", text
        for name, text in (
            ("perf/step_time_seconds", "median seconds of a step"),
            ("perf/tokens_per_second", "median tokens/s"),
            ("perf/tflops_per_second_per_device", "median TFLOP/s of a device"),
            ("perf/mfu", "median MFU"),
        ):
            values = [row[name] for row in self.steps if row.get(name)]
            if values:
                yield text, f"{np.median(values):.4g}"
        seconds = sum(row["perf/step_time_seconds"] for row in self.steps)
        yield "hours in steps", f"{seconds / 3600:.3g}"

    def _charts(self) -> Iterator[str]:
        if not has_matplotlib():
            rule = "Charts need the package matplotlib; all figures are in the metrics file"
            yield f"<p>{rule}: {html.escape(INSTALL)}</p>"
            return
        parts = by_part(self.steps)
        loss = [_curve(part or "loss", rows, "learning/loss") for part, rows in parts.items()]
        yield from _chart("Loss", loss, logarithmic=True)
        held_out = _prefixed(
            self.events, "eval/loss", lambda name: not name.startswith("eval/loss_")
        )
        yield from _chart("Loss on held-out clips", held_out)
        buckets = _prefixed(self.steps, "learning/loss_")
        yield from _chart("Loss by timestep", buckets, logarithmic=True)
        held_out = _prefixed(self.events, "eval/loss_")
        yield from _chart("Held-out loss by timestep", held_out, logarithmic=True)
        norm = _curve("gradient norm", self.steps, "learning/gradient_norm")
        yield from _chart("Gradient norm", [norm], logarithmic=True)
        names = {name for row in self.steps for name in row if name.startswith("gradient_norm/")}
        for model in sorted({name.removeprefix("gradient_norm/").split(".")[0] for name in names}):
            groups = _prefixed(self.steps, f"gradient_norm/{model}.")
            yield from _chart(f"Gradient norm by part of {model}", groups, logarithmic=True)
        seconds = _curve("seconds", self.steps, "perf/step_time_seconds")
        yield from _chart("Seconds of a step", [seconds], logarithmic=True)  # some compile
        for title, name in (
            ("Learning rate", "learning/rate"),
            ("Tokens per second", "perf/tokens_per_second"),
            ("MFU", "perf/mfu"),
        ):
            yield from _chart(title, [_curve(title, self.steps, name)])

    def _samples(self) -> Iterator[str]:
        made = [event for event in self.events if "sample" in event]
        if made:
            yield "<h2>Samples</h2><div class='samples'>"
            yield from map(_sample, made[-SHOWN_SAMPLES:])
            yield "</div>"


def by_part(steps: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the steps of every expert."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in steps:
        found.setdefault(row["part"], []).append(row)
    return found


def _curve(label: str, rows: Rows, name: str) -> Curve | None:
    """Returns the curve of one figure, or None if no step has it."""
    held = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if not held:
        return None
    steps, values = np.array(held, np.float64).T
    return Curve(label=label, steps=steps, values=values)


def _prefixed(
    rows: Rows, prefix: str, wanted: Callable[[str], bool] = lambda name: True
) -> list[Curve | None]:
    """Returns the curves of all figures with a prefix, in the order of their numbers."""
    names = {name for row in rows for name in row if name.startswith(prefix) and wanted(name)}
    ends = {name: name[len(prefix) :].strip("/") for name in names}
    ordered = sorted(names, key=lambda name: (_first_number(ends[name]), ends[name]))
    return [_curve(ends[name] or "all", rows, name) for name in ordered]


def _first_number(text: str) -> int:
    digits = text.split("-")[0]
    return int(digits) if digits.isdigit() else -1


def _chart(
    title: str, curves: Iterable[Curve | None], *, logarithmic: bool = False
) -> Iterator[str]:
    """Yields a chart, or nothing if there is no curve to draw."""
    found = [curve for curve in curves if curve is not None and np.any(curve.values)]
    if found:
        chart = curve_chart(found, logarithmic=logarithmic)
        yield f"<section><h2>{html.escape(title)}</h2>{chart}</section>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def _sample(event: Mapping[str, Any]) -> str:
    """Returns a sample video with its step; only its name if it is missing or large."""
    file, caption = as_path(event["sample"]), f"step {event['step']}"
    try:
        small = size_in_bytes(file) <= LARGEST_SAMPLE
        content = base64.b64encode(file.read_bytes()).decode() if small else ""
    except OSError:
        content = ""
    if not content:
        return f"<figure><figcaption>{caption}: {html.escape(str(file))}</figcaption></figure>"
    source = f"data:video/mp4;base64,{content}"
    video = f'<video src="{source}" controls loop muted></video>'
    return f"<figure>{video}<figcaption>{caption}</figcaption></figure>"


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1340px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.5em } h2 { font-size: 1.05em; margin: 1.2em 0 .3em }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr));
       column-gap: 24px } main > * { grid-column: 1 / -1 } main > section { grid-column: auto }
svg { width: 100%; height: auto }
.warning { border-left: 4px solid #d55e00; background: #fdf1e9; padding: .5em .8em }
table { border-collapse: collapse; justify-self: start }
th, td { text-align: left; padding: .2em 1em .2em 0;
        border-bottom: 1px solid #e4e4e4; font-weight: normal }
td { font-variant-numeric: tabular-nums }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 12.5px }
.samples { display: flex; flex-wrap: wrap; gap: 16px } figure { margin: 0 }
video { max-width: 400px; min-width: 200px }
"""
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Training</title>
<style>{style}</style></head>
<body><main>
{body}
</main></body>
</html>
"""
