"""Norm, rotation and the move of heads to their layout in one pass over HBM (Pallas, TPU).

XLA does the same in seven passes: it keeps q and k in float32 for the rotation, whose halves it
cuts out and joins again, and cuts and joins once more for the collective. Here a block of rows is
read once, worked on in registers, and written where its heads belong.

Both moves have a gradient: each is the other's, and that of norm and rotation is left to XLA
(`layout.pending_gradient`), which has to read the columns and the gradient of the heads anyway.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from maxdiffusion.kernels.qk_prep.layout import (
    PAD,
    HeadLayout,
    HeadPosition,
    ProjectedHeads,
    pending_gradient,
)
from maxdiffusion.kernels.tpu import MIB

ROWS_AT_ONCE = 32
"""Rows of a head that are worked on together: four registers of float32."""
Order = Int[Array, " J"]
BLOCK_BYTES = 4 * MIB
"""What one block may hold; it is there four times, coming and going, twice each."""


def qk_norm_rope_scatter(
    columns: ProjectedHeads,
    layout: HeadLayout,
    *,
    head_dim: int,
    order: Order | None = None,
    interpret: bool = False,
) -> Sequence[Float[Array, "_U S _D"]]:
    """Returns the arrays of `layout` with the heads of `columns`, each 128 lanes wide.

    `order` says which head goes to each of `layout.slots()`, or PAD, where that is not known
    before the program runs.
    """
    if columns.finished and not layout.moves and order is None:
        return [columns.values]
    batch, _, width = columns.values.shape
    assert (batch, width) == (layout.batch, layout.head_count * head_dim), (columns, layout)
    move = Move(layout=layout, head_dim=head_dim, interpret=interpret)
    return _scatter(move, columns, order)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Everything about a pass that is not an array."""

    layout: HeadLayout
    head_dim: int
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(move: Move, columns: ProjectedHeads, order: Order | None) -> list[Array]:
    """Returns the arrays of the layout; their gradient moves back, then turns and norms back."""
    layout, head_dim = move.layout, move.head_dim
    batch, rows, width = columns.values.shape
    size = _block_rows(rows, batch * width * columns.values.dtype.itemsize)
    inputs, specs = _inputs(columns, size, head_dim)
    arrays = _call(
        functools.partial(_place, columns, layout, head_dim),
        name="qk_norm_rope_scatter",
        order=order,
        inputs=inputs,
        in_specs=specs,
        outputs=[(blocks, rows, slots * head_dim) for blocks, slots in layout.arrays],
        block_rows=size,
        operations=_operations(columns, order),
        interpret=move.interpret,
    )
    return [*arrays]


def _scatter_forward(
    move: Move, columns: ProjectedHeads, order: Order | None
) -> tuple[list[Array], tuple[ProjectedHeads, Order | None]]:
    return _scatter(move, columns, order), (columns, order)


def _scatter_backward(
    move: Move, saved: tuple[ProjectedHeads, Order | None], d_arrays: list[Array]
) -> tuple[ProjectedHeads, None]:
    columns, order = saved
    return pending_gradient(columns, _gather(move, d_arrays, order), move.head_dim), None


_scatter.defvjp(_scatter_forward, _scatter_backward)


def gather_heads(
    arrays: Sequence[Float[Array, "_U S _D"]],
    layout: HeadLayout,
    *,
    head_dim: int,
    order: Order | None = None,
    interpret: bool = False,
) -> Float[Array, "B S D"]:
    """Returns columns: the inverse of the move of `qk_norm_rope_scatter`."""
    if not layout.moves and order is None:
        return arrays[0]
    return _gather(Move(layout=layout, head_dim=head_dim, interpret=interpret), [*arrays], order)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(move: Move, arrays: list[Array], order: Order | None) -> Array:
    """Returns columns; their gradient goes to the slots, and is zero where no head is."""
    layout, head_dim = move.layout, move.head_dim
    rows, width = arrays[0].shape[1], layout.head_count * head_dim
    size = _block_rows(rows, layout.batch * width * arrays[0].dtype.itemsize)
    (joined,) = _call(
        functools.partial(_join, layout, head_dim),
        name="gather_heads",
        order=order,
        inputs=arrays,
        in_specs=[_rows_spec(array.shape, size) for array in arrays],
        outputs=[(layout.batch, rows, width)],
        block_rows=size,
        operations=0,
        interpret=move.interpret,
    )
    return joined


def _gather_forward(
    move: Move, arrays: list[Array], order: Order | None
) -> tuple[Array, Order | None]:
    return _gather(move, arrays, order), order


def _gather_backward(move: Move, order: Order | None, d_columns: Array) -> tuple[list[Array], None]:
    return _scatter(move, ProjectedHeads(values=d_columns), order), None


_gather.defvjp(_gather_forward, _gather_backward)


def _block_rows(rows: int, row_bytes: int) -> int:
    most = max(1, BLOCK_BYTES // row_bytes // ROWS_AT_ONCE) * ROWS_AT_ONCE
    return min(most, -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE)


def _rows_spec(shape: tuple[int, ...], size: int) -> pl.BlockSpec:
    return pl.BlockSpec((shape[0], size, shape[2]), lambda i, *_: (0, i, 0))


def _inputs(
    columns: ProjectedHeads, size: int, head_dim: int
) -> tuple[list[Array], list[pl.BlockSpec]]:
    """Returns the inputs of the kernel: columns, then the gain, then cosines and signed sines."""
    inputs, specs = [columns.values], [_rows_spec(columns.values.shape, size)]
    if columns.gain is not None:
        inputs.append(columns.gain.astype(jnp.float32)[None])
        specs.append(pl.BlockSpec((1, columns.gain.shape[0]), lambda i, *_: (0, 0)))
    if columns.cosines is not None and columns.sines is not None:
        # Turning is x * cos + swapped(x) * sin, if the sine of the first half is negative.
        inputs.append(jnp.concatenate([columns.cosines] * 2, axis=1))
        inputs.append(jnp.concatenate([-columns.sines, columns.sines], axis=1))
        specs += [pl.BlockSpec((size, head_dim), lambda i, *_: (i, 0))] * 2
    return inputs, specs


def _operations(columns: ProjectedHeads, order: Order | None) -> int:
    """Returns the slots of vector units that the machine code takes, of four in a cycle.

    For tpu7x it has 320 bundles for the norm of 32 rows of 40 heads, 527 with the rotation, and 46
    where rows are only moved; 537 with both and an order, whose lanes are looked up. A slot for
    each number is 40 bundles.
    """
    quarters = 4 + (28 if columns.gain is not None else 0)
    quarters += 21 if columns.cosines is not None else 0
    if order is not None:
        quarters += 1 if columns.gain is not None else 8
    return columns.values.size * quarters // 4


def _call(
    kernel: Any,
    *,
    name: str,
    order: Order | None,
    inputs: list[Array],
    in_specs: list[pl.BlockSpec],
    outputs: list[tuple[int, ...]],
    block_rows: int,
    operations: int,
    interpret: bool,
) -> Sequence[Array]:
    first = inputs[0]
    # Under shard_map the result varies over the mesh axes that the columns vary over.
    varies = jax.typeof(first).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(out, first.dtype, manual_axis_type=varies) for out in outputs]
    touched: list[Any] = [*inputs, *shapes]
    moved = sum(x.size * x.dtype.itemsize for x in touched)
    scalars = [] if order is None else [order]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(pl.cdiv(first.shape[1], block_rows),),
        in_specs=in_specs,
        out_specs=[_rows_spec(out, block_rows) for out in outputs],
    )
    results: Sequence[Array] = pl.pallas_call(
        functools.partial(kernel, *[None] * (not scalars)),
        grid_spec=grid_spec,
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=8 * BLOCK_BYTES
        ),
        cost_estimate=pl.CostEstimate(flops=operations, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name=name,
    )(*scalars, *inputs)
    return results


def _place(
    columns: ProjectedHeads, layout: HeadLayout, head_dim: int, order: Any, *refs: Any
) -> None:
    """Works on one block of rows, some rows at a time."""
    left = iter(refs)
    values = next(left)
    gain = next(left) if columns.gain is not None else None
    tables = [next(left), next(left)] if columns.cosines is not None else []
    outs = [*left]

    count = values.shape[1] // ROWS_AT_ONCE

    def factors_of(index: Any) -> list[Array]:
        if gain is None:
            return []
        rows = _rows(index)
        return [_inverse_rms(values[batch, rows], columns.eps) for batch in range(layout.batch)]

    def work(index: Array, factors: list[Array]) -> list[Array]:
        rows = _rows(index)
        turn = [table[rows] for table in tables]
        # One turn ahead, so that nothing waits for the MXU.
        following = factors_of(jnp.minimum(index + 1, count - 1))
        for (array, block, slot), source in _moves(layout, order, head_dim):
            x = values[source.batch, rows, source.lanes]
            if gain is not None:
                factor = _chosen(factors, source.batch)
                x = (x.astype(jnp.float32) * factor * gain[:, source.lanes]).astype(x.dtype)
            if turn:
                x = _turned(x, turn[0], turn[1])
            if source.there is not None:
                x = jnp.where(source.there, x, jnp.zeros_like(x))
            outs[array][block, rows, _lanes(slot, head_dim)] = x
        for array, block, slot in layout.empty_slots() if order is None else ():
            nothing = jnp.zeros((ROWS_AT_ONCE, head_dim), outs[array].dtype)
            outs[array][block, rows, _lanes(slot, head_dim)] = nothing
        return following

    lax.fori_loop(0, count, work, factors_of(0))


def _rows(index: Any) -> Any:
    return pl.ds(pl.multiple_of(index * ROWS_AT_ONCE, ROWS_AT_ONCE), ROWS_AT_ONCE)


class _Source(NamedTuple):
    """Batch row and lanes of a head in its columns; `there` where a slot may hold none."""

    batch: Any
    lanes: slice | pl.Slice
    there: Array | None


def _moves(layout: HeadLayout, order: Any, head_dim: int) -> Iterator[tuple[HeadPosition, _Source]]:
    """Yields the slots that may hold a head, and the source of its columns."""
    for index, (position, head) in enumerate(zip(layout.slots(), layout.order(), strict=True)):
        if order is not None:
            yield position, _source(order[index], layout, head_dim)
        elif head != PAD:
            batch, column = divmod(head, layout.head_count)
            yield position, _Source(batch, _lanes(column, head_dim), None)


def _source(head: Array, layout: HeadLayout, head_dim: int) -> _Source:
    """Returns the source of a head that is known when the program runs."""
    there = head != PAD if layout.empty_slots() else None
    head = head if there is None else jnp.maximum(head, 0)
    batch = 0 if layout.batch == 1 else lax.div(head, jnp.int32(layout.head_count))
    start = (head - batch * layout.head_count) * head_dim
    return _Source(batch, pl.ds(pl.multiple_of(start, head_dim), head_dim), there)


def _chosen(factors: Sequence[Array], batch: Any) -> Array:
    """Returns the factor of a batch row."""
    if isinstance(batch, int):
        return factors[batch]
    chosen = factors[0]
    for row, factor in enumerate(factors[1:], start=1):
        chosen = jnp.where(batch == row, factor, chosen)
    return chosen


def _lanes(head: int, head_dim: int) -> slice:
    return slice(head * head_dim, (head + 1) * head_dim)


def _inverse_rms(x: Array, eps: float) -> Array:
    """Returns [rows, 1]: one over the root mean square of each row.

    The squares are the diagonal of x x^T: the MXU, which has nothing else to do here, multiplies
    bfloat16 exactly and adds in float32. Vector units would take a fifth of their time for it.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    products = lax.dot_general(
        x,
        x,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    row, column = (lax.broadcasted_iota(jnp.int32, products.shape, axis) for axis in range(2))
    squares = jnp.sum(jnp.where(row == column, products, 0.0), axis=1, keepdims=True)
    return lax.rsqrt(squares * (1.0 / x.shape[1]) + eps)


def _turned(x: Array, cosines: Array, sines: Array) -> Array:
    wide = x.astype(jnp.float32)
    swapped = pltpu.roll(wide, wide.shape[1] // 2, 1)
    return (wide * cosines + swapped * sines).astype(x.dtype)


def _join(layout: HeadLayout, head_dim: int, order: Any, *refs: Any) -> None:
    """Copies one block of rows, some rows at a time."""
    *arrays, out = refs

    @pl.loop(0, out.shape[1] // ROWS_AT_ONCE)
    def _(index: Array) -> None:
        rows = _rows(index)
        for (array, block, slot), source in _moves(layout, order, head_dim):
            x = arrays[array][block, rows, _lanes(slot, head_dim)]
            store = functools.partial(_store, out, (source.batch, rows, source.lanes), x)
            store() if source.there is None else pl.when(source.there)(store)


def _store(out: Any, where: Any, x: Array) -> None:
    out[where] = x
