"""Tiles of a kernel: the candidates of a search, their time on a device, the table of results.

`candidates` lists the sizes to try, `attention_seconds` times one of them, and `Tried` is the row
of its result in a CSV file, from which an interrupted search continues.
"""

import csv
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.attention.backends import AnyBackend
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.tpu import LANES, SEARCHED, BlockSizes
from maxdiffusion.preflight.kernels import kernel_alone
from maxdiffusion.runtime.files import replacing


def attention_seconds(plan: AttentionPlan, device: jax.Device, runs: int) -> float:
    """Returns the median time of one attention's kernel calls, on random q, k and v.

    One call is timed; the calls for further ring shards and groups of heads take as long.
    """
    compiled = kernel_alone(plan, device).compile()
    arrays = _random_tokens(plan, device)
    jax.block_until_ready(compiled(*arrays))  # warm-up: the first run loads the program
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - started)
    sizes = plan.local
    calls = plan.padded_kv_len // sizes.kv_len * sum(sizes.heads) / sizes.heads[0]
    return statistics.median(seconds) * calls


def _random_tokens(plan: AttentionPlan, device: jax.Device) -> list[jax.Array]:
    """Returns q, k and v with unit normal features, as after qk-norm."""
    sizes, problem = plan.local, plan.problem
    made = []
    for index, length in enumerate((sizes.q_len, sizes.kv_len, sizes.kv_len)):
        shape = (sizes.batch, length, sizes.heads[0], problem.head_dim)
        with jax.default_device(device):
            made.append(jax.random.normal(jax.random.key(index), shape, jnp.dtype(problem.dtype)))
    return made


QUERIES = (128, 256, 512, 1024, 2048, 4096, 6144, 8192)
KEYS = (128, 256, 512, 1024, 2048, 4096)
# Number of the largest fitting sizes to try: smaller tiles were never the best.
MOST_QUERIES, MOST_KEYS = 5, 3


def candidates(plan: AttentionPlan, mode: str) -> list[BlockSizes]:
    """Returns the sizes to try: the current ones, then a grid; `full` also splits tiles inside.

    The current sizes are included, so that a search never ends with worse ones.
    """
    sizes = plan.local
    grid = product(
        fitting(QUERIES, sizes.q_len, MOST_QUERIES), fitting(KEYS, sizes.kv_len, MOST_KEYS)
    )
    tried = [current_sizes(plan.backend)]
    for block_q, block_kv in grid:
        for candidate in _variants(plan.backend, block_q, block_kv, mode):
            if candidate not in tried:
                tried.append(candidate)
    return tried


def current_sizes(backend: AnyBackend) -> BlockSizes:
    """Returns the block sizes of a kernel that a search sets."""
    blocks = backend.blocks
    assert blocks is not None, backend.title
    return blocks.only(backend.searched_sizes)


def fitting(table: Sequence[int], length: int, most: int) -> list[int]:
    """Returns the largest sizes of a table up to the one that covers the whole length."""
    whole = -(-length // LANES) * LANES
    below = [size for size in table if size < whole]
    return [*below, whole][-most:] if whole <= table[-1] else below[-most:]


def _variants(backend: AnyBackend, block_q: int, block_kv: int, mode: str) -> Iterator[BlockSizes]:
    """Yields a tile and, in `full`, its variants with smaller score tiles and two heads at once."""
    inner, heads = [block_kv], [1]
    if mode == "full":
        inner += [size for size in (block_kv // 2, block_kv // 4) if size and size % LANES == 0]
        if max(backend.problem.heads) % 2 == 0:
            heads.append(2)
    for compute, per_tile in product(inner, heads):
        sizes = BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_kv_compute=compute,
            block_kv_compute_in=compute,
            heads_per_tile=per_tile,
        )
        yield sizes.only(backend.searched_sizes)


REFUSED = float("inf")


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One candidate and its result: a row of the table.

    `seconds` are those of one attention on one device. A size of 0 does not exist in the kernel.
    `place` names the device and the software.
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
        """Returns the fields that identify a candidate."""
        results = ("seconds", "mxu_share", "vmem_bytes", "refusal")
        return tuple(value for name, value in asdict(self).items() if name not in results)

    @property
    def sizes(self) -> BlockSizes:
        """Returns the tile."""
        return BlockSizes(**{name: vars(self)[name] for name in SEARCHED})

    @property
    def overrides(self) -> tuple[str, ...]:
        """Returns the command line arguments that select this tile."""
        return tuple(
            f"flash_block_sizes.{name}={size}" for name, size in self.sizes.given().items()
        )


def ranked(rows: Sequence[Tried]) -> list[Tried]:
    """Returns the rows that can run, the fastest first."""
    return sorted((row for row in rows if not row.refusal), key=lambda row: row.seconds)


def read_table(path: Path) -> list[Tried]:
    """Returns the rows of an earlier search; none if there is no file."""
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
        rule = f"is not a table of an earlier search ({error})"
        problem = Problem(name="report", value=str(path), rule=rule)
        raise ProblemsFound([problem]) from error


def write_table(path: Path, rows: Sequence[Tried]) -> None:
    """Writes all rows as CSV, atomically."""
    with (
        replacing(path) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as lines,
    ):
        writer = csv.DictWriter(lines, [field.name for field in fields(Tried)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
