"""Layer norm and modulation of rows in one pass over HBM (Pallas, TPU).

XLA takes two passes: one for the mean and the square of every row, and one that normalises. Here a
block of rows is read once, its moments are computed in VMEM, and the modulated rows are written.

    layer_norm_modulate             the kernel
    reference_layer_norm_modulate   the same as plain array code, on any device; its gradient too
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from maxdiffusion.kernels.tpu import LANES, MIB, round_up

ROWS_AT_ONCE = 32
LANES_AT_ONCE = 2 * LANES
"""Rows and features that are worked on together: eight registers of float32. On tpu7x, 32 rows of
5120 take 409 bundles so, 468 with half of the lanes, 430 with twice the rows, and 504 with half."""
BLOCK_BYTES = 4 * MIB
"""Bytes of a block of rows; VMEM holds four, coming and going, two each."""


def takes(features: int) -> bool:
    """Returns whether the kernel takes rows of this many features."""
    return features % LANES_AT_ONCE == 0


def reference_layer_norm_modulate(
    x: Float[Array, "B S D"],
    scale: Float[Array, "B D"],
    shift: Float[Array, "B D"],
    *,
    eps: float,
) -> Float[Array, "B S D"]:
    """Returns norm(x) * (1 + scale) + shift, computed in float32 and rounded once."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean)
    normal = (wide - mean) * lax.rsqrt(jnp.maximum(variance, 0.0) + eps)
    return (normal * (1.0 + scale)[:, None] + shift[:, None]).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm_modulate(
    x: Float[Array, "B S D"],
    scale: Float[Array, "B D"],
    shift: Float[Array, "B D"],
    eps: float,
    interpret: bool = False,
) -> Float[Array, "B S D"]:
    """Returns `reference_layer_norm_modulate` in one pass; its gradient is left to XLA."""
    batch, rows, features = x.shape
    assert takes(features), x.shape
    size = _block_rows(rows, features * x.dtype.itemsize)
    block = pl.BlockSpec((None, size, features), lambda b, i: (b, i, 0))
    vector = pl.BlockSpec((None, 1, features), lambda b, i: (b, 0, 0))
    gain, offset = (1.0 + scale)[:, None], shift[:, None]
    result: Array = pl.pallas_call(
        functools.partial(_modulate, eps),
        grid=(batch, pl.cdiv(rows, size)),
        in_specs=[block, vector, vector],
        out_specs=block,
        # Under shard_map the result varies over the mesh axes that the rows vary over.
        out_shape=jax.ShapeDtypeStruct(
            x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=8 * BLOCK_BYTES
        ),
        cost_estimate=_cost(x),
        interpret=interpret,
        name="layer_norm_modulate",
    )(x, gain, offset)
    return result


def _forward(
    x: Array, scale: Array, shift: Array, eps: float, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    return layer_norm_modulate(x, scale, shift, eps, interpret), (x, scale, shift)


def _backward(
    eps: float, interpret: bool, saved: tuple[Array, Array, Array], d_rows: Array
) -> tuple[Array, Array, Array]:
    reference = functools.partial(reference_layer_norm_modulate, eps=eps)
    d_x, d_scale, d_shift = jax.vjp(reference, *saved)[1](d_rows)
    return d_x, d_scale, d_shift


layer_norm_modulate.defvjp(_forward, _backward)


def _block_rows(rows: int, row_bytes: int) -> int:
    most = max(1, BLOCK_BYTES // row_bytes // ROWS_AT_ONCE) * ROWS_AT_ONCE
    return min(most, round_up(rows, ROWS_AT_ONCE))


def _cost(x: Array) -> pl.CostEstimate:
    """Returns the bytes moved, and the slots of vector units that the machine code takes.

    There are four of them in a cycle: 409 bundles for 32 rows of 5120 are ten for each number.
    """
    return pl.CostEstimate(
        flops=41 * x.size // 4, transcendentals=0, bytes_accessed=2 * x.size * x.dtype.itemsize
    )


def _modulate(eps: float, x: Any, gain: Any, offset: Any, out: Any) -> None:
    """Works on one block of rows, some rows at a time."""
    rows, features = x.shape
    parts = [slice(at, at + LANES_AT_ONCE) for at in range(0, features, LANES_AT_ONCE)]

    @pl.loop(0, rows // ROWS_AT_ONCE)
    def _(index: Array) -> None:
        here = pl.ds(pl.multiple_of(index * ROWS_AT_ONCE, ROWS_AT_ONCE), ROWS_AT_ONCE)
        total = squares = jnp.zeros((ROWS_AT_ONCE, LANES_AT_ONCE), jnp.float32)
        for part in parts:
            wide = x[here, part].astype(jnp.float32)
            total, squares = total + wide, squares + wide * wide
        mean, square = (
            jnp.sum(one, axis=1, keepdims=True) * (1.0 / features) for one in (total, squares)
        )
        inverse = lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + eps)
        for part in parts:
            normal = (x[here, part].astype(jnp.float32) - mean) * inverse
            out[here, part] = (normal * gain[:, part] + offset[:, part]).astype(out.dtype)
