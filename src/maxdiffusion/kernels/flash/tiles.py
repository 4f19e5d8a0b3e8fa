"""Adds blocks of keys to the state of a block of queries, tile by tile.

`unmasked_tile` is the main loop. It takes exponentials against the maximum of the blocks *before*
this one. float32 and bfloat16 have exponents to spare, so scores above the shift do no harm until
they exceed it by `HEADROOM_BITS`, and the block's own maximum is only needed for the next block: no
matmul ever waits for a maximum. The state before the block is saved, so that a block that did
overflow can be rolled back and repeated by `masked_tiles`.

`masked_tiles` takes the maximum of its own scores and hides keys that are not attended: exact for
any input, and slower.

`bf16_exp` takes exponentials in the type that P.V multiplies, for scores that float8 has rounded
already. Two of them fit into the place of a float32, so that everything after the subtraction is
half the work, and the MXUs need not wait for it. A score x below the shift is off by 2**-9 |x|.
"""

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxdiffusion.kernels.flash.config import NO_SCORE
from maxdiffusion.kernels.flash.fp8 import KEYS_PER_INT32, inverse
from maxdiffusion.kernels.flash.plan import KernelPlan
from maxdiffusion.kernels.tpu import (
    BF16_SUBLANES,
    LANES,
    SUBLANES,
    largest_divisor,
    round_up,
)

if TYPE_CHECKING:

    class Ref(Protocol):
        """A Pallas reference to a block in VMEM or SMEM: it reads and writes arrays."""

        shape: tuple[int, ...]
        at: Any

        def __getitem__(self, index: Any) -> Array: ...

        def __setitem__(self, index: Any, value: Array) -> None: ...
else:
    Ref = Any


class Maximum(enum.Enum):
    """Shift of the scores: the running maximum, or a bound fixed beforehand."""

    RUNNING = "running"
    PINNED = "pinned"


@dataclass(frozen=True, kw_only=True)
class State:
    """Running sums of a block of queries after some keys, [heads, rows, block_q] each."""

    o: Ref  # H rows: sum of p v
    l: Ref  # noqa: E741  # 8 rows, to be added up: sum of p
    m_acc: Ref  # 1 row: the shift that o and l are relative to
    m_next: Ref  # 1 row: the largest score seen, the shift of the next block


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Partials of one block of queries, with queries in lanes as in `State`."""

    o: Ref  # [heads, H, rows]
    m: Ref  # [heads, 1, rows]
    l: Ref  # noqa: E741  # [heads, 1, rows]


@dataclass(frozen=True, kw_only=True)
class Refs:
    """The references of one grid step: prefetched scalars, blocks in VMEM, scratch."""

    limits: Ref  # [B] keys at or past this position are not attended
    full: Ref  # [B, kv_blocks] 1 where a mask hides nothing; None without a mask
    key_norm: Ref  # [B, N] largest key norm; None when online
    fixed: Ref  # [B, N] 1 where the head uses a fixed bound; None when online
    key_scale: Ref  # [B, K] of float8 keys; None otherwise
    q: Ref
    k: Ref
    v: Ref
    mask: Ref  # [1, block_kv] int32; None without a mask
    before: Sums | None  # of the keys of earlier calls
    out: Ref
    out_m: Ref  # None unless partials are returned
    out_l: Ref  # the sums; without partials their natural logs, None unless they are returned
    qt: Ref  # [heads, depth, block_q] scaled, transposed queries
    q_scale: Ref  # [heads, 1, block_q] what their scores are multiplied by; None without float8
    state: State
    saved: State  # before the last unmasked block, without `m_next`, which is the new `m_acc`
    weights: Ref  # [block_kv, q_tile] of a tile; None unless the product subtracts the shift

    @classmethod
    def named(cls, plan: KernelPlan, refs: Sequence[Ref]) -> "Refs":
        """Names the references of a call, whose number depends on the plan."""
        left = iter(refs)
        absent: Any = None
        return cls(
            limits=next(left),
            full=next(left) if plan.masked else absent,
            key_norm=next(left) if plan.fixed_m else absent,
            fixed=next(left) if plan.fixed_m else absent,
            key_scale=next(left) if plan.fp8 else absent,
            q=next(left),
            k=next(left),
            v=next(left),
            mask=next(left) if plan.masked else absent,
            before=Sums(o=next(left), m=next(left), l=next(left)) if plan.carried else None,
            out=next(left),
            out_m=next(left) if plan.partials else absent,
            out_l=next(left) if plan.partials or plan.log_sum else absent,
            qt=next(left),
            q_scale=next(left) if plan.fp8 else absent,
            state=State(o=next(left), l=next(left), m_acc=next(left), m_next=next(left)),
            saved=State(o=next(left), l=next(left), m_acc=next(left), m_next=absent),
            weights=next(left) if plan.shift_in_product else absent,
        )


class Weights(NamedTuple):
    """Exponentials of a tile of scores against the shift of its queries."""

    p: Array  # [keys, queries]
    total: Array  # [8, queries] to be added up
    largest: Array  # [8, queries] the largest scores, to be compared


class Step:
    """One grid step: its indices, the kind of its block, and views of its operands."""

    def __init__(self, plan: KernelPlan, refs: Refs):
        self.plan, self.refs = plan, refs
        self.batch, self.tile, self.q_block, self.kv_block = (pl.program_id(a) for a in range(4))
        self.limit = refs.limits[self.batch]
        self.first_key = self.kv_block * plan.blocks.block_kv
        self.dot_qk = _matmul(plan.product_dtype, contract=(1, 0))
        """Scores [keys, queries] of keys [keys, depth] and transposed queries [depth, queries]."""
        self.dot_pv = _matmul(plan.dtype, contract=(0, 0))
        """V^T P of [H, queries] from values [keys, H] and probabilities [keys, queries]."""

    @property
    def heads(self) -> range:
        """Query heads of this tile."""
        return range(self.plan.blocks.heads_per_tile)

    def live(self) -> Array:
        """Returns whether any key of this block is attended."""
        return self.first_key < self.limit

    def fully_attended(self) -> Array:
        """Returns whether every key of this block is attended."""
        if self.plan.masked:
            return self.refs.full[self.batch, self.kv_block] == 1
        return self.first_key + self.plan.blocks.block_kv <= self.limit

    def ends_here(self) -> Array:
        """Returns whether the keys end in this block as the array does, or a little before."""
        if self.plan.masked or not self.plan.tail:
            never: Array = jnp.bool_(False)
            return never
        last = self.kv_block == self.plan.whole_blocks
        return last & (self.first_key + self.plan.num_unmasked_tail_keys < self.limit)

    def query_tiles(self) -> Iterator[Callable[[Callable[..., None]], Any]]:
        """Yields the loops over tiles of queries; each calls a function with a tile's columns.

        A loop is over tiles of `q_tile`, and skips those past the end of the array; what is left of
        a block is one shorter tile.
        """
        blocks, q_len = self.plan.blocks, self.plan.shape.q_len
        tiles, rest = divmod(blocks.block_q, blocks.q_tile)
        left = q_len - self.q_block * blocks.block_q
        ragged = q_len % blocks.block_q > 0
        yield pl.loop(0, jnp.minimum(tiles, pl.cdiv(left, blocks.q_tile)) if ragged else tiles)
        if rest:
            yield pl.when(left > blocks.block_q - rest if ragged else jnp.bool_(True))

    def columns(self, index: Array | None) -> Any:
        """Returns the queries of a tile: number `index`, or without one the shorter last tile."""
        blocks = self.plan.blocks
        if index is None:
            rest = blocks.block_q % blocks.q_tile
            return pl.ds(blocks.block_q - rest, rest)
        return pl.ds(pl.multiple_of(index * blocks.q_tile, LANES), blocks.q_tile)

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

    def of_head(self, ref: Ref, head: int) -> Ref:
        """Returns the [rows, H] view of one head in a block of q, v or out."""
        return self._columns(ref, head, self.plan.shape.head_dim)

    def _columns(self, ref: Ref, head: int, width: int) -> Ref:
        view: Ref = (
            ref.at[:, head * width : (head + 1) * width] if self.plan.folded else ref.at[head]
        )
        return view

    def keys(self, head: int, rows: Any) -> Array:
        """Returns the keys that query head `head` attends to, [rows, depth]."""
        keys = self._columns(self.refs.k, self.plan.kv_head(head), self.plan.product_depth)
        if not self.plan.fp8:
            return keys[rows]
        start = pl.multiple_of(rows.start // KEYS_PER_INT32, LANES // KEYS_PER_INT32)
        packed_rows = pl.ds(start, rows.size // KEYS_PER_INT32)
        return pltpu.bitcast(keys[packed_rows], self.plan.product_dtype)

    def values(self, head: int, rows: Any) -> Array:
        """Returns the values that query head `head` attends to, [rows, H]."""
        return self.of_head(self.refs.v, self.plan.kv_head(head))[rows]

    def operands(self, head: int, rows: Any, columns: Any) -> tuple[Array, Array]:
        """Returns keys and transposed queries of a product of the main loop."""
        keys, queries = self.keys(head, rows), self.refs.qt[head, :, columns]
        if not self.plan.shift_in_product:
            return keys, queries
        from maxdiffusion.kernels.flash.free_depth import with_ones, with_terms

        return with_ones(keys), with_terms(queries, -self.refs.state.m_next[head, :, columns])

    def rounded(self, p: Array, start: int) -> Array:
        """Returns weights of keys from `start` on, in the type of the values."""
        weights = p.astype(self.plan.dtype)
        if not self.plan.shift_in_product:
            return weights
        # Stored here, they are rounded where they are made, and half as many bytes wait for P.V.
        kept: Ref = self.refs.weights.at[pl.ds(start, len(p)), pl.ds(0, p.shape[1])]
        kept[...] = weights
        return kept[...]

    def scaled(self, products: Array, head: int, columns: Any) -> Array:
        """Returns scores in units of the exponent; float8 products are still to be scaled."""
        return products * self.refs.q_scale[head, :, columns] if self.plan.fp8 else products

    def power(self, x: Array) -> Array:
        """Returns base ** x."""
        return self.plan.options.exponent.power(x)

    def attended(self, row: Any, rows: int) -> Array:
        """Returns [rows, 1]: which keys from `row` of this block on are attended."""
        position = self.first_key + row + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        attended: Array = position < self.limit
        if self.plan.masked:
            lanes = self.refs.mask[:, pl.ds(row, rows)]
            attended = attended & (jnp.broadcast_to(lanes, (SUBLANES, rows)).T[:, :1] != 0)
        return attended


def _matmul(dtype: jnp.dtype, *, contract: tuple[int, int]) -> Callable[[Array, Array], Array]:
    """Returns a product of operands of `dtype`, summed in float32."""
    # Without HIGHEST a float32 matmul of the TPU rounds its operands to bfloat16.
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(
        lax.dot_general,
        dimension_numbers=(((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def fold(x: Array, reduce: Callable[..., Array]) -> Array:
    """Returns x [rows, queries] reduced to [8, queries]: whole registers, no sublane shuffles."""
    return reduce(x.reshape(-1, SUBLANES, x.shape[1]), axis=0)


MASKED_TILE = 512
"""Keys and queries of a masked tile: small, so that this seldom used code stays small."""


def masked_tiles(step: Step, head: int, maximum: Maximum) -> Callable[[], None]:
    """Returns the loop that adds the attended keys of this step to a head, tile by tile."""
    width = largest_divisor(step.plan.blocks.block_q, MASKED_TILE, LANES)
    add = functools.partial(_add_masked_queries, step, head, width, maximum)
    return functools.partial(pl.loop(0, step.plan.blocks.block_q // width), add)


def _add_masked_queries(step: Step, head: int, width: int, maximum: Maximum, index: Array) -> None:
    """Adds the attended keys to the state of `width` queries, those with number `index`."""
    block_kv = step.plan.blocks.block_kv
    height = largest_divisor(block_kv, MASKED_TILE, LANES)
    keys = jnp.minimum(step.limit - step.first_key, block_kv)
    columns = pl.ds(pl.multiple_of(index * width, LANES), width)
    add = functools.partial(_add_masked, step, head, height, columns, maximum)
    pl.loop(0, pl.cdiv(keys, height))(add)


def _add_masked(
    step: Step, head: int, height: int, columns: Any, maximum: Maximum, part: Array
) -> None:
    """Adds `height` keys, those with number `part`, to the state of some queries."""
    state = step.refs.state
    start = pl.multiple_of(part * height, LANES)
    rows = pl.ds(start, height)
    attended = step.attended(start, height)
    products = step.dot_qk(step.keys(head, rows), step.refs.qt[head, :, columns])
    s = jnp.where(attended, step.scaled(products, head, columns), -jnp.inf)
    m_acc, m_next = state.m_acc[head, :, columns], state.m_next[head, :, columns]
    if maximum is Maximum.RUNNING:
        m_next = jnp.maximum(m_next, jnp.max(s, axis=0, keepdims=True))
    keep, p = step.power(m_acc - m_next), step.power(s - m_next)
    # Rows past the array hold arbitrary bits; times a zero probability they could still be NaN.
    v = jnp.where(attended, step.values(head, rows).astype(jnp.float32), 0.0)
    dtype = step.plan.dtype
    part_o = step.dot_pv(v.astype(dtype), p.astype(dtype))
    state.o[head, :, columns] = state.o[head, :, columns] * keep + part_o
    state.l[head, :, columns] = state.l[head, :, columns] * keep + fold(p, jnp.sum)
    state.m_acc[head, :, columns] = m_next
    state.m_next[head, :, columns] = m_next


ADDENDS = 8
"""Exponentials that are added up before their sum is widened: three roundings of 2**-9 at most."""


def bf16_exp(step: Step, products: Array, head: int, columns: Any) -> Weights:
    """Returns exponentials in the type of the values; scales are powers of two, and cost nothing.

    The subtraction is in float32: products may be large, and what counts is near the shift.
    """
    dtype, shift = step.plan.dtype, step.refs.state.m_next[head, :, columns]
    scale = step.refs.q_scale[head, :, columns]
    level = jnp.maximum(shift * inverse(scale), NO_SCORE)
    x = (products - level).astype(dtype) * scale.astype(dtype)
    p = step.power(x)
    largest = jnp.max(x.reshape(-1, BF16_SUBLANES, x.shape[1]), axis=0).astype(jnp.float32)
    return Weights(p=p, total=_total(p), largest=fold(largest, jnp.max) + shift)


def _total(p: Array) -> Array:
    addends = p.reshape(-1, ADDENDS, BF16_SUBLANES, p.shape[1])
    parts = [addends[:, index] for index in range(ADDENDS)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return fold(parts[0].astype(jnp.float32).reshape(-1, p.shape[1]), jnp.sum)


HEADROOM_BITS = 24
"""How far a block may rise above the shift: p <= 2**24 leaves 2**80 for the sum and for v."""


def unmasked_tile(step: Step, heads: Sequence[int], keys: int, maximum: Maximum) -> None:
    """Adds the first `keys` keys of this step, all of which are attended up to its limit."""
    for head in heads:
        for loop in step.query_tiles():
            loop(functools.partial(_add_unmasked, step, head, keys, maximum))


def _add_unmasked(
    step: Step, head: int, keys: int, maximum: Maximum, index: Array | None = None
) -> None:
    """Adds all keys for one tile of queries: branch-free, so that the scheduler overlaps scores,
    exponentials and P.V, since nothing in it waits for a maximum."""
    columns = step.columns(index)
    blocks, padded = step.plan.blocks, round_up(keys, LANES)
    exponentials = _exponentials(step.plan)
    sums: list[Array] = []
    for start in range(0, padded, blocks.block_kv_compute):
        rows = pl.ds(start, min(blocks.block_kv_compute, padded - start))
        scores = step.dot_qk(*step.operands(head, rows, columns))
        end, sure = _ends(step, keys)
        for row in range(0, len(scores), blocks.block_kv_compute_in):
            s = scores[row : row + blocks.block_kv_compute_in]
            v = step.values(head, pl.ds(start + row, len(s)))
            if start + row + len(s) > sure:
                s, v = _hide(s, v, end - start - row, max(0, sure - start - row))
            weights = exponentials(step, s, head, columns)
            part = [step.dot_pv(v, step.rounded(weights.p, start + row)), weights.total]
            if maximum is Maximum.RUNNING:
                part.append(weights.largest)
            sums = _join(sums, part)
    _commit(step, sums, head, columns, maximum)


def _exponentials(plan: KernelPlan) -> Callable[[Step, Array, int, Any], Weights]:
    if plan.fp8:
        return bf16_exp
    return _shifted_exp if plan.shift_in_product else _f32_exp


def _shifted_exp(step: Step, x: Array, head: int, columns: Any) -> Weights:
    """Returns exponentials in float32 of scores that are less the shift already."""
    p, shift = step.power(x), step.refs.state.m_next[head, :, columns]
    return Weights(p=p, total=fold(p, jnp.sum), largest=fold(x, jnp.max) + shift)


def _f32_exp(step: Step, s: Array, head: int, columns: Any) -> Weights:
    """Returns exponentials in float32."""
    p = step.power(s - step.refs.state.m_next[head, :, columns])
    return Weights(p=p, total=fold(p, jnp.sum), largest=fold(s, jnp.max))


def _ends(step: Step, keys: int) -> tuple[Array | int, int]:
    """Returns where the keys of a tile end, and how many at its start are surely attended."""
    if keys == step.plan.blocks.block_kv:
        return keys, keys
    if not (step.plan.lengths or step.plan.one_form):
        return keys, keys // LANES * LANES
    return step.limit - step.first_key, step.plan.num_unmasked_tail_keys


def _hide(s: Array, v: Array, keys: Array | int, sure: int) -> tuple[Array, Array]:
    """Returns scores and values without those past `keys`, where the bits are arbitrary.

    Only rows from `sure` on are looked at.
    """
    attended = sure + lax.broadcasted_iota(jnp.int32, (len(s) - sure, 1), 0) < keys
    visible = jnp.where(attended, v[sure:].astype(jnp.float32), 0.0).astype(v.dtype)
    scores = jnp.where(attended, s[sure:], -jnp.inf)
    if not sure:
        return scores, visible
    return jnp.concatenate([s[:sure], scores]), jnp.concatenate([v[:sure], visible])


def _join(sums: list[Array], part: list[Array]) -> list[Array]:
    if not sums:
        return part
    joined = [a + b for a, b in zip(sums[:2], part[:2], strict=True)]
    return joined + [jnp.maximum(a, b) for a, b in zip(sums[2:], part[2:], strict=True)]


def _commit(step: Step, sums: list[Array], head: int, columns: Any, maximum: Maximum) -> None:
    """Adds the block's sums to the state, which moves on to the shift of this block."""
    state, saved = step.refs.state, step.refs.saved
    o, l = state.o[head, :, columns], state.l[head, :, columns]  # noqa: E741
    if maximum is Maximum.PINNED:
        state.o[head, :, columns] = o + sums[0]
        state.l[head, :, columns] = l + sums[1]
        return
    m_acc, m_next = state.m_acc[head, :, columns], state.m_next[head, :, columns]
    saved.o[head, :, columns], saved.l[head, :, columns] = o, l
    saved.m_acc[head, :, columns] = m_acc
    keep = step.power(m_acc - m_next)
    state.o[head, :, columns] = o * keep + sums[0]
    state.l[head, :, columns] = l * keep + sums[1]
    state.m_acc[head, :, columns] = m_next
    state.m_next[head, :, columns] = jnp.maximum(m_next, jnp.max(sums[2], axis=0, keepdims=True))


def overflowed(step: Step, heads: Sequence[int]) -> Array:
    """Returns whether some query's maximum rose past the headroom in this block."""
    headroom = HEADROOM_BITS * step.plan.options.exponent.per_bit
    state = step.refs.state
    return jnp.max(jnp.concatenate([state.m_next[h] - state.m_acc[h] for h in heads])) > headroom


def rollback(step: Step, heads: Sequence[int]) -> None:
    """Restores the state from before this block."""
    for head in heads:
        for loop in step.query_tiles():
            loop(functools.partial(_restore, step, head))


def _restore(step: Step, head: int, index: Array | None = None) -> None:
    state, saved, columns = step.refs.state, step.refs.saved, step.columns(index)
    state.o[head, :, columns] = saved.o[head, :, columns]
    state.l[head, :, columns] = saved.l[head, :, columns]
    state.m_next[head, :, columns] = state.m_acc[head, :, columns]
    state.m_acc[head, :, columns] = saved.m_acc[head, :, columns]
