"""One grid step of the kernel: where it is, what it can see, and the state that it carries on."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxdiffusion.kernels.flash.blocks import LANES
from maxdiffusion.kernels.flash.fp8 import KEYS_PER_WORD
from maxdiffusion.kernels.flash.plan import KernelPlan

SUBLANES = 8
NO_SCORE = -0.5 * float(jnp.finfo(jnp.float32).max)
"""Reference of a row that has seen no key: finite, so that masked (-inf) minus it is never NaN."""


class Maximum(enum.Enum):
    """What scores are taken relative to: the running maximum, or a bound pinned beforehand."""

    RUNNING = "running"
    PINNED = "pinned"


@dataclass(frozen=True, kw_only=True)
class State:
    """What a block of queries knows after some keys, [heads, rows, block_q] each."""

    o: Any  # H rows: sum of p v
    l: Any  # noqa: E741  # 8 rows, to be added up: sum of p
    used: Any  # 1 row: the reference that o and l are relative to
    top: Any  # 1 row: the largest score seen, the reference of the next block


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Partials of one block of queries, as they lie in HBM."""

    o: Any  # [rows, heads * H], or by head
    m: Any  # [heads, 1, rows]
    l: Any  # noqa: E741  # [heads, 1, rows]


@dataclass(frozen=True, kw_only=True)
class Refs:
    """The references of one grid step: prefetched scalars, blocks in VMEM, scratch."""

    limits: Any  # [B] keys at or past this position are not attended
    full: Any  # [B, kv_blocks] 1 where a mask hides nothing; None without a mask
    key_norm: Any  # [B, N] largest key norm; None when online
    fixed: Any  # [B, N] 1 where the head uses a fixed bound; None when online
    key_scale: Any  # [B, K] of float8 keys; None otherwise
    q: Any
    k: Any
    v: Any
    mask: Any  # [1, block_kv] int32; None without a mask
    before: Sums | None  # of the keys of earlier calls
    out: Any
    out_m: Any  # None unless partials are returned
    out_l: Any
    qt: Any  # [heads, depth, block_q] scaled, transposed queries
    q_scale: Any  # [heads, 1, block_q] what their scores are multiplied by; None without float8
    state: State
    saved: State  # as it was before the last quick block; `top` is not kept, it is the new `used`


class Weights(NamedTuple):
    """Exponentials of a tile of scores against the reference of its queries."""

    p: Array  # [keys, queries]
    total: Array  # [8, queries] to be added up
    largest: Array  # [8, queries] the largest scores, to be compared


class Step:
    """One grid step: its place, the kind of block it has, and views of its operands."""

    def __init__(self, plan: KernelPlan, refs: Refs):
        self.plan, self.refs = plan, refs
        self.batch, self.tile, self.q_block, self.kv_block = (pl.program_id(a) for a in range(4))
        self.limit = refs.limits[self.batch]
        self.first_key = self.kv_block * plan.blocks.block_kv

    @property
    def heads(self) -> range:
        """Query heads of this tile."""
        return range(self.plan.blocks.heads_per_tile)

    def live(self) -> Array:
        """Returns whether any key of this block is attended."""
        return self.first_key < self.limit

    def whole(self) -> Array:
        """Returns whether every key of this block is attended."""
        if self.plan.masked:
            return self.refs.full[self.batch, self.kv_block] == 1
        return self.first_key + self.plan.blocks.block_kv <= self.limit

    def ends_here(self) -> Array:
        """Returns whether the keys end in this block as the array does, or a little before."""
        if self.plan.masked or not self.plan.tail:
            return jnp.bool_(False)
        last = self.kv_block == self.plan.whole_blocks
        return last & (self.first_key + self.plan.sure_of_tail < self.limit)

    def each_tile(self, visit: Callable[[Any], None]) -> None:
        """Calls `visit` with the columns of every tile of queries; a last block has fewer."""
        blocks, q_len = self.plan.blocks, self.plan.shape.q_len
        tiles, rest = divmod(blocks.block_q, blocks.q_tile)
        left = q_len - self.q_block * blocks.block_q
        ragged = q_len % blocks.block_q > 0

        @pl.loop(0, jnp.minimum(tiles, pl.cdiv(left, blocks.q_tile)) if ragged else tiles)
        def _(index: Array) -> None:
            visit(pl.ds(pl.multiple_of(index * blocks.q_tile, LANES), blocks.q_tile))

        if rest:
            start = blocks.block_q - rest
            there = left > start if ragged else jnp.bool_(True)
            pl.when(there)(lambda: visit(pl.ds(start, rest)))

    def is_fixed(self, head: int) -> Array:
        """Returns whether head `head` of the tile uses its fixed bound."""
        return self.refs.fixed[self.batch, self._head(head)] == 1

    def key_norm(self, head: int) -> Array:
        """Returns the largest key norm of head `head` of the tile."""
        return self.refs.key_norm[self.batch, self._head(head)]

    def key_scale(self, head: int) -> Array:
        """Returns the scale of the float8 keys that head `head` of the tile attends to."""
        return self.refs.key_scale[self.batch, self._head(head) // self.plan.shape.group]

    def _head(self, head: int) -> Array:
        return self.tile * self.plan.blocks.heads_per_tile + head

    def of_head(self, ref: Any, head: int) -> Any:
        """Returns the [rows, H] view of one head in a block of q, v or out."""
        return self._columns(ref, head, self.plan.shape.head_dim)

    def _columns(self, ref: Any, head: int, width: int) -> Any:
        return ref.at[:, head * width : (head + 1) * width] if self.plan.folded else ref.at[head]

    def keys(self, head: int, rows: Any) -> Array:
        """Returns the keys that query head `head` attends to, [rows, depth]."""
        keys = self._columns(self.refs.k, self.plan.kv_head(head), self.plan.product_depth)
        if not self.plan.fp8:
            return keys[rows]
        start = pl.multiple_of(rows.start // KEYS_PER_WORD, LANES // KEYS_PER_WORD)
        words = pl.ds(start, rows.size // KEYS_PER_WORD)
        return pltpu.bitcast(keys[words], self.plan.product_dtype)

    def values(self, head: int, rows: Any) -> Array:
        """Returns the values that query head `head` attends to, [rows, H]."""
        return self.of_head(self.refs.v, self.plan.kv_head(head))[rows]

    def scores(self, head: int, rows: Any, columns: Any) -> Array:
        """Returns transposed scores [keys, queries], in units of the exponent."""
        s = self.products(head, rows, columns)
        return s * self.refs.q_scale[head, :, columns] if self.plan.fp8 else s

    def products(self, head: int, rows: Any, columns: Any) -> Array:
        """Returns scores that are still to be multiplied by the scale of float8 queries."""
        return _dot(self.keys(head, rows), self.refs.qt[head, :, columns], (1, 0))

    def weigh(self, values: Array, p: Array) -> Array:
        """Returns V^T P of [H, queries] from values [keys, H] and p [keys, queries]."""
        return _dot(values, p.astype(self.plan.dtype), (0, 0))

    def power(self, x: Array) -> Array:
        """Returns base ** x."""
        return self.plan.options.exponent.power(x)

    def attended(self, row: Any, rows: int) -> Array:
        """Returns [rows, 1]: which keys from `row` of this block on are attended."""
        position = self.first_key + row + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        attended = position < self.limit
        if self.plan.masked:
            lanes = self.refs.mask[:, pl.ds(row, rows)]
            attended = attended & (jnp.broadcast_to(lanes, (SUBLANES, rows)).T[:, :1] != 0)
        return attended


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    # Without HIGHEST a float32 matmul of the TPU rounds its operands to bfloat16.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)


def fold(x: Array, reduce: Any) -> Array:
    """Returns x [rows, queries] reduced to [8, queries]: whole registers, no sublane shuffles."""
    return reduce(x.reshape(-1, SUBLANES, x.shape[1]), axis=0)


def largest_divisor(length: int, limit: int, multiple: int) -> int:
    """Returns the largest divisor of `length` up to `limit` that is a multiple of `multiple`."""
    divisors = range(min(limit, length) // multiple * multiple, 0, -multiple)
    return next(d for d in divisors if length % d == 0)
