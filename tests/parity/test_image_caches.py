"""Image to video with step caches and an end of guidance: the same on a mesh as on one device."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from maxdiffusion.diffusion.caches.cfg_cache import CfgCache
from maxdiffusion.diffusion.caches.magcache import MagCache, MagRatios
from maxdiffusion.diffusion.caches.sen_cache import SenCache
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.tasks.image_to_video import WanImageToVideoPipeline
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import wan22_i2v, write_family

pytestmark = pytest.mark.slow
# Meshes change the order of float32 sums alone; that of test_family_meshes.py.
TOLERANCE = 5e-5
MODEL = wan22_i2v(
    51,
    transformer=TransformerSize(heads=4, head_dim=32, layers=2, ffn=64),
    vae=VaeSize(base=4, multipliers=(1, 1, 2, 2), res_blocks=1),
)
FEATURES: dict[str, dict[str, Any]] = {
    "MagCache": {"step_cache": MagCache(ratios=MagRatios.interleaved([0.995] * 20), threshold=0.1)},
    "CFG cache": {"step_cache": CfgCache(height=32)},
    "SenCache": {"step_cache": SenCache(tolerance=0.5)},
    "end of guidance": {"guidance_end_step": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("i2v") / "model", MODEL)


def on_mesh(folder: Path, shape: MeshShape) -> WanImageToVideoPipeline:
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    settings = PipelineSettings(attention="dot_product", text_length=16)
    return WanImageToVideoPipeline.from_pretrained(folder, mesh=mesh, settings=settings)


@pytest.fixture(scope="module")
def pipelines(folder: Path) -> list[WanImageToVideoPipeline]:
    return [on_mesh(folder, shape) for shape in (MeshShape(), MeshShape(data=2, ulysses=2))]


def latents_of(pipeline: WanImageToVideoPipeline, **more: Any) -> np.ndarray:
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    call = {"prompt": "a fox", "negative_prompt": "grey", "num_frames": 5, "seed": 5}
    call |= {"height": 32, "width": 32, "num_inference_steps": 10, "guidance_scale": 2.0}
    image = Image.fromarray(pixels)
    return pipeline(image, **call, **more, output_type="latent").frames


@pytest.fixture(scope="module")
def exact(pipelines: list[WanImageToVideoPipeline]) -> np.ndarray:
    return latents_of(pipelines[0])


@pytest.mark.parametrize("name", FEATURES)
def test_features_on_a_data_axis(
    pipelines: list[WanImageToVideoPipeline], exact: np.ndarray, name: str
) -> None:
    one, two = (latents_of(pipeline, **FEATURES[name]) for pipeline in pipelines)
    np.testing.assert_allclose(two, one, rtol=0, atol=TOLERANCE)
    assert np.abs(one - exact).max() > 1e-3


def test_a_sampler_with_fresh_noise_is_refused(folder: Path, tmp_path: Path) -> None:
    pipeline = on_mesh(folder, MeshShape())
    config = pipeline.builder.spec.scheduler
    assert config["_class_name"] != "FlowMatchLCMScheduler"
    lcm = {"_class_name": "FlowMatchLCMScheduler", "shift": 3.0}
    (folder / "scheduler" / "scheduler_config.json").write_text(str(lcm).replace("'", '"'))
    noisy = on_mesh(folder, MeshShape())
    with pytest.raises(ProblemsFound, match="draws new noise at every step"):
        latents_of(noisy, **FEATURES["SenCache"])
