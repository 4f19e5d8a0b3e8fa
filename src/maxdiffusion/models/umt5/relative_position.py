"""Buckets of relative positions: exact near by, logarithmic far away, a set for each direction."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.models.umt5.config import Umt5Config


def relative_buckets(offsets: np.ndarray, *, buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each offset (key position minus query position).

    Half of the buckets are for keys after the query. Within a direction the first half hold one
    distance each, the others grow by a constant factor, and the last holds all that is farther.
    """
    one_way = buckets // 2
    exact = one_way // 2
    distance = np.abs(offsets)
    # float32, as transformers computes it, so that a distance on the edge falls on the same side
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    growth = np.log(ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (growth * np.float32(one_way - exact)).astype(np.int32)
    bucket = np.where(distance < exact, distance, np.minimum(far, one_way - 1))
    return (bucket + one_way * (offsets > 0)).astype(np.int32)


def position_bias(
    table_KN: Float[Array, "K N"], length: int, config: Umt5Config
) -> Float[Array, "N T T"]:
    """What each head adds to the score of every (query, key) pair of a text of `length` tokens."""
    offsets = np.arange(1 - length, length)
    buckets = relative_buckets(offsets, buckets=config.buckets, max_distance=config.max_distance)
    by_offset = table_KN[buckets]
    positions = jnp.arange(length)
    pairs = positions[None, :] - positions[:, None] + length - 1
    return jnp.moveaxis(by_offset[pairs], -1, 0)
