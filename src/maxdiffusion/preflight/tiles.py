"""What a search over tiles tried, as a CSV file that it goes on from."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.problems import Problem, ProblemsFound

REFUSED = float("inf")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One candidate at one place: its tile, and what became of it.

    `seconds` are those of one attention on one device. A size of 0 is one that the kernel has not.
    """

    purpose: str
    attention: str
    place: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    block_kv_compute: int
    block_kv_compute_in: int
    heads_per_tile: int
    seconds: float = REFUSED
    mxu_share: float = 0.0
    vmem_bytes: int = 0
    refusal: str = ""

    @property
    def candidate(self) -> tuple[str | int, ...]:
        """What makes two rows the same candidate."""
        results = ("seconds", "mxu_share", "vmem_bytes", "refusal")
        return tuple(value for name, value in asdict(self).items() if name not in results)

    @property
    def sizes(self) -> dict[str, int]:
        """The tile as entries of flash_block_sizes."""
        names = ("block_q", "block_kv", "block_kv_compute", "block_kv_compute_in", "heads_per_tile")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def overrides(self) -> tuple[str, ...]:
        """What to add to a command to run with this tile."""
        return tuple(f"flash_block_sizes.{name}={size}" for name, size in self.sizes.items())


def ranked(rows: Sequence[Tried]) -> list[Tried]:
    """The rows that can run, the quickest first."""
    return sorted((row for row in rows if not row.refusal), key=lambda row: row.seconds)


def read_table(path: Path) -> list[Tried]:
    """The rows of a table that an earlier search wrote; none if there is no file."""
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in fields(Tried)}
    convert = {"str": str, "int": int, "float": float, str: str, int: int, float: float}
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    try:
        if any(set(row) != set(kinds) for row in rows):
            raise ValueError("other columns")
        return [
            Tried(**{name: convert[kind](row[name]) for name, kind in kinds.items()})
            for row in rows
        ]
    except (ValueError, TypeError) as error:
        rule, remedy = f"is not a table of an earlier search ({error})", "Name another file"
        problem = Problem(name="report", value=str(path), rule=rule, remedy=remedy)
        raise ProblemsFound([problem]) from error


def write_table(path: Path, rows: Sequence[Tried]) -> None:
    """Writes all rows as CSV, whole or not at all."""
    with (
        replacing(path) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as lines,
    ):
        writer = csv.DictWriter(lines, [field.name for field in fields(Tried)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
