"""Ranks several attentions, or several sizes of slice: a table, a page with a chart, and JSON."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion.config.load import ParsedConfig, read_config
from maxdiffusion.costs.chips import GIB, Topology, read_topology, topology_of_size
from maxdiffusion.costs.flops import step_bounds
from maxdiffusion.costs.planner import Choice, Task, choices, explain
from maxdiffusion.costs.step_time import COPIES, EXPOSED, format_seconds
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.generation.job import ResolvedJob
from maxdiffusion.preflight.command import compiled_report, plan_for_topology, step_flops
from maxdiffusion.preflight.compile import DENOISE_STEP
from maxdiffusion.preflight.devices import describe_devices
from maxdiffusion.preflight.plots import Bar, RankingRow, ranking_page
from maxdiffusion.runtime.charts import require_matplotlib
from maxdiffusion.runtime.tpu_flags import pins_clock

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One entry of a ranking: its row on the page, and further entries of its JSON object."""

    row: RankingRow
    json: dict[str, Any]


def compare(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Compiles the denoise step of every entry of `compare` and ranks them by predicted time.

    An entry that cannot run is reported and does not stop the others.
    """
    if parsed.config.report:
        require_matplotlib()
    entries = []
    for entry in parsed.config.compare:
        changed = [*arguments, *entry_overrides(entry)]
        try:
            logger.info(f"== {entry}")
            job = plan_for_topology(read_config(changed))
            report = compiled_report(job, changed, only=DENOISE_STEP)
        except ProblemsFound as error:
            logger.info(f"{entry} cannot run:\n{error}")
            continue
        row = RankingRow(
            bar=Bar(label=entry, parts=report.step.parts()),
            bound=report.bounds.head_dim_aware,
            facts={"MFU": f"{report.mfu:.1%}", "HBM": f"{report.residence.peak / GIB:.1f} GiB"},
        )
        entries.append(Ranked(row=row, json={"report": report.as_json()}))
    entries.sort(key=lambda entry: entry.row.bar.total)
    chip = read_topology(parsed.config.topology).chip
    clock = chip.as_run(pinned=pins_clock(chip.name)).clock
    title = f"predicted seconds per step, {parsed.config.topology} at {clock}"
    publish(parsed, title, entries)


def entry_overrides(entry: str) -> tuple[str, ...]:
    """Returns the overrides of an entry such as `ulysses_ring_custom:2x2`."""
    found = re.fullmatch(r"(\w+)(?::(\d+)x(\d+))?", entry)
    if found is None:
        rule = "an entry is a name, or name:UxR with the context split into ulysses x ring"
        remedy = "Use for example ulysses_ring_custom:2x2"
        raise ProblemsFound([Problem(name="compare", value=entry, rule=rule, remedy=remedy)])
    name, ulysses, ring = found.groups()
    if ulysses is None:
        return (f"attention={name}",)
    context = int(ulysses) * int(ring)
    split = (f"ici_context_parallelism={context}", f"ulysses_shards={ulysses}")
    return (f"attention={name}", *split)


def scan(parsed: ParsedConfig) -> None:
    """Estimates the best attention for every context of `scan_cp`; compiles nothing."""
    if parsed.config.report:
        require_matplotlib()
    job = plan_for_topology(parsed)
    chip, data = job.topology.chip, job.planned.builder.mesh.shape["data"]
    entries = []
    for context in parsed.config.scan_cp:
        topology = topology_of_size(chip, data * context)
        if topology is None:
            logger.info(f"context {context}: no {chip.name} slice has {data * context} devices")
            continue
        task = task_of(job.planned, topology)
        found = choices(task, data=data, context=context)
        if not found:
            logger.info(f"context {context}: every attention is refused")
            continue
        logger.info(f"context {context}, {explain(found)}")
        entries.append(scan_entry(task, found[0]))
    publish(parsed, f"estimated seconds per step at {chip.clock}", entries)


def task_of(job: ResolvedJob, topology: Topology) -> Task:
    """Returns the planner's task: the attention of a job on another slice."""
    builder, shape = job.builder, job.shape
    return Task(
        problem=job.attention.self_attention.problem,
        flops=step_flops(job),
        layers=builder.spec.transformer.layers,
        topology=topology,
        devices=describe_devices(topology),
        options=builder.settings.attention_options,
        text_length=shape.text_length,
        product_dtype=builder.settings.precision.product_dtype,
    )


def scan_entry(task: Task, best: Choice) -> Ranked:
    """Returns the entry of one size of slice."""
    topology, parts = task.topology, best.estimate
    bounds = step_bounds(
        task.flops,
        topology.chip,
        devices=topology.device_count,
        head_dim=task.problem.head_dim,
        product_dtype=task.product_dtype,
    )
    split = f"U{best.shape.ulysses} R{best.shape.ring}"
    mfu = bounds.mfu(task.flops.total, parts.total)
    row = RankingRow(
        bar=Bar(
            label=f"CP{best.shape.context} {topology.name}: {best.name} {split}",
            parts={
                "attention kernels": parts.kernels,
                "other work": parts.outside,
                COPIES: parts.copies,
                EXPOSED: parts.exposed_collectives,
            },
        ),
        bound=bounds.head_dim_aware,
        facts={
            "devices": str(topology.device_count),
            "device-seconds per step": f"{parts.total * topology.device_count:.1f}",
            "MFU": f"{mfu:.1%}",
        },
    )
    return Ranked(
        row=row,
        json={
            "context": best.shape.context,
            "topology": topology.name,
            "attention": best.name,
            "ulysses": best.shape.ulysses,
            "ring": best.shape.ring,
            "devices": topology.device_count,
            "blocks": best.blocks,
            "mfu": mfu,
        },
    )


def publish(parsed: ParsedConfig, title: str, entries: Sequence[Ranked]) -> None:
    """Shows the table; writes JSON, and next to it a page with a chart, if `report` is set."""
    logger.info(title)
    for entry in entries:
        row = entry.row
        share = row.bound / row.bar.total
        seconds = format_seconds(row.bar.total)
        logger.info(f"  {seconds:>10}  {share:5.1%} of the bound's speed  {row.bar.label}")
    if not parsed.config.report:
        return
    path = Path(parsed.config.report)
    path.write_text(json.dumps([_entry_json(entry) for entry in entries], indent=2) + "\n")
    page = path.with_suffix(".html")
    page.write_text(ranking_page(title, [entry.row for entry in entries]), encoding="utf-8")
    logger.info(f"wrote {path} and {page}")


def _entry_json(entry: Ranked) -> dict[str, Any]:
    row = entry.row
    return {
        "label": row.bar.label,
        "seconds_per_step": row.bar.total,
        "bound_seconds_per_step": row.bound,
        "seconds": dict(row.bar.parts),
        **entry.json,
    }
