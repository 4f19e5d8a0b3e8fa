"""Dense attention in plain jnp: the reference that every kernel is compared with."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Queries are taken in chunks so that one chunk's float32 scores stay within this many bytes.
SCORE_BYTES = 32 * 2**20
TILE_ROWS = 8


class Partials(NamedTuple):
    """Unnormalised attention over some of the keys: the output is o / l, comparable through m.

    o = sum_j exp(s_j - m) v_j and l = sum_j exp(s_j - m), in the base the kernel was asked for.
    """

    o: Float[Array, "B S N H"]
    m: Float[Array, "B S N"]
    l: Float[Array, "B S N"]  # noqa: E741 - the literature's letter for the denominator


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
    m = jnp.maximum(jnp.max(s, axis=-1), jnp.finfo(jnp.float32).min)
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


def chunk_length(pairs: int, q_len: int, kv_len: int) -> int:
    """How many queries of so many (batch, head) pairs keep their scores within SCORE_BYTES.

    Up to twice as many chunks as needed if they then divide the queries, best in whole tiles:
    padded queries are copied twice, 15 % of attention to 512 keys on a TPU.
    """
    most = max(1, SCORE_BYTES // (4 * pairs * kv_len))
    fewest = math.ceil(q_len / most)
    even = [q_len // n for n in range(fewest, min(2 * fewest, q_len) + 1) if q_len % n == 0]
    tiled = [length for length in even if length % TILE_ROWS == 0]
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
) -> Float[Array, "B S N H"]:
    """`dense_attention` a chunk of queries at a time.

    `sequence_shards`: the query dimension may be split over so many devices; each chunk then takes
    the same share of every device's queries, and the compiler need not move any. `pair_shards`:
    over how many devices batch and heads are split, which hold as much less of a chunk's scores.
    """
    batch, q_len, heads, width = q.shape
    local = q_len // sequence_shards
    assert local * sequence_shards == q_len, (q_len, sequence_shards)
    chunk = chunk_length(math.ceil(batch * heads / pair_shards), local, k.shape[1])
    if chunk == local:
        return dense_attention(q, k, v, scale=scale, valid=valid)
    chunks = math.ceil(local / chunk)
    padded = jnp.pad(
        q.reshape(batch, sequence_shards, local, heads, width),
        ((0, 0), (0, 0), (0, chunks * chunk - local), (0, 0), (0, 0)),
    )
    split = padded.reshape(batch, sequence_shards, chunks, chunk, heads, width)

    @jax.checkpoint
    def one(q_chunk: Float[Array, "B K S N H"]) -> Float[Array, "B K S N H"]:
        rows = q_chunk.reshape(batch, sequence_shards * chunk, heads, width)
        out = dense_attention(rows, k, v, scale=scale, valid=valid)
        return out.reshape(batch, sequence_shards, chunk, heads, width)

    out = jax.lax.map(one, jnp.moveaxis(split, 2, 0))
    joined = jnp.moveaxis(out, 0, 2).reshape(batch, sequence_shards, chunks * chunk, heads, width)
    return joined[:, :, :local].reshape(q.shape)
