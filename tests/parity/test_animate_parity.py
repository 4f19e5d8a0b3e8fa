"""Whole Animate runs against diffusers, on checkpoints made by the test."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanAnimatePipeline as TheirPipeline
from PIL import Image

from maxdiffusion import WanAnimatePipeline
from maxdiffusion.pipelines.tasks.animate import denormalised
from tests.oracle.arrays import as_numpy
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import wan22_animate, write_family
from tests.parity.whole_runs import picture

LATENTS, FRAMES = 1e-4, 1e-3
POSES = 14
SIZE = {"height": 32, "width": 48}
TWO_PROMPTS = {"prompt": ["A dancer", "“Fox” in the snow"], "negative_prompt": ["grey", "static"]}
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "static, grey"}


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
    "animate, two segments": {"segment_frame_length": 13},
    "replace, two segments, guided": {"segment_frame_length": 13, **scene(11), **GUIDED},
    "five frames taken over, two prompts, guided": {
        "segment_frame_length": 13,
        "prev_segment_conditioning_frames": 5,
        "motion_encode_batch_size": 3,
        "guidance_scale": 2.0,
        **TWO_PROMPTS,
    },
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[TheirPipeline, WanAnimatePipeline]:
    """Returns diffusers' pipeline and ours with the same weights."""
    tiny = wan22_animate(
        31,
        transformer=TransformerSize(heads=3, head_dim=20, layers=2, ffn=72),
        vae=VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
        every=1,
    )
    folder = write_family(tmp_path_factory.mktemp("animate"), tiny)
    theirs = TheirPipeline.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    return theirs, WanAnimatePipeline.from_pretrained(folder)


@pytest.mark.parametrize("name", CASES)
def test_latents_and_frames_equal_those_of_diffusers(
    name: str, pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = pair
    settings = {
        "image": picture(1, 61, 44),
        "pose_video": video(100, POSES, 50, 36),
        "face_video": video(300, POSES, 40, 40),
        "prompt": "A small robot walks &amp; looks back",
        "num_inference_steps": 3,
        **SIZE,
        **CASES[name],
    }
    their_latents = recorded(monkeypatch, theirs.vae, "decode", lambda given, made: given)
    our_latents = recorded(monkeypatch, ours, "final_latents", lambda given, made: made)
    expected = theirs(**settings, generator=generator(), output_type="np").frames
    frames = ours(**settings, latents=noise_of_segments(settings, 2), output_type="np").frames
    assert len(our_latents) == len(their_latents) == 2
    for actual, decoded in zip(our_latents, their_latents, strict=True):
        whole = denormalised(actual, ours.builder.spec.vae)
        # diffusers decodes without the frame of the character.
        np.testing.assert_allclose(
            np.moveaxis(whole, -1, 1)[:, :, 1:], as_numpy(decoded), rtol=0, atol=LATENTS
        )
    assert frames.shape[1] == POSES
    np.testing.assert_allclose(frames, expected, rtol=0, atol=FRAMES)


def recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, pick) -> list[Any]:
    """Returns a list that gets a value of every call of a method: its argument or its result."""
    seen, method = [], getattr(owner, name)

    def call(given: Any, *others: Any, **options: Any) -> Any:
        made = method(given, *others, **options)
        seen.append(pick(given, made))
        return made

    monkeypatch.setattr(owner, name, call)
    return seen


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def noise_of_segments(settings: dict[str, Any], segments: int) -> list[np.ndarray]:
    """Returns the noise that diffusers draws for the segments, one after the other."""
    drawn = generator()
    frames = (settings["segment_frame_length"] - 1) // 4 + 2
    videos = len(settings["prompt"]) if isinstance(settings["prompt"], list) else 1
    shape = (videos, 16, frames, SIZE["height"] // 8, SIZE["width"] // 8)
    return [torch.randn(shape, generator=drawn).numpy() for _ in range(segments)]


def test_latent_output_is_the_last_segment_as_diffusers_returns_it(pair) -> None:
    theirs, ours = pair
    settings = {
        "image": picture(1, 48, 32),
        "pose_video": video(100, 3, 48, 32),
        "face_video": video(300, 2, 32, 32),
        "prompt": "A dancer",
        "num_inference_steps": 1,
        "segment_frame_length": 13,
        **SIZE,
    }
    expected = theirs(**settings, generator=generator(), output_type="latent").frames
    latents = ours(**settings, latents=noise_of_segments(settings, 1), output_type="latent").frames
    np.testing.assert_allclose(latents, as_numpy(expected), rtol=0, atol=LATENTS)
