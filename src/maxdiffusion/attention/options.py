"""The user's options of an attention, and block sizes that searches found.

`AttentionOptions` holds block sizes, exponent, scheduler, head groups and thresholds. A search
over block sizes writes its winners to a JSON file, one row for each kernel and local problem.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jax import dtypes

from maxdiffusion.attention.problem import LocalProblem
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.tpu import SEARCHED, BlockSizes, covering, even_block, fitting
from maxdiffusion.runtime.files import replacing

FORMAT = "maxdiffusion tuned blocks 1"
KEY = "tuned_blocks_file"
FixedMGate = Literal["measured", "forced"]
_ROW = {
    "chip": str,
    "kernel": str,
    "batch": int,
    "heads": int,
    "q_len": int,
    "kv_len": int,
    "head_dim": int,
    "dtype": str,
    "ring": int,
}
"""Fields of a row that say which calls its block sizes hold for."""


@dataclass(frozen=True, kw_only=True)
class TunedBlocks:
    """Block sizes that won a search.

    They hold for calls of `kernel` with exactly the sizes of `problem`, which is a tuning key.
    `seconds` are those of one attention, `how` says how they were taken.
    """

    kernel: str
    problem: LocalProblem
    blocks: BlockSizes
    # No part of what is compiled, so two searches with the same winner give the same program.
    seconds: float = field(repr=False, compare=False)
    how: str = field(repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Returns the row of a file."""
        problem = self.problem
        return {
            "chip": problem.device_kind,
            "kernel": self.kernel,
            "batch": problem.batch,
            "heads": max(problem.heads),
            "q_len": problem.q_len,
            "kv_len": problem.kv_len,
            "head_dim": problem.head_dim,
            "dtype": problem.dtype.name,
            "ring": problem.num_kv_shards,
            "sizes": self.blocks.given(),
            "seconds": self.seconds,
            "how": self.how,
        }


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Everything about an attention that is not its name, its sizes or its mesh.

    `flash_min_seq_length`: with fewer queries or keys (also those of a text), modes with
    `dense_below_min_seq_length` run `dot_product`; 0 turns this off. The plan says what runs.
    `use_experimental_scheduler`: the linear-programming scheduler of the TPU compiler, which helps
    kernels of one big tile and hurts ours, whose tiles already overlap.
    `fixed_m_gate`: "measured" gives fixed-m softmax to heads whose norms allow it; "forced", for
    tests, gives it to every head, and outlier heads lose precision.
    `tuned_blocks`: block sizes from searches, used where `block_sizes` gives none.
    `interpret`: None interprets Pallas kernels on CPU devices and compiles elsewhere.
    """

    block_sizes: BlockSizes = field(default_factory=BlockSizes)
    use_base2_exp: bool = True
    use_experimental_scheduler: bool = False
    ulysses_attention_chunks: int = 1
    flash_min_seq_length: int = 0
    fixed_m_gate: FixedMGate = "measured"
    tuned_blocks: tuple[TunedBlocks, ...] = ()
    interpret: bool | None = None

    def __post_init__(self) -> None:
        chunks, shortest = self.ulysses_attention_chunks, self.flash_min_seq_length
        if not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"ulysses_attention_chunks={chunks!r}: a whole number from 1")
        if not isinstance(shortest, int) or shortest < 0:
            raise ValueError(f"flash_min_seq_length={shortest!r}: a whole number from 0")
        if self.fixed_m_gate not in get_args(FixedMGate):
            raise ValueError(f"fixed_m_gate={self.fixed_m_gate!r}: one of {get_args(FixedMGate)}")

    def interprets(self, platform: str) -> bool:
        """Returns whether Pallas kernels are interpreted on a platform."""
        return platform == "cpu" if self.interpret is None else self.interpret


def find_row(rows: Sequence[TunedBlocks], kernel: str, problem: LocalProblem) -> TunedBlocks | None:
    """Returns the last row of a kernel for a problem; None without a search."""
    key = problem.tuning_key()
    matching = (row for row in reversed(rows) if (row.kernel, row.problem) == (kernel, key))
    return next(matching, None)


def read_tuned_blocks(path: Path) -> tuple[TunedBlocks, ...]:
    """Returns the rows of a file that a search wrote; refuses other files."""
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
    return tuple(_read_row(path, row) for row in (rows if isinstance(rows, list) else [None]))


def write_tuned_blocks(path: Path, rows: Iterable[TunedBlocks]) -> None:
    """Adds rows to a file; a row replaces an older one of the same kernel and problem."""
    older = read_tuned_blocks(path) if path.exists() else ()
    latest = {(row.kernel, row.problem): row for row in (*older, *rows)}
    content = {"format": FORMAT, "rows": [row.as_json() for row in latest.values()]}
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_row(path: Path, row: Any) -> TunedBlocks:
    wrong = (
        not isinstance(row, dict)
        or set(row) != {*_ROW, "sizes", "seconds", "how"}
        or any(not isinstance(row[name], kind) for name, kind in _ROW.items())
        or not isinstance(row["seconds"], int | float)
        or not _are_sizes(row["sizes"])
        or row["dtype"] not in ("float32", "bfloat16")
    )
    if wrong:
        rule = f"this row is not one that a search writes: {json.dumps(row)[:200]}"
        raise _refusal(path, rule, "Search again, or delete the row")
    problem = LocalProblem(
        batch=row["batch"],
        heads=(row["heads"],),
        q_len=row["q_len"],
        kv_len=row["kv_len"],
        head_dim=row["head_dim"],
        dtype=np.dtype(dtypes.canonicalize_dtype(row["dtype"])),
        num_kv_shards=row["ring"],
        platform="",
        device_kind=row["chip"],
    )
    return TunedBlocks(
        kernel=row["kernel"],
        problem=problem,
        blocks=BlockSizes.from_mapping(row["sizes"]),
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


def _tiles(block_q: int, block_kv: int, compute: int, inner: int) -> BlockSizes:
    return BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_kv_compute_in=inner,
    )


# Best tiles of our kernel for WAN 2.2 A14B, 720p, 81 frames (75,600 tokens), as compiled by libtpu
# 0.0.42 without a device: on tpu7x 99 % of the MXU bound in the main loop and 97 % over the whole
# call, in 34 MiB of VMEM. Queries are whole tiles of 512; keys are evened out, up to this many.
TUNED = {
    "tpu7x": _tiles(4608, 8192, 8192, 8192),
    "v6e": _tiles(4608, 8192, 8192, 8192),
}
# Queries of a block where there are as many, in bfloat16: 18,904 are two blocks, not five, which
# start and end 0.8 % of the call less often, in 48 MiB. Calls between the first and the last hop of
# a longer ring hold sums that come and sums that go, and have the smaller block.
TUNED_LONG_QUERIES = {"tpu7x": 9728}
LONG_QUERIES_RING = 2
# Products in float8 take half as long, so that the start and the end of a tile weigh twice as much.
TUNED_FP8 = {"tpu7x": _tiles(4608, 19200, 19200, 19200)}
KEYS_AT_ONCE = 256
# Interpreted kernels pay per grid step and per element: one tile of a few hundred is quickest.
INTERPRETED = _tiles(256, 256, 256, 256)


def _backward_tiles(block_q: int, block_kv: int, compute: int) -> BlockSizes:
    return BlockSizes(block_q_dkv=block_q, block_kv_dkv=block_kv, block_kv_dkv_compute=compute)


# Backward tiles of the same problem: on tpu7x the MXU bound of its five products in the main loop.
TUNED_BACKWARD = {
    "tpu7x": _backward_tiles(2048, 4096, 1024),
    "v6e": _backward_tiles(2048, 4096, 1024),
}
INTERPRETED_BACKWARD = _backward_tiles(256, 256, 256)
# For other chips, and for float32, whose products are six times as many and as much code.
CAUTIOUS_BACKWARD = _backward_tiles(512, 1024, 1024)
# For chips without a row, and for jax's and tokamax's splash: small enough for 16 MiB of VMEM.
CAUTIOUS = _tiles(1024, 1024, 512, 512)

SPLASH_FORWARD = ("block_q", "block_kv", "block_kv_compute")
"""Sizes that a search over tiles of a splash kernel sets."""


def searched_row(
    problem: LocalProblem, options: AttentionOptions, kernel: str
) -> TunedBlocks | None:
    """Returns the row of a search for this kernel and problem, unless the user gives sizes."""
    given = options.block_sizes.given()
    if any(name in given for name in SEARCHED):
        return None
    return find_row(options.tuned_blocks, kernel, problem)


def tuned_tiles(
    problem: LocalProblem, options: AttentionOptions, *, fp8: bool = False
) -> BlockSizes:
    """Returns the table's blocks of our flash kernel, with blocks of keys evened out."""
    if options.interprets(problem.platform):
        return INTERPRETED
    most = (TUNED_FP8 if fp8 else TUNED).get(problem.chip)
    if most is None:
        return CAUTIOUS
    keys = even_block(most.block_kv, problem.kv_len, KEYS_AT_ONCE)
    return _tiles(
        most.block_q if fp8 else _query_block(most.block_q, problem),
        keys,
        fitting(most.block_kv_compute, keys),
        fitting(most.block_kv_compute_in, keys),
    )


def _query_block(block_q: int, problem: LocalProblem) -> int:
    """Returns the long block of queries where it is known to be quicker."""
    long = TUNED_LONG_QUERIES.get(problem.chip, block_q)
    short_ring = problem.num_kv_shards <= LONG_QUERIES_RING
    return long if short_ring and long <= problem.q_len and problem.dtype.itemsize == 2 else block_q


def flash_blocks(
    problem: LocalProblem, options: AttentionOptions, kernel: str, *, fp8: bool = False
) -> BlockSizes:
    """Returns blocks of our flash kernel: given sizes first, the rest tuned to fit them.

    If none is given, the result of a search goes before the table.
    """
    found = searched_row(problem, options, kernel)
    if found is not None:
        return found.blocks.fit(problem.q_len, problem.kv_len)
    given, tuned = options.block_sizes, tuned_tiles(problem, options, fp8=fp8)
    block_kv = given.block_kv or tuned.block_kv
    compute = given.block_kv_compute or fitting(tuned.block_kv_compute, block_kv)
    inner = given.block_kv_compute_in or fitting(tuned.block_kv_compute_in, compute)
    blocks = BlockSizes(
        block_q=given.block_q or tuned.block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_kv_compute_in=inner,
        heads_per_tile=given.heads_per_tile or 1,
        vmem_limit_bytes=given.vmem_limit_bytes,
    )
    return blocks.fit(problem.q_len, problem.kv_len)


def flash_backward_blocks(problem: LocalProblem, options: AttentionOptions) -> BlockSizes:
    """Returns blocks of our backward kernel: given sizes first, the rest from the table."""
    given = options.block_sizes
    if options.interprets(problem.platform):
        tuned = INTERPRETED_BACKWARD
    elif problem.dtype.name == "float32":
        tuned = CAUTIOUS_BACKWARD
    else:
        tuned = TUNED_BACKWARD.get(problem.chip, CAUTIOUS_BACKWARD)
    block_kv = given.block_kv_dkv or tuned.block_kv_dkv
    return BlockSizes(
        block_q_dkv=given.block_q_dkv or tuned.block_q_dkv,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=given.block_kv_dkv_compute
        or fitting(tuned.block_kv_dkv_compute, block_kv),
        block_q_dq=given.block_q_dq,
        vmem_limit_bytes=given.vmem_limit_bytes,
    )


def splash_blocks(
    problem: LocalProblem, options: AttentionOptions, kernel: str = "splash"
) -> BlockSizes:
    """Returns blocks of the splash kernels: given sizes first, clipped to the lengths."""
    given, q_len, kv_len = options.block_sizes, problem.q_len, problem.kv_len
    found = searched_row(problem, options, kernel)
    if found is not None:
        given = given.updated(found.blocks.given())
    tuned = INTERPRETED if options.interprets(problem.platform) else CAUTIOUS
    block_q = covering(given.block_q or tuned.block_q, q_len)
    block_kv = covering(given.block_kv or tuned.block_kv, kv_len)
    compute = fitting(given.block_kv_compute or tuned.block_kv_compute, block_kv)
    kv_dkv = covering(given.block_kv_dkv or block_kv, kv_len)
    return replace(
        given,
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=covering(given.block_q_dkv or block_q, q_len),
        block_kv_dkv=kv_dkv,
        block_kv_dkv_compute=fitting(given.block_kv_dkv_compute or compute, kv_dkv),
        block_q_dq=covering(given.block_q_dq or block_q, q_len),
        block_kv_dq=covering(given.block_kv_dq or block_kv, kv_len),
    )
