"""The two forms of a convolution over time give the same sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.models.vae.convolution import (
    convolve_folded,
    convolve_time,
    convolve_volume,
    with_past,
)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("window", [(3, 3, 3), (3, 1, 1), (1, 1, 1)])
def test_folded_equals_volume(step: int, window: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 7, 4, 5, 3), dtype=np.float32)
    kernel = rng.standard_normal((*window, 3, 6), dtype=np.float32)
    volume = convolve_volume(x, kernel, step=step)
    assert volume.shape == (2, (7 - window[0]) // step + 1, 4, 5, 6)
    # Sums of at most 81 products of order 1, of size 9: 81 roundings of 9 * 6e-8 at the very worst.
    for convolve in (convolve_folded, convolve_time):
        np.testing.assert_allclose(convolve(x, kernel, step=step), volume, rtol=0, atol=4e-5)


def test_the_past_of_the_first_chunk_is_zeros() -> None:
    x = jnp.ones((1, 2, 1, 1, 1))
    np.testing.assert_array_equal(with_past(x, None).ravel(), [0, 0, 1, 1])
    np.testing.assert_array_equal(with_past(x, 5 * x).ravel(), [5, 5, 1, 1])
