"""Q.K^T in float8 (e4m3): lossy, for chips whose MXUs multiply it twice as fast.

A head of 128 fills half of an MXU's depth of 256, so a key as the sum of two float8 terms costs no
more than one: k = hi + lo is as good as bfloat16, and only the queries lose bits (4 of their 8).

    keys      less their mean, over a power of two per head that brings the largest to 448 at most;
              lo is the rounding error of hi. |k - hi - lo| <= 2**-8 |k|, or 2**-17 of the head's
              largest |k| if that is more
    queries   over a power of two of their own, so that the largest element of each is in
              (224, 448]; their rounding error is at most 2**-4 |q|, or 2**-17 of the query's
              largest |q|

float8 is floating point, so powers of two cost no precision; scores are multiplied by both scales.

Keys are smoothed, scaled, split into hi and lo, and packed, four keys to an int32. Packed rows have
the layout that the MXU reads, for any number of keys; rows of single bytes would be repacked for
every tile of queries. Where heads are whole lanes one Pallas pass over HBM does all of this; XLA
takes forty times as long to pack the bytes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int32

from maxdiffusion.kernels.flash.fixed_m import key_total
from maxdiffusion.kernels.tpu import LANES, MIB, round_up

FP8 = jnp.float8_e4m3fn
TERMS_PER_KEY = 2
"""The hi and lo terms of the split."""
KEYS_PER_INT32 = 4
LARGEST = 448.0
CHIPS = ("tpu7x",)
"""Chips whose MXUs multiply float8 faster than bfloat16."""
_LEAST = 2.0**-100
"""Keeps the scale of zeros, and its inverse, finite."""


class KeyRange(NamedTuple):
    """Least and largest element of the attended keys in every feature; -inf where there is none.

    Both are such that the maximum over shards is that of all keys.
    """

    largest: Float[Array, "B K H"]
    least_negated: Float[Array, "B K H"]

    def scale(self, mean: Float[Array, "B K H"]) -> Float[Array, "B K"]:
        """Returns the scale of each head, once its mean is taken away."""
        reach = jnp.maximum(self.largest - mean, self.least_negated + mean)
        return power_of_two(jnp.max(reach, axis=2))


def power_of_two(largest: Array) -> Array:
    """Returns the least power of two that brings `largest` down to 448 or less."""
    # 448 is 1.75 * 2**8: rounding x / 1.75 up to a power of two is a carry into the exponent.
    bits = lax.bitcast_convert_type(jnp.maximum(largest, _LEAST) / 1.75, jnp.int32)
    exponent = (bits + 0x7FFFFF) >> 23
    return lax.bitcast_convert_type((exponent - 8) << 23, jnp.float32)


def inverse(scale: Array) -> Array:
    """Returns 1 / scale of a power of two, exactly."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)


def key_range(k: Float[Array, "B T K H"], attended: Bool[Array, "B T"] | None = None) -> KeyRange:
    """Returns the range of the attended keys."""
    wide = k.astype(jnp.float32)
    there = None if attended is None else attended[:, :, None, None]
    return KeyRange(
        largest=jnp.max(wide, axis=1, where=there, initial=-jnp.inf),
        least_negated=-jnp.min(wide, axis=1, where=there, initial=jnp.inf),
    )


def hi_lo_split(x: Float[Array, "..."]) -> tuple[Array, Array]:
    """Returns float8 hi and lo whose sum is close to x; zeros for what is too large or NaN."""
    # Only keys outside the mask are.
    x = jnp.where(jnp.abs(x) <= LARGEST, x, 0.0)
    hi = x.astype(FP8)
    return hi, (x - hi.astype(jnp.float32)).astype(FP8)


def fp8_queries(qt: Float[Array, "H S"]) -> tuple[Array, Array]:
    """Returns transposed, scaled queries once per term of a key, and the scale of each."""
    scale = power_of_two(jnp.max(jnp.abs(qt), axis=0, keepdims=True))
    quantised = (qt * inverse(scale)).astype(FP8)
    return jnp.concatenate([quantised] * TERMS_PER_KEY, axis=0), scale


ROWS_AT_ONCE = 32
"""Keys of one pass of a loop: the rows of one float8 register."""
BLOCK_BYTES = 2 * MIB
"""Largest block; four are in VMEM: input and output, both double-buffered."""
OPERATIONS = 10
"""VPU slots per element in the machine code; a cycle has four."""


class Fp8Keys(NamedTuple):
    """Hi and lo of every key in adjacent columns, four keys packed to an int32; scale of each head.

    Keys are padded to a multiple of 32, so that packed rows fill whole registers.
    """

    packed: Int32[Array, "B _ K D"]
    scale: Float[Array, "B K"]


def fp8_keys(
    k: Float[Array, "B T K H"],
    attended: Bool[Array, "B T"] | None = None,
    *,
    interpret: Any = False,
) -> Fp8Keys:
    """Returns all keys of a call, smoothed here."""
    mean = key_total(k, attended).mean()
    return split_keys(k, mean, key_range(k, attended).scale(mean), interpret=interpret)


def split_keys(
    k: Float[Array, "B T K H"],
    mean: Float[Array, "B K H"],
    scale: Float[Array, "B K"],
    *,
    interpret: Any = False,
) -> Fp8Keys:
    """Returns the packed split of keys, less a mean; `mean` and `scale` are those of all shards."""
    split = _split_pallas if k.shape[3] % LANES == 0 else _split_xla
    return Fp8Keys(packed=split(k, mean, inverse(scale), interpret), scale=scale)


def _split_xla(k: Array, mean: Array, factor: Array, _: Any) -> Array:
    wide = (k.astype(jnp.float32) - mean[:, None]) * factor[:, None, :, None]
    return pack_keys(jnp.concatenate(hi_lo_split(wide), axis=3))


def pack_keys(split: Float[Array, "B T K D"]) -> Int32[Array, "B _ K D"]:
    """Returns rows of int32, the bytes of four consecutive keys each."""
    batch, keys, *rest = split.shape
    split = jnp.pad(split, ((0, 0), (0, -keys % ROWS_AT_ONCE), (0, 0), (0, 0)))
    fours = split.reshape(batch, -1, KEYS_PER_INT32, *rest)
    return lax.bitcast_convert_type(jnp.moveaxis(fours, 2, -1), jnp.int32)


def _split_pallas(k: Array, mean: Array, factor: Array, interpret: Any) -> Array:
    batch, keys, heads, width = k.shape
    size = _block_rows(keys, heads * width * k.dtype.itemsize)
    per_feature = [x.reshape(batch, 1, -1) for x in (mean, jnp.repeat(factor, width, axis=1))]
    rows = round_up(keys, ROWS_AT_ONCE) // KEYS_PER_INT32
    # Under shard_map the result varies over the mesh axes that the keys vary over.
    varies = jax.typeof(k).manual_axis_type
    shape = (batch, rows, heads * width * TERMS_PER_KEY)
    inputs = [k.reshape(batch, keys, -1), *per_feature]
    moved = sum(x.size * x.dtype.itemsize for x in inputs) + 4 * batch * rows * shape[2]
    packed: Array = pl.pallas_call(
        functools.partial(_split_block, width),
        grid=(batch, pl.cdiv(keys, size)),
        in_specs=[
            pl.BlockSpec((None, size, heads * width), lambda b, i: (b, i, 0)),
            *[pl.BlockSpec((None, 1, heads * width), lambda b, i: (b, 0, 0))] * 2,
        ],
        out_specs=pl.BlockSpec((None, size // KEYS_PER_INT32, shape[2]), lambda b, i: (b, i, 0)),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.int32, manual_axis_type=varies),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=8 * BLOCK_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=k.size * OPERATIONS, transcendentals=0, bytes_accessed=moved
        ),
        interpret=interpret,
        name="split_keys",
    )(*inputs)
    return packed.reshape(batch, rows, heads, width * TERMS_PER_KEY)


def _block_rows(rows: int, row_bytes: int) -> int:
    most = max(1, BLOCK_BYTES // row_bytes // ROWS_AT_ONCE) * ROWS_AT_ONCE
    return min(most, round_up(rows, ROWS_AT_ONCE))


def _split_block(width: int, k: Any, mean: Any, factor: Any, out: Any) -> None:
    """Splits and packs one block of keys, the rows of one register at a time."""
    packed_rows = ROWS_AT_ONCE // KEYS_PER_INT32

    @pl.loop(0, k.shape[0] // ROWS_AT_ONCE)
    def _(index: Array) -> None:
        rows = pl.ds(pl.multiple_of(index * ROWS_AT_ONCE, ROWS_AT_ONCE), ROWS_AT_ONCE)
        to = pl.ds(pl.multiple_of(index * packed_rows, packed_rows), packed_rows)
        for start in range(0, k.shape[1], width):
            lanes = slice(start, start + width)
            x = (k[rows, lanes].astype(jnp.float32) - mean[:, lanes]) * factor[:, lanes]
            for term, value in enumerate(hi_lo_split(x)):
                first = start * TERMS_PER_KEY + term * width
                out[to, first : first + width] = pltpu.bitcast(value, jnp.int32)
