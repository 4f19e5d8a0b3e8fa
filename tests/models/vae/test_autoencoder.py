"""The autoencoder against diffusers' results, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.vae import LatentDistribution, WanVae, WanVaeConfig

# Values of order 1 after about thirty float32 convolutions of 27 * 6..24 terms, each of which is
# brought back to order 1 by a norm.
TOLERANCE = 2e-5
Goldens = dict[str, np.ndarray]


def decode(vae: WanVae, latents: np.ndarray) -> jax.Array:
    return jax.jit(vae.decode)(latents)


@pytest.mark.slow
def test_moments_equal_those_of_diffusers(golden_vae: WanVae, goldens: Goldens) -> None:
    found = jax.jit(golden_vae.encode)(goldens["video"])
    np.testing.assert_allclose(found.moments, goldens["moments_17f"], rtol=0, atol=TOLERANCE)
    # Later frames do not change earlier ones: three latent frames are those of nine frames.
    np.testing.assert_allclose(found.mean[:, :3], goldens["mode_9f"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_an_image_is_a_video_of_one_frame(golden_vae: WanVae, goldens: Goldens) -> None:
    found = jax.jit(golden_vae.encode)(goldens["video"][:, :1])
    np.testing.assert_allclose(found.moments, goldens["moments_1f"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [pytest.param(5, "decoded_5lat", marks=pytest.mark.slow), (1, "decoded_1lat")],
)
def test_video_equals_that_of_diffusers(
    golden_vae: WanVae, goldens: Goldens, frames: int, expected: str
) -> None:
    found = decode(golden_vae, goldens["latents"][:, :frames])
    np.testing.assert_allclose(found, goldens[expected], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_bfloat16_strays_no_further_than_that_of_diffusers(
    golden_vae_bf16: WanVae, goldens: Goldens
) -> None:
    exact = goldens["decoded_5lat"]
    found = decode(golden_vae_bf16, goldens["latents"])
    assert found.dtype == jnp.bfloat16
    ours = np.abs(np.asarray(found, np.float32) - exact)
    theirs = np.abs(goldens["decoded_5lat_bf16"] - exact)
    assert ours.mean() < 1.25 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


def test_normalised_latents_of_the_statistics_are_zero_and_one() -> None:
    vae = nnx.eval_shape(lambda: WanVae(WanVaeConfig(), rngs=nnx.Rngs(0)))
    mean = np.array(vae.config.latents_mean, np.float32)
    std = np.array(vae.config.latents_std, np.float32)
    normalised = vae.normalise(jnp.stack([mean, mean + std]))
    np.testing.assert_allclose(normalised, [[0] * 16, [1] * 16], rtol=1e-6)
    np.testing.assert_allclose(vae.denormalise(jnp.ones((1, 16))), [mean + std], rtol=1e-6)


@pytest.mark.parametrize("width", [3, 16])
def test_a_latent_width_equal_to_the_channels_is_a_width(width: int) -> None:
    vae = nnx.eval_shape(lambda: WanVae(WanVaeConfig(), rngs=nnx.Rngs(0)))
    latents = jax.ShapeDtypeStruct((1, 2, 8, width, 16), jnp.float32)
    assert nnx.eval_shape(WanVae.decode, vae, latents).shape == (1, 5, 64, 8 * width, 3)


def test_samples_follow_mean_and_clamped_variance() -> None:
    means = jnp.full((1, 1, 64, 64, 1), 3.0)
    narrow = LatentDistribution(jnp.concatenate([means, jnp.full_like(means, -100.0)], axis=-1))
    np.testing.assert_array_equal(narrow.log_variance, -30.0)
    wide = LatentDistribution(jnp.concatenate([means, jnp.full_like(means, np.log(4.0))], axis=-1))
    drawn = wide.sample(jax.random.key(0))
    # 4,096 draws: the mean strays by 2/64 and the deviation by 2/90 a standard error.
    np.testing.assert_allclose([drawn.mean(), drawn.std()], [3.0, 2.0], atol=4 * 2 / 64)


@pytest.mark.parametrize("frames", [2, 4, 8, 18])
def test_frames_without_a_latent_are_refused(small_vae: WanVae, frames: int) -> None:
    with pytest.raises(ValueError, match=rf"frames={frames}: .* whole groups of 4\. Use \d+ or"):
        small_vae.encode(jnp.zeros((1, frames, 8, 8, 3)))


def test_sides_between_latents_are_refused_together(small_vae: WanVae) -> None:
    with pytest.raises(ValueError, match="multiple of 4") as error:
        small_vae.encode(jnp.zeros((1, 1, 10, 7, 3)))
    assert "video height=10" in str(error.value)
    assert "video width=7" in str(error.value)


def test_channels_first_is_refused(small_vae: WanVae) -> None:
    with pytest.raises(ValueError, match=r"latents\.shape=\(1, 16, 2, 4, 4\)"):
        small_vae.decode(jnp.zeros((1, 16, 2, 4, 4)))
