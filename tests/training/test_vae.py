"""An autoencoder begins as one of pictures, learns, and knows the statistics of its latents."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.vae import ALL_FRAMES, WanVae, WanVaeConfig
from maxdiffusion.models.vae.config import wan_2_2_vae
from maxdiffusion.training.random_init import vae_json
from maxdiffusion.training.step import LearningRate, first_state
from maxdiffusion.training.vae import (
    VAE,
    VaeTraining,
    as_pictures,
    divergence,
    first_bias,
    peak_signal,
    unclipped,
    with_statistics,
)
from tests.training.tiny_training import drawn_values, mesh_of, optimiser

CONFIG = WanVaeConfig(
    base_dim=4,
    z_dim=2,
    dim_mult=(1, 1),
    num_res_blocks=1,
    temperal_downsample=(True,),
    latents_mean=(0.0, 0.0),
    latents_std=(1.0, 1.0),
)


@pytest.fixture(scope="module")
def training():
    rate = LearningRate(peak=0.01, steps=100, warmup_share=0.0)
    return VaeTraining(config=CONFIG, optimiser=optimiser(learning_rate=rate), mesh=mesh_of())


@pytest.fixture(scope="module")
def values(training):
    drawn = drawn_values(training.model, training.mesh, 0)
    fixed = {"gamma": jnp.ones_like, "bias": jnp.zeros_like}  # as fresh parameters have them
    begun = {path: fixed.get(path.split(".")[-1], jnp.asarray)(v) for path, v in drawn.items()}
    return {path: first_bias(path, as_pictures(path, value)) for path, value in begun.items()}


@pytest.mark.slow
def test_a_clip_begins_as_its_pictures(training, values):
    """Frames are decoded as if each stood alone, and steps in time repeat or pick a frame."""
    video = jax.random.uniform(jax.random.key(0), (1, 3, 8, 8, 3), minval=-1)

    @jax.jit
    def run(values, video):
        vae = training.model.merge(values)
        latents = vae.encode(video, chunk=ALL_FRAMES)
        return latents.mean, latents.log_variance, vae.decode(latents.mean, chunk=ALL_FRAMES)

    mean, log_variance, decoded = run(values, video)
    first, _, alone = run(values, video[:, :1])
    last, _, _ = run(values, video[:, 2:])
    # Each is a sum of at most 4 x 27 products of size 1 in float32.
    np.testing.assert_allclose(mean[:, :1], first, atol=1e-5)
    np.testing.assert_allclose(mean[:, 1:], last, atol=1e-5)
    np.testing.assert_allclose(decoded[:, :1], alone, atol=1e-5)
    np.testing.assert_allclose(decoded[:, 1], decoded[:, 2], atol=1e-5)
    assert float(jnp.mean(log_variance)) < -3


@pytest.mark.slow
def test_it_learns(training, values):
    state = first_state({VAE: values}, training.optimiser, seed=0, mesh=training.mesh)
    video = np.zeros((2, 3, 8, 8, 3), np.uint8)
    video[0, :, 2:6, 2:6] = 200
    step, losses = training.step(), []
    for _ in range(40):
        state, report = step(state, {"video": video})
        losses.append(float(report.loss))
    assert losses[-1] < 0.5 * losses[0]
    assert {*report.figures} == {"absolute", "square", "edges", "divergence"}


# That of WAN 2.2: pixels folded by two, shortcuts around the stages, another width to decode.
FOLDED = replace(
    CONFIG, in_channels=12, out_channels=12, is_residual=True, patch_size=2, decoder_base_dim=6
)


def test_a_clip_before_clipping_has_the_pixels_of_the_decoded_one():
    vae = nnx.eval_shape(lambda: WanVae(FOLDED, rngs=nnx.Rngs(0)))
    latents = jax.ShapeDtypeStruct((1, 2, 2, 3, 2), jnp.float32)
    shapes = [nnx.eval_shape(run, vae, latents).shape for run in (unclipped, WanVae.decode)]
    assert shapes == [(1, 3, 8, 12, 3)] * 2


@pytest.mark.parametrize("config", [CONFIG, FOLDED, WanVaeConfig(), wan_2_2_vae()])
def test_a_written_config_is_read_as_it_was(config):
    assert WanVaeConfig.from_diffusers(vae_json(config)) == config


def test_divergence_is_zero_for_a_standard_normal():
    zeros = jnp.zeros((1, 1, 1, 1, 4))
    assert float(divergence(zeros, zeros)) == 0
    assert float(divergence(zeros + 2, zeros)) == 2
    assert float(divergence(zeros, zeros - 6)) == pytest.approx((np.exp(-6) + 5) / 2)


def test_statistics_make_latents_normal():
    draws = np.random.default_rng(0).standard_normal((3, 4, 5, 5, 2)) * (3.0, 0.5) + (1.0, -2.0)
    config = with_statistics(CONFIG, [draws[:1], draws[1:]])
    normal = (draws - config.latents_mean) / config.latents_std
    np.testing.assert_allclose(normal.mean(axis=(0, 1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(normal.std(axis=(0, 1, 2, 3)), 1, atol=1e-5)


def test_decibels():
    black = np.zeros((2, 2), np.uint8)
    assert peak_signal(black + 255, black) == 0
    assert peak_signal(black + 1, black) == pytest.approx(48.13, abs=0.01)
