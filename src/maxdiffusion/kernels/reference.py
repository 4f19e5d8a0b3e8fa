"""Dense attention in plain jnp: the reference that every kernel is compared with.

cuDNN's fused attention, which jax can call on NVIDIA GPUs.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from maxdiffusion.kernels.tpu import MIB, SUBLANES

# Queries are taken in chunks so that one chunk's float32 scores stay within this many bytes.
SCORE_BYTES = 32 * MIB


class Partials(NamedTuple):
    """Unnormalised attention over some of the keys, to be merged with that over others.

    o = sum_j b**(s_j - m) v_j and l = sum_j b**(s_j - m), with scores s and shift m in units of the
    exponent b that the kernel was asked for; the attention is o / l. m need not be the largest
    score, but o and l share it, so two partials merge as m' = max(m1, m2), w_i = b**(m_i - m'),
    o' = w1 o1 + w2 o2, l' = w1 l1 + w2 l2. A head with a fixed bound has m = that bound in every
    call that got the same bounds: its weights are 1, and plain addition is enough. Without attended
    keys l = 0, o = 0 and m is finite.
    """

    o: Float[Array, "B S N H"]
    m: Float[Array, "B S N"]
    l: Float[Array, "B S N"]  # noqa: E741 - the literature's letter for the denominator


def pad_length(array: Shaped[Array, "..."], dim: int, multiple: int) -> Shaped[Array, "..."]:
    """Returns `array` with zeros appended up to the next multiple of `multiple` along `dim`."""
    missing = -array.shape[dim] % multiple
    if missing == 0:
        return array
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, missing)
    return jnp.pad(array, widths)


def scores(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None,
) -> Float[Array, "B N S T"]:
    """Scaled scores in float32; keys that do not count are -inf."""
    # Heads first, then plain matrix products: einsums over [B, S, N, H] make XLA for CPU copy the
    # scores transposed, a sixth of the time at 2,048 tokens of 12 heads x 128 on an EPYC.
    q_BNSH, k_BNHT = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)
    s = jnp.matmul(q_BNSH, k_BNHT, preferred_element_type=jnp.float32, precision="highest") * scale
    return s if valid is None else jnp.where(valid[:, None, None, :], s, -jnp.inf)


def reference_partials(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
) -> Partials:
    """Unnormalised attention over these keys; a row without keys has l = 0 and a finite m."""
    s = scores(q, k, scale=scale, valid=valid)
    # exp of a difference of infinities is NaN: rows without keys get a finite, harmless maximum.
    m = jnp.maximum(jnp.max(s, axis=-1), np.finfo(np.float32).min)
    p = jnp.exp(s - jax.lax.stop_gradient(m)[..., None])
    o_BNSH = jnp.matmul(p, v.astype(jnp.float32).transpose(0, 2, 1, 3), precision="highest")
    o = o_BNSH.transpose(0, 2, 1, 3)
    return Partials(o=o, m=m.transpose(0, 2, 1), l=jnp.sum(p, axis=-1).transpose(0, 2, 1))


def normalise(o: Float[Array, "B S N H"], l: Float[Array, "B S N"]) -> Float[Array, "B S N H"]:  # noqa: E741
    """o / l, and zero for rows that had no key."""
    # One factor per row: a comparison and a division per element would each be broadcast to them.
    factor = jnp.where(l > 0, 1.0 / jnp.where(l > 0, l, 1.0), 0.0)
    return o * factor[..., None]


def dense_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B S N H"]:
    """Attention with float32 scores and softmax, whole score matrix at once."""
    partial = reference_partials(q, k, v, scale=scale, valid=valid)
    return normalise(partial.o, partial.l).astype(q.dtype)


def chunk_length(pairs: int, q_len: int, kv_len: int, *, score_bytes: int = SCORE_BYTES) -> int:
    """Returns the queries of a chunk whose scores stay within `score_bytes`.

    Up to twice as many chunks as needed if they then divide the queries, best in whole tiles:
    padded queries are copied twice, 15 % of attention to 512 keys on a TPU.
    """
    most = max(1, score_bytes // (4 * pairs * kv_len))
    fewest = math.ceil(q_len / most)
    even = [q_len // n for n in range(fewest, min(2 * fewest, q_len) + 1) if q_len % n == 0]
    tiled = [length for length in even if length % SUBLANES == 0]
    return next(iter(tiled or even), math.ceil(q_len / fewest))


def chunked_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
    sequence_shards: int = 1,
    pair_shards: int = 1,
    score_bytes: int = SCORE_BYTES,
) -> Float[Array, "B S N H"]:
    """`dense_attention` a chunk of queries at a time.

    `sequence_shards`: devices that the query dimension is split over; each chunk then takes the
    same share of every device's queries, and the compiler need not move any. `pair_shards`:
    devices that batch and heads are split over, which hold as much less of a chunk's scores.
    """
    batch, q_len, heads, width = q.shape
    local = q_len // sequence_shards
    assert local * sequence_shards == q_len, (q_len, sequence_shards)
    pairs = math.ceil(batch * heads / pair_shards)
    chunk = chunk_length(pairs, local, k.shape[1], score_bytes=score_bytes)
    if chunk == local:
        return dense_attention(q, k, v, scale=scale, valid=valid)
    chunks = math.ceil(local / chunk)
    padded = jnp.pad(
        q.reshape(batch, sequence_shards, local, heads, width),
        ((0, 0), (0, 0), (0, chunks * chunk - local), (0, 0), (0, 0)),
    )
    split = padded.reshape(batch, sequence_shards, chunks, chunk, heads, width)

    @jax.checkpoint
    def one(q_chunk: Float[Array, "B shards S N H"]) -> Float[Array, "B shards S N H"]:
        rows = q_chunk.reshape(batch, sequence_shards * chunk, heads, width)
        out = dense_attention(rows, k, v, scale=scale, valid=valid)
        return out.reshape(batch, sequence_shards, chunk, heads, width)

    out = jax.lax.map(one, jnp.moveaxis(split, 2, 0))
    joined = jnp.moveaxis(out, 0, 2).reshape(batch, sequence_shards, chunks * chunk, heads, width)
    return joined[:, :, :local].reshape(q.shape)


HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 128


def cudnn_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B S N H"]:
    """Attention by cuDNN, differentiable; "xla" is the same call for other devices."""
    mask = None if valid is None else valid[:, None, None, :]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, implementation=implementation
    )
