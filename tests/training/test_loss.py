"""Noise levels fall where samplers look, weights ignore the batch, velocities lead to the data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion import UniPC
from maxdiffusion.training.loss import (
    BellWeighting,
    BucketLosses,
    EvenWeighting,
    NoiseLevels,
    add_noise,
    sample_losses,
    timestep_of,
)

KEY = jax.random.key(0)


def drawn(levels, count=4096):
    return np.asarray(levels.draw(KEY, count))


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("boundary", [0.875, 0.9])
def test_experts_split_the_shifted_levels_at_the_boundary(shift, boundary):
    levels = NoiseLevels(shift=shift)
    high = levels.of_expert("transformer", boundary)
    low = levels.of_expert("transformer_2", boundary)
    assert (np.asarray(timestep_of(high.draw(KEY, 4096))) >= 1000 * boundary).all()
    assert (np.asarray(timestep_of(low.draw(KEY, 4096))) < 1000 * boundary).all()
    assert high.share + low.share == pytest.approx(1)
    # Together they are the draws of one network: the share is that of an even draw, shifted.
    assert (drawn(levels) >= boundary).mean() == pytest.approx(high.share, abs=2 / 4096)


def test_levels_are_as_dense_as_a_sampler_visits_them():
    visited = np.asarray(UniPC(steps=200, shift=3.0).sigmas)[:-1]
    quantiles = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(
        np.quantile(drawn(NoiseLevels(shift=3.0)), quantiles),
        np.quantile(visited, quantiles),
        atol=3 / 200,  # the widest step
    )


def test_levels_stay_inside_and_cover_every_part():
    levels = np.sort(drawn(NoiseLevels(shift=1.0), 64))
    assert levels[0] >= 0
    assert levels[-1] < 1
    np.testing.assert_array_equal(np.floor(levels * 64), np.arange(64))


@pytest.mark.parametrize("weighting", [EvenWeighting(), BellWeighting(shift=3.0)])
def test_a_weight_does_not_depend_on_the_batch(weighting):
    levels = NoiseLevels(shift=3.0).draw(KEY, 32)
    run_distributed = np.asarray(weighting(levels))
    alone = [float(weighting(levels[i : i + 1])[0]) for i in range(32)]
    np.testing.assert_allclose(run_distributed, alone, rtol=1e-6)
    assert np.isfinite(alone).all()
    assert (run_distributed > 0).all()
    assert float(np.mean(weighting(NoiseLevels(shift=3.0).draw(KEY, 4096)))) == pytest.approx(
        1, abs=0.01
    )


def test_following_the_velocity_back_gives_the_data():
    data = jax.random.normal(jax.random.key(1), (4, 3, 2, 2, 5))
    level = NoiseLevels().draw(KEY, 4)
    sample = add_noise(data, level, jax.random.key(2))
    share = level[:, None, None, None, None]
    np.testing.assert_allclose(sample.latents - share * sample.velocity, data, atol=1e-6)
    every = jnp.ones((4, 3))
    assert float(jnp.max(sample_losses(sample.velocity, sample, every))) == 0
    far = sample_losses(sample.velocity + 2, sample, every)
    np.testing.assert_allclose(far, 4, rtol=1e-5)
    # A frame that does not count changes nothing, and the mean is over the others.
    wrong = sample.velocity.at[:, 0].add(100.0).at[:, 1].add(3.0)
    found = sample_losses(wrong, sample, every.at[:, 0].set(0.0))
    np.testing.assert_allclose(found, 9 / 2, rtol=1e-5)


def test_buckets_add_up_to_the_batch():
    losses, levels = jnp.arange(1.0, 7.0), jnp.array([0.0, 0.1, 0.13, 0.5, 0.99, 1.0])
    buckets = BucketLosses.of(losses, levels)
    assert buckets.means() == {"0-125": 1.5, "125-250": 3.0, "500-625": 4.0, "875-1000": 5.5}
    assert float(buckets.totals.sum()) == 21


@pytest.mark.parametrize("values", [{"shift": 0.0}, {"low": 0.5, "high": 0.5}, {"high": 1.2}])
def test_bad_levels_are_refused(values):
    with pytest.raises(ValueError, match="must"):
        NoiseLevels(**values)
