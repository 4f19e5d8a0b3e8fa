"""Norm and attention within a frame."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.vae import SpatialSharding
from maxdiffusion.models.vae import layers as blocks
from maxdiffusion.models.vae.layers import Numerics


def test_norm_of_16_bit_values_is_taken_in_float32() -> None:
    numerics = Numerics(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    norm = blocks.RmsNorm(384, numerics)
    x = np.random.default_rng(0).standard_normal((64, 384), dtype=np.float32).astype(jnp.bfloat16)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True))
    found = norm(jnp.asarray(x))
    assert found.dtype == jnp.bfloat16
    # One rounding to eight bits.
    np.testing.assert_allclose(np.asarray(found).astype(np.float64), expected, rtol=2**-8)


def test_norm_of_zeros_is_zero() -> None:
    numerics = Numerics(dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    norm = blocks.RmsNorm(4, numerics)
    np.testing.assert_array_equal(norm(jnp.zeros((2, 4))), 0)


@pytest.mark.parametrize(("start", "doubled"), [(-1, -1), (0, 1), (1, 3), (2, 5)])
def test_the_first_frame_is_the_second_of_its_pair(start: int, doubled: int) -> None:
    chunk = blocks.Chunk(start=jnp.asarray(start))
    assert chunk.doubled().start == doubled
    assert chunk.doubled().halved().start == start


def test_frames_before_the_clip_are_zeros() -> None:
    x = jnp.arange(1.0, 5.0).reshape(1, 4, 1, 1, 1)
    for start, expected in ((-1, [1, 2, 3, 4]), (0, [1, 2, 3, 4]), (3, [0, 0, 0, 4])):
        chunk = blocks.Chunk(start=jnp.asarray(start))
        np.testing.assert_array_equal(chunk.clear(x).ravel(), expected)
    first = blocks.Chunk(start=jnp.asarray(1)).keep_first(10 * x, x)
    np.testing.assert_array_equal(first.ravel(), [1, 20, 3, 4])


@pytest.mark.parametrize("most_scores", [blocks.MOST_SCORES, 2 * 2 * 3 * 18, 1])
def test_attention_is_the_same_in_any_number_of_turns(most_scores: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 6, 3, 8), dtype=np.float32)
    scores = np.einsum("bfyxc,bfuvc->bfyxuv", q, k, dtype=np.float64) / np.sqrt(8)
    weights = np.exp(scores)
    weights /= weights.sum(axis=(-2, -1), keepdims=True)
    expected = np.einsum("bfyxuv,bfuvc->bfyxc", weights, v)
    attend = jax.jit(blocks.attend_frame_by_frame, static_argnums=3, static_argnames="most_scores")
    found = attend(q, k, v, SpatialSharding(), most_scores=most_scores)
    # Means of 18 values of order 1, weights from scores with eight products each.
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)
