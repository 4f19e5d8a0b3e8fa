"""A search over the tiles of every kernel of a job: what is tried, kept and applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.attention.tuned_blocks import place_of, searched_row
from maxdiffusion.attention.tuned_sites import SEARCHED, TunedSite, row_at, write_tuned_sites
from maxdiffusion.config.config import Config
from maxdiffusion.pipelines.programs import ProgramShape, Workshop
from maxdiffusion.preflight.compile_errors import is_refusal
from maxdiffusion.preflight.heat_map import HeatMap, draw
from maxdiffusion.preflight.kernel_clock import attention_seconds
from maxdiffusion.preflight.kernels import kernel_plans
from maxdiffusion.preflight.step_time import in_words
from maxdiffusion.preflight.tile_candidates import candidates, kernel_name
from maxdiffusion.preflight.tile_table import Tried, ranked, read_table, write_table
from maxdiffusion.runtime.problems import Problem, ProblemsFound, RunFailed
from maxdiffusion.runtime.progress import steps_bar


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a tile costs: seconds of one attention; the rest only where machine code was read."""

    seconds: float
    mxu_share: float = 0.0
    vmem_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Meter:
    """A way to measure plans: `how` says which, `place` also where and with what software."""

    how: str
    place: str
    measure: Callable[[str, AttentionPlan], Measured]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A kernel whose tiles are searched: its plan now, and its plan with other sizes."""

    purpose: str
    plan: AttentionPlan
    planned: Callable[[Mapping[str, int]], AttentionPlan]


def subjects(workshop: Workshop, shape: ProgramShape) -> list[Subject]:
    """Every Pallas kernel of a job: over tokens and, where a kernel runs there, over text."""
    plan_makers: dict[str, Callable[[Workshop], AttentionPlan]] = {
        "self-attention": lambda changed: changed.self_attention(shape),
        "cross-attention": lambda changed: changed.cross_attention(shape),
    }
    return [
        Subject(
            purpose=purpose,
            plan=plan,
            planned=partial(_planned, workshop, plan_makers[purpose]),
        )
        for purpose, plan in kernel_plans(workshop.attention(shape)).items()
    ]


def _planned(
    workshop: Workshop, make: Callable[[Workshop], AttentionPlan], sizes: Mapping[str, int]
) -> AttentionPlan:
    return make(with_sizes(workshop, sizes))


def with_sizes(workshop: Workshop, sizes: Mapping[str, int]) -> Workshop:
    """The workshop with these tiles in all kernels."""
    options = workshop.settings.attention_options
    given = {**dict.fromkeys(SEARCHED), **sizes}  # a size left out is not the one given before
    changed = replace(options, block_sizes=options.block_sizes.changed(given))
    return replace(workshop, settings=replace(workshop.settings, attention_options=changed))


def with_tuned(workshop: Workshop, rows: Sequence[TunedSite]) -> Workshop:
    """The workshop with rows of a search beside those that it has."""
    options = workshop.settings.attention_options
    changed = replace(options, tuned_sites=(*options.tuned_sites, *rows))
    return replace(workshop, settings=replace(workshop.settings, attention_options=changed))


def clock_meter(device: jax.Device, runs: int) -> Meter:
    """Measures by running kernels on a device that is there."""
    interpreted = " (interpreted)" if device.platform == "cpu" else ""
    return Meter(
        how=f"timed on {device.device_kind}{interpreted}",
        place=f"{device.device_kind}, jax {jax.__version__}",
        measure=lambda _, plan: Measured(seconds=attention_seconds(plan, device, runs)),
    )


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search: how tiles are measured, how many are tried, and the table that is kept."""

    meter: Meter
    mode: str
    table: Path | None
    say: Callable[[str], None]

    def run(self, found: Sequence[Subject]) -> list[TunedSite]:
        """The winner of every subject; a table on disk is taken up again."""
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
                self.say(f"[{number}/{len(blank)}] {subject.purpose}, {_words(tried)}")
                if self.table is not None and not again:
                    write_table(self.table, list(known.values()))
                advance()
        return rows

    def _blank(self, subject: Subject, sizes: Mapping[str, int]) -> Tried:
        site = subject.plan.kernel.site.sizes
        tile: dict[str, Any] = {name: sizes.get(name, 0) for name in SEARCHED}
        return Tried(
            purpose=subject.purpose,
            attention=subject.plan.name,
            place=self.meter.place,
            batch=site.batch,
            heads=sum(site.heads),
            q_len=site.q_len,
            kv_len=site.kv_len,
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

    def _winner(self, subject: Subject, rows: Sequence[Tried]) -> TunedSite:
        able = ranked(rows)
        if not able:
            raise RunFailed(f"no tile of {subject.purpose} could run; the reasons stand above")
        self.say(f"{subject.purpose}, one attention on one device, {self.meter.how}:")
        for row in able:
            self.say(f"  {_words(row)}")
        self.say(f"best: {' '.join(able[0].overrides)}")
        self._draw(subject, rows)
        kernel = subject.plan.kernel
        return TunedSite(
            place=place_of(kernel.site, kernel_name(kernel)),
            sizes=tuple(able[0].sizes.items()),
            seconds=able[0].seconds,
            how=self.meter.how,
        )

    def _draw(self, subject: Subject, rows: Sequence[Tried]) -> None:
        if self.table is None:
            return
        picture = self.table.with_name(f"{self.table.stem}_{subject.purpose}.png")
        sizes = subject.plan.kernel.site.sizes
        title = f"{subject.plan.name}, {subject.purpose}: {sizes.q_len:,} x {sizes.kv_len:,}"
        draw(HeatMap.of(title, self.meter.how, rows), picture)
        self.say(f"wrote {self.table} and {picture}")


def _words(row: Tried) -> str:
    tile = f"block_q {row.block_q}, block_kv {row.block_kv}"
    if row.block_kv_compute != row.block_kv:
        tile += f", block_kv_compute {row.block_kv_compute}"
    if row.heads_per_tile > 1:
        tile += f", heads_per_tile {row.heads_per_tile}"
    share = f", {row.mxu_share:.1%} of the MXU bound" if row.mxu_share else ""
    return f"{tile}: {row.refusal or in_words(row.seconds) + share}"


def keep_winners(config: Config, rows: Sequence[TunedSite], say: Callable[[str], None]) -> None:
    """Writes what won to `tuned_blocks_file`, or says how to keep it."""
    if not config.tuned_blocks_file:
        say("set tuned_blocks_file=FILE.json to keep the best tiles for later runs")
        return
    path = Path(config.tuned_blocks_file)
    write_tuned_sites(path, rows)
    say(f"wrote {path}, which runs with tuned_blocks_file={path} read")


def search_before_run(
    workshop: Workshop, config: Config, shape: ProgramShape, say: Callable[[str], None] = print
) -> Workshop:
    """The workshop with the best tiles for all of its kernels, if `enable_tile_search` asks so.

    What `tuned_blocks_file` has already is not searched again.
    """
    if not config.enable_tile_search:
        return workshop
    if jax.process_count() > 1:
        rule = "hosts that time tiles apart may end with different programs"
        remedy = "Run tune_attention on one host, and set tuned_blocks_file in the job"
        problem = Problem(name="enable_tile_search", value=True, rule=rule, remedy=remedy)
        raise ProblemsFound([problem])
    known = workshop.settings.attention_options.tuned_sites
    found = [
        subject
        for subject in subjects(workshop, shape)
        if row_at(known, place_of(subject.plan.kernel.site, kernel_name(subject.plan.kernel)))
        is None
    ]
    if not found:
        say("enable_tile_search: no kernel without known tiles runs here, nothing is searched")
        return workshop
    search = Search(
        meter=clock_meter(workshop.mesh.devices.flat[0], config.tile_search_iters),
        mode=config.tile_search_mode,
        table=table_of(config),
        say=say,
    )
    winners = search.run(found)
    keep_winners(config, winners, say)
    return with_tuned(workshop, winners)


def tile_notes(workshop: Workshop, shape: ProgramShape) -> tuple[str, ...]:
    """What a start-up plan says of tiles that are from a search."""
    notes = []
    for purpose, plan in kernel_plans(workshop.attention(shape)).items():
        row = searched_row(plan.kernel.site, kernel_name(plan.kernel))
        if row is not None:
            tile = ", ".join(f"{name} {size}" for name, size in row.sizes)
            notes.append(f"tiles of {purpose} from a search, {row.how}: {tile}")
    return tuple(notes)


def table_of(config: Config) -> Path | None:
    """The CSV file of a search: in `tile_search_out`, else what `report` names if it is a table."""
    if config.tile_search_out:
        return Path(config.tile_search_out) / "tiles.csv"
    return Path(config.report) if config.report.endswith(".csv") else None
