"""Sizes of a TPU core, arithmetic on lengths, and the block sizes of attention kernels.

A vector register holds [SUBLANES, LANES] values of 32 bits. The last two dimensions of an array are
tiled by it, so block sizes are multiples of LANES along lanes and of SUBLANES along sublanes.
`BlockSizes` is the one type from `flash_block_sizes` in YAML to `pallas_call`.

This file imports no jax, so that costs can be computed before jax starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from maxdiffusion.errors import Problem, ProblemsFound

LANES = 128
SUBLANES = 8
BF16_SUBLANES = 16
"""Rows of a whole register of bfloat16."""
MIB = 2**20

EVEN_TILE = 512
"""Queries that keep two MXUs of 256 columns equally busy; other widths schedule differently."""

VMEM_BYTES = {"tpu7x": 64 * MIB, "v6e": 128 * MIB, "v5p": 64 * MIB, "v5e": 128 * MIB}
"""VMEM of one TensorCore by chip."""

MXU_DEPTH = {"tpu7x": 256, "v6e": 256, "v5p": 128, "v5e": 128}
"""Length of a dot product that fills an MXU, by chip."""

CHIP_NAMES = {
    "tpu7x": "tpu7x",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu v5p": "v5p",
    "tpu v5": "v5p",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
}
"""Chip names of libtpu's topologies by the lower-case device kind of jax."""


def chip_of(device_kind: str) -> str:
    """Returns the short name of a chip; an unknown one gets the sizes of a tpu7x."""
    return CHIP_NAMES.get(device_kind.lower(), "tpu7x")


def round_up(length: int, multiple: int) -> int:
    """Returns the least positive multiple of `multiple` that is at least `length`."""
    return max(1, -(-length // multiple)) * multiple


def largest_divisor(length: int, limit: int, multiple: int) -> int:
    """Returns the largest divisor of `length` up to `limit` that is a multiple of `multiple`."""
    divisors = range(min(limit, length) // multiple * multiple, 0, -multiple)
    return next(divisor for divisor in divisors if length % divisor == 0)


def even_block(most: int, length: int, multiple: int) -> int:
    """Returns the block up to `most` that cuts `length` into blocks of about equal length."""
    blocks = -(-length // most)
    return round_up(-(-length // blocks), multiple)


def covering(size: int, length: int) -> int:
    """Returns `size`, but no more than the lane tiles that cover `length`."""
    return min(size, round_up(length, LANES))


def fitting(inner: int, outer: int) -> int:
    """Returns the largest multiple of LANES up to `inner` that divides `outer`, or `outer`."""
    candidates = range(min(inner, outer) // LANES * LANES, 0, -LANES)
    return next((size for size in candidates if outer % size == 0), outer)


SCORES_AT_ONCE = 2048 * 1024
"""Queries of a tile times keys of a block: enough to hide the tile's start and end behind matmuls,
few enough to compile in seconds and to bound the VMEM that the compiler uses for spills."""
FLASH_SIZES = ("block_q", "block_kv", "block_kv_compute", "block_kv_compute_in")
FLASH_BACKWARD_SIZES = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
SPLASH_SIZES = (
    "block_q",
    "block_kv",
    "block_kv_compute",
    "block_q_dkv",
    "block_kv_dkv",
    "block_kv_dkv_compute",
    "block_q_dq",
    "block_kv_dq",
)
SEARCHED = (*FLASH_SIZES, "heads_per_tile")
"""Sizes that a search over tiles sets."""


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Block sizes of one kernel; 0 and None leave the choice to the tuned table or the kernel.

    block_q               queries kept in VMEM while all keys pass by
    block_kv              keys fetched from HBM at a time
    block_kv_compute      keys of one score tile (one Q.K^T)
    block_kv_compute_in   keys of one softmax and P.V step inside a score tile (flash kernel)
    block_q_dkv, block_kv_dkv, block_kv_dkv_compute
                          the same in the backward pass for k and v; in that of the flash kernel
                          queries and keys of a grid step, and keys of one score tile
    block_q_dq, block_kv_dq
                          the same in a separate backward pass for q (splash kernels); in the flash
                          kernel block_q_dq are the queries whose gradient is kept in VMEM
    use_fused_bwd_kernel  one backward pass for q, k and v (splash kernels)
    heads_per_tile        query heads of one grid step (flash kernel)
    vmem_limit_bytes      VMEM that the compiler may use (flash kernel)
    block_q_compute       queries of one score tile (flash kernel)
    """

    block_q: int = 0
    block_kv: int = 0
    block_kv_compute: int = 0
    block_kv_compute_in: int = 0
    block_q_dkv: int = 0
    block_kv_dkv: int = 0
    block_kv_dkv_compute: int = 0
    block_q_dq: int = 0
    block_kv_dq: int = 0
    use_fused_bwd_kernel: bool | None = None
    heads_per_tile: int = 0
    vmem_limit_bytes: int = 0
    block_q_compute: int = 0

    def __post_init__(self) -> None:
        wrong = [
            _problem(name, size, "must be a positive integer")
            for name, size in vars(self).items()
            if name != "use_fused_bwd_kernel" and not (type(size) is int and size >= 0)
        ]
        if wrong:
            raise ProblemsFound(wrong)

    @classmethod
    def from_mapping(cls, sizes: Mapping[str, int | bool | None]) -> "BlockSizes":
        """Returns the sizes of a YAML mapping; refuses unknown names and zeros."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(sizes) - known)
        if unknown:
            raise ValueError(f"flash_block_sizes has {unknown}: the keys are {sorted(known)}")
        zeros = [name for name, size in sizes.items() if type(size) is int and size == 0]
        if zeros:
            raise ProblemsFound([_problem(name, 0, "must be a positive integer") for name in zeros])
        given = {name: size for name, size in sizes.items() if size is not None}
        return cls(**given)  # type: ignore[arg-type]

    def given(self) -> dict[str, int]:
        """Returns the sizes that are set, by name."""
        return {name: size for name, size in vars(self).items() if size}

    def only(self, names: Sequence[str]) -> "BlockSizes":
        """Returns the named sizes, and leaves the choice of all others open."""
        return BlockSizes(**{name: vars(self)[name] for name in names})

    def updated(self, sizes: Mapping[str, int]) -> "BlockSizes":
        """Returns these sizes with some of them replaced."""
        return replace(self, **sizes)  # type: ignore[arg-type]

    @property
    def q_tile(self) -> int:
        """Queries of one score tile; the last of a block may be shorter."""
        if self.block_q_compute:
            return min(self.block_q, self.block_q_compute)
        most = max(SCORES_AT_ONCE // self.block_kv, EVEN_TILE)
        tiles = -(-self.block_q // most)
        return min(self.block_q, round_up(-(-self.block_q // tiles), EVEN_TILE))

    def fit(self, q_len: int, kv_len: int) -> "BlockSizes":
        """Returns sizes of the flash kernel, no longer than the sequences need.

        Raises `ProblemsFound` if a size breaks a rule of the kernel.
        """
        self.check_flash()
        inner = min(self.block_kv_compute_in, round_up(kv_len, LANES))
        compute = min(self.block_kv_compute, round_up(kv_len, inner))
        return replace(
            self,
            block_q=min(self.block_q, round_up(q_len, LANES)),
            block_kv=min(self.block_kv, round_up(kv_len, compute)),
            block_kv_compute=compute,
            block_kv_compute_in=inner,
            heads_per_tile=self.heads_per_tile or 1,
        )

    def check_flash(self) -> None:
        """Raises `ProblemsFound` unless the flash kernel can run with these sizes."""
        names = FLASH_SIZES + (("block_q_compute",) if self.block_q_compute else ())
        problems = self._lane_problems(names)
        if not problems:
            problems += self._nesting_problems("block_kv_compute", "block_kv_compute_in")
            problems += self._nesting_problems("block_kv", "block_kv_compute")
        if problems:
            raise ProblemsFound(problems)

    def check_backward(self) -> None:
        """Raises `ProblemsFound` unless the backward flash kernel can run with these sizes."""
        optional = ("block_q_dq",) if self.block_q_dq else ()
        problems = self._lane_problems((*FLASH_BACKWARD_SIZES, *optional))
        if not problems:
            problems += self._nesting_problems("block_kv_dkv", "block_kv_dkv_compute")
        if problems:
            raise ProblemsFound(problems)

    def check_splash(self) -> None:
        """Raises `ProblemsFound` if a splash kernel cannot run with the sizes that are set."""
        problems = self._lane_problems([name for name in SPLASH_SIZES if self.given().get(name)])
        problems += self._nesting_problems("block_kv", "block_kv_compute")
        problems += self._nesting_problems("block_kv_dkv", "block_kv_dkv_compute")
        if problems:
            raise ProblemsFound(problems)

    def _lane_problems(self, names: Sequence[str]) -> list[Problem]:
        sizes = vars(self)
        rule = f"must be a positive multiple of {LANES}"
        return [
            _problem(name, sizes[name], rule, f"Use {round_up(sizes[name], LANES)}")
            for name in names
            if sizes[name] == 0 or sizes[name] % LANES
        ]

    def _nesting_problems(self, outer: str, inner: str) -> list[Problem]:
        large, small = vars(self)[outer], vars(self)[inner]
        if not (large and small and large % small):
            return []
        divisors = [size for size in range(LANES, large + 1, LANES) if large % size == 0]
        return [_problem(inner, small, f"must divide {outer}={large}", f"Use one of {divisors}")]


def _problem(name: str, value: object, rule: str, remedy: str = "") -> Problem:
    return Problem(name=f"flash_block_sizes.{name}", value=value, rule=rule, remedy=remedy)
