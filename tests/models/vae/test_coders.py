"""Folded pixels and the shortcuts of the 2.2 autoencoder, value by value."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.models.vae.coders import AverageDown, RepeatUp, fold, unfold


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def test_pixels_are_folded_by_channel_column_row() -> None:
    # Pixel (row, column) of channel c has the value 100 c + 10 row + column.
    row, column, channel = np.meshgrid(range(2), range(2), range(3), indexing="ij")
    video = jnp.asarray(100.0 * channel + 10.0 * row + column)[None, None]
    folded = fold(video, 2)
    assert folded.shape == (1, 1, 1, 1, 12)
    np.testing.assert_array_equal(
        folded.ravel(), [100 * c + 10 * y + x for c in range(3) for x in (0, 1) for y in (0, 1)]
    )


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_unfolding_brings_the_pixels_back(patch: int) -> None:
    video = draw(2, 3, 8, 12, 3)
    folded = fold(jnp.asarray(video), patch)
    assert folded.shape == (2, 3, 8 // patch, 12 // patch, 3 * patch**2)
    np.testing.assert_array_equal(unfold(folded, patch), video)


@pytest.mark.parametrize(("channels", "time"), [(3, 2), (6, 2), (12, 1), (4, 1), (24, 2)])
def test_means_are_of_cells_and_neighbouring_channels(channels: int, time: int) -> None:
    x = draw(1, 4, 4, 6, 3)
    found = AverageDown(channels=channels, time=time, side=2)(jnp.asarray(x), False)
    assert found.shape == (1, 4 // time, 2, 3, channels)
    cell = x[0, 2 : 2 + time, 2:4, 4:6]  # frame, row, column, channel
    groups = np.moveaxis(cell, -1, 0).reshape(channels, -1)
    # The mean of at most eight values of order 1.
    np.testing.assert_allclose(found[0, 2 // time, 1, 2], groups.mean(axis=1), rtol=0, atol=5e-7)


def test_the_first_frame_is_averaged_with_zeros() -> None:
    x = jnp.asarray(draw(1, 5, 2, 2, 1))
    down = AverageDown(channels=1, time=2, side=1)
    found = down(x, True)
    np.testing.assert_allclose(found[:, 0], x[:, 0] / 2, rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], (x[:, 1] + x[:, 2]) / 2, rtol=1e-6)
    in_chunks = [down(x[:, :1], True), down(x[:, 1:3], False), down(x[:, 3:], False)]
    np.testing.assert_array_equal(jnp.concatenate(in_chunks, axis=1), found)


def test_copies_fill_channel_frame_row_column() -> None:
    x = jnp.arange(4.0).reshape(1, 1, 1, 1, 4)
    # 4 channels to 2 x (2 frames, 2 rows, 2 columns): each of them four times, in this order.
    found = RepeatUp(channels=2, time=2, side=2)(x, False)
    assert found.shape == (1, 2, 2, 2, 2)
    np.testing.assert_array_equal(
        jnp.moveaxis(found, -1, 1).reshape(4, 4), [[c] * 4 for c in range(4)]
    )


def test_the_first_frame_is_kept_once() -> None:
    x = jnp.asarray(draw(1, 3, 2, 2, 2))
    up = RepeatUp(channels=1, time=2, side=1)
    found = up(x, True)
    # One channel of two frames: channel 0 is the first frame of a pair, channel 1 the second.
    pairs = jnp.moveaxis(x, -1, 2).reshape(1, 6, 2, 2, 1)
    np.testing.assert_array_equal(found, pairs[:, 1:])
    in_chunks = [up(x[:, :1], True), up(x[:, 1:], False)]
    np.testing.assert_array_equal(jnp.concatenate(in_chunks, axis=1), found)
