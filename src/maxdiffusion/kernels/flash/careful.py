"""A block of keys with its own maximum and with keys to hide: exact for anything, and slower."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from maxdiffusion.kernels.flash.blocks import LANES
from maxdiffusion.kernels.flash.step import Maximum, Step, fold, largest_divisor

CAREFUL_TILE = 512
"""Keys and queries of a tile: small, so that this seldom used code stays small."""


def careful(step: Step, heads: Sequence[int], maximum: Maximum) -> None:
    """Takes in the attended keys of this step, tile by tile."""
    blocks = step.plan.blocks
    width = largest_divisor(blocks.block_q, CAREFUL_TILE, LANES)
    height = largest_divisor(blocks.block_kv, CAREFUL_TILE, LANES)
    keys = jnp.minimum(step.limit - step.first_key, blocks.block_kv)

    def queries(head: int, index: Array) -> None:
        columns = pl.ds(pl.multiple_of(index * width, LANES), width)

        @pl.loop(0, pl.cdiv(keys, height))
        def _(part: Array) -> None:
            row = pl.multiple_of(part * height, LANES)
            _tile(step, head, pl.ds(row, height), columns, maximum)

    for head in heads:
        pl.loop(0, blocks.block_q // width)(functools.partial(queries, head))


def _tile(step: Step, head: int, rows: Any, columns: Any, maximum: Maximum) -> None:
    state = step.refs.state
    attended = step.attended(rows.start, rows.size)
    s = jnp.where(attended, step.scores(head, rows, columns), -jnp.inf)
    used, top = state.used[head, :, columns], state.top[head, :, columns]
    if maximum is Maximum.RUNNING:
        top = jnp.maximum(top, jnp.max(s, axis=0, keepdims=True))
    keep, p = step.power(used - top), step.power(s - top)
    # Rows past the array hold arbitrary bits, which even a zero probability would not silence.
    v = jnp.where(attended, step.values(head, rows).astype(jnp.float32), 0.0)
    part = step.weigh(v.astype(step.plan.dtype), p)
    state.o[head, :, columns] = state.o[head, :, columns] * keep + part
    state.l[head, :, columns] = state.l[head, :, columns] * keep + fold(p, jnp.sum)
    state.used[head, :, columns] = top
    state.top[head, :, columns] = top
