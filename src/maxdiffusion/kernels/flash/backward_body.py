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
    q: Ref  # [block_q, H]
    d_out: Ref  # [block_q, H]
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
    qt: Ref  # [H, block_q] scaled queries
    d_ot: Ref  # [H, block_q]
    kt: Ref  # [H, block_kv]
    keys: Ref  # [block_kv, H] with zeros for keys that are not attended; k if all are
    values: Ref  # [block_kv, H] likewise
    attended: Ref | None  # [block_kv, LANES] 1 where a key is attended; None if all are

    @classmethod
    def named(cls, plan: BackwardPlan, refs: tuple[Ref, ...]) -> "Refs":
        """Returns the references by name, from the order in which Pallas passes them."""
        left = iter(refs)
        limits, full = next(left), next(left) if plan.masked else None
        q, d_out, per_query, k, v = (next(left) for _ in range(5))
        mask = next(left) if plan.masked else None
        d_q, d_k, d_v, d_qt, d_kt, d_vt, qt, d_ot, kt = (next(left) for _ in range(9))
        keys, values = (next(left), next(left)) if plan.partial_keys else (k, v)
        attended = next(left) if plan.partial_keys else None
        return cls(
            limits=limits,
            full=full,
            q=q,
            d_out=d_out,
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
            qt=qt,
            d_ot=d_ot,
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
        pl.when(step.live())(step.load_queries)
        pl.when(step.live() & full)(functools.partial(step.add_tiles, masked=False))
        pl.when(step.live() & ~full)(functools.partial(step.add_tiles, masked=True))
    else:
        step.load_queries()
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

    def load_queries(self) -> None:
        """Transposes the queries, scaled and rounded as in the forward pass, and d_out."""
        plan, refs = self.plan, self.refs
        q, d_out = (ref[...].astype(jnp.float32) for ref in (refs.q, refs.d_out))
        if plan.ragged_queries:
            # The last block ends past the array, where the bits are arbitrary.
            first = self.q_block % plan.q_blocks * plan.block_q
            row = first + lax.broadcasted_iota(jnp.int32, (len(q), 1), 0)
            q, d_out = (jnp.where(row < plan.shape.q_len, x, 0.0) for x in (q, d_out))
        refs.qt[...] = (q * plan.score_scale).T.astype(plan.dtype)
        refs.d_ot[...] = d_out.T.astype(plan.dtype)

    def add_tiles(self, *, masked: bool) -> None:
        """Adds all pairs of this step to the sums, a tile of queries at a time."""
        plan = self.plan
        pl.loop(0, plan.block_q // plan.q_tile)(functools.partial(self._add_queries, masked))

    def _add_queries(self, masked: bool, index: Array) -> None:
        """Adds all keys of this step for one tile of queries, without a branch."""
        plan, refs = self.plan, self.refs
        columns = pl.ds(pl.multiple_of(index * plan.q_tile, LANES), plan.q_tile)
        d_qt = jnp.zeros((plan.shape.head_dim, plan.q_tile), jnp.float32)
        for start in range(0, plan.block_kv, plan.kv_tile):
            d_qt = d_qt + self._add_tile(pl.ds(start, plan.kv_tile), columns, masked)
        refs.d_qt[self.q_block, :, columns] = refs.d_qt[self.q_block, :, columns] + d_qt

    def _add_tile(self, rows: Any, columns: Any, masked: bool) -> Array:
        """Adds a tile to the sums over queries; returns its part of the sums over keys."""
        plan, refs = self.plan, self.refs
        dot = functools.partial(_product, plan)
        qt, d_ot = refs.qt[:, columns], refs.d_ot[:, columns]
        shift, delta = (refs.per_query[row : row + 1, columns] for row in (SHIFT, DELTA))
        # Rounding apart a score never exceeds the log-sum; for huge ones rounding may be large.
        s = jnp.minimum(dot(refs.keys[rows], qt, contract=(1, 0)) - shift, 0.0)
        p = plan.options.exponent.power(s)
        if masked and refs.attended is not None:
            p = jnp.where(refs.attended[rows, :1] > 0.0, p, 0.0)
        d_s = p * (dot(refs.values[rows], d_ot, contract=(1, 0)) - delta)
        p, d_s = p.astype(plan.dtype), d_s.astype(plan.dtype)
        refs.d_vt[:, rows] = refs.d_vt[:, rows] + dot(d_ot, p, contract=(1, 1))
        refs.d_kt[:, rows] = refs.d_kt[:, rows] + dot(qt, d_s, contract=(1, 1))
        return dot(refs.kt[:, rows], d_s, contract=(1, 0))

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
        info = jnp.finfo(plan.dtype)
        a, b = (lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant) for x in (a, b))
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
