"""Q.K^T in float8 (e4m3): lossy, for chips whose MXUs multiply it twice as fast.

A head of 128 fills half of an MXU's depth of 256, so two float8 pieces of a key cost no more than
one: k = high + low is as good as bfloat16, and only the queries lose bits (4 of their 8).

    keys      less their mean, over a power of two per head that brings the largest to 448 at most;
              what the first piece leaves is the second. |k - high - low| <= 2**-8 |k|, or 2**-17 of
              the head's largest |k| if that is more
    queries   over a power of two of their own, so that the largest element of each lies in
              (224, 448]; |q - piece| <= 2**-4 |q|, or 2**-17 of the query's largest |q|

float8 is floating point, so powers of two cost no precision; scores are multiplied by both scales.

Keys for a product in float8: smoothed, scaled, in two pieces, and four of them to a word.

Words lie as the MXU takes them, whatever the number of keys; rows of single bytes would be taken
apart and put together again for every tile of queries. On heads of whole lanes one Pallas pass over
HBM does it all; XLA takes forty times as long for the bytes of words.
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
PIECES = 2
KEYS_PER_WORD = 4
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


def two_pieces(x: Float[Array, "..."]) -> tuple[Array, Array]:
    """Returns float8 numbers whose sum is close to x; zeros for what is too large or no number."""
    # Only keys outside the mask are.
    x = jnp.where(jnp.abs(x) <= LARGEST, x, 0.0)
    high = x.astype(FP8)
    return high, (x - high.astype(jnp.float32)).astype(FP8)


def fp8_queries(qt: Float[Array, "H S"]) -> tuple[Array, Array]:
    """Returns transposed, scaled queries once per piece of a key, and the scale of each."""
    scale = power_of_two(jnp.max(jnp.abs(qt), axis=0, keepdims=True))
    piece = (qt * inverse(scale)).astype(FP8)
    return jnp.concatenate([piece] * PIECES, axis=0), scale


ROWS_AT_ONCE = 32
"""Keys that are worked on together: one register of float8."""
BLOCK_BYTES = 2 * MIB
"""What one block may hold; it is there four times, coming and going, twice each."""
OPERATIONS = 10
"""Slots of vector units that the machine code takes for an element, of four in a cycle."""


class Fp8Keys(NamedTuple):
    """Both pieces of every key side by side, four keys to a word, and the scale of each head.

    Keys are filled up to 32s, so that words lie in whole registers and no exchange moves them.
    """

    words: Int32[Array, "B _ K D"]
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
    """Returns keys less a mean in pieces; both are of all keys, wherever they are."""
    split = _in_one_pass if k.shape[3] % LANES == 0 else _in_plain_code
    return Fp8Keys(words=split(k, mean, inverse(scale), interpret), scale=scale)


def _in_plain_code(k: Array, mean: Array, factor: Array, _: Any) -> Array:
    wide = (k.astype(jnp.float32) - mean[:, None]) * factor[:, None, :, None]
    return in_words(jnp.concatenate(two_pieces(wide), axis=3))


def in_words(pieces: Float[Array, "B T K D"]) -> Int32[Array, "B _ K D"]:
    """Returns four keys after each other as the bytes of one row of words."""
    batch, keys, *rest = pieces.shape
    pieces = jnp.pad(pieces, ((0, 0), (0, -keys % ROWS_AT_ONCE), (0, 0), (0, 0)))
    fours = pieces.reshape(batch, -1, KEYS_PER_WORD, *rest)
    return lax.bitcast_convert_type(jnp.moveaxis(fours, 2, -1), jnp.int32)


def _in_one_pass(k: Array, mean: Array, factor: Array, interpret: Any) -> Array:
    batch, keys, heads, width = k.shape
    size = _block_rows(keys, heads * width * k.dtype.itemsize)
    per_feature = [x.reshape(batch, 1, -1) for x in (mean, jnp.repeat(factor, width, axis=1))]
    rows = round_up(keys, ROWS_AT_ONCE) // KEYS_PER_WORD
    # Under shard_map the result varies over the mesh axes that the keys vary over.
    varies = jax.typeof(k).manual_axis_type
    shape = (batch, rows, heads * width * PIECES)
    inputs = [k.reshape(batch, keys, -1), *per_feature]
    moved = sum(x.size * x.dtype.itemsize for x in inputs) + 4 * batch * rows * shape[2]
    words: Array = pl.pallas_call(
        functools.partial(_split, width),
        grid=(batch, pl.cdiv(keys, size)),
        in_specs=[
            pl.BlockSpec((None, size, heads * width), lambda b, i: (b, i, 0)),
            *[pl.BlockSpec((None, 1, heads * width), lambda b, i: (b, 0, 0))] * 2,
        ],
        out_specs=pl.BlockSpec((None, size // KEYS_PER_WORD, shape[2]), lambda b, i: (b, i, 0)),
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
    return words.reshape(batch, rows, heads, width * PIECES)


def _block_rows(rows: int, row_bytes: int) -> int:
    most = max(1, BLOCK_BYTES // row_bytes // ROWS_AT_ONCE) * ROWS_AT_ONCE
    return min(most, round_up(rows, ROWS_AT_ONCE))


def _split(width: int, k: Any, mean: Any, factor: Any, out: Any) -> None:
    """Works on one block of keys, some rows at a time."""
    words = ROWS_AT_ONCE // KEYS_PER_WORD

    @pl.loop(0, k.shape[0] // ROWS_AT_ONCE)
    def _(index: Array) -> None:
        rows = pl.ds(pl.multiple_of(index * ROWS_AT_ONCE, ROWS_AT_ONCE), ROWS_AT_ONCE)
        to = pl.ds(pl.multiple_of(index * words, words), words)
        for start in range(0, k.shape[1], width):
            lanes = slice(start, start + width)
            x = (k[rows, lanes].astype(jnp.float32) - mean[:, lanes]) * factor[:, lanes]
            for piece, value in enumerate(two_pieces(x)):
                first = start * PIECES + piece * width
                out[to, first : first + width] = pltpu.bitcast(value, jnp.int32)
