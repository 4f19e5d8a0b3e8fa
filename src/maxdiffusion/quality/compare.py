"""Compares the modes of a config with its exact form: a table, JSON and a contact sheet.

    output_dir/quality.json    every figure of every clip, config, device and date
    output_dir/quality.png     frames of the exact run and of every mode, a column for each prompt

The table has two parts that are never mixed: exact runs that differ in rounding only (the floor),
and lossy modes. A lossy mode near the floor is as good as another machine.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax

from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.generation.generate import run_details
from maxdiffusion.generation.settings import use_compilation_cache
from maxdiffusion.quality.contact_sheet import (
    Row,
    draw_row,
    sheet_zoom,
    side_by_side,
    stacked,
    thinned,
)
from maxdiffusion.quality.metrics import Distance, mean_distance, scale_weights
from maxdiffusion.quality.modes import Kind
from maxdiffusion.quality.runs import Compared, Ledger, of_mode, resolve_modes, run_all
from maxdiffusion.quality.scores import Scores, find_scorers
from maxdiffusion.runtime.files import as_path, replacing

logger = logging.getLogger(__name__)

JSON_FILE, SHEET_FILE = "quality.json", "quality.png"
TITLES = {
    Kind.ROUNDING: "exact, other rounding (floor)",
    Kind.LOSSY: "lossy",
}
COLUMNS = ("PSNR dB", "worst", "SSIM", "MS-SSIM", "flicker", "forwards")


def compare(parsed: ParsedConfig, arguments: Sequence[str], names: Sequence[str]) -> None:
    """Compares modes with the exact run, on all processes; the first one writes the files.

    `arguments` are those of the config; `names` are the modes, all if empty.
    """
    use_compilation_cache(parsed.config)
    scorers = find_scorers(parsed.config)
    ledger = run_all(*resolve_modes(parsed, arguments, names))
    if jax.process_index() == 0:
        scores = merged([scorer(ledger) for scorer in scorers])
        logger.info("\n%s", table(ledger, scores))
        write_files(ledger, scores)


def merged(parts: Sequence[Scores]) -> dict[str, dict[str, float]]:
    """Returns the columns of all scorers for each mode."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: {column: value for part in parts for column, value in part.get(name, {}).items()}
        for name in names
    }


def table(ledger: Ledger, scores: Scores) -> str:
    """Returns the ledger as text: one part for the floor, one for lossy modes."""
    columns = [*dict.fromkeys(column for row in scores.values() for column in row)]
    own = [
        f"{scores['exact'][name]:.3g}" if name in scores.get("exact", {}) else ""
        for name in columns
    ]
    made = ledger.reference
    parts = [["exact", *[""] * 5, f"{made.forwards:.4g} of {made.most}", *own]]
    head = ["", *COLUMNS, *columns]
    lines = [f"{len(ledger.prompts)} clips; MS-SSIM of {scales(ledger)} scales"]
    lines += aligned([head, *parts])
    for kind, title in TITLES.items():
        rows = ledger.rows_of(kind)
        if rows:
            cells = [[title, *head[1:]], *(cells_of(row, scores, columns) for row in rows)]
            lines += ["", *aligned(cells)]
    return "\n".join(lines)


def cells_of(row: Compared, scores: Scores, columns: Sequence[str]) -> list[str]:
    """Returns the cells of one mode."""
    mean = mean_distance(row.distances)
    own = scores.get(row.run.name, {})
    return [
        row.run.name,
        decibels(mean),
        decibels(max(row.distances, key=lambda one: one.squared_error)),
        f"{mean.ssim:.4f}",
        f"{mean.ms_ssim:.4f}",
        f"{mean.flicker:.3f}",
        f"{row.made.forwards:.4g} of {row.made.most}",
        *(f"{own[name]:.3g}" if name in own else "" for name in columns),
    ]


def decibels(distance: Distance) -> str:
    """Returns a PSNR as text."""
    return "equal" if math.isinf(distance.psnr) else f"{distance.psnr:.2f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with columns of equal width; the first column is text, others are numbers."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def scales(ledger: Ledger) -> int:
    """Returns the number of scales of MS-SSIM."""
    config = ledger.exact.job.config
    return len(scale_weights(config.height, config.width))


def write_files(ledger: Ledger, scores: Scores) -> None:
    """Writes JSON and contact sheet to the output folder."""
    folder = as_path(ledger.exact.job.config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / JSON_FILE) as unfinished:
        unfinished.write_text(json.dumps(as_json(ledger, scores), indent=2) + "\n")
    with replacing(folder / SHEET_FILE) as unfinished, unfinished.open("wb") as file:
        contact_sheet(ledger).save(file, format="PNG")
    logger.info("wrote %s and %s", folder / JSON_FILE, folder / SHEET_FILE)


def as_json(ledger: Ledger, scores: Scores) -> dict[str, Any]:
    """Returns the ledger as JSON types; the PSNR of equal clips is null."""
    return {
        **run_details(ledger.exact.job),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "ms_ssim_scales": scales(ledger),
        "clips": [
            {"prompt": prompt, "seed": seed}
            for prompt, seed in zip(ledger.prompts, ledger.seeds, strict=True)
        ],
        "exact": made_json(ledger.reference) | {"scores": dict(scores.get("exact", {}))},
        "floor": [row_json(row, scores) for row in ledger.rows_of(Kind.ROUNDING)],
        "lossy": [row_json(row, scores) for row in ledger.rows_of(Kind.LOSSY)],
        "not_run": [
            {"mode": one.mode.name, "reasons": [str(of_mode(one.mode, p)) for p in one.problems]}
            for one in ledger.refused
        ],
    }


def made_json(made: Any) -> dict[str, Any]:
    """Returns seconds and forwards of a run."""
    return {
        "seconds_per_clip": round(made.seconds, 3),
        "forwards": made.forwards,
        "forwards_of": made.most,
    }


def row_json(row: Compared, scores: Scores) -> dict[str, Any]:
    """Returns one mode: its means, and the distances of every clip."""
    return {
        "mode": row.run.name,
        "overrides": list(row.run.overrides),
        **distance_json(mean_distance(row.distances)),
        **made_json(row.made),
        "scores": dict(scores.get(row.run.name, {})),
        "clips": [distance_json(one) for one in row.distances],
    }


def distance_json(distance: Distance) -> Mapping[str, float | None]:
    """Returns the distances of a clip."""
    psnr = None if math.isinf(distance.psnr) else distance.psnr
    return {"psnr": psnr, **asdict(distance)}


def contact_sheet(ledger: Ledger) -> Any:
    """Returns the picture of all clips: a column for each prompt, a row for each mode."""
    zoom = sheet_zoom(ledger.exact.job.config.width)
    most = 9 if len(ledger.prompts) == 1 else 5
    columns = []
    for index, prompt in enumerate(ledger.prompts):
        rows = [Row(title=f"{prompt}: exact", frames=ledger.reference.clips[index])]
        rows += [
            Row(title=title_of(row, index), frames=row.made.clips[index])
            for kind in TITLES
            for row in ledger.rows_of(kind)
        ]
        columns.append(stacked([draw_row(thinned(row, most), zoom=zoom) for row in rows]))
    return side_by_side(columns)


def title_of(row: Compared, index: int) -> str:
    """Returns the title of a clip: kind, mode and PSNR."""
    assert row.run.mode is not None
    psnr = decibels(row.distances[index])
    unit = "" if psnr == "equal" else " dB"
    return f"{row.run.mode.kind.value}: {row.run.name}, {psnr}{unit}"
