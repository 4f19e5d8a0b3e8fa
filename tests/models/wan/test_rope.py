"""Rotations: their tables, and the property that they are for."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels.qk_prep import rotate
from maxdiffusion.models.wan.layers import axis_widths, rotation_tables


@pytest.mark.parametrize(("head_dim", "widths"), [(128, (44, 42, 42)), (32, (12, 10, 10))])
def test_widths_by_axis(head_dim, widths):
    assert axis_widths(head_dim) == widths


def test_tables_go_by_frame_row_column():
    cosines, sines = rotation_tables((3, 4, 5), 32)
    assert cosines.shape == sines.shape == (60, 16)
    assert cosines.dtype == sines.dtype == np.float32
    token = (2 * 4 + 3) * 5 + 1  # frame 2, row 3, column 1
    rates = [1e4 ** -(np.arange(0, width, 2) / width) for width in (12, 10, 10)]
    angles = np.concatenate([2 * rates[0], 3 * rates[1], 1 * rates[2]])
    np.testing.assert_allclose(cosines[token], np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sines[token], np.sin(angles), atol=1e-7)


def test_scores_depend_on_the_distance_only():
    cosines, sines = rotation_tables((1, 1, 6), 32)
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 1, 1, 1, 32)).astype(np.float32)
    everywhere = lambda x: rotate(jnp.broadcast_to(x, (1, 6, 1, 32)), cosines, sines)[0, :, 0]  # noqa: E731
    scores = everywhere(query) @ everywhere(key).T
    for distance in range(-5, 6):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert abs(scores[0, 0] - scores[0, 5]) > 1e-2


def test_pairs_are_halves_apart():
    cosines, sines = rotation_tables((1, 1, 2), 32)
    heads = jnp.zeros((1, 2, 1, 32)).at[..., 11].set(1.0)  # the first pair that turns with columns
    turned = rotate(heads, cosines, sines)[0, 1, 0]
    np.testing.assert_allclose(turned[11], np.cos(1.0), atol=1e-6)
    np.testing.assert_allclose(turned[11 + 16], np.sin(1.0), atol=1e-6)


def test_rotation_rounds_once():
    cosines, sines = rotation_tables((1, 2, 3), 32)
    heads = jnp.asarray(np.random.default_rng(1).standard_normal((1, 6, 2, 32)), jnp.bfloat16)
    exact = rotate(heads.astype(jnp.float32), cosines, sines)
    np.testing.assert_array_equal(rotate(heads, cosines, sines), exact.astype(jnp.bfloat16))
