"""Attention to keys that fit VMEM at once, such as those of a text: q, k, v [B, S, N, H], bfloat16.

A grid step takes one head and a block of queries; k (scaled) and v^T stay in VMEM for all of them.
The queries of a block go tile by tile through four stages, each one tile behind the one before:

    shift    scores of the first 128 keys; their maximum is the shift of the tile's exponentials
    weights  scores of the other keys, and the exponentials of all
    sums     V^T P; rows of ones below V^T give the sums of the exponentials
    write    normalised and transposed

Stages of one step work on different tiles, so the scheduler runs products under exponentials. No
exponential depends on the maximum of all keys; where that exceeds the shift by `HEADROOM_BITS`, the
block is computed once more with the true maximum.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from maxdiffusion.kernels.flash.config import NO_SCORE, FlashOptions, FlashShape
from maxdiffusion.kernels.flash.tiles import HEADROOM_BITS, Ref, fold
from maxdiffusion.kernels.tpu import (
    BF16_SUBLANES,
    LANES,
    MIB,
    SUBLANES,
    even_block,
    round_up,
)

BLOCK_Q = 9728
"""Queries of a grid step at most: its first and last stages have nothing to run under."""
TILE_Q = 2048
"""Queries of a tile."""
MXU_COLUMNS = 256
"""Queries of one product of the sums."""


@dataclass(frozen=True, kw_only=True)
class ResidentPlan:
    """Static description of a call; the first `kv_len` keys count, the others are padding."""

    shape: FlashShape
    kv_len: int
    options: FlashOptions

    @property
    def block_q(self) -> int:
        """Queries of a grid step: blocks of about equal length."""
        return even_block(BLOCK_Q, self.shape.q_len, LANES)

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """First query and number of queries of each tile of a block; the last may be shorter."""
        starts = range(0, self.block_q, TILE_Q)
        return tuple((start, min(TILE_Q, self.block_q - start)) for start in starts)

    @property
    def keys(self) -> int:
        """Keys in VMEM, in whole lanes."""
        return round_up(self.shape.kv_len, LANES)

    @property
    def key_scale(self) -> float:
        """Scale of k: 1/sqrt(H), in units of the exponent."""
        inverse_root: float = self.shape.head_dim**-0.5
        return self.options.exponent.per_nat * inverse_root

    @property
    def vmem_bytes(self) -> int:
        """VMEM of blocks (twice: one is fetched while another is in use) and scratch."""
        blocks = 2 * 2 * (self.block_q + self.keys) * self.shape.head_dim * self.shape.itemsize
        return blocks + sum(_bytes(part) for part in _scratch(self))

    @property
    def vmem_limit(self) -> int:
        """VMEM that the compiler may use: it spills up to the scores of a tile."""
        width = self.tiles[0][1]
        return self.vmem_bytes + 4 * self.keys * width + 4 * MIB


class Scratch(NamedTuple):
    """Arrays in VMEM: keys and values of a head, and two tiles between each two stages."""

    keys: Ref  # [T, H], scaled
    values: Ref  # [H + BF16_SUBLANES, T]; rows of ones below
    first: Ref  # [2, 128, queries] scores of the first keys
    shift: Ref  # [2, 1, queries]
    weights: Ref  # [2, T, queries] exponentials
    sums: Ref  # [2, H, queries] normalised sums
    rise: Ref  # [8, queries] largest score above the shift, over all tiles


def resident_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    options: FlashOptions,
    kv_len: int | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q k^T / sqrt(H)) v over the first `kv_len` keys, of which there is one."""
    shape = FlashShape.of(q, k, v)
    plan = ResidentPlan(shape=shape, kv_len=kv_len or shape.kv_len, options=options)
    columns = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
    out: Array = _pallas_call(plan, columns[0])(*columns)
    return out.reshape(q.shape)


def _pallas_call(plan: ResidentPlan, q: Array) -> Any:
    shape, rows = plan.shape, plan.block_q
    queries = pl.BlockSpec((None, rows, shape.head_dim), lambda b, n, i: (b, i, n))
    keys = pl.BlockSpec((None, plan.keys, shape.head_dim), lambda b, n, i: (b, 0, n // shape.group))
    return pl.pallas_call(
        functools.partial(_attend, plan),
        grid=(shape.batch, shape.heads, -(-shape.q_len // rows)),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        # Under shard_map the result varies over the mesh axes that the queries vary over.
        out_shape=jax.ShapeDtypeStruct(
            q.shape, q.dtype, manual_axis_type=jax.typeof(q).manual_axis_type
        ),
        scratch_shapes=_scratch(plan),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=plan.vmem_limit,
        ),
        cost_estimate=_cost(plan),
        interpret=plan.options.interpret,
        name=f"resident_{rows}_{plan.keys}",
    )


def _scratch(plan: ResidentPlan) -> list[Any]:
    keys, width, tile = plan.keys, plan.shape.head_dim, plan.tiles[0][1]
    return [
        pltpu.VMEM((keys, width), jnp.bfloat16),
        pltpu.VMEM((width + BF16_SUBLANES, keys), jnp.bfloat16),
        pltpu.VMEM((2, LANES, tile), jnp.float32),
        pltpu.VMEM((2, 1, tile), jnp.float32),
        pltpu.VMEM((2, keys, tile), jnp.bfloat16),
        pltpu.VMEM((2, width, tile), jnp.float32),
        pltpu.VMEM((SUBLANES, tile), jnp.float32),
    ]


def _bytes(part: Any) -> int:
    *outer, rows, columns = map(int, part.shape)
    count = math.prod(outer) * round_up(rows, SUBLANES) * columns
    return count * int(jnp.dtype(part.dtype).itemsize)


def _cost(plan: ResidentPlan) -> pl.CostEstimate:
    shape = plan.shape
    pairs = shape.batch * shape.heads * shape.q_len * shape.kv_len
    tokens = shape.batch * (shape.heads * shape.q_len + shape.kv_heads * shape.kv_len)
    return pl.CostEstimate(
        flops=4 * pairs * shape.head_dim,
        transcendentals=pairs,
        bytes_accessed=2 * tokens * shape.head_dim * shape.itemsize,
    )


def _attend(plan: ResidentPlan, q: Ref, k: Ref, v: Ref, out: Ref, *scratch: Ref) -> None:
    """Runs one grid step: the kernel that `pallas_call` is given."""
    step = Step(plan, q, out, Scratch(*scratch))
    pl.when(pl.program_id(2) == 0)(functools.partial(step.read_keys, k, v))
    step.scratch.rise[...] = jnp.zeros(step.scratch.rise.shape, jnp.float32)
    # The order in a round is that of the longest path; it decides which stage is served first.
    stages = ((step.weights, 1), (step.sums, 2), (step.shift, 0), (step.write, 3))
    count = len(plan.tiles)
    for round_ in range(count + len(stages) - 1):
        running = [stage(round_ - lag) for stage, lag in stages if 0 <= round_ - lag < count]
        for _ in zip_longest(*running):
            pass
    headroom = HEADROOM_BITS * plan.options.exponent.per_bit
    pl.when(jnp.max(step.scratch.rise[...]) > headroom)(step.repeat)


class Step:
    """One grid step: its stages, which yield where those of other tiles may go on."""

    def __init__(self, plan: ResidentPlan, q: Ref, out: Ref, scratch: Scratch):
        self.plan, self.q, self.out, self.scratch = plan, q, out, scratch
        self.power = plan.options.exponent.power
        self.left = plan.shape.q_len - pl.program_id(2) * plan.block_q
        """Queries from this block on; past them the bits are arbitrary."""

    def read_keys(self, k: Ref, v: Ref) -> None:
        """Scales the keys, which rounds them once, and transposes the values."""
        plan, scratch = self.plan, self.scratch
        row = lax.broadcasted_iota(jnp.int32, (plan.keys, 1), 0)
        # Past the array the bits are arbitrary; a weight of zero does not hide NaN.
        attended = row < plan.kv_len
        keys, values = (jnp.where(attended, x[...].astype(jnp.float32), 0.0) for x in (k, v))
        scratch.keys[...] = (keys * plan.key_scale).astype(jnp.bfloat16)
        width = plan.shape.head_dim
        scratch.values[:width] = values.T.astype(jnp.bfloat16)
        scratch.values[width:] = jnp.ones((BF16_SUBLANES, plan.keys), jnp.bfloat16)

    def scores(self, first: int, keys: int, columns: Any) -> Array:
        """Returns the scores [keys, queries] of some keys; those of padding are never largest."""
        rows = self.scratch.keys[pl.ds(first, keys)]
        s: Array = lax.dot_general(
            rows,
            self.q[columns],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        if first + keys <= self.plan.kv_len:
            return s
        row = first + lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
        return jnp.where(row < self.plan.kv_len, s, NO_SCORE)

    def columns(self, tile: int) -> tuple[int, Any, Any]:
        """Returns the buffer of a tile, its queries in the block, and its columns in buffers."""
        start, width = self.plan.tiles[tile]
        return tile % 2, pl.ds(start, width), pl.ds(0, width)

    def shift(self, tile: int) -> Iterator[None]:
        """Finds the shift of a tile."""
        buffer, queries, here = self.columns(tile)
        s = self.scores(0, LANES, queries)
        self.scratch.first[buffer, :, here] = s
        self.scratch.shift[buffer, :, here] = jnp.max(fold(s, jnp.max), axis=0, keepdims=True)
        yield

    def weights(self, tile: int) -> Iterator[None]:
        """Computes the exponentials of a tile, and how far a score rises above its shift."""
        scratch, (buffer, queries, here) = self.scratch, self.columns(tile)
        shift = scratch.shift[buffer, :, here]
        largest = shift
        for first in range(0, self.plan.keys, LANES):
            if first:
                s = self.scores(first, LANES, queries)
                largest = jnp.maximum(largest, fold(s, jnp.max))
            else:
                s = scratch.first[buffer, :, here]
            p = self.power(s - shift).astype(jnp.bfloat16)
            scratch.weights[buffer, pl.ds(first, LANES), here] = p
            yield
        start, width = self.plan.tiles[tile]
        query = start + lax.broadcasted_iota(jnp.int32, (1, width), 1)
        rise = jnp.where(query < self.left, largest - shift, 0.0)
        scratch.rise[:, here] = jnp.maximum(scratch.rise[:, here], rise)

    def sums(self, tile: int) -> Iterator[None]:
        """Multiplies weights and values, and normalises."""
        scratch, (buffer, _, _) = self.scratch, self.columns(tile)
        for start in range(0, self.plan.tiles[tile][1], MXU_COLUMNS):
            size = min(MXU_COLUMNS, self.plan.tiles[tile][1] - start)
            some = pl.ds(start, size)
            scratch.sums[buffer, :, some] = self.normalised(scratch.weights[buffer, :, some])
            yield

    def normalised(self, weights: Array) -> Array:
        """Returns V^T P divided by the sums of the weights, [H, queries]."""
        width = self.plan.shape.head_dim
        o = lax.dot_general(
            self.scratch.values[...],
            weights,
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return o[:width] * (1.0 / o[width : width + 1])

    def write(self, tile: int) -> Iterator[None]:
        """Writes the output of a tile."""
        buffer = tile % 2
        start, width = self.plan.tiles[tile]
        for column in range(0, width, LANES):
            o = self.scratch.sums[buffer, :, pl.ds(column, LANES)]
            self.out[pl.ds(start + column, LANES)] = o.T.astype(jnp.bfloat16)
            yield

    def repeat(self) -> None:
        """Computes the block with the maximum of all keys: seldom, so in little code."""

        @pl.loop(0, self.plan.block_q // LANES)
        def _(index: Array) -> None:
            queries = pl.ds(pl.multiple_of(index * LANES, LANES), LANES)
            s = self.scores(0, self.plan.keys, queries)
            p = self.power(s - jnp.max(s, axis=0, keepdims=True)).astype(jnp.bfloat16)
            self.out[queries] = self.normalised(p).T.astype(jnp.bfloat16)
