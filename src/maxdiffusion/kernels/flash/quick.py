"""A whole block of keys against a reference known at its start: the main loop of the kernel.

The reference is the maximum of the blocks *before* this one. float32 and bfloat16 have exponents to
spare, so scores above it do no harm until they exceed it by `HEADROOM_BITS`, and the block's own
maximum is only needed for the next block: no matmul ever waits for a maximum. The state before the
block is saved, so that a block that did rise too far can be taken back and done carefully.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from maxdiffusion.kernels.flash.step import Maximum, Step, fold

HEADROOM_BITS = 24
"""How far a block may rise above the reference: p <= 2**24 leaves 2**80 for the sum and for v."""


def quick(step: Step, heads: Sequence[int], maximum: Maximum) -> None:
    """Takes in this step's keys, all of which are attended."""
    tiles = _tiles(step, heads)
    ahead = _scores(step, tiles[0])
    sums: list[Array] = []
    for tile, after in zip(tiles, [*tiles[1:], None], strict=True):
        scores = ahead
        if after is not None:
            # Issued before this tile's softmax so that the MXUs have work during it.
            ahead = _scores(step, after)
        sums = _accumulate(step, sums, scores, tile, maximum)
        if tile.last:
            _commit(step, sums, tile, maximum)
            sums = []


class _Tile(NamedTuple):
    head: int
    columns: slice
    row: int
    last: bool


def _tiles(step: Step, heads: Sequence[int]) -> list[_Tile]:
    """Returns the score tiles in order: all keys of a tile of queries, then the next queries."""
    blocks = step.plan.blocks
    starts = range(0, blocks.block_q, blocks.q_tile)
    columns = [slice(q, min(q + blocks.q_tile, blocks.block_q)) for q in starts]
    rows = range(0, blocks.block_kv, blocks.block_kv_compute)
    return [_Tile(h, c, r, r == rows[-1]) for h in heads for c in columns for r in rows]


def _scores(step: Step, tile: _Tile) -> Array:
    rows = pl.ds(tile.row, step.plan.blocks.block_kv_compute)
    return step.scores(tile.head, rows, tile.columns)


def _accumulate(
    step: Step, sums: list[Array], scores: Array, tile: _Tile, maximum: Maximum
) -> list[Array]:
    """Returns o, l (and the maximum) of the block so far, this tile included."""
    reference = step.refs.state.top[tile.head, :, tile.columns]
    inner = step.plan.blocks.block_kv_compute_in
    for row in range(0, step.plan.blocks.block_kv_compute, inner):
        s = scores[row : row + inner]
        p = step.power(s - reference)
        v = step.values(tile.head, pl.ds(tile.row + row, inner))
        part = [step.weigh(v, p), fold(p, jnp.sum)]
        if maximum is Maximum.RUNNING:
            part.append(fold(s, jnp.max))
        sums = _join(sums, part)
    return sums


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
        state.o[head], state.l[head] = saved.o[head], saved.l[head]
        state.top[head] = state.used[head]
        state.used[head] = saved.used[head]
