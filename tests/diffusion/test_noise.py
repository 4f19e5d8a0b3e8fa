"""Noise depends on the seed and the size of a video, and on nothing else."""

import jax
import numpy as np

from maxdiffusion.diffusion.denoise import initial_noise

DIMS = (3, 4, 6, 16)


def test_a_video_has_the_same_noise_in_any_company():
    together = initial_noise([7, 8, 9], DIMS)
    for index, seed in enumerate((7, 8, 9)):
        np.testing.assert_array_equal(together[index], initial_noise([seed], DIMS)[0])


def test_it_is_standard_normal_drawn_channels_first():
    noise = initial_noise([5], DIMS)
    assert noise.shape == (1, 3, 4, 6, 16)
    drawn = jax.random.normal(jax.random.key(5), (1, 16, 3, 4, 6))
    np.testing.assert_array_equal(np.moveaxis(noise, -1, 1), drawn)
