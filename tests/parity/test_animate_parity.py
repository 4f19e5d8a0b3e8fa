"""Whole Animate runs against diffusers, on checkpoints made by the test."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanAnimatePipeline as TheirPipeline
from PIL import Image

from maxdiffusion import WanAnimatePipeline
from tests.oracle.arrays import as_numpy
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import wan22_animate, write_family

LATENTS, FRAMES = 1e-4, 1e-3
SIZE = {"height": 32, "width": 48}
TWO_PROMPTS = {"prompt": ["A dancer", "“Fox” in the snow"], "negative_prompt": ["grey", "static"]}
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "static, grey"}


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Returns a smooth picture with some noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (3 + c) + seed) * np.cos(columns / (5 + c)) for c in range(3)]
    values = 128 + 90 * np.stack(waves, -1) + rng.normal(0, 10, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def video(seed: int, frames: int, width: int, height: int) -> list[Image.Image]:
    return [picture(seed + frame, width, height) for frame in range(frames)]


def scene(frames: int) -> dict[str, Any]:
    """Returns a background and its mask, of another size than the result."""
    masks = [frame.convert("L") for frame in video(700, frames, 60, 40)]
    return {
        "mode": "replace",
        "background_video": video(600, frames, 60, 40),
        "mask_video": masks,
    }


CASES: dict[str, dict[str, Any]] = {
    "animate, two segments": {"segment_frame_length": 9},
    "replace, two segments, guided": {"segment_frame_length": 9, **scene(11), **GUIDED},
    "five frames taken over, two prompts, guided": {
        "segment_frame_length": 13,
        "prev_segment_conditioning_frames": 5,
        "motion_encode_batch_size": 3,
        "guidance_scale": 2.0,
        **TWO_PROMPTS,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = wan22_animate(
        31,
        transformer=TransformerSize(heads=3, head_dim=20, layers=2, ffn=72),
        vae=VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
        every=1,
    )
    return write_family(tmp_path_factory.mktemp("animate"), tiny)


@pytest.mark.parametrize("name", CASES)
def test_latents_and_frames_equal_those_of_diffusers(name: str, folder: Path) -> None:
    poses = 14
    settings = {
        "image": picture(1, 61, 44),
        "pose_video": video(100, poses, 50, 36),
        "face_video": video(300, poses, 40, 40),
        "prompt": "A small robot walks &amp; looks back",
        "num_inference_steps": 3,
        **SIZE,
        **CASES[name],
    }
    theirs = TheirPipeline.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    ours = WanAnimatePipeline.from_pretrained(folder)
    start = noise_of_segments(settings, 2)
    expected, last = {}, []
    decode = theirs.vae.decode
    theirs.vae.decode = lambda latents, **options: (
        last.append(latents) or decode(latents, **options)
    )
    expected["np"] = theirs(**settings, generator=generator(), output_type="np").frames
    frames = ours(**settings, latents=start, output_type="np").frames
    assert frames.shape[1] == poses
    assert len(last) == len(start)
    np.testing.assert_allclose(frames, expected["np"], rtol=0, atol=FRAMES)
    latents = ours(**settings, latents=start, output_type="latent").frames
    np.testing.assert_allclose(latents[:, :, 1:], as_numpy(last[-1]), rtol=0, atol=LATENTS)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def noise_of_segments(settings: dict[str, Any], segments: int) -> list[np.ndarray]:
    """Returns the noise that diffusers draws for the segments, one after the other."""
    drawn = generator()
    frames = (settings["segment_frame_length"] - 1) // 4 + 2
    videos = len(settings["prompt"]) if isinstance(settings["prompt"], list) else 1
    shape = (videos, 16, frames, SIZE["height"] // 8, SIZE["width"] // 8)
    return [torch.randn(shape, generator=drawn).numpy() for _ in range(segments)]
