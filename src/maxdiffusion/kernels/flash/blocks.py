"""The sizes that the flash kernel works in, and every rule about them."""

from dataclasses import dataclass, replace
from itertools import pairwise

from maxdiffusion.runtime.problems import Problem, ProblemsFound

LANES = 128
"""Queries lie on the lanes of a score tile, key masks on those of a row: both come in 128s."""


class UnsupportedFlash(ProblemsFound):
    """Everything that keeps the flash kernel from running as asked, at once."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence per violated rule: name, value, rule, way out."""
        return tuple(str(problem) for problem in self.problems)


@dataclass(frozen=True, kw_only=True)
class FlashBlocks:
    """Tile sizes of one kernel call.

    block_q              queries kept in VMEM while all keys pass by
    block_kv             keys fetched from HBM at a time
    block_kv_compute     keys of one score tile (one Q.K^T)
    block_kv_compute_in  keys of one softmax and P.V step inside a score tile
    heads_per_tile       query heads handled by one grid step
    block_q_compute      queries of one score tile; None keeps tiles near `SCORES_AT_ONCE`
    vmem_limit_bytes     what the compiler may use; None gives it the computed need plus a margin
    """

    block_q: int
    block_kv: int
    block_kv_compute: int
    block_kv_compute_in: int
    heads_per_tile: int = 1
    vmem_limit_bytes: int | None = None
    block_q_compute: int | None = None

    def __post_init__(self) -> None:
        problems = _size_problems(self)
        if problems:
            raise UnsupportedFlash(problems)

    @property
    def q_tile(self) -> int:
        """Queries of one score tile; the last of a block may be shorter."""
        if self.block_q_compute is not None:
            return min(self.block_q, self.block_q_compute)
        most = max(SCORES_AT_ONCE // self.block_kv, EVEN_TILE)
        tiles = -(-self.block_q // most)
        return min(self.block_q, round_up(-(-self.block_q // tiles), EVEN_TILE))

    def fit(self, q_len: int, kv_len: int) -> "FlashBlocks":
        """Returns blocks no longer than the sequences need, still obeying every rule."""
        inner = min(self.block_kv_compute_in, round_up(kv_len, LANES))
        compute = min(self.block_kv_compute, round_up(kv_len, inner))
        return replace(
            self,
            block_q=min(self.block_q, round_up(q_len, LANES)),
            block_kv=min(self.block_kv, round_up(kv_len, compute)),
            block_kv_compute=compute,
            block_kv_compute_in=inner,
        )


EVEN_TILE = 512
"""Queries that keep two MXUs of 256 columns equally busy."""
SCORES_AT_ONCE = 2048 * 1024
"""Queries of a tile times keys of a block: enough to hide the tile's start and end behind matmuls,
few enough to compile in seconds and to bound what the compiler keeps in VMEM beside the blocks."""


def round_up(length: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is at least `length` (and at least one)."""
    return max(1, -(-length // multiple)) * multiple


def _size_problems(blocks: FlashBlocks) -> list[Problem]:
    names = ["block_q", "block_kv", "block_kv_compute", "block_kv_compute_in"]
    if blocks.block_q_compute is not None:
        names.append("block_q_compute")
    problems = [p for name in names for p in _lane_problems(name, vars(blocks)[name])]
    if not problems:
        problems += _nesting_problems(blocks)
    if not _is_count(blocks.heads_per_tile):
        problems.append(
            Problem(
                name="heads_per_tile",
                value=blocks.heads_per_tile,
                rule="must be a positive integer",
                remedy="Use 1",
            )
        )
    limit = blocks.vmem_limit_bytes
    if limit is not None and not _is_count(limit):
        problems.append(
            Problem(
                name="vmem_limit_bytes",
                value=limit,
                rule="must be a positive number of bytes or None",
                remedy="Leave it None to use the computed need",
            )
        )
    return problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _lane_problems(name: str, value: int) -> list[Problem]:
    if _is_count(value) and value % LANES == 0:
        return []
    remedy = f"Use {round_up(value, LANES)}" if _is_count(value) else f"Use {LANES} or more"
    rule = f"must be a positive multiple of {LANES}"
    return [Problem(name=name, value=value, rule=rule, remedy=remedy)]


def _nesting_problems(blocks: FlashBlocks) -> list[Problem]:
    nested = ("block_kv_compute_in", "block_kv_compute", "block_kv")
    problems = []
    for inner, outer in pairwise(nested):
        small, large = vars(blocks)[inner], vars(blocks)[outer]
        if large % small:
            problems.append(
                Problem(
                    name=inner,
                    value=small,
                    rule=f"must divide {outer}={large}",
                    remedy=f"Use one of {_divisors(large)}",
                )
            )
    return problems


def _divisors(length: int) -> list[int]:
    return [d for d in range(LANES, length + 1, LANES) if length % d == 0]
