"""A block of keys against a reference known at its start: the main loop of the kernel.

The reference is the maximum of the blocks *before* this one. float32 and bfloat16 have exponents to
spare, so scores above it do no harm until they exceed it by `HEADROOM_BITS`, and the block's own
maximum is only needed for the next block: no matmul ever waits for a maximum. The state before the
block is saved, so that a block that did rise too far can be taken back and done carefully.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from maxdiffusion.kernels.flash.blocks import LANES, round_up
from maxdiffusion.kernels.flash.coarse import coarse
from maxdiffusion.kernels.flash.step import Maximum, Step, Weights, fold

HEADROOM_BITS = 24
"""How far a block may rise above the reference: p <= 2**24 leaves 2**80 for the sum and for v."""


def quick(step: Step, heads: Sequence[int], keys: int, maximum: Maximum) -> None:
    """Takes in the first `keys` keys of this step, all of which are attended up to its limit."""
    for head in heads:

        def visit(columns: Any, head: int = head) -> None:
            _queries(step, _Tile(head, columns, keys), maximum)

        step.each_tile(visit)


class _Tile(NamedTuple):
    head: int
    columns: Any
    keys: int


def _queries(step: Step, tile: _Tile, maximum: Maximum) -> None:
    """Takes in all keys for some queries: one stretch of straight code, for which the compiler
    finds the overlap of scores, exponentials and P.V, since nothing in it waits for a maximum."""
    compute, padded = step.plan.blocks.block_kv_compute, round_up(tile.keys, LANES)
    sums: list[Array] = []
    for row in range(0, padded, compute):
        rows = pl.ds(row, min(compute, padded - row))
        products = step.products(tile.head, rows, tile.columns)
        sums = _accumulate(step, sums, products, row, tile, maximum)
    _commit(step, sums, tile, maximum)


def _accumulate(
    step: Step, sums: list[Array], scores: Array, start: int, tile: _Tile, maximum: Maximum
) -> list[Array]:
    """Returns o, l (and the maximum) of the block so far, these scores (from `start`) included."""
    inner = step.plan.blocks.block_kv_compute_in
    end, sure = _ends(step, tile)
    for row in range(0, len(scores), inner):
        s = scores[row : row + inner]
        v = step.values(tile.head, pl.ds(start + row, len(s)))
        if start + row + len(s) > sure:
            s, v = _hide(s, v, end - start - row, max(0, sure - start - row))
        weights = (coarse if step.plan.fp8 else _exact)(step, s, tile.head, tile.columns)
        part = [step.weigh(v, weights.p), weights.total]
        if maximum is Maximum.RUNNING:
            part.append(weights.largest)
        sums = _join(sums, part)
    return sums


def _exact(step: Step, s: Array, head: int, columns: Any) -> Weights:
    """Returns exponentials in float32."""
    p = step.power(s - step.refs.state.top[head, :, columns])
    return Weights(p=p, total=fold(p, jnp.sum), largest=fold(s, jnp.max))


def _ends(step: Step, tile: _Tile) -> tuple[Array | int, int]:
    """Returns where the keys of a tile end, and how many at its start are surely attended."""
    if tile.keys == step.plan.blocks.block_kv:
        return tile.keys, tile.keys
    if not step.plan.lengths:
        return tile.keys, tile.keys // LANES * LANES
    return step.limit - step.first_key, step.plan.sure_of_tail


def _hide(s: Array, v: Array, keys: Array | int, sure: int) -> tuple[Array, Array]:
    """Returns scores and values without what lies past `keys`, which is arbitrary bits.

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


def _commit(step: Step, sums: list[Array], tile: _Tile, maximum: Maximum) -> None:
    """Adds the block's sums to the state, which moves on to the reference of this block."""
    state, saved, head, columns = step.refs.state, step.refs.saved, tile.head, tile.columns
    o, l = state.o[head, :, columns], state.l[head, :, columns]  # noqa: E741
    if maximum is Maximum.PINNED:
        state.o[head, :, columns] = o + sums[0]
        state.l[head, :, columns] = l + sums[1]
        return
    used, top = state.used[head, :, columns], state.top[head, :, columns]
    saved.o[head, :, columns], saved.l[head, :, columns] = o, l
    saved.used[head, :, columns] = used
    keep = step.power(used - top)
    state.o[head, :, columns] = o * keep + sums[0]
    state.l[head, :, columns] = l * keep + sums[1]
    state.used[head, :, columns] = top
    state.top[head, :, columns] = jnp.maximum(top, jnp.max(sums[2], axis=0, keepdims=True))


def rose_too_far(step: Step, heads: Sequence[int]) -> Array:
    """Returns whether some query's maximum rose past the headroom in this block."""
    headroom = HEADROOM_BITS * step.plan.options.exponent.per_bit
    state = step.refs.state
    return jnp.max(jnp.concatenate([state.top[h] - state.used[h] for h in heads])) > headroom


def take_back(step: Step, heads: Sequence[int]) -> None:
    """Returns the state to what it was before this block."""
    state, saved = step.refs.state, step.refs.saved
    for head in heads:

        def visit(columns: Any, head: int = head) -> None:
            state.o[head, :, columns] = saved.o[head, :, columns]
            state.l[head, :, columns] = saved.l[head, :, columns]
            state.top[head, :, columns] = state.used[head, :, columns]
            state.used[head, :, columns] = saved.used[head, :, columns]

        step.each_tile(visit)
