"""Tile sizes that a search found for one site each, and the file that a user keeps them in."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.problems import Problem, ProblemsFound

FORMAT = "maxdiffusion tuned blocks 1"
KEY = "tuned_blocks_file"
SEARCHED = ("block_q", "block_kv", "block_kv_compute", "block_kv_compute_in", "heads_per_tile")


@dataclass(frozen=True, kw_only=True)
class SitePlace:
    """Where tile sizes hold: a kernel on a chip, for calls of exactly these sizes."""

    chip: str
    kernel: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    ring: int


@dataclass(frozen=True, kw_only=True)
class TunedSite:
    """The sizes that won at a place; seconds are of one attention, `how` says where they are from.

    `sizes` are entries of `flash_block_sizes`.
    """

    place: SitePlace
    sizes: tuple[tuple[str, int], ...]
    # No part of what is compiled, so two searches with the same winner give the same program.
    seconds: float = field(repr=False, compare=False)
    how: str = field(repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """The row of a file."""
        facts = {"sizes": dict(self.sizes), "seconds": self.seconds, "how": self.how}
        return {**asdict(self.place), **facts}


def row_at(rows: Sequence[TunedSite], place: SitePlace) -> TunedSite | None:
    """What a search found for a place, the last of several; None without a search."""
    return next((row for row in reversed(rows) if row.place == place), None)


def read_tuned_sites(path: Path) -> tuple[TunedSite, ...]:
    """The rows of a file that a search wrote; another file is refused."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Write it with tune_attention, or leave the key empty"
        raise _refusal(path, f"it cannot be read ({error.strerror})", remedy) from error
    except ValueError as error:
        raise _refusal(path, f"it is no JSON ({error})", "Search again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _refusal(path, f"its format must be {FORMAT!r}", "Search again")
    rows = content.get("rows")
    return tuple(_row(path, row) for row in (rows if isinstance(rows, list) else [None]))


def write_tuned_sites(path: Path, rows: Iterable[TunedSite]) -> None:
    """Adds rows to a file; a row takes the place of an older one of the same place."""
    older = read_tuned_sites(path) if path.exists() else ()
    by_place = {row.place: row for row in (*older, *rows)}
    content = {"format": FORMAT, "rows": [row.as_json() for row in by_place.values()]}
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _row(path: Path, row: Any) -> TunedSite:
    places = {part.name: part.type for part in fields(SitePlace)}
    kinds = {"str": str, "int": int, str: str, int: int}
    wrong = (
        not isinstance(row, dict)
        or set(row) != {*places, "sizes", "seconds", "how"}
        or any(not isinstance(row[name], kinds[kind]) for name, kind in places.items())
        or not isinstance(row["seconds"], int | float)
        or not _are_sizes(row["sizes"])
    )
    if wrong:
        rule = f"this row is not one that a search writes: {json.dumps(row)[:200]}"
        raise _refusal(path, rule, "Search again, or take the row out")
    return TunedSite(
        place=SitePlace(**{name: row[name] for name in places}),
        sizes=tuple(row["sizes"].items()),
        seconds=float(row["seconds"]),
        how=str(row["how"]),
    )


def _are_sizes(sizes: Any) -> bool:
    return (
        isinstance(sizes, dict)
        and set(sizes) <= {*SEARCHED, "vmem_limit_bytes"}
        and all(type(size) is int and size > 0 for size in sizes.values())
    )


def _refusal(path: Path, rule: str, remedy: str) -> ProblemsFound:
    return ProblemsFound([Problem(name=KEY, value=str(path), rule=rule, remedy=remedy)])
