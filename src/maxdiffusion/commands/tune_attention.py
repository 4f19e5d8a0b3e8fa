"""Tiles of the attention kernel, ranked by the machine code that each compiles to."""

import csv
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

from maxdiffusion.commands.preflight import finish_kernels, prepare, say, start_kernels
from maxdiffusion.config.loading import Reading, read_config
from maxdiffusion.preflight.kernels import kernel_plans, use_of
from maxdiffusion.preflight.step_time import in_words
from maxdiffusion.runtime.problems import Problem, ProblemsFound, RunFailed

QUERIES = (1024, 2048, 4096, 6144, 8192)
KEYS = (1024, 2048, 4096)
SELF_ATTENTION = "self-attention"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One candidate: its tile, and what became of it; seconds are those of one attention."""

    attention: str
    topology: str
    tokens: int
    block_q: int
    block_kv: int
    seconds: float
    mxu_share: float
    vmem_bytes: int
    refusal: str

    @property
    def place(self) -> tuple[str, str, int, int, int]:
        """What makes two rows the same candidate."""
        return self.attention, self.topology, self.tokens, self.block_q, self.block_kv

    @property
    def overrides(self) -> tuple[str, ...]:
        """What to add to a command to run with this tile."""
        return tile_overrides(self.block_q, self.block_kv)


def tile_overrides(block_q: int, block_kv: int) -> tuple[str, ...]:
    """The overrides of a tile whose score tiles span all of its keys."""
    sizes = {"block_q": block_q, "block_kv": block_kv}
    sizes |= {"block_kv_compute": block_kv, "block_kv_compute_in": block_kv}
    return tuple(f"flash_block_sizes.{name}={size}" for name, size in sizes.items())


def tune(reading: Reading, arguments: Sequence[str]) -> None:
    """Tries every tile, quickest shown first at the end; a table on disk is taken up again."""
    table = Path(reading.config.report) if reading.config.report else None
    known = {} if table is None else {row.place: row for row in read_table(table)}
    rows = []
    for number, row in enumerate(attempts(reading, arguments, known), 1):
        rows.append(row)
        words = row.refusal or f"{in_words(row.seconds)}, {row.mxu_share:.1%} of the MXU bound"
        total = len(QUERIES) * len(KEYS)
        say(f"[{number}/{total}] block_q {row.block_q}, block_kv {row.block_kv}: {words}")
        if table is not None:
            write_table(table, rows)
    show(rows)


def attempts(
    reading: Reading, arguments: Sequence[str], known: dict[tuple[str, str, int, int, int], Tried]
) -> Iterator[Tried]:
    """The candidates one by one; what is known already is not compiled again."""
    base = prepare(reading)
    plans = kernel_plans(base.workshop.attention(base.shape))
    if SELF_ATTENTION not in plans:
        rule = "has no Pallas kernel for these sizes, so there are no tiles to choose"
        remedy = "Use an attention with a kernel of ours, such as ulysses_custom"
        name = base.config.attention
        raise ProblemsFound([Problem(name="attention", value=name, rule=rule, remedy=remedy)])
    for block_q, block_kv in product(QUERIES, KEYS):
        place = (
            *(base.config.attention, base.topology.name, base.shape.latent.tokens),
            *(block_q, block_kv),
        )
        yield known[place] if place in known else attempt(place, arguments)


def attempt(place: tuple[str, str, int, int, int], arguments: Sequence[str]) -> Tried:
    """What one tile compiles to."""
    attention, topology, tokens, block_q, block_kv = place
    changed = [*arguments, *tile_overrides(block_q, block_kv)]
    seconds, share, vmem, refusal = float("inf"), 0.0, 0, ""
    try:
        job = prepare(read_config(changed))
        with tempfile.TemporaryDirectory(prefix="tune_") as folder:
            figures = finish_kernels(start_kernels(job, changed, Path(folder)), Path(folder))
        (kernel,) = (one for one in figures if one.purpose == SELF_ATTENTION)
        use = use_of(kernel_plans(job.workshop.attention(job.shape))[SELF_ATTENTION])
        seconds = job.topology.chip.seconds(use.cycles(kernel))
        share, vmem = kernel.mxu_share, kernel.vmem_bytes
    except (ProblemsFound, RunFailed) as error:
        refusal = str(error).splitlines()[0]
    return Tried(
        attention=attention,
        topology=topology,
        tokens=tokens,
        block_q=block_q,
        block_kv=block_kv,
        seconds=seconds,
        mxu_share=share,
        vmem_bytes=vmem,
        refusal=refusal,
    )


def show(rows: Sequence[Tried]) -> None:
    """Prints the ranking and the overrides of the winner."""
    ranked = sorted((row for row in rows if not row.refusal), key=lambda row: row.seconds)
    if not ranked:
        raise RunFailed("no tile could be compiled; the reasons stand above")
    say("one attention on one device, by the machine code of its kernel:")
    for row in ranked:
        tile = f"block_q {row.block_q:>5}, block_kv {row.block_kv:>5}"
        say(f"  {in_words(row.seconds):>10}  {row.mxu_share:6.1%}  {tile}")
    say("best: " + " ".join(ranked[0].overrides))


def read_table(path: Path) -> list[Tried]:
    """The rows of a table that an earlier search wrote; none if there is no file."""
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in fields(Tried)}
    convert = {"str": str, "int": int, "float": float, str: str, int: int, float: float}
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    if any(set(row) != set(kinds) for row in rows):
        rule, remedy = "is not a table of an earlier search", "Name another file"
        raise ProblemsFound([Problem(name="report", value=str(path), rule=rule, remedy=remedy)])
    return [
        Tried(**{name: convert[kind](row[name]) for name, kind in kinds.items()}) for row in rows
    ]


def write_table(path: Path, rows: Sequence[Tried]) -> None:
    """Writes all rows as CSV."""
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, [field.name for field in fields(Tried)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
