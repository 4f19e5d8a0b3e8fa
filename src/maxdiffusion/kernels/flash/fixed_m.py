"""Softmax against a bound instead of a maximum: the bound, the gate, and smoothing of the keys.

Cauchy-Schwarz gives q_i . k_j <= ||q_i|| M with M = max_j ||k_j||, so with m_i = ||q_i|| M - C
every p_ij = 2 ** (q_i . k_j - m_i) is at most 2 ** C, and sum_j p_ij v_j / sum_j p_ij is the exact
softmax as long as float32 neither overflows nor loses what matters. Counting in powers of two:

    above   C + KEYS + VALUES_HIGH <= 127: nothing overflows; C = 88
    below   a row's largest p stays PRECISION + KEYS + VALUES_LOW above the least float32, 2**-126,
            so that all terms flushed to zero together weigh less than 2**-PRECISION of it

With b = max_i ||q_i|| M the largest p of a row is at least 2 ** (C - b + r), r its largest score.
Smoothed keys (their mean taken away, which softmax does not see) give r >= 0 up to their rounding,
hence the gate b <= C + 126 - KEYS - VALUES_LOW - PRECISION; raw keys only give r >= -b, hence half
of that. A head outside the gate runs online. The natural exponent has the same bits, each worth
ln 2.
"""

import enum
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from maxdiffusion.kernels.flash.config import Exponent, Gate

CEILING_BITS = 88
KEYS_BITS = 20
"""Up to a million keys."""
VALUES_HIGH_BITS = 19
VALUES_LOW_BITS = 8
"""The largest |v| of a head is in [2**-8, 2**19], or the head runs online."""
PRECISION_BITS = {"bfloat16": 12, "float32": 26}
LARGEST_NORM = 1e30
"""Keeps a norm finite, so that the bound of a zero query stays zero."""
NORM_SLACK = 1.01
"""Rounding of the scaled queries (2**-9) and of the norms themselves."""


class Keys(enum.Enum):
    """State of the keys: as given, or with the mean over all attended keys subtracted."""

    SMOOTHED = "smoothed"
    RAW = "raw"


class KeyTotal(NamedTuple):
    """Sum and number of attended keys; add those of several shards, then take the mean."""

    total: Float[Array, "B K H"]
    keys: Float[Array, " B"]

    def mean(self) -> Float[Array, "B K H"]:
        """Returns the mean key, zero where nothing is attended."""
        return self.total / jnp.maximum(self.keys, 1.0)[:, None, None]


class KeyNorms(NamedTuple):
    """Largest norms of a (batch, key head): of attended keys, of elements of their values.

    The maximum over shards of each is that of the whole.
    """

    key: Float[Array, "B K"]
    value: Float[Array, "B K"]


class FixedMBounds(NamedTuple):
    """Bound M of every (batch, head), and whether the head passes the gate.

    `fixed.sum()` is the number of heads that take the fast path.
    """

    key_norm: Float[Array, "B N"]
    fixed: Bool[Array, "B N"]


def key_total(k: Float[Array, "B T K H"], attended: Bool[Array, "B T"] | None = None) -> KeyTotal:
    """Returns the sum, in float32, and the number of the attended keys."""
    if attended is None:
        count = jnp.full(k.shape[0], k.shape[1], jnp.float32)
        return KeyTotal(total=jnp.sum(k, axis=1, dtype=jnp.float32), keys=count)
    keys = jnp.where(attended[:, :, None, None], k, jnp.zeros((), k.dtype))
    return KeyTotal(
        total=jnp.sum(keys, axis=1, dtype=jnp.float32),
        keys=jnp.sum(attended, axis=1, dtype=jnp.float32),
    )


def smooth_keys(
    k: Float[Array, "B T K H"],
    attended: Bool[Array, "B T"] | None = None,
    mean: Float[Array, "B K H"] | None = None,
) -> Float[Array, "B T K H"]:
    """Returns the keys less their mean over attended keys (or less `mean`, for a shard)."""
    if mean is None:
        mean = key_total(k, attended).mean()
    return (k.astype(jnp.float32) - mean[:, None]).astype(k.dtype)


def key_norms(
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    attended: Bool[Array, "B T"] | None = None,
) -> KeyNorms:
    """Returns the largest norms that the gate needs of attended keys and their values."""
    key, value = _norms(k), jnp.max(jnp.abs(v.astype(jnp.float32)), axis=3)
    if attended is not None:
        key = jnp.where(attended[:, :, None], key, 0.0)
        value = jnp.where(attended[:, :, None], value, 0.0)
    return KeyNorms(
        key=jnp.minimum(jnp.max(key, axis=1), LARGEST_NORM), value=jnp.max(value, axis=1)
    )


def query_norm(
    q: Float[Array, "B S N H"], *, exponent: Exponent = Exponent.BASE_2
) -> Float[Array, "B N"]:
    """Returns the largest norm of scaled queries of each head."""
    scale = exponent.per_nat * q.shape[3] ** -0.5
    return jnp.minimum(jnp.max(_norms(q), axis=1) * scale, LARGEST_NORM)


def _norms(x: Float[Array, "B S N H"]) -> Float[Array, "B S N"]:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=3))


def gate_bits(dtype: str, keys: Keys) -> float:
    """Returns the largest bound, in powers of two, at which fixed-m is exact to `dtype`."""
    window = CEILING_BITS + 126 - KEYS_BITS - VALUES_LOW_BITS - PRECISION_BITS[dtype]
    # A smoothed key's mean is zero up to the rounding of bfloat16, 2**-9 of its norm.
    return window / (1 + 2**-8) if keys is Keys.SMOOTHED else window / 2


def gate_heads(
    query: Float[Array, "B N"],
    norms: KeyNorms,
    *,
    dtype: str,
    keys: Keys,
    gate: Gate,
    exponent: Exponent,
) -> FixedMBounds:
    """Returns which heads may use the fixed bound for their queries, and its key norm."""
    key, value = (jnp.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in norms)
    bound = query * key * NORM_SLACK / exponent.per_bit
    fits = (value <= 2.0**VALUES_HIGH_BITS) & (value >= 2.0**-VALUES_LOW_BITS)
    fixed = (bound <= gate_bits(dtype, keys)) & (fits | (value == 0))
    if gate is Gate.FORCED:
        fixed = jnp.ones_like(fixed)
    return FixedMBounds(key_norm=key, fixed=fixed)


def fixed_m_bounds(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    attended: Bool[Array, "B T"] | None = None,
    *,
    keys: Keys = Keys.SMOOTHED,
    gate: Gate = Gate.MEASURED,
    exponent: Exponent = Exponent.BASE_2,
) -> FixedMBounds:
    """Returns the bounds of a call that holds all queries and keys (`k` as the kernel gets it)."""
    return gate_heads(
        query_norm(q, exponent=exponent),
        key_norms(k, v, attended),
        dtype=q.dtype.name,
        keys=keys,
        gate=gate,
        exponent=exponent,
    )
