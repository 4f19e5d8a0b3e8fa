"""First frames condition a training: the loss is that of the model, and skips what is known."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.config.load import load_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.clip import ClipVisionConfig
from maxdiffusion.models.vae import ALL_FRAMES
from maxdiffusion.pipelines.preprocess.images import first_frame_mask
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.training.data.store import check_lengths
from maxdiffusion.training.data.video_folder import ClipSize
from maxdiffusion.training.image_conditioning import (
    ImageChannels,
    KnownFirstFrame,
    NoImage,
    NoisyClips,
    first_frames,
    image_conditioning,
)
from maxdiffusion.training.loss import IMAGE_STREAM, WanLoss, add_noise, timestep_of
from maxdiffusion.training.models import vae_of
from maxdiffusion.training.wan import place_batch
from tests.training.tiny_training import (
    CLIPS,
    LATENT,
    TRANSFORMER,
    batch_of,
    flat,
    mesh_of,
    state_of,
    training,
)

MODEL = Path(__file__).parents[1] / "goldens" / "wan21_t2v"
CONFIG = Path(__file__).parents[2] / "configs" / "train_embedded.yml"
EXPERT = "transformer"
KEY = jax.random.key(11)
WIDER = replace(TRANSFORMER, in_channels=12)  # 4 noisy, 4 of the mask, 4 of the image
HALF = KnownFirstFrame(dropout=0.5)
KINDS = {"channels": (ImageChannels(), WIDER), "first_frame": (HALF, TRANSFORMER)}
# The same sums in another order: see tests/training/test_step.py.
RTOL = 1e-5


def run_of(kind, **changes):
    image, transformer = KINDS[kind]
    return training(image=image, transformer=transformer, **changes)


def clips_of(number):
    """A batch with encoded first frames, which `first_frame` does not read."""
    image = np.random.default_rng(100 + number).standard_normal((CLIPS, *LATENT, 4))
    return replace(batch_of(number), image=image.astype(np.float32))


def dropped_of(share=0.5, key=KEY, clips=CLIPS):
    key = jax.random.fold_in(key, IMAGE_STREAM)
    return np.asarray(jax.random.bernoulli(key, share, (clips,)))


@pytest.fixture(scope="module", params=KINDS)
def computed(request):
    """A run of one kind, and loss and gradient of a batch."""
    run = run_of(request.param)
    state, loss = state_of(run), run.loss(EXPERT)
    with jax.set_mesh(run.mesh):
        gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, _), gradients = gradient(state.values, clips_of(0), KEY)
    return SimpleNamespace(
        kind=request.param, run=run, state=state, loss=value, gradients=gradients
    )


@pytest.mark.slow
def test_the_loss_is_that_of_the_transformer(computed):
    """Every clip by itself, as generation calls the model: with a known frame or without."""
    run, batch = computed.run, clips_of(0)
    level_key, noise_key, text_key = jax.random.split(KEY, 3)
    levels = run.experts.levels.draw(level_key, CLIPS)
    sample = add_noise(jnp.asarray(batch.latents), levels, noise_key)
    rows = run.loss(EXPERT).text(computed.state.values, batch.captions, text_key)
    noisy = np.array(sample.latents)
    known = ~dropped_of() if computed.kind == "first_frame" else np.zeros(CLIPS, bool)
    assert computed.kind == "channels" or {*known.tolist()} == {True, False}
    noisy[known, 0] = batch.latents[known, 0]
    mask = np.broadcast_to(first_frame_mask(*LATENT), (CLIPS, *LATENT, 4))
    wide = np.concatenate([noisy, mask, batch.image], axis=-1)
    latents = wide if computed.kind == "channels" else noisy
    velocities = [velocity_of(run, computed.state, latents, levels, rows, n) for n in (0, 1)]
    errors = []
    for clip in range(CLIPS):
        first = int(known[clip])
        wrong = velocities[first][clip, first:] - np.asarray(sample.velocity)[clip, first:]
        errors.append(np.mean(wrong.astype(np.float64) ** 2))
    assert float(computed.loss) == pytest.approx(np.mean(errors), rel=RTOL)


def velocity_of(run, state, latents, levels, rows, known_frames):
    model = run.models[EXPERT].merge(state.values[EXPERT])
    with jax.set_mesh(run.mesh):
        return np.asarray(
            model(
                jnp.asarray(latents),
                timestep_of(levels),
                model.text_keys_values(rows),
                attention=run.block_attention,
                layout=run.layout,
                known_frames=known_frames,
            )
        )


@pytest.mark.slow
def test_gradients_reach_every_parameter(computed):
    for path, value in flat(computed.gradients[EXPERT]).items():
        assert np.isfinite(value).all(), path
        assert np.abs(value).max() > 0, path


def conditioned(image, key=KEY, clips=64):
    noisy, clean = (jax.random.normal(jax.random.key(n), (clips, 3, 2, 2, 4)) for n in (1, 2))
    times = jnp.arange(1.0, 1 + clips)
    given = image(NoisyClips(noisy=noisy, clean=clean, timestep=times, image=clean), key)
    return noisy, clean, given


def test_clips_without_an_image_are_text_to_video():
    noisy, clean, given = conditioned(HALF)
    dropped = np.asarray(given.counted[:, 0], bool)
    assert 16 < dropped.sum() < 48
    read = given.conditioning.model_input(noisy)
    np.testing.assert_array_equal(read[dropped], noisy[dropped])
    np.testing.assert_array_equal(read[~dropped, 0], clean[~dropped, 0])
    np.testing.assert_array_equal(read[:, 1:], noisy[:, 1:])
    np.testing.assert_array_equal(given.counted[:, 1:], 1)
    times = np.arange(1.0, 65.0)
    np.testing.assert_array_equal(given.known_timestep, np.where(dropped, times, 0))


def test_dropout_depends_on_the_key_of_the_step_alone():
    counted = [
        np.asarray(conditioned(HALF, jax.random.fold_in(KEY, step))[2].counted)
        for step in (0, 0, 1)
    ]
    np.testing.assert_array_equal(counted[0], counted[1])
    assert (counted[0] != counted[2]).any()
    for share in (0.0, 1.0):
        _, _, given = conditioned(KnownFirstFrame(dropout=share))
        np.testing.assert_array_equal(given.counted[:, 0], share)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attention", "sizes"),
    [
        ("first_frame", "ring", {"fsdp": 2, "ring": 2, "ulysses": 2}),
        ("channels", "dot_product", {"data": 2, "tensor": 4}),
    ],
)
def test_losses_are_the_same_on_one_device_and_eight(kind, attention, sizes):
    runs = [run_of(kind), run_of(kind, mesh=mesh_of(**sizes), attention=attention)]
    losses = []
    for run in runs:
        with jax.set_mesh(run.mesh):
            batch = place_batch(clips_of(0), run.mesh)
            program = jax.jit(partial(WanLoss.__call__, run.loss(EXPERT)))
            value, buckets = program(state_of(run).values, batch, KEY)
        losses.append([float(value), *np.asarray(buckets.totals)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=RTOL)


@pytest.mark.slow
def test_the_first_latent_frame_is_the_encoded_first_frame():
    """The autoencoder is causal, so that nothing but the latents of a clip has to be stored."""
    folder, spec = open_wan_folder(MODEL)
    model, values = vae_of(folder, spec)
    video = jax.random.uniform(KEY, (1, 5, 32, 32, 3), minval=-1.0, maxval=1.0)

    @jax.jit
    def encode(values, video):
        return model.merge(values).encode(video, chunk=ALL_FRAMES).mean

    whole, alone = encode(values, video), encode(values, video[:, :1])
    scale = float(jnp.abs(alone).max())
    # Both are the same sums, over up to 27 taps x 16 channels in each of some 20 layers.
    np.testing.assert_allclose(whole[:, :1], alone, atol=1e-5 * scale)
    assert float(jnp.abs(whole[:, 1:] - alone).max()) > 0.1 * scale


def test_first_frames_are_followed_by_mid_grey():
    videos = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 4, 3)).astype(np.uint8)
    signed = first_frames(videos) / np.float32(127.5) - np.float32(1)
    np.testing.assert_array_equal(signed[:, 1:], 0)
    np.testing.assert_array_equal(first_frames(videos)[:, 0], videos[:, 0])


def spec_of(**changes):
    spec = open_wan_folder(MODEL)[1]
    names = ("in_channels", "control_layers", "control_channels", "image_dim", "image_positions")
    sizes = {name: changes.pop(name) for name in names if name in changes}
    return replace(spec, transformer=replace(spec.transformer, **sizes), **changes)


def config_of(**values):
    stated = [f"{name}={value}" for name, value in values.items()]
    return load_config([str(CONFIG), *stated])


def test_the_model_decides_unless_the_config_does():
    tokens = spec_of(time_per_token=True)
    plain = config_of()
    assert image_conditioning(plain, spec_of()) == NoImage()
    assert image_conditioning(plain, spec_of(in_channels=36)) == ImageChannels()
    clip = spec_of(in_channels=36, image_dim=8, image_encoder=ClipVisionConfig())
    assert image_conditioning(plain, clip) == ImageChannels(clip_tokens=257)
    assert image_conditioning(plain, tokens) == KnownFirstFrame(dropout=0.1)
    assert image_conditioning(config_of(first_frame_dropout=0.3), tokens).dropout == 0.3
    assert image_conditioning(config_of(train_image_conditioning="none"), tokens) == NoImage()


@pytest.mark.parametrize(
    ("stated", "model", "message"),
    [
        ({"train_image_conditioning": "channels"}, {}, "the 16 input channels of this model have"),
        ({"train_image_conditioning": "none"}, {"in_channels": 36}, "include a mask"),
        ({"train_image_conditioning": "first_frame"}, {}, "lacks `expand_timesteps: true`"),
        ({"first_frame_dropout": 0.2}, {"in_channels": 36}, "first_frame_dropout=0.2"),
        ({}, {"control_layers": (0,), "control_channels": 96}, r"needs control videos \(VACE\)"),
        ({}, {"image_dim": 8, "image_positions": 514, "in_channels": 36}, "needs a last image too"),
    ],
)
def test_what_a_model_cannot_learn_is_refused(stated, model, message):
    with pytest.raises(ProblemsFound, match=message):
        image_conditioning(config_of(**stated), spec_of(**model))


def test_single_frames_are_refused_if_they_are_known():
    sizes = [ClipSize(frames=5, height=32, width=32), ClipSize(frames=1, height=32, width=32)]
    check_lengths(sizes, ImageChannels())
    with pytest.raises(ProblemsFound, match=r"clips=\['1x32x32'\]: the only frame is known"):
        check_lengths(sizes, HALF)
