"""Searches the best tiles (block sizes) of every kernel of a job.

Tiles are timed on this machine, or ranked by machine code where there is no TPU.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.attention.options import TunedBlocks, find_row, write_tuned_blocks
from maxdiffusion.config import Config
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.costs.chips import Topology, read_topology
from maxdiffusion.costs.step_time import format_seconds, kernel_calls, kernel_plans
from maxdiffusion.errors import Problem, ProblemsFound, RunFailed
from maxdiffusion.generation.job import ResolvedJob
from maxdiffusion.kernels.tpu import SEARCHED, BlockSizes
from maxdiffusion.pipelines.programs import ProgramBuilder, ProgramShape
from maxdiffusion.preflight.command import plan_on
from maxdiffusion.preflight.compile import explain, is_refusal
from maxdiffusion.preflight.devices import describe_devices
from maxdiffusion.preflight.kernels import measure_kernel
from maxdiffusion.preflight.plots import HeatMap
from maxdiffusion.preflight.tiles import (
    Tried,
    attention_seconds,
    candidates,
    ranked,
    read_table,
    write_table,
)
from maxdiffusion.runtime.charts import require_matplotlib
from maxdiffusion.runtime.progress import steps_bar

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of one attention with a tile; the rest is known only from machine code."""

    seconds: float
    mxu_share: float = 0.0
    vmem_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Meter:
    """A way to measure plans: `how` describes it, `place` adds the device and the software."""

    how: str
    place: str
    measure: Callable[[str, AttentionPlan], Measured]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A kernel whose tiles are searched: its current plan, and its plan with other sizes."""

    purpose: str
    plan: AttentionPlan
    planned: Callable[[BlockSizes], AttentionPlan]


def subjects(builder: ProgramBuilder, shape: ProgramShape) -> list[Subject]:
    """Returns every Pallas kernel of a job: of self-, cross- and image-attention."""
    plan_makers: dict[str, Callable[[ProgramBuilder], AttentionPlan]] = {
        "self-attention": lambda changed: changed.self_attention(shape),
        "cross-attention": lambda changed: changed.cross_attention(shape, shape.text_length),
        "image-attention": lambda changed: changed.cross_attention(shape, shape.task.image_tokens),
    }
    return [
        Subject(
            purpose=purpose,
            plan=plan,
            planned=partial(_planned, builder, plan_makers[purpose]),
        )
        for purpose, plan in kernel_plans(builder.attention(shape)).items()
        if plan.backend.searched_sizes
    ]


def _planned(
    builder: ProgramBuilder,
    make: Callable[[ProgramBuilder], AttentionPlan],
    sizes: BlockSizes,
) -> AttentionPlan:
    return make(with_sizes(builder, sizes))


def with_sizes(builder: ProgramBuilder, sizes: BlockSizes) -> ProgramBuilder:
    """Returns the builder with this tile in all kernels."""
    options = builder.settings.attention_options
    # A size that is left out is 0, which gives it its default back.
    searched = {name: vars(sizes)[name] for name in SEARCHED}
    changed = replace(options, block_sizes=options.block_sizes.updated(searched))
    return replace(builder, settings=replace(builder.settings, attention_options=changed))


def with_tuned(builder: ProgramBuilder, rows: Sequence[TunedBlocks]) -> ProgramBuilder:
    """Returns the builder with further rows of a search."""
    options = builder.settings.attention_options
    changed = replace(options, tuned_blocks=(*options.tuned_blocks, *rows))
    return replace(builder, settings=replace(builder.settings, attention_options=changed))


def clock_meter(device: jax.Device, runs: int) -> Meter:
    """Returns the meter that times kernels on a device of this machine."""
    interpreted = " (interpreted)" if device.platform == "cpu" else ""
    return Meter(
        how=f"timed on {device.device_kind}{interpreted}",
        place=f"{device.device_kind}, jax {jax.__version__}",
        measure=lambda _, plan: Measured(seconds=attention_seconds(plan, device, runs)),
    )


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search: the meter, the number of tiles to try (`mode`), and the table of results."""

    meter: Meter
    mode: str
    table: Path | None

    def run(self, found: Sequence[Subject]) -> list[TunedBlocks]:
        """Returns the best tile of every subject; reuses the rows of an existing table."""
        if self.table is not None:
            require_matplotlib()
        known = {} if self.table is None else {r.candidate: r for r in read_table(self.table)}
        winners = []
        for subject in found:
            rows = self._rows(subject, known)
            winners.append(self._winner(subject, rows))
        return winners

    def _rows(self, subject: Subject, known: dict[tuple[str | int, ...], Tried]) -> list[Tried]:
        blank = [self._blank(subject, sizes) for sizes in candidates(subject.plan, self.mode)]
        rows = []
        with steps_bar(f"Tiles of {subject.purpose}", len(blank), unit="tile") as advance:
            for number, row in enumerate(blank, 1):
                again = row.candidate in known
                tried = known[row.candidate] if again else self._tried(subject, row)
                known[row.candidate] = tried
                rows.append(tried)
                logger.info(f"[{number}/{len(blank)}] {subject.purpose}, {_words(tried)}")
                if self.table is not None and not again:
                    write_table(self.table, list(known.values()))
                advance()
        return rows

    def _blank(self, subject: Subject, sizes: BlockSizes) -> Tried:
        local = subject.plan.local
        tile: dict[str, Any] = {name: vars(sizes)[name] for name in SEARCHED}
        return Tried(
            purpose=subject.purpose,
            attention=subject.plan.name,
            place=self.meter.place,
            batch=local.batch,
            heads=sum(local.heads),
            q_len=local.q_len,
            kv_len=local.kv_len,
            **tile,
        )

    def _tried(self, subject: Subject, row: Tried) -> Tried:
        try:
            measured = self.meter.measure(subject.purpose, subject.planned(row.sizes))
        except (ProblemsFound, RunFailed) as error:
            return replace(row, refusal=str(error).splitlines()[0])
        except Exception as error:
            if not is_refusal(error):
                raise
            return replace(row, refusal=f"does not compile: {str(error).splitlines()[0][:200]}")
        return replace(
            row,
            seconds=measured.seconds,
            mxu_share=measured.mxu_share,
            vmem_bytes=measured.vmem_bytes,
        )

    def _winner(self, subject: Subject, rows: Sequence[Tried]) -> TunedBlocks:
        able = ranked(rows)
        if not able:
            raise RunFailed(f"no tile of {subject.purpose} could run; the reasons are listed above")
        logger.info(f"{subject.purpose}, one attention on one device, {self.meter.how}:")
        for row in able:
            logger.info(f"  {_words(row)}")
        logger.info(f"best: {' '.join(able[0].overrides)}")
        self._draw(subject, rows)
        kernel = subject.plan.backend
        return TunedBlocks(
            kernel=kernel.search_name,
            problem=kernel.problem.tuning_key(),
            blocks=able[0].sizes,
            seconds=able[0].seconds,
            how=self.meter.how,
        )

    def _draw(self, subject: Subject, rows: Sequence[Tried]) -> None:
        if self.table is None:
            return
        picture = self.table.with_name(f"{self.table.stem}_{subject.purpose}.png")
        sizes = subject.plan.local
        title = f"{subject.plan.name}, {subject.purpose}: {sizes.q_len:,} x {sizes.kv_len:,}"
        HeatMap.of(title, self.meter.how, rows).draw(picture)
        logger.info(f"wrote {self.table} and {picture}")


def _words(row: Tried) -> str:
    tile = f"block_q {row.block_q}, block_kv {row.block_kv}"
    if row.block_kv_compute != row.block_kv:
        tile += f", block_kv_compute {row.block_kv_compute}"
    if row.heads_per_tile > 1:
        tile += f", heads_per_tile {row.heads_per_tile}"
    share = f", {row.mxu_share:.1%} of the MXU bound" if row.mxu_share else ""
    return f"{tile}: {row.refusal or format_seconds(row.seconds) + share}"


def keep_winners(config: Config, rows: Sequence[TunedBlocks]) -> None:
    """Writes the best tiles to `tuned_blocks_file`, or explains how to keep them."""
    if not config.tuned_blocks_file:
        logger.info("set tuned_blocks_file=FILE.json to keep the best tiles for later runs")
        return
    path = Path(config.tuned_blocks_file)
    write_tuned_blocks(path, rows)
    logger.info(f"wrote {path}; use it with tuned_blocks_file={path}")


def search_before_run(
    builder: ProgramBuilder, config: Config, shape: ProgramShape, meter: Meter | None = None
) -> ProgramBuilder:
    """Returns the builder with the best tiles for its kernels, if `enable_tile_search` is set.

    Kernels whose tiles `tuned_blocks_file` has are not searched. `meter` rates a tile, by default
    by the clock on the first device.
    """
    if not config.enable_tile_search:
        return builder
    if jax.process_count() > 1:
        rule = "hosts that time tiles separately may end up with different programs"
        remedy = "Run tune_attention on one host, and set tuned_blocks_file in the job"
        problem = Problem(name="enable_tile_search", value=True, rule=rule, remedy=remedy)
        raise ProblemsFound([problem])
    known = builder.settings.attention_options.tuned_blocks
    found = [
        subject
        for subject in subjects(builder, shape)
        if find_row(known, subject.plan.backend.search_name, subject.plan.local) is None
    ]
    if not found:
        logger.info("enable_tile_search: all kernels have known tiles, nothing to search")
        return builder
    search = Search(
        meter=meter or clock_meter(builder.mesh.devices.flat[0], config.tile_search_iters),
        mode=config.tile_search_mode,
        table=table_of(config),
    )
    winners = search.run(found)
    keep_winners(config, winners)
    return with_tuned(builder, winners)


def table_of(config: Config) -> Path | None:
    """Returns the CSV file of a search: in `tile_search_out`, or `report` if it ends in .csv."""
    if config.tile_search_out:
        return Path(config.tile_search_out) / "tiles.csv"
    return Path(config.report) if config.report.endswith(".csv") else None


def tune_here(parsed: ParsedConfig) -> None:
    """Times the tiles of a job on the devices of this machine."""
    job = plan_on(searching(parsed), jax.devices())
    search(job, clock_meter(jax.local_devices()[0], job.config.tile_search_iters))


def tune_for_topology(parsed: ParsedConfig, dump: Path) -> None:
    """Ranks the tiles of a job by machine code, which libtpu dumps into `dump`."""
    topology = read_topology(parsed.config.topology)
    job = plan_on(searching(parsed), describe_devices(topology))
    search(job, machine_code_meter(topology, dump))


def searching(parsed: ParsedConfig) -> ParsedConfig:
    """Returns the config with its search on, so that `tuned_blocks_file` need not exist yet."""
    return replace(parsed, config=replace(parsed.config, enable_tile_search=True))


def search(job: ResolvedJob, meter: Meter) -> None:
    """Searches the tiles of every kernel of a job, and shows and keeps the best."""
    found = subjects(job.builder, job.shape)
    if not found:
        rule = "has no Pallas kernel for these sizes, so there are no tiles to choose"
        remedy = "Use an attention with a kernel of ours, such as ulysses_custom"
        name = job.choices.attention
        raise ProblemsFound([Problem(name="attention", value=name, rule=rule, remedy=remedy)])
    mode, table = job.config.tile_search_mode, table_of(job.config)
    winners = Search(meter=meter, mode=mode, table=table).run(found)
    keep_winners(job.config, winners)


def machine_code_meter(topology: Topology, dump: Path) -> Meter:
    """Returns the meter that compiles kernels for a topology and counts their bundles."""
    chip = topology.chip

    def measure(purpose: str, plan: AttentionPlan) -> Measured:
        try:
            found = list(measure_kernel(plan, purpose=purpose, chip=chip, dump=dump))
        except Exception as error:
            if not is_refusal(error):
                raise
            raise ProblemsFound([explain(purpose, str(error), chip)]) from error
        calls = kernel_calls(plan)
        slowest = max(found, key=calls.cycles)
        return Measured(
            seconds=chip.seconds(calls.cycles(slowest)),
            mxu_share=slowest.mxu_share,
            vmem_bytes=slowest.vmem_bytes,
        )

    return Meter(
        how=f"by machine code for {topology.name}",
        place=f"{topology.name}, compiled by jax {jax.__version__}",
        measure=measure,
    )
