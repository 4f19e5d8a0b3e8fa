"""Whole image-to-video runs against diffusers, on checkpoints made by the test."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import WanImageToVideoPipeline as TheirPipeline

from maxdiffusion import WanImageToVideoPipeline, WanPipeline
from maxdiffusion.errors import ProblemsFound
from tests.oracle.arrays import normal
from tests.oracle.pipeline import load_pipeline
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import (
    FamilyCheckpoint,
    wan21_flf2v,
    wan21_i2v,
    wan22_i2v,
    wan22_ti2v,
    write_family,
)
from tests.parity.whole_runs import TOLERANCE, compare_runs, picture

SMALL = {"transformer": TransformerSize(heads=3, head_dim=20, layers=2, ffn=72)}
SMALL_VAE = {"vae": VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1)}
GUIDED = {"num_inference_steps": 4, "guidance_scale": 5.0, "negative_prompt": "static, grey"}
PROMPT = "A small robot walks &amp; looks back"


def compare(
    folder: Path, latent: tuple[int, ...], settings: dict[str, Any], tolerance: float = TOLERANCE
) -> None:
    """Compares latents and frames of one call of both pipelines."""
    start = normal(len(settings["prompt"]), *latent)
    compare_runs((TheirPipeline, WanImageToVideoPipeline), folder, start, settings, tolerance)


CASES: dict[str, tuple[FamilyCheckpoint, tuple[int, ...], dict[str, Any]]] = {
    "2.2, two experts, guided, another aspect": (
        wan22_i2v(11, **SMALL, **SMALL_VAE),
        (1, 16, 2, 4, 10),
        {"height": 32, "width": 80, "num_frames": 5, "guidance_scale_2": 2.5, **GUIDED},
    ),
    "2.2, last image, unguided": (
        wan22_i2v(12, **SMALL, **SMALL_VAE),
        (1, 16, 3, 4, 4),
        {
            "height": 32,
            "width": 32,
            "num_frames": 9,
            "last_image": picture(2, 40, 40),
            "num_inference_steps": 3,
            "guidance_scale": 1.0,
        },
    ),
    "2.1, CLIP, two prompts": (
        wan21_i2v(13, **SMALL, **SMALL_VAE),
        (2, 16, 2, 4, 6),
        {"height": 32, "width": 48, "num_frames": 5, **GUIDED},
    ),
    "2.1, first and last image": (
        wan21_flf2v(14, **SMALL, **SMALL_VAE),
        (1, 16, 2, 6, 4),
        {
            "height": 48,
            "width": 32,
            "num_frames": 5,
            "last_image": picture(3, 33, 70),
            **GUIDED,
        },
    ),
    "5B, first frame known": (
        wan22_ti2v(15, **SMALL),
        (1, 48, 3, 2, 4),
        {"height": 32, "width": 64, "num_frames": 9, **GUIDED},
    ),
    "5B, one frame": (
        wan22_ti2v(16, **SMALL),
        (1, 48, 1, 4, 2),
        {"height": 64, "width": 32, "num_frames": 1, **GUIDED},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_latents_and_frames_equal_those_of_diffusers(name: str, tmp_path: Path) -> None:
    tiny, latent, settings = CASES[name]
    folder = write_family(tmp_path / "model", tiny)
    prompt = PROMPT if latent[0] == 1 else [PROMPT, "“Fox” in the snow"]
    if latent[0] == 2:
        settings = {**settings, "negative_prompt": ["static", "grey"]}
    settings = {"image": picture(1, 61, 44), "prompt": prompt, **settings}
    compare(folder, latent, settings)


def test_text_alone_on_a_model_for_both_equals_diffusers(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", wan22_ti2v(17, **SMALL))
    settings = {"prompt": PROMPT, "height": 32, "width": 64, "num_frames": 5, **GUIDED}
    start = normal(9, 1, 48, 2, 2, 4)
    theirs, ours = load_pipeline(folder), WanPipeline.from_pretrained(folder)
    for output in ("latent", "np"):
        expected = theirs(**settings, latents=start, output_type=output).frames
        actual = ours(**settings, latents=start.numpy(), output_type=output).frames
        np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=TOLERANCE)


def test_refusals_before_the_model_runs(tmp_path: Path) -> None:
    image, size = picture(1, 32, 32), {"height": 32, "width": 32, "num_frames": 5}
    both = WanImageToVideoPipeline.from_pretrained(
        write_family(tmp_path / "5b", wan22_ti2v(18, **SMALL))
    )
    with pytest.raises(ProblemsFound, match="last_image='given': this checkpoint knows the first"):
        both(image=image, last_image=image, prompt="x", **size)
    folder = write_family(tmp_path / "i2v", wan22_i2v(19, **SMALL, **SMALL_VAE))
    with pytest.raises(ProblemsFound, match="needs an image: use WanImageToVideoPipeline"):
        WanPipeline.from_pretrained(folder)(prompt="x", **size)
