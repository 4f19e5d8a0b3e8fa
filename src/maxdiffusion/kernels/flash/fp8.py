"""Q.K^T in float8 (e4m3): lossy, for chips whose MXUs multiply it twice as fast.

A head of 128 fills half of an MXU's depth of 256, so two float8 pieces of a key cost no more than
one: k = high + low is as good as bfloat16, and only the queries lose bits (4 of their 8).

    keys      less their mean, over a power of two per head that brings the largest to 448 at most;
              what the first piece leaves is the second. |k - high - low| <= 2**-8 |k|, or 2**-17 of
              the head's largest |k| if that is more
    queries   over a power of two of their own, so that the largest element of each lies in
              (224, 448]; |q - piece| <= 2**-4 |q|, or 2**-17 of the query's largest |q|

float8 is floating point, so powers of two cost no precision; scores are multiplied by both scales.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

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
    # Only keys that nobody attends to are that.
    x = jnp.where(jnp.abs(x) <= LARGEST, x, 0.0)
    high = x.astype(FP8)
    return high, (x - high.astype(jnp.float32)).astype(FP8)


def fp8_queries(qt: Float[Array, "H S"]) -> tuple[Array, Array]:
    """Returns transposed, scaled queries once per piece of a key, and the scale of each."""
    scale = power_of_two(jnp.max(jnp.abs(qt), axis=0, keepdims=True))
    piece = (qt * inverse(scale)).astype(FP8)
    return jnp.concatenate([piece] * PIECES, axis=0), scale
