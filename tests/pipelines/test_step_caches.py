"""Whole runs with step caches: what they compute, on one device and on meshes."""

from pathlib import Path

import jax
import numpy as np
import pytest

from maxdiffusion import WanPipeline
from maxdiffusion.diffusion.caches.cfg_cache import CfgCache
from maxdiffusion.diffusion.caches.magcache import MagCache, MagRatios
from maxdiffusion.diffusion.caches.sen_cache import SenCache
from maxdiffusion.diffusion.caches.taylor_cache import TaylorCache
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.settings import PipelineSettings

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "goldens" / "wan22_t2v"
# float32 sums in another order, over twelve steps; that of the goldens.
TOLERANCE = 5e-5
MAG = MagCache(ratios=MagRatios.interleaved([0.995] * 24), threshold=0.1, retention=0.2)
CACHES = {
    "mag": MAG,
    "cfg": CfgCache(height=48),
    "sen": SenCache(tolerance=0.5),
    "taylor": TaylorCache(),
}
STEPS = {"taylor": {"num_inference_steps": 20}}  # it skips none of fewer
CALL = {
    "prompt": "A red fox runs through deep snow.",
    "negative_prompt": "blurred",
    "height": 48,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 12,
    "guidance_scale": 4.0,
    "guidance_scale_2": 3.0,
    "flow_shift": 5.0,
    "seed": 3,
}


def on_mesh(shape: MeshShape) -> WanPipeline:
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    settings = PipelineSettings(attention="dot_product")
    return WanPipeline.from_pretrained(FOLDER, mesh=mesh, settings=settings)


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    return on_mesh(MeshShape())


def latents_of(pipeline: WanPipeline, **more: object) -> np.ndarray:
    return pipeline(**CALL | more, output_type="latent").frames


def latents_with(pipeline: WanPipeline, name: str) -> np.ndarray:
    return latents_of(pipeline, step_cache=CACHES[name], **STEPS.get(name, {}))


@pytest.fixture(scope="module")
def exact(pipeline: WanPipeline) -> np.ndarray:
    return latents_of(pipeline)


@pytest.fixture(scope="module")
def cached(pipeline: WanPipeline) -> dict[str, np.ndarray]:
    return {name: latents_with(pipeline, name) for name in CACHES}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mag", "cfg", "sen"])
def test_a_cache_changes_the_latents_and_stays_near(
    name: str, cached: dict[str, np.ndarray], exact: np.ndarray
) -> None:
    # Random weights make the velocity change at every step: near means less than its own size.
    distance = np.abs(cached[name] - exact)
    assert distance.max() > 1e-3
    assert distance.mean() < 0.5 * np.abs(exact).mean()


@pytest.mark.slow
def test_caches_that_never_skip_are_exact(pipeline: WanPipeline, exact: np.ndarray) -> None:
    strict = MagCache(ratios=MAG.ratios, threshold=0.0)
    for cache in (strict, SenCache(tolerance=0.0)):
        found = latents_of(pipeline, step_cache=cache)
        np.testing.assert_allclose(found, exact, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "names"),
    [
        # The negative prompt is on other devices, which share the prompt's sequence in estimates.
        (MeshShape(data=2, ring=2, ulysses=2), [*CACHES]),
        (MeshShape(fsdp=2, ring=2, tensor=2), ["mag"]),
    ],
)
def test_caches_give_the_same_latents_on_every_mesh(
    shape: MeshShape, names: list[str], cached: dict[str, np.ndarray]
) -> None:
    meshed = on_mesh(shape)
    for name in names:
        found = latents_with(meshed, name)
        np.testing.assert_allclose(found, cached[name], rtol=0, atol=TOLERANCE, err_msg=name)


def test_every_run_starts_with_an_empty_cache(pipeline: WanPipeline) -> None:
    first = latents_of(pipeline, step_cache=MAG)
    np.testing.assert_array_equal(latents_of(pipeline, step_cache=MAG), first)


def test_skipped_steps_run_no_blocks(pipeline: WanPipeline) -> None:
    request = request_from_arguments(pipeline.builder.spec, **CALL, step_cache=MAG)
    shape = pipeline.shape(request)
    plan = pipeline.builder.attention(shape)
    flops = {}
    for guidance, action in request.plan.programs:
        assert guidance == shape.guidance
        lowered = pipeline.builder.lower_denoise_step(
            shape, request.sampler, plan, cache=MAG, action=action
        )
        flops[action.value] = "attention" in lowered.as_text(debug_info=True)
    assert flops == {"C": True, ".": False}


def test_sen_cache_reports_what_it_computed(
    pipeline: WanPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        latents_of(pipeline, step_cache=CACHES["sen"])
    (line,) = [text for text in caplog.messages if text.startswith("SenCache")]
    assert 4 < int(line.split()[1]) < 12
