"""MagCache against diffusers' own, on a checkpoint made by the test: decisions and latents."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import MagCacheConfig

from maxdiffusion import WanPipeline
from maxdiffusion.diffusion.caches.magcache import MagCache, MagCalibration, MagRatios
from maxdiffusion.pipelines.request import request_from_arguments
from tests.oracle.arrays import as_numpy, normal
from tests.oracle.pipeline import load_pipeline
from tests.oracle.tiny_checkpoints import (
    TextSize,
    TinyCheckpoint,
    TransformerSize,
    VaeSize,
    write_checkpoint,
)

# Velocities within 1e-5, times 2 * 5 - 1 by guidance, averaged over the steps.
TOLERANCE = 5e-5
TINY = TinyCheckpoint(
    seed=77,
    transformer=TransformerSize(heads=2, head_dim=16, layers=3, ffn=40),
    vae=VaeSize(base=8, multipliers=(1, 1, 2, 2), res_blocks=1),
    text=TextSize(width=32, heads=4, head_dim=8, layers=1, ffn=48),
    boundary_ratio=None,
    flow_shift=5.0,
)
RATIOS = [1.0, 1.02, 0.99, 0.985, 0.98, 0.97, 0.99, 0.96, 0.95, 0.93, 0.9, 0.8]
SETTINGS = {
    "prompt": "a red fox",
    "negative_prompt": "blurred",
    "height": 32,
    "width": 48,
    "num_frames": 5,
    "num_inference_steps": 12,
    "guidance_scale": 5.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cache") / "model", TINY)


def test_skipped_steps_and_latents_are_those_of_diffusers(folder: Path) -> None:
    start = normal(12, 1, 16, 2, 4, 6)
    theirs = load_pipeline(folder)
    computed: list[int] = []
    block = theirs.transformer.blocks[1].attn1
    forward = block.forward
    block.forward = lambda *inputs, **more: (computed.append(1), forward(*inputs, **more))[1]
    theirs.transformer.enable_cache(
        MagCacheConfig(
            threshold=0.06,
            max_skip_steps=2,
            retention_ratio=0.25,
            num_inference_steps=12,
            mag_ratios=RATIOS,
        )
    )
    expected = as_numpy(theirs(**SETTINGS, latents=start, output_type="latent").frames)

    both = [ratio for one in RATIOS for ratio in (one, one)]
    ratios = MagRatios.interleaved(both)
    cache = MagCache(ratios=ratios, threshold=0.06, max_skips=2, retention=0.25)
    ours = WanPipeline.from_pretrained(folder, dtype="float32")
    call = {**SETTINGS, "latents": start.numpy(), "step_cache": cache}
    plan = request_from_arguments(ours.builder.spec, **call).plan
    assert 2 * plan.actions.count("C") == len(computed) < 24
    latents = ours(**call, output_type="latent").frames
    np.testing.assert_allclose(latents, expected, rtol=0, atol=TOLERANCE)
    exact = ours(**(call | {"step_cache": None}), output_type="latent").frames
    assert np.abs(latents - exact).max() > 100 * TOLERANCE


def test_measured_ratios_are_those_that_diffusers_logs(folder: Path) -> None:
    start = normal(12, 1, 16, 2, 4, 6)
    theirs = load_pipeline(folder)
    residuals: dict[str, list[torch.Tensor]] = {"in": [], "out": []}
    blocks = theirs.transformer.blocks
    blocks[0].register_forward_pre_hook(lambda _, inputs: residuals["in"].append(inputs[0]))
    blocks[-1].register_forward_hook(lambda _, inputs, out: residuals["out"].append(out))
    theirs(**SETTINGS, latents=start, output_type="latent")
    found = [out - before for before, out in zip(*residuals.values(), strict=True)]
    expected = [1.0, 1.0] + [
        float((now.norm(dim=-1) / before.norm(dim=-1)).mean())
        for before, now in zip(found[:-2], found[2:], strict=True)
    ]
    ours = WanPipeline.from_pretrained(folder, dtype="float32")
    call = {**SETTINGS, "latents": start.numpy()}
    request = request_from_arguments(
        ours.builder.spec, **call, step_cache=MagCalibration(steps=12, tokens=12)
    )
    *_, (state, _) = ours.states(request, ours.condition(request))
    # Norms of residuals that agree to 1e-5 of their size.
    ratios = np.asarray(state.cache.ratios).reshape(-1)
    np.testing.assert_allclose(ratios, expected, rtol=1e-4)
