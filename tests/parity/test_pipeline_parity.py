"""Whole runs against diffusers' WanPipeline, on checkpoints made by the test."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from maxdiffusion import WanPipeline
from tests.oracle.arrays import as_numpy, normal
from tests.oracle.pipeline import load_pipeline
from tests.oracle.tiny_checkpoints import (
    TextSize,
    TinyCheckpoint,
    TransformerSize,
    VaeSize,
    write_checkpoint,
)

# Velocities within 1e-5, times 2 * 6 - 1 by guidance, averaged over the steps.
TOLERANCE = 5e-5

TWO_EXPERTS = TinyCheckpoint(
    seed=123,
    transformer=TransformerSize(heads=3, head_dim=20, layers=3, ffn=88),
    vae=VaeSize(base=8, multipliers=(1, 2, 2, 2), res_blocks=1),
    text=TextSize(width=40, heads=2, head_dim=24, layers=1, ffn=72),
    boundary_ratio=0.9,
    flow_shift=7.0,
    shard_size="150KB",
)
ONE_TRANSFORMER = TinyCheckpoint(
    seed=321,
    transformer=TransformerSize(heads=2, head_dim=16, layers=1, ffn=40),
    vae=VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
    text=TextSize(width=32, heads=4, head_dim=8, layers=3, ffn=48),
    boundary_ratio=None,
    flow_shift=1.5,
    dtype=torch.float16,
)
RUNS = {
    "two experts, guided, a batch": (
        TWO_EXPERTS,
        {
            "prompt": ["A small robot walks &amp; looks back", "“Fox” — 狐 in the snow…"],
            "negative_prompt": ["ugly,   watermark", "static"],
            "height": 32,
            "width": 80,
            "num_frames": 5,
            "num_inference_steps": 5,
            "guidance_scale": 6.0,
            "guidance_scale_2": 2.5,
        },
    ),
    "one transformer, unguided, one frame": (
        ONE_TRANSFORMER,
        {
            "prompt": "x" * 700,
            "height": 16,
            "width": 48,
            "num_frames": 1,
            "num_inference_steps": 3,
            "guidance_scale": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_latents_and_frames_equal_those_of_diffusers(name: str, tmp_path: Path) -> None:
    tiny, settings = RUNS[name]
    folder = write_checkpoint(tmp_path / "model", tiny)
    batch = len(settings["prompt"]) if isinstance(settings["prompt"], list) else 1
    latent_frames = (settings["num_frames"] - 1) // 4 + 1
    shape = (batch, 16, latent_frames, settings["height"] // 8, settings["width"] // 8)
    start = normal(len(name), *shape)

    theirs = load_pipeline(folder)
    expected = as_numpy(theirs(**settings, latents=start, output_type="latent").frames)
    ours = WanPipeline.from_pretrained(folder, dtype="float32")
    latents = ours(**settings, latents=start.numpy(), output_type="latent").frames
    np.testing.assert_allclose(latents, expected, rtol=0, atol=TOLERANCE)

    expected = theirs(**settings, latents=start, output_type="np").frames
    frames = ours(**settings, latents=start.numpy(), output_type="np").frames
    np.testing.assert_allclose(frames, expected, rtol=0, atol=TOLERANCE)


def test_four_distilled_steps_equal_those_of_diffusers(tmp_path: Path) -> None:
    folder, levels = write_checkpoint(tmp_path / "model", TWO_EXPERTS), [1.0, 0.75, 0.5, 0.25]
    settings = {"prompt": "a fox", "height": 32, "width": 48, "num_frames": 5}
    start = normal(4, 1, 16, 2, 4, 6)
    theirs = load_pipeline(folder)
    theirs.scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    set_timesteps = theirs.scheduler.set_timesteps
    # Its pipelines have no argument for sigmas.
    theirs.scheduler.set_timesteps = lambda steps, device: set_timesteps(sigmas=levels)
    expected = as_numpy(
        theirs(
            **settings,
            num_inference_steps=4,
            guidance_scale=1.0,
            latents=start,
            output_type="latent",
        ).frames
    )
    theirs.scheduler.save_pretrained(folder / "scheduler")
    ours = WanPipeline.from_pretrained(folder, dtype="float32")
    latents = ours(
        **settings,
        sigmas=levels,
        boundary_step_index=2,
        guidance_scale=1.0,
        latents=start.numpy(),
        output_type="latent",
    ).frames
    np.testing.assert_allclose(latents, expected, rtol=0, atol=TOLERANCE)


def test_the_model_in_the_package_is_one_that_diffusers_runs() -> None:
    import maxdiffusion

    folder = Path(maxdiffusion.__file__).parent / "assets" / "wan_tiny"
    settings = {
        "prompt": "a red circle moves right",
        "height": 32,
        "width": 48,
        "num_frames": 1,
        "num_inference_steps": 4,
        "guidance_scale": 4.0,
    }
    start = normal(8, 1, 16, 1, 4, 6)
    expected = as_numpy(
        load_pipeline(folder)(**settings, latents=start, output_type="latent").frames
    )
    ours = WanPipeline.from_pretrained("embedded", dtype="float32")
    latents = ours(**settings, latents=start.numpy(), output_type="latent").frames
    np.testing.assert_allclose(latents, expected, rtol=0, atol=TOLERANCE)
