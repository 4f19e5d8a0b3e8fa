"""Trainings of models of the family, from folders with their own autoencoders, on video files."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from PIL import Image
from transformers import CLIPImageProcessor

from maxdiffusion import WanImageToVideoPipeline, preprocess_wan, train_wan
from maxdiffusion.config.load import load_config
from maxdiffusion.pipelines.preprocess.images import first_frame_mask
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.runtime.video import read_clip, read_video, write_video
from maxdiffusion.training.data.latent_cache import CachedClips
from maxdiffusion.training.loss import add_noise, timestep_of
from maxdiffusion.training.models import initial_state
from maxdiffusion.training.train import resolve_job
from maxdiffusion.training.wan import place_batch
from tests.oracle.arrays import as_numpy
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import (
    Vae22Size,
    make_clip,
    wan21_flf2v,
    wan21_i2v,
    wan22_ti2v,
    write_family,
)
from tests.training.interrupted import (
    SHARDED,
    assert_moments_are_sharded,
    assert_same_end,
    run_until_killed,
    shared_programs,
    weights,
)

__all__ = ["shared_programs"]
CONFIG = Path(__file__).parents[2] / "configs" / "train_embedded.yml"
TRANSFORMER = TransformerSize(heads=2, head_dim=24, layers=2, ffn=64)
FRAMES, HEIGHT, WIDTH = 5, 32, 64
CLIPS = 8

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Compiles in half the time for code that runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of short videos with captions."""
    folder = tmp_path_factory.mktemp("videos")
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    for clip in range(CLIPS):
        waves = [np.sin((columns + 3 * frame * clip) / 9 + rows / 7) for frame in range(FRAMES)]
        colours = np.stack([np.stack(waves) * size for size in (100, 60, -80)], axis=-1)
        pixels = (128 + colours).astype(np.uint8)
        write_video(folder / f"{clip}.mp4", pixels, fps=16)
        (folder / f"{clip}.txt").write_text(f"waves number {clip}")
    return folder


@pytest.fixture(scope="module")
def ti2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a 5B folder: 48 latent channels, 16 pixels a latent, patches of 2."""
    tiny = wan22_ti2v(51, transformer=TRANSFORMER, vae=Vae22Size(res_blocks=1))
    return write_family(tmp_path_factory.mktemp("ti2v"), tiny)


I2V = wan21_i2v(
    52,
    transformer=TRANSFORMER,
    vae=VaeSize(base=4, multipliers=(1, 1, 2, 2), res_blocks=1),
)


@pytest.fixture(scope="module")
def i2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of 2.1 image-to-video: a mask and an image as channels, and CLIP tokens."""
    return write_family(tmp_path_factory.mktemp("i2v"), I2V)


def arguments(model, videos, work, *more):
    stated = {
        "pretrained_model_name_or_path": model,
        "model_name": "wan2.1",
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "dataset_type": "videos",
        "train_data_dir": videos,
        "global_batch_size": CLIPS,
        "ici_data_parallelism": 4,
        "ici_fsdp_parallelism": 2,
        "train_text_encoder": "false",
        "weights_dtype": "float32",
        "learning_rate": "1e-3",
        "latent_cache_dir": work / "cache",
    }
    return [str(CONFIG), *(f"{name}={value}" for name, value in stated.items()), *more]


class Trained:
    """Runs of one model: whole, and one that is killed and continued."""

    def __init__(self, model, videos, work, *more):
        self.model, self.videos, self.work, self.more = model, videos, work, more

    def arguments(self, name, *more):
        folder = self.work / name
        return arguments(
            self.model,
            self.videos,
            self.work,
            *("max_train_steps=4", "checkpoint_every=2", SHARDED),
            f"checkpoint_dir={folder / 'checkpoints'}",
            f"export_dir={folder / 'model'}",
            f"metrics_file={folder / 'metrics.jsonl'}",
            *self.more,
            *more,
        )

    def train(self, name, *more):
        return train_wan.main(self.arguments(name, *more))

    def assert_continues_bit_for_bit(self):
        assert self.train("whole") == 0
        assert_moments_are_sharded(self.work / "whole")
        run_until_killed(self.arguments("killed"), step=4)
        assert self.train("killed") == 0
        assert_same_end(self.work / "whole", self.work / "killed")


def encoded_by_diffusers(folder: Path, frames: np.ndarray) -> np.ndarray:
    """Returns the normalised latents [F Y X C] of a video in bytes."""
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    signed = torch.tensor(frames.astype(np.float32) / 127.5 - 1).permute(3, 0, 1, 2)[None]
    with torch.no_grad():
        mean = np.moveaxis(as_numpy(vae.encode(signed).latent_dist.mode())[0], 0, -1)
    shift, scale = (np.array(vae.config[name]) for name in ("latents_mean", "latents_std"))
    return (mean - shift) / scale


def test_5b_trains_from_a_folder_and_continues_bit_for_bit(
    ti2v, videos, shared_programs, tmp_path, capsys
):
    assert preprocess_wan.main(arguments(ti2v, videos, tmp_path)) == 0
    cached = CachedClips(tmp_path / "cache")
    assert cached.latent_shape == (2, 2, 4, 48)
    frames = read_clip(videos / "3.mp4", frames=FRAMES, height=HEIGHT, width=WIDTH)
    np.testing.assert_allclose(
        cached[3]["latents"], encoded_by_diffusers(ti2v, frames), rtol=0, atol=1e-4
    )
    runs = Trained(ti2v, videos, tmp_path, shared_programs, "first_frame_dropout=0.25")
    runs.assert_continues_bit_for_bit()
    assert "25 % of the clips are text to video" in capsys.readouterr().out
    before, after = weights(ti2v), weights(tmp_path / "whole" / "model")
    assert before.keys() == after.keys()
    changed = [name for name in before if np.abs(after[name] - before[name]).max() > 0]
    assert len(changed) == len(before)
    assert_keeps_the_first_frame(tmp_path / "whole" / "model", frames)


def assert_keeps_the_first_frame(folder: Path, frames: np.ndarray) -> None:
    """The first latent frame of a generated video is that of the image, by diffusers' encoder."""
    pipeline = WanImageToVideoPipeline.from_pretrained(
        folder, settings=PipelineSettings(attention="dot_product")
    )
    made = pipeline(
        Image.fromarray(frames[0]),
        "waves",
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=1,
        guidance_scale=1.0,
        seed=3,
        output_type="latent",
    ).frames
    wanted = encoded_by_diffusers(folder, frames[:1])[0]
    np.testing.assert_allclose(np.moveaxis(made[0], 0, -1)[0], wanted, rtol=0, atol=1e-4)


def first_frame_of(videos: Path, clip: int) -> np.ndarray:
    return read_clip(videos / f"{clip}.mp4", frames=1, height=HEIGHT, width=WIDTH)[0]


def test_a_model_with_clip_trains_from_a_folder_and_continues_bit_for_bit(
    i2v, videos, shared_programs, tmp_path, capsys
):
    assert preprocess_wan.main(arguments(i2v, videos, tmp_path)) == 0
    assert_stores_what_diffusers_encodes(i2v, videos, CachedClips(tmp_path / "cache"))
    assert_the_loss_is_that_of_diffusers(i2v, videos, tmp_path)
    runs = Trained(i2v, videos, tmp_path, shared_programs)
    runs.assert_continues_bit_for_bit()
    assert "first frame as channels, and its 5 CLIP tokens" in capsys.readouterr().out
    before, after = weights(i2v), weights(tmp_path / "whole" / "model")
    assert before.keys() == after.keys()
    assert all(np.abs(after[name] - before[name]).max() > 0 for name in before)
    Image.fromarray(first_frame_of(videos, 0)).save(tmp_path / "first.png")
    sampled = ("max_train_steps=5", "sample_every=5", "num_inference_steps=1")
    image = f"image_url={tmp_path / 'first.png'}"
    assert runs.train("killed", *sampled, image, f"output_dir={tmp_path}", "export_dir=") == 0
    video, _ = read_video(tmp_path / "step_000005.mp4")
    assert video.shape == (FRAMES, HEIGHT, WIDTH, 3)


def assert_stores_what_diffusers_encodes(folder: Path, videos: Path, cached: CachedClips) -> None:
    """First frames: tokens before CLIP's last layer, and latents of the frame and mid grey."""
    processor = CLIPImageProcessor.from_pretrained(folder / "image_processor")
    clip = make_clip(I2V.clip, 10 * I2V.seed + 5)
    for number in (0, CLIPS - 1):
        frame = first_frame_of(videos, number)
        pixels = processor(images=Image.fromarray(frame), return_tensors="pt").pixel_values
        with torch.no_grad():
            tokens = clip(pixels, output_hidden_states=True).hidden_states[-2][0]
        stored = cached[number]
        np.testing.assert_allclose(stored["image_tokens"], as_numpy(tokens), rtol=0, atol=1e-4)
        shown = np.full((FRAMES, HEIGHT, WIDTH, 3), 127.5)
        shown[0] = frame
        wanted = encoded_by_diffusers(folder, shown)
        np.testing.assert_allclose(stored["image"], wanted, rtol=0, atol=1e-4)


def assert_the_loss_is_that_of_diffusers(folder: Path, videos: Path, work: Path) -> None:
    """A batch at drawn levels, with the tokens of first frames, through diffusers' transformer."""
    more = (f"checkpoint_dir={work / 'none'}", "caption_dropout=0", "max_sequence_length=512")
    stated = ("activations_dtype=float32", "disable_training_weights=true")
    config = load_config(arguments(folder, videos, work, *more, *stated))
    job, key = resolve_job(config), jax.random.key(4)
    training, batch = job.model.training, next(job.batches)
    state = initial_state(config, training, job.model.folder, job.model.spec)
    with jax.set_mesh(training.mesh):
        program = jax.jit(training.loss("transformer").__call__)
        found, _ = program(state.values, place_batch(batch, training.mesh), key)
    level_key, noise_key, _ = jax.random.split(key, 3)
    levels = training.experts.levels.draw(level_key, CLIPS)
    sample = add_noise(jnp.asarray(batch.latents), levels, noise_key)
    _, frames, rows, columns, _ = batch.latents.shape
    mask = np.broadcast_to(
        first_frame_mask(frames, rows, columns), (CLIPS, frames, rows, columns, 4)
    )
    wide = np.concatenate([np.asarray(sample.latents), mask, batch.image], axis=-1)
    text = np.zeros((CLIPS, 512, batch.captions.rows.shape[-1]), np.float32)
    text[:, : batch.captions.rows.shape[1]] = batch.captions.rows
    with torch.no_grad():
        velocity = WanTransformer3DModel.from_pretrained(folder / "transformer")(
            hidden_states=torch.tensor(np.moveaxis(wide, -1, 1)),
            timestep=torch.tensor(np.asarray(timestep_of(levels))),
            encoder_hidden_states=torch.tensor(text),
            encoder_hidden_states_image=torch.tensor(batch.image_tokens),
        ).sample
    wanted = np.moveaxis(as_numpy(velocity), 1, -1).astype(np.float64)
    error = np.mean(np.square(wanted - np.asarray(sample.velocity, np.float64)))
    # Velocities within 3e-5 of each other (test_transformer_parity.py), errors of order 1.
    assert float(found) == pytest.approx(error, rel=1e-4)


def test_first_and_last_frame_models_are_refused_before_weights_are_read(
    videos, tmp_path, monkeypatch, capsys
):
    tiny = wan21_flf2v(53, transformer=TRANSFORMER)
    folder = write_family(tmp_path / "model", tiny)
    monkeypatch.setattr(
        "maxdiffusion.checkpoints.safetensors_io.FileReader.read",
        lambda *_: pytest.fail("weights were read"),
    )
    work = tmp_path / "work"
    assert preprocess_wan.main(arguments(folder, videos, work)) == 2
    assert Trained(folder, videos, work).train("run") == 2
    said = capsys.readouterr().err
    assert said.count("this model needs a last image too (first and last frame to video)") == 2
