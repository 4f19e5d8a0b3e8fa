"""Whole runs of VACE and of video to video against diffusers, on checkpoints made by the test."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanVACEPipeline as TheirVace
from diffusers import WanVideoToVideoPipeline as TheirVideoToVideo
from PIL import Image

from maxdiffusion import WanVACEPipeline, WanVideoToVideoPipeline
from maxdiffusion.errors import ProblemsFound
from tests.oracle.arrays import as_numpy, normal
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize, wan21_t2v, write_checkpoint
from tests.oracle.tiny_family import wan21_vace, wan22_vace, write_family
from tests.parity.whole_runs import TOLERANCE, compare_runs, picture

SMALL: dict[str, Any] = {
    "transformer": TransformerSize(heads=3, head_dim=20, layers=3, ffn=72),
    "vae": VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
}
GUIDED = {"num_inference_steps": 3, "guidance_scale": 5.0, "negative_prompt": "static, grey"}
WIDTH, HEIGHT = 48, 32


def clip(frames: int, seed: int = 1) -> list[Image.Image]:
    return [picture(seed + frame, WIDTH, HEIGHT) for frame in range(frames)]


def masks(frames: int) -> list[Image.Image]:
    """Returns boxes that move, with grey edges: a mask has values between black and white."""
    drawn = np.zeros((frames, HEIGHT, WIDTH), np.uint8)
    for frame, one in enumerate(drawn):
        one[4:20, 3 + frame : 25 + frame] = 128
        one[6:18, 5 + frame : 23 + frame] = 255
    return [Image.fromarray(one) for one in drawn]


VACE_RUNS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "video, mask, two references": (
        wan21_vace(21, control_layers=(0, 2), **SMALL),
        2,
        {
            "video": clip(5),
            "mask": masks(5),
            "reference_images": [picture(7, 40, 64), picture(8, 80, 24)],
            "num_frames": 5,
            "conditioning_scale": [0.8, 1.4],
        },
    ),
    "prompt alone": (wan21_vace(22, control_layers=(0, 2), **SMALL), 0, {"num_frames": 5}),
    "a shorter video": (
        wan21_vace(23, control_layers=(0,), **SMALL),
        0,
        {"video": clip(5), "num_frames": 9, "conditioning_scale": 0.7},
    ),
    "two experts, one reference, unguided": (
        wan22_vace(24, control_layers=(0, 1), **SMALL),
        1,
        {
            "video": clip(5),
            "reference_images": picture(9, 48, 32),
            "num_frames": 5,
            "guidance_scale": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", VACE_RUNS)
def test_vace_equals_diffusers(name: str, tmp_path: Path) -> None:
    tiny, references, chosen = VACE_RUNS[name]
    folder = write_family(tmp_path / "model", tiny)
    settings = {"prompt": "a fox", "height": HEIGHT, "width": WIDTH, **GUIDED, **chosen}
    frames = (settings["num_frames"] - 1) // 4 + 1 + references
    start = normal(5, 1, 16, frames, HEIGHT // 8, WIDTH // 8)
    compare_runs((TheirVace, WanVACEPipeline), folder, start, settings)


@pytest.mark.parametrize(("strength", "steps"), [(0.8, 5), (0.5, 4), (1.0, 3)])
def test_video_to_video_equals_diffusers(strength: float, steps: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", wan21_t2v(25, **SMALL))
    noise = normal(6, 1, 16, 2, HEIGHT // 8, WIDTH // 8)
    settings = {
        "prompt": "a fox",
        "height": HEIGHT,
        "width": WIDTH,
        "strength": strength,
        **GUIDED,
        "num_inference_steps": steps,
    }
    theirs = TheirVideoToVideo.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    drawn: list[torch.Tensor] = []

    def given_noise(shape, **_):
        assert tuple(shape) == tuple(noise.shape)
        drawn.append(noise)
        return noise

    with pytest.MonkeyPatch.context() as patch:
        # diffusers takes no noise; its only draw in this pipeline is replaced.
        module = "diffusers.pipelines.wan.pipeline_wan_video2video.randn_tensor"
        patch.setattr(module, given_noise)
        run = theirs(video=clip(7), **settings, output_type="latent").frames
    assert len(drawn) == 1
    ours = WanVideoToVideoPipeline.from_pretrained(folder)
    latents = ours(video=clip(7), **settings, noise=noise.numpy(), output_type="latent").frames
    np.testing.assert_allclose(latents, as_numpy(run), rtol=0, atol=TOLERANCE)


def test_refusals(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", wan21_t2v(26, **SMALL))
    pipeline = WanVideoToVideoPipeline.from_pretrained(folder)
    size = {"height": HEIGHT, "width": WIDTH}
    with pytest.raises(ProblemsFound, match="leaves none of num_inference_steps"):
        pipeline(video=clip(5), prompt="x", strength=0.1, num_inference_steps=3, **size)
    with pytest.raises(ProblemsFound, match="has no control blocks"):
        WanVACEPipeline.from_pretrained(folder)(prompt="x", num_frames=5, **size)
