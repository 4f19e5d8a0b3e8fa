"""The flash attention kernel as one grid step sees it.

Scores are transposed, S^T = K Q^T of [keys, queries]: maxima and sums then run over sublanes, what
a query carries (maximum, sum) is a row of lanes, and O^T = V^T P^T fills the MXU although a head is
only 128 wide. A step (batch, head tile, q block, block j of keys) turns state j % 2 into the other:

    o    [H, block_q]  sum of p v             used  [1, block_q]  what o and l are relative to
    l    [8, block_q]  partial sums of p      top   [1, block_q]  the largest score seen

Because the old state is kept, a block may be done twice: first quickly, against `top` (the maximum
of the blocks *before* it, so that its own maximum is off the critical path and the rescaling known
at the start), and again with its own maximum in the rare case that it rose past the headroom.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from maxdiffusion.kernels.flash.blocks import LANES
from maxdiffusion.kernels.flash.fixed_m import CEILING_BITS
from maxdiffusion.kernels.flash.plan import KernelPlan

SUBLANES = 8
NO_SCORE = -0.5 * float(jnp.finfo(jnp.float32).max)
"""Reference of a row that has seen no key: finite, so that masked (-inf) minus it is never NaN."""
HEADROOM_BITS = 24
"""How far a block may rise above the reference: p <= 2**24 leaves 2**80 for the sum and for v."""


@dataclass(frozen=True, kw_only=True)
class Refs:
    """The references of one grid step: prefetched scalars, blocks in VMEM, scratch."""

    limits: Any  # [B] keys at or past this position are not attended
    full: Any  # [B, kv_blocks] 1 where a mask hides nothing; None without a mask
    key_norm: Any  # [B, N] largest key norm; None when online
    fixed: Any  # [B, N] 1 where the head uses a fixed bound; None when online
    q: Any
    k: Any
    v: Any
    mask: Any  # [1, block_kv] int32; None without a mask
    out: Any
    out_m: Any  # None unless partials are returned
    out_l: Any
    qt: Any  # [heads, H, block_q] scaled, transposed queries
    o: Any  # [2, heads, H, block_q]
    l: Any  # [2, heads, 8, block_q]  # noqa: E741
    used: Any  # [2, heads, 1, block_q]
    top: Any  # [2, heads, 1, block_q]


class Step:
    """One grid step: where it is, and the work that can be done there."""

    def __init__(self, plan: KernelPlan, refs: Refs):
        self.plan, self.refs = plan, refs
        self.batch, self.tile, self.q_block, self.kv_block = (pl.program_id(a) for a in range(4))
        self.limit = refs.limits[self.batch]
        self.first_key = self.kv_block * plan.blocks.block_kv
        self.old = lax.rem(self.kv_block, 2)
        self.new = 1 - self.old

    # -- what kind of step this is ---------------------------------------------------------------

    def live(self) -> Array:
        """Whether any key of this block is attended."""
        return self.first_key < self.limit

    def whole(self) -> Array:
        """Whether every key of this block is attended."""
        if self.plan.masked:
            return self.refs.full[self.batch, self.kv_block] == 1
        return self.first_key + self.plan.blocks.block_kv <= self.limit

    def is_fixed(self, head: int) -> Array:
        """Whether head `head` of the tile uses its fixed bound."""
        return self.refs.fixed[self.batch, self._head(head)] == 1

    def _head(self, head: int) -> Array:
        return self.tile * self.plan.blocks.heads_per_tile + head

    # -- views -----------------------------------------------------------------------------------

    def _view(self, ref: Any, head: int) -> Any:
        width = self.plan.shape.head_dim
        return ref.at[:, head * width : (head + 1) * width] if self.plan.folded else ref.at[head]

    def _power(self, x: Array) -> Array:
        return self.plan.options.exponent.power(x)

    def _dot(self, a: Array, b: Array, contract: tuple[int, int]) -> Array:
        exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
        return lax.dot_general(
            a,
            b,
            (((contract[0],), (contract[1],)), ((), ())),
            precision=exact,
            preferred_element_type=jnp.float32,
        )

    # -- the beginning of a q block --------------------------------------------------------------

    def start(self) -> None:
        """Scales and transposes the queries and empties the state."""
        for head in range(self.plan.blocks.heads_per_tile):
            self._start_queries(head)
            self._start_state(head)

    def _start_queries(self, head: int) -> None:
        plan = self.plan
        q = self._view(self.refs.q, head)[...].astype(jnp.float32)
        if plan.shape.q_len % plan.blocks.block_q:
            # The last block ends past the array; what lies there is arbitrary bits.
            row = lax.broadcasted_iota(jnp.int32, q.shape, 0) + self.q_block * plan.blocks.block_q
            q = jnp.where(row < plan.shape.q_len, q, 0.0)
        scaled = (q * plan.score_scale).T
        self.refs.qt[head] = scaled.astype(plan.dtype)

    def _start_state(self, head: int) -> None:
        refs = self.refs
        refs.o[0, head] = jnp.zeros(refs.o.shape[2:], jnp.float32)
        refs.l[0, head] = jnp.zeros(refs.l.shape[2:], jnp.float32)
        reference = jnp.full(refs.top.shape[2:], NO_SCORE, jnp.float32)
        if self.plan.fixed_m:
            reference = jnp.where(self.is_fixed(head), self._pinned(head), reference)
        refs.used[0, head] = reference
        refs.top[0, head] = reference

    def _pinned(self, head: int) -> Array:
        """Returns ||q_i|| max_j ||k_j|| - C, the fixed reference of every query."""
        qt = self.refs.qt[head].astype(jnp.float32)
        norm = jnp.sqrt(jnp.sum(qt * qt, axis=0, keepdims=True))
        ceiling = CEILING_BITS * self.plan.options.exponent.per_bit
        return norm * self.refs.key_norm[self.batch, self._head(head)] - ceiling

    # -- whole blocks ----------------------------------------------------------------------------

    def quick(self, heads: Sequence[int], pinned: bool) -> None:
        """Takes in a whole block against the known reference: no mask, no maximum to wait for."""
        tiles = [(h, q0, kv0) for h in heads for q0 in self._q_tiles() for kv0 in self._kv_tiles()]
        scores = self._scores(*tiles[0])
        sums: list[Array] = []
        for index, (head, q0, kv0) in enumerate(tiles):
            current = scores
            if index + 1 < len(tiles):
                # Issued before this tile's softmax so that the MXUs have work during it.
                scores = self._scores(*tiles[index + 1])
            sums = self._accumulate(sums, current, head, q0, kv0, pinned)
            if kv0 == self._kv_tiles()[-1]:
                self._commit(sums, head, q0, pinned)
                sums = []

    def _q_tiles(self) -> range:
        return range(0, self.plan.blocks.block_q, self.plan.blocks.q_tile)

    def _kv_tiles(self) -> range:
        return range(0, self.plan.blocks.block_kv, self.plan.blocks.block_kv_compute)

    def _columns(self, q0: int) -> slice:
        return slice(q0, min(q0 + self.plan.blocks.q_tile, self.plan.blocks.block_q))

    def _scores(self, head: int, q0: int, kv0: int) -> Array:
        rows = pl.ds(kv0, self.plan.blocks.block_kv_compute)
        k = self._view(self.refs.k, self.plan.kv_head(head))[rows]
        return self._dot(k, self.refs.qt[head, :, self._columns(q0)], (1, 0))

    def _accumulate(
        self, sums: list[Array], scores: Array, head: int, q0: int, kv0: int, pinned: bool
    ) -> list[Array]:
        reference = self.refs.top[self.old, head, :, self._columns(q0)]
        inner = self.plan.blocks.block_kv_compute_in
        for row in range(0, self.plan.blocks.block_kv_compute, inner):
            s = scores[row : row + inner]
            p = self._power(s - reference)
            v = self._view(self.refs.v, self.plan.kv_head(head))[pl.ds(kv0 + row, inner)]
            part = [self._dot(v, p.astype(self.plan.dtype), (0, 0)), _fold(p, jnp.sum)]
            if not pinned:
                part.append(_fold(s, jnp.max))
            sums = _join(sums, part)
        return sums

    def _commit(self, sums: list[Array], head: int, q0: int, pinned: bool) -> None:
        refs, old, new = self.refs, self.old, self.new
        columns = self._columns(q0)
        o, l = refs.o[old, head, :, columns], refs.l[old, head, :, columns]  # noqa: E741
        top = refs.top[old, head, :, columns]
        if not pinned:
            keep = self._power(refs.used[old, head, :, columns] - top)
            o, l = o * keep, l * keep  # noqa: E741
        refs.o[new, head, :, columns] = o + sums[0]
        refs.l[new, head, :, columns] = l + sums[1]
        refs.used[new, head, :, columns] = top
        if not pinned:
            top = jnp.maximum(top, jnp.max(sums[2], axis=0, keepdims=True))
        refs.top[new, head, :, columns] = top

    def rose_too_far(self, heads: Sequence[int]) -> Array:
        """Whether some query's maximum rose by more than the headroom in this block."""
        headroom = HEADROOM_BITS * self.plan.options.exponent.per_bit
        rise = [self.refs.top[self.new, h] - self.refs.used[self.new, h] for h in heads]
        return jnp.max(jnp.concatenate(rise)) > headroom

    # -- any block -------------------------------------------------------------------------------

    def careful(self, heads: Sequence[int], pinned: bool) -> None:
        """Takes in a block with its own maximum, hiding the keys that are not attended."""
        width = _divisor(self.plan.blocks.block_q, self.plan.blocks.q_tile)
        inner = self.plan.blocks.block_kv_compute_in
        keys = jnp.minimum(self.limit - self.first_key, self.plan.blocks.block_kv)

        def tile(head: int, index: Array) -> None:
            columns = pl.ds(pl.multiple_of(index * width, LANES), width)
            self._carry_over(head, columns)

            @pl.loop(0, pl.cdiv(keys, inner))
            def _(part: Array) -> None:
                self._careful_tile(head, columns, pl.multiple_of(part * inner, LANES), pinned)

        for head in heads:
            tiles = pl.loop(0, self.plan.blocks.block_q // width)
            tiles(functools.partial(tile, head))

    def _carry_over(self, head: int, columns: Any) -> None:
        refs, old, new = self.refs, self.old, self.new
        top = refs.top[old, head, :, columns]
        keep = self._power(refs.used[old, head, :, columns] - top)
        refs.o[new, head, :, columns] = refs.o[old, head, :, columns] * keep
        refs.l[new, head, :, columns] = refs.l[old, head, :, columns] * keep
        refs.used[new, head, :, columns] = top
        refs.top[new, head, :, columns] = top

    def _careful_tile(self, head: int, columns: Any, row: Array, pinned: bool) -> None:
        refs, new, inner = self.refs, self.new, self.plan.blocks.block_kv_compute_in
        rows, kv_head = pl.ds(row, inner), self.plan.kv_head(head)
        attended = self._attended(row)
        s = self._dot(self._view(refs.k, kv_head)[rows], refs.qt[head, :, columns], (1, 0))
        s = jnp.where(attended, s, -jnp.inf)
        used = refs.used[new, head, :, columns]
        top = used if pinned else jnp.maximum(used, jnp.max(s, axis=0, keepdims=True))
        keep = self._power(used - top)
        p = self._power(s - top)
        # Rows past the array hold arbitrary bits, which even a zero probability would not silence.
        v = jnp.where(attended, self._view(refs.v, kv_head)[rows].astype(jnp.float32), 0.0)
        v = v.astype(self.plan.dtype)
        part = self._dot(v, p.astype(self.plan.dtype), (0, 0))
        refs.o[new, head, :, columns] = refs.o[new, head, :, columns] * keep + part
        refs.l[new, head, :, columns] = refs.l[new, head, :, columns] * keep + _fold(p, jnp.sum)
        refs.used[new, head, :, columns] = top
        refs.top[new, head, :, columns] = top

    def _attended(self, row: Array) -> Array:
        """Returns [block_kv_compute_in, 1]: which keys from `row` of the block are attended."""
        inner = self.plan.blocks.block_kv_compute_in
        position = self.first_key + row + lax.broadcasted_iota(jnp.int32, (inner, 1), 0)
        attended = position < self.limit
        if self.plan.masked:
            lanes = self.refs.mask[:, pl.ds(row, inner)]
            column = jnp.broadcast_to(lanes, (LANES, inner)).T[:, :1]
            attended = attended & (column != 0)
        return attended

    # -- the end of a q block --------------------------------------------------------------------

    def finish(self) -> None:
        """Writes the output, or the unnormalised sums, of this q block."""
        live_blocks = pl.cdiv(self.limit, self.plan.blocks.block_kv)
        last = lax.rem(live_blocks, 2)
        for head in range(self.plan.blocks.heads_per_tile):
            o = self.refs.o[last, head]
            l = jnp.sum(self.refs.l[last, head], axis=0, keepdims=True)  # noqa: E741
            out = self._view(self.refs.out, head)
            if self.plan.partials:
                out[...] = o.T
                self.refs.out_m[head] = self.refs.used[last, head]
                self.refs.out_l[head] = l
            else:
                out[...] = (o * jnp.where(l > 0, 1.0 / l, 0.0)).T.astype(self.plan.dtype)


def _fold(x: Array, reduce: Any) -> Array:
    """Returns x [rows, queries] reduced to [8, queries]: whole registers, no sublane shuffles."""
    return reduce(x.reshape(-1, SUBLANES, x.shape[1]), axis=0)


def _join(sums: list[Array], part: list[Array]) -> list[Array]:
    """Returns o and l added, and the maximum (where there is one) taken."""
    if not sums:
        return part
    joined = [a + b for a, b in zip(sums[:2], part[:2], strict=True)]
    return joined + [jnp.maximum(a, b) for a, b in zip(sums[2:], part[2:], strict=True)]


def _divisor(length: int, limit: int) -> int:
    """Returns the largest multiple of 128 up to `limit` that divides `length`."""
    return next(d for d in range(limit, 0, -LANES) if length % d == 0)


def attend(plan: KernelPlan, refs: Refs) -> None:
    """Runs one grid step."""
    step = Step(plan, refs)
    pl.when(step.kv_block == 0)(step.start)
    if plan.fixed_m:
        for head in range(plan.blocks.heads_per_tile):
            pl.when(step.is_fixed(head))(lambda head=head: _take_in(step, [head], pinned=True))
            pl.when(~step.is_fixed(head))(lambda head=head: _take_in(step, [head], pinned=False))
    else:
        _take_in(step, range(plan.blocks.heads_per_tile), pinned=False)
    pl.when(step.kv_block == plan.kv_blocks - 1)(step.finish)


def _take_in(step: Step, heads: Sequence[int], pinned: bool) -> None:
    """Adds this step's keys to the state, quickly if that is exact and carefully if not."""
    quick = step.live() & step.whole()
    if pinned:
        pl.when(quick)(lambda: step.quick(heads, pinned=True))
        pl.when(step.live() & ~quick)(lambda: step.careful(heads, pinned=True))
        return
    # The first block has no reference yet.
    quick = quick & (step.kv_block > 0)
    pl.when(quick)(lambda: step.quick(heads, pinned=False))
    again = lax.cond(quick, lambda: step.rose_too_far(heads), lambda: step.live())
    pl.when(again)(lambda: step.careful(heads, pinned=False))
