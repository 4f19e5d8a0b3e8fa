"""The backward kernel: one grid step (batch, key head, block of keys, block of queries).

Scores are transposed as in the forward pass. With P^T = exp(S^T - log-sum) the five products are

    S^T  = K Q^T            [keys, queries]
    dP^T = V dO^T           [keys, queries]
    dV^T = dO^T P           [H, keys]           summed over queries
    dK^T = Q^T dS           [H, keys]           summed over queries, dS = P (dP - delta)
    dQ^T = K^T dS^T         [H, queries]        summed over keys

The last three fill an MXU of 256 x 256 although a head is only 128 wide, since H is the number of
rows that stream through it; the first two fill half of its depth.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from maxdiffusion.kernels.flash.backward_plan import BackwardPlan
from maxdiffusion.kernels.flash.tiles import Ref
from maxdiffusion.kernels.tpu import LANES, SUBLANES

SHIFT, DELTA = 0, 1
"""Rows of `Refs.per_query`."""


@dataclass(frozen=True, kw_only=True)
class Refs:
    """The references of one grid step: prefetched scalars, blocks in VMEM, scratch."""

    limits: Ref  # [B] keys at or past this position are not attended
    full: Ref | None  # [B, kv_blocks] 1 where a mask hides nothing; None without a mask
    qt: Ref  # [H, block_q] scaled queries
    d_ot: Ref  # [H, block_q]
    per_query: Ref  # [2, block_q] shift and delta
    k: Ref  # [block_kv, H]
    v: Ref  # [block_kv, H]
    mask: Ref | None  # [1, block_kv] int32; None without a mask
    d_q: Ref  # [block_q, H]
    d_k: Ref  # [block_kv, H]
    d_v: Ref  # [block_kv, H]
    d_qt: Ref  # [group_blocks, H, block_q] sums over keys
    d_kt: Ref  # [H, block_kv] sums over queries
    d_vt: Ref  # [H, block_kv]
    kt: Ref  # [H, block_kv]
    keys: Ref  # [block_kv, H] with zeros for keys that are not attended; k if all are
    values: Ref  # [block_kv, H] likewise
    attended: Ref | None  # [block_kv, LANES] 1 where a key is attended; None if all are

    @classmethod
    def named(cls, plan: BackwardPlan, refs: tuple[Ref, ...]) -> "Refs":
        """Returns the references by name, from the order in which Pallas passes them."""
        left = iter(refs)
        limits, full = next(left), next(left) if plan.masked else None
        qt, d_ot, per_query, k, v = (next(left) for _ in range(5))
        mask = next(left) if plan.masked else None
        d_q, d_k, d_v, d_qt, d_kt, d_vt, kt = (next(left) for _ in range(7))
        keys, values = (next(left), next(left)) if plan.partial_keys else (k, v)
        attended = next(left) if plan.partial_keys else None
        return cls(
            limits=limits,
            full=full,
            qt=qt,
            d_ot=d_ot,
            per_query=per_query,
            k=k,
            v=v,
            mask=mask,
            d_q=d_q,
            d_k=d_k,
            d_v=d_v,
            d_qt=d_qt,
            d_kt=d_kt,
            d_vt=d_vt,
            kt=kt,
            keys=keys,
            values=values,
            attended=attended,
        )


def differentiate(plan: BackwardPlan, *refs: Ref) -> None:
    """Runs one grid step: the kernel that `pallas_call` is given."""
    step = Step(plan, Refs.named(plan, refs))
    pl.when(step.q_block == 0)(step.start_keys)
    pl.when(step.kv_block == 0)(step.start_queries)
    if plan.partial_keys:
        full = step.fully_attended()
        pl.when(step.live() & full)(functools.partial(step.add_tiles, masked=False))
        pl.when(step.live() & ~full)(functools.partial(step.add_tiles, masked=True))
    else:
        step.add_tiles(masked=False)
    pl.when(step.kv_block == plan.kv_blocks - 1)(step.finish_queries)
    pl.when(step.q_block == plan.group_blocks - 1)(step.finish_keys)


class Step:
    """One grid step: its indices, the kind of its block, and what it does."""

    def __init__(self, plan: BackwardPlan, refs: Refs):
        self.plan, self.refs = plan, refs
        self.batch, self.head, self.kv_block, self.q_block = (pl.program_id(a) for a in range(4))
        self.limit = refs.limits[self.batch]
        self.first_key = self.kv_block * plan.block_kv
        self.dot = functools.partial(_product, plan)

    def live(self) -> Array:
        """Returns whether any key of this block is attended."""
        return self.first_key < self.limit

    def fully_attended(self) -> Array:
        """Returns whether every key of this block is attended."""
        if self.refs.full is not None:
            return self.refs.full[self.batch, self.kv_block] == 1
        return self.first_key + self.plan.block_kv <= self.limit

    def start_keys(self) -> None:
        """Begins the sums over queries, and keeps the keys as the products need them.

        Keys that are not attended become zeros: rows past the array hold arbitrary bits.
        """
        plan, refs = self.plan, self.refs
        refs.d_kt[...] = jnp.zeros(refs.d_kt.shape, jnp.float32)
        refs.d_vt[...] = jnp.zeros(refs.d_vt.shape, jnp.float32)
        k = refs.k[...].astype(jnp.float32)
        if refs.attended is not None:
            attended = self.attended()
            refs.attended[...] = jnp.broadcast_to(attended.astype(jnp.float32), refs.attended.shape)
            k = jnp.where(attended, k, 0.0)
            v = jnp.where(attended, refs.v[...].astype(jnp.float32), 0.0)
            refs.keys[...], refs.values[...] = k.astype(plan.dtype), v.astype(plan.dtype)
        refs.kt[...] = k.T.astype(plan.dtype)

    def attended(self) -> Array:
        """Returns [block_kv, 1]: which keys of this block are attended."""
        size = self.plan.block_kv
        position = self.first_key + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        attended: Array = position < self.limit
        if self.refs.mask is not None:
            lanes = jnp.broadcast_to(self.refs.mask[...], (SUBLANES, size))
            attended = attended & (lanes.T[:, :1] != 0)
        return attended

    def start_queries(self) -> None:
        """Begins the sums over keys of this block of queries."""
        shape = self.refs.d_qt.shape[1:]
        self.refs.d_qt[self.q_block] = jnp.zeros(shape, jnp.float32)

    def add_tiles(self, *, masked: bool) -> None:
        """Adds all pairs of this step to the sums, a tile of queries at a time."""
        plan = self.plan
        left = plan.shape.q_len - self.q_block % plan.q_blocks * plan.block_q
        tiles = jnp.minimum(plan.block_q // plan.q_tile, pl.cdiv(left, plan.q_tile))
        add = self._add_masked if masked else self._add_unmasked
        pl.loop(0, tiles)(lambda index: add(self._columns(index)))

    def _columns(self, index: Array) -> Any:
        return pl.ds(pl.multiple_of(index * self.plan.q_tile, LANES), self.plan.q_tile)

    def _add_unmasked(self, columns: Any) -> None:
        """Adds all keys of this step for one tile of queries, without a branch."""
        plan = self.plan
        starts = range(0, plan.block_kv, plan.kv_step)
        self._add_d_q(
            columns, self._sum_over_keys([pl.ds(x, plan.kv_step) for x in starts], columns)
        )

    def _add_masked(self, columns: Any) -> None:
        """Adds the attended keys of this step for one tile of queries, some keys at a time."""
        plan = self.plan
        keys = jnp.minimum(self.limit - self.first_key, plan.block_kv)

        @pl.loop(0, pl.cdiv(keys, plan.kv_tile))
        def _(index: Array) -> None:
            first = pl.multiple_of(index * plan.kv_tile, LANES)
            starts = range(0, plan.kv_tile, plan.kv_step)
            rows = [pl.ds(first + start, plan.kv_step) for start in starts]
            self._add_d_q(columns, self._sum_over_keys(rows, columns, masked=True))

    def _add_d_q(self, columns: Any, d_qt: Array) -> None:
        sums = self.refs.d_qt
        sums[self.q_block, :, columns] = sums[self.q_block, :, columns] + d_qt

    def _sum_over_keys(self, parts: list[Any], columns: Any, *, masked: bool = False) -> Array:
        """Adds some keys to the sums over queries; returns their sum for each query.

        The scores of the next keys come before the products of these in program order, and dQ^T is
        one product over `kv_tile` keys: so the scheduler keeps the MXUs busy (99 % on tpu7x).
        """
        plan, refs = self.plan, self.refs
        per_product = plan.kv_tile // plan.kv_step
        d_qt = jnp.zeros((plan.shape.head_dim, plan.q_tile), jnp.float32)
        waiting: list[Array] = []
        following = self._scores(parts[0], columns)
        for index, rows in enumerate(parts):
            scores = following
            if index + 1 < len(parts):
                following = self._scores(parts[index + 1], columns)
            waiting.append(self._add_keys(rows, columns, scores, masked=masked))
            if len(waiting) == per_product:
                first = parts[index + 1 - per_product].start
                keys = refs.kt[:, pl.ds(first, plan.kv_tile)]
                d_qt = d_qt + self.dot(keys, jnp.concatenate(waiting), contract=(1, 0))
                waiting = []
        return d_qt

    def _scores(self, rows: Any, columns: Any) -> tuple[Array, Array]:
        """Returns S^T and dP^T of some keys."""
        refs = self.refs
        s = self.dot(refs.keys[rows], refs.qt[:, columns], contract=(1, 0))
        d_p = self.dot(refs.values[rows], refs.d_ot[:, columns], contract=(1, 0))
        return s, d_p

    def _add_keys(
        self, rows: Any, columns: Any, scores: tuple[Array, Array], *, masked: bool
    ) -> Array:
        """Adds some keys to the sums over queries; returns dS^T."""
        plan, refs, (s, d_p) = self.plan, self.refs, scores
        shift, delta = (refs.per_query[row : row + 1, columns] for row in (SHIFT, DELTA))
        # Rounding apart a score never exceeds the log-sum; for huge ones rounding may be large.
        p = plan.options.exponent.power(jnp.minimum(s - shift, 0.0))
        if masked and refs.attended is not None:
            p = jnp.where(refs.attended[rows, :1] > 0.0, p, 0.0)
        d_s = (p * (d_p - delta)).astype(plan.dtype)
        d_v = self.dot(refs.d_ot[:, columns], p.astype(plan.dtype), contract=(1, 1))
        d_k = self.dot(refs.qt[:, columns], d_s, contract=(1, 1))
        refs.d_vt[:, rows] = refs.d_vt[:, rows] + d_v
        refs.d_kt[:, rows] = refs.d_kt[:, rows] + d_k
        return d_s

    def finish_queries(self) -> None:
        """Writes the gradient of this block of queries."""
        refs = self.refs
        refs.d_q[...] = (refs.d_qt[self.q_block] * self.plan.q_scale).T.astype(self.plan.out_dtype)

    def finish_keys(self) -> None:
        """Writes the gradients of this block of keys; the queries were scaled by the exponent's."""
        refs = self.refs
        unscale = 1.0 / self.plan.options.exponent.per_nat
        refs.d_k[...] = (refs.d_kt[...] * unscale).T.astype(self.plan.out_dtype)
        refs.d_v[...] = refs.d_vt[...].T.astype(self.plan.out_dtype)


def _product(plan: BackwardPlan, a: Array, b: Array, *, contract: tuple[int, int]) -> Array:
    """Returns a product of operands of the plan's type, summed in float32."""
    if plan.options.interpret:
        # XLA for CPU lacks some products of bfloat16; those of float32 are the same. Without
        # reduce_precision it would also drop the roundings to bfloat16.
        bits = 7 if plan.dtype == jnp.bfloat16 else 23
        a, b = (lax.reduce_precision(x.astype(jnp.float32), 8, bits) for x in (a, b))
    # Without HIGHEST a float32 matmul of the TPU rounds its operands to bfloat16.
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else lax.Precision.DEFAULT
    dot: Callable[..., Array] = lax.dot_general
    return dot(
        a,
        b,
        dimension_numbers=(((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
