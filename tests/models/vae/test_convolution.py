"""All forms of a convolution over time give the same sums and the same gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.vae.conv_impl import (
    COLUMNS,
    ROWS,
    convolve_folded,
    convolve_stacked,
    convolve_time,
    convolve_volume,
)
from maxdiffusion.models.vae.layers import CausalConv, Numerics, with_cache


@pytest.mark.parametrize(("step", "stride"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("window", [(3, 3, 3), (3, 1, 1), (1, 3, 3)])
def test_forms_equal_volume(step: int, stride: int, window: tuple[int, int, int]) -> None:
    """With taps along columns, which are five and fill the lanes better, as channels."""
    rng = np.random.default_rng(0)
    x, kernel = (
        jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
        for shape in ((2, 7, 4, 5, 3), (*window, 3, 6))
    )
    side = window[1] // 2
    padding = ((side, side), (side, 0))
    volume = convolve_volume(x, kernel, step=step, stride=stride, padding=padding)
    assert volume.shape == (
        2,
        (7 - window[0]) // step + 1,
        4 // stride,
        -(-(5 - side) // stride),
        6,
    )
    # Sums of at most 81 products of order 1, of size 9: 81 roundings of 9 * 6e-8 at the very worst.
    for convolve in (convolve_folded, exact_stacked, convolve_time):
        found = convolve(x, kernel, step=step, stride=stride, padding=padding)
        np.testing.assert_allclose(found, volume, rtol=0, atol=4e-5)


def exact_stacked(*inputs: Any, **more: Any) -> jax.Array:
    """Returns the convolution of TPUs without their rounding."""
    with jax.default_matmul_precision("highest"):
        return convolve_stacked(*inputs, **more)


def test_the_side_that_fills_the_lanes_better_is_stacked() -> None:
    """Rows and columns change places, and the operands are rounded as a TPU rounds them."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((1, 3, 6, 4, 3), dtype=np.float32))
    kernel = jnp.asarray(rng.standard_normal((3, 3, 3, 3, 2), dtype=np.float32))
    kernel = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    padding = ((1, 1), (0, 1))
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    for stride in (1, 2):
        volume = convolve_volume(rounded, kernel, step=1, stride=stride, padding=padding)
        for dim in (None, ROWS, COLUMNS):
            found = convolve_stacked(x, kernel, step=1, stride=stride, padding=padding, stacked=dim)
            np.testing.assert_allclose(found, volume, rtol=0, atol=4e-5)
    text = jax.jit(partial(convolve_stacked, step=1, padding=padding)).lower(x, kernel).as_text()
    assert "tensor<3x6x4x9xf32>" in text  # frames, rows, columns, taps of rows


def test_stacked_taps_have_the_gradients_of_the_volume() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 4, 3, 4, 2), dtype=np.float32)
    kernel = rng.standard_normal((3, 3, 3, 2, 3), dtype=np.float32)
    pull = rng.standard_normal((1, 2, 3, 4, 3), dtype=np.float32)

    def pulled(convolve):  # type: ignore[no-untyped-def]
        def total(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return jnp.sum(convolve(x, kernel, step=1, padding=((1, 1), (1, 1))) * pull)

        return jax.jit(jax.grad(total, argnums=(0, 1)))(x, kernel)

    # Sums of at most 81 products of order 1, as above.
    for found, expected in zip(pulled(exact_stacked), pulled(convolve_volume), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-5)


def test_the_past_of_the_first_chunk_is_zeros() -> None:
    x = jnp.ones((1, 2, 1, 1, 1))
    np.testing.assert_array_equal(with_cache(x, None).ravel(), [0, 0, 1, 1])
    np.testing.assert_array_equal(with_cache(x, 5 * x).ravel(), [5, 5, 1, 1])


@pytest.mark.slow
def test_a_first_single_frame_needs_only_the_last_tap() -> None:
    numerics = Numerics(dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    conv = CausalConv((3, 3, 3, 4, 5), numerics)
    x = np.random.default_rng(1).standard_normal((2, 1, 6, 6, 4), dtype=np.float32)
    alone, cache = conv(jnp.asarray(x), None)
    first_of_two = conv(jnp.asarray(np.concatenate([x, x], axis=1)), None)[0][:, :1]
    # Sums of 36 products of order 1 beside 72 exact zeros: 36 roundings of 6 * 6e-8 at the worst.
    np.testing.assert_allclose(alone, first_of_two, rtol=0, atol=1.3e-5)
    np.testing.assert_array_equal(cache[:, 0], 0)
    np.testing.assert_array_equal(cache[:, 1], x[:, 0])
