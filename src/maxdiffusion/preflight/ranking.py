"""Several attentions, or several sizes of slice, side by side: a table, a picture, JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxdiffusion.commands.preflight import Preflight, compiled_report, prepare, say
from maxdiffusion.config.loading import Reading, read_config
from maxdiffusion.preflight.chart import Bar
from maxdiffusion.preflight.flops import forward_flops, step_bounds
from maxdiffusion.preflight.page import PageRow, page
from maxdiffusion.preflight.planner import Choice, Task, choices, explain
from maxdiffusion.preflight.programs import DENOISE_STEP
from maxdiffusion.preflight.step_time import in_words
from maxdiffusion.preflight.topology import Topology, describe_devices, topology_of_size
from maxdiffusion.runtime.problems import Problem, ProblemsFound


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a ranking: what it is, its parts in seconds, and all else that is known."""

    bar: Bar
    bound: float
    facts: dict[str, Any]
    shown: Mapping[str, str] = field(default_factory=dict)


def compare(reading: Reading, arguments: Sequence[str]) -> None:
    """Compiles the denoise step of every entry of `compare` and ranks them by predicted time.

    What one of them cannot do is said, and does not stop the others.
    """
    rows = []
    for entry in reading.config.compare:
        overrides = entry_overrides(entry)
        changed = [*arguments, *overrides]
        try:
            say(f"== {entry}")
            job = prepare(read_config(changed))
            report = compiled_report(job, changed, only=DENOISE_STEP)
        except ProblemsFound as error:
            say(f"{entry} cannot run:\n{error}")
            continue
        bar = Bar(label=entry, parts=report.step.parts())
        rows.append(
            Row(
                bar=bar,
                bound=report.bounds.head_dim_aware,
                facts={"report": report.as_json()},
                shown={"MFU": f"{report.mfu:.1%}", "HBM": _gib(report.residence.peak)},
            )
        )
    publish(reading, f"predicted seconds per step, {reading.config.topology}", rows)


def entry_overrides(entry: str) -> tuple[str, ...]:
    """The overrides that an entry such as `ulysses_ring_custom:2x2` stands for."""
    found = re.fullmatch(r"(\w+)(?::(\d+)x(\d+))?", entry)
    if found is None:
        rule = "an entry is a name, or name:UxR with the split of the context"
        remedy = "Use for example ulysses_ring_custom:2x2"
        raise ProblemsFound([Problem(name="compare", value=entry, rule=rule, remedy=remedy)])
    name, ulysses, ring = found.groups()
    if ulysses is None:
        return (f"attention={name}",)
    context = int(ulysses) * int(ring)
    split = (f"ici_context_parallelism={context}", f"ulysses_shards={ulysses}")
    return (f"attention={name}", *split)


def scan(reading: Reading) -> None:
    """Estimates, without compiling, the best attention for every context of `scan_cp`."""
    job = prepare(reading)
    data = job.workshop.mesh.shape["data"]
    rows = []
    for context in reading.config.scan_cp:
        topology = topology_of_size(job.topology.chip, data * context)
        if topology is None:
            say(
                f"context {context}: no {job.topology.chip.name} slice has {data * context} devices"
            )
            continue
        found = choices(task_of(job, topology), data=data, context=context)
        if not found:
            say(f"context {context}: every attention is refused")
            continue
        say(f"context {context}, {explain(found)}")
        rows.append(scan_row(job, topology, found[0]))
    publish(reading, "estimated seconds per step", rows, ranked=False)


def task_of(job: Preflight, topology: Topology) -> Task:
    """The attention of a job on another slice."""
    workshop, shape = job.workshop, job.shape
    transformer = workshop.spec.transformer
    return Task(
        problem=workshop.attention(shape).self_attention.problem,
        flops=forward_flops(
            transformer,
            tokens=shape.latent.tokens,
            text_length=shape.text_length,
            batch=shape.model_batch,
        ),
        layers=transformer.layers,
        topology=topology,
        devices=describe_devices(topology),
        options=workshop.settings.attention_options,
        text_length=shape.text_length,
    )


def scan_row(job: Preflight, topology: Topology, best: Choice) -> Row:
    """The row of one size of slice."""
    task, parts = task_of(job, topology), best.estimate
    head_dim = job.workshop.spec.transformer.head_dim
    bounds = step_bounds(task.flops, topology.chip, topology.device_count, head_dim)
    split = f"U{best.shape.ulysses} R{best.shape.ring}"
    mfu = bounds.mfu(task.flops.total, parts.total)
    return Row(
        bar=Bar(
            label=f"CP{best.shape.context} {topology.name}: {best.name} {split}",
            parts={
                "attention kernels": parts.kernels,
                "other work": parts.outside,
                "exchange copies": parts.exchange_copies,
                "exposed exchange": parts.exposed_exchange,
            },
        ),
        bound=bounds.head_dim_aware,
        facts={
            "context": best.shape.context,
            "topology": topology.name,
            "attention": best.name,
            "ulysses": best.shape.ulysses,
            "ring": best.shape.ring,
            "devices": topology.device_count,
            "blocks": best.blocks,
            "mfu": mfu,
        },
        shown={
            "devices": str(topology.device_count),
            "device-seconds per step": f"{parts.total * topology.device_count:.1f}",
            "MFU": f"{mfu:.1%}",
        },
    )


def publish(reading: Reading, title: str, rows: Sequence[Row], *, ranked: bool = True) -> None:
    """Prints the table and writes JSON, and a page with a picture, where `report` says."""
    if ranked:
        rows = sorted(rows, key=lambda row: row.bar.total)
    say(title)
    for row in rows:
        share = row.bound / row.bar.total
        time = in_words(row.bar.total)
        say(f"  {time:>10}  {share:5.1%} of the bound's speed  {row.bar.label}")
    if not reading.config.report:
        return
    path = Path(reading.config.report)
    content = [
        {
            "label": row.bar.label,
            "seconds_per_step": row.bar.total,
            "bound_seconds_per_step": row.bound,
            "seconds": dict(row.bar.parts),
            **row.facts,
        }
        for row in rows
    ]
    path.write_text(json.dumps(content, indent=2) + "\n")
    pictured = path.with_suffix(".html")
    shown = [PageRow(bar=row.bar, bound=row.bound, facts=row.shown) for row in rows]
    pictured.write_text(page(title, shown), encoding="utf-8")
    say(f"wrote {path} and {pictured}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
