"""Dense attention in jnp: against numpy in float64, in chunks, with masks, and its gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels import reference

SCALE = 0.3


def arrays(q_len=20, kv_len=14, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(2, q_len, 3, 16), (2, kv_len, 3, 16), (2, kv_len, 3, 16)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def in_float64(q, k, v, valid=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.einsum("bsnh,btnh->bnst", q, k) * SCALE
    if valid is not None:
        s = np.where(np.asarray(valid)[:, None, None], s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.einsum("bnst,btnh->bsnh", p / p.sum(axis=-1, keepdims=True), v)


MASK = jnp.asarray(np.random.default_rng(1).random((2, 14)) < 0.6).at[:, 2].set(True)


@pytest.mark.parametrize("valid", [None, MASK], ids=["all keys", "masked"])
def test_equals_float64(valid):
    q, k, v = arrays()
    got = reference.dense_attention(q, k, v, scale=SCALE, valid=valid)
    # 14 keys of 16 features: a few dozen roundings of numbers of order one.
    np.testing.assert_allclose(got, in_float64(q, k, v, valid), atol=40 * 2**-24)


def test_rows_without_keys_are_zero_and_so_is_their_gradient():
    q, k, v = arrays()
    nothing = jnp.zeros((2, 14), bool)

    def loss(q, k, v):
        return jnp.sum(reference.dense_attention(q, k, v, scale=SCALE, valid=nothing))

    assert loss(q, k, v) == 0
    assert not any(np.any(grad) for grad in jax.grad(loss, argnums=(0, 1, 2))(q, k, v))


@pytest.mark.parametrize("pair_shards", [1, 2])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_chunks_change_nothing(shards, pair_shards):
    q, k, v = arrays()
    whole = reference.dense_attention(q, k, v, scale=SCALE, valid=MASK)
    # 14 keys x 3 heads x 2 batch rows x 4 bytes: three queries at a time.
    score_bytes = 3 * 14 * 3 * 2 * 4 // pair_shards
    sizes = (6 // pair_shards, 20 // shards, 14)
    assert reference.chunk_length(*sizes, score_bytes=score_bytes) < min(20 // shards, 4)
    got = reference.chunked_attention(
        *(q, k, v),
        scale=SCALE,
        valid=MASK,
        sequence_shards=shards,
        pair_shards=pair_shards,
        score_bytes=score_bytes,
    )
    np.testing.assert_allclose(got, whole, atol=8 * 2**-24)


@pytest.mark.parametrize(
    ("q_len", "heads", "expected"),
    [
        (18_904, 40, 278),  # 8 x 17 x 139: 68 chunks, where 47 would do but pad
        (75_600, 40, 400),
        (4096, 16, 1024),
        (4099, 16, 820),  # a prime: five chunks as equal as can be
        (300, 40, 300),
    ],
)
def test_chunks_divide_the_queries_if_twice_as_many_can(q_len, heads, expected):
    length = reference.chunk_length(heads, q_len, 512)
    assert length == expected
    assert 4 * heads * 512 * length <= reference.SCORE_BYTES


def test_chunks_have_the_gradient_of_the_whole():
    q, k, v = arrays()

    def loss(attention):
        return lambda *qkv: jnp.sum(attention(*qkv, scale=SCALE, valid=MASK) ** 2)

    wanted = jax.grad(loss(reference.dense_attention), argnums=(0, 1, 2))(q, k, v)
    chunked = partial(reference.chunked_attention, score_bytes=3 * 14 * 3 * 2 * 4)
    got = jax.grad(loss(chunked), argnums=(0, 1, 2))(q, k, v)
    for pair in zip(got, wanted, strict=True):
        np.testing.assert_allclose(*pair, atol=64 * 2**-24)


def test_keeps_the_dtype_of_the_queries():
    q, k, v = arrays(dtype=jnp.bfloat16)
    got = reference.chunked_attention(q, k, v, scale=SCALE)
    assert got.dtype == jnp.bfloat16
    # Only the output is rounded to bfloat16.
    np.testing.assert_allclose(
        got.astype(jnp.float32), in_float64(q, k, v), rtol=2**-8, atol=40 * 2**-24
    )
