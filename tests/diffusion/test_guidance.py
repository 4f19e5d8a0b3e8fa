"""Guidance: one batch of two, combined in the model's dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion.guidance import ClassifierFree, GuidanceScales, Unguided

LATENTS = jnp.arange(24, dtype=jnp.float32).reshape(2, 1, 2, 3, 2)


def test_prompts_come_first_and_negatives_second():
    batch = ClassifierFree().model_batch(LATENTS)
    np.testing.assert_array_equal(batch, np.concatenate([LATENTS, LATENTS]))


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.5])
def test_the_scale_moves_away_from_the_negative(scale):
    prompted, negative = LATENTS, LATENTS[::-1] * 0.5
    combined = ClassifierFree().combine(jnp.concatenate([prompted, negative]), jnp.float32(scale))
    expected = negative + scale * (prompted - negative)
    np.testing.assert_allclose(combined, expected, rtol=1e-6)


def test_the_result_keeps_the_models_dtype_and_rounds_once_per_operation():
    velocity = jnp.asarray([1.01, 0.33], jnp.bfloat16).reshape(2, 1, 1, 1, 1)
    combined = ClassifierFree().combine(velocity, jnp.float32(3.7))
    difference = velocity[0] - velocity[1]
    scaled = (jnp.float32(3.7) * difference.astype(jnp.float32)).astype(jnp.bfloat16)
    assert combined.dtype == jnp.bfloat16
    np.testing.assert_array_equal(combined[0], velocity[1] + scaled)


def test_without_guidance_nothing_changes():
    assert Unguided().model_batch(LATENTS) is LATENTS
    assert Unguided().combine(LATENTS, jnp.float32(9)) is LATENTS


def test_one_scale_above_one_is_enough():
    assert GuidanceScales(high_noise=1.0, low_noise=1.1).active
    assert not GuidanceScales(high_noise=1.0, low_noise=0.5).active
