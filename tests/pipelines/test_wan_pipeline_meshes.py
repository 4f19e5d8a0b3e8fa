"""The same seed gives the same video on every mesh, and the weights are split as the mesh says."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from maxdiffusion import WanPipeline
from maxdiffusion.attention import AttentionOptions
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.settings import PipelineSettings

FOLDER = Path(__file__).parents[1] / "goldens" / "wan22_t2v"
DENSE = PipelineSettings(attention="dot_product")
# The kernels run at any length: 18 tokens are fewer than they are worth, not than they can do.
KERNELS = AttentionOptions(flash_min_seq_length=0)

# Meshes change the order of float32 sums alone: the tolerance of the goldens holds between them.
TOLERANCE = 5e-5
# 3 x 3 x 2 = 18 tokens: 4 and 8 do not divide them, so sequences are padded.
CALL = {
    "prompt": ["A red fox runs through deep snow.", "a quiet harbour at night"],
    "negative_prompt": "blurred",
    "height": 48,
    "width": 32,
    "num_frames": 9,
    "num_inference_steps": 3,
    "guidance_scale": 4.0,
    "guidance_scale_2": 3.0,
    "seed": 11,
}


def make_pipeline(shape: MeshShape, settings: PipelineSettings = DENSE) -> WanPipeline:
    """Returns the pipeline on a mesh of the first devices."""
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    return WanPipeline.from_pretrained(FOLDER, mesh=mesh, settings=settings)


@pytest.fixture(scope="module")
def on_one_device() -> WanPipeline:
    return make_pipeline(MeshShape())


@pytest.fixture(scope="module")
def latents(on_one_device: WanPipeline) -> np.ndarray:
    return on_one_device(**CALL, output_type="latent").frames


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "attention"),
    [
        (MeshShape(data=2, ring=2, ulysses=2), "dot_product"),
        (MeshShape(fsdp=8), "dot_product"),
        (MeshShape(tensor=2), "dot_product"),
        (MeshShape(ulysses=4, fsdp=2), "ulysses"),
        (MeshShape(ring=4, tensor=2), "flash"),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value.sizes)),
)
def test_a_seed_gives_the_same_latents_on_every_mesh(
    shape: MeshShape, attention: str, latents: np.ndarray
) -> None:
    settings = replace(DENSE, attention=attention, attention_options=KERNELS)
    found = make_pipeline(shape, settings)(**CALL, output_type="latent").frames
    np.testing.assert_allclose(found, latents, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_frames_are_the_same_when_devices_share_the_decoder(on_one_device: WanPipeline) -> None:
    call = CALL | {"prompt": CALL["prompt"][0], "num_inference_steps": 1, "num_frames": 1}
    alone = on_one_device(**call).frames
    # 6 x 4 latents over eight devices: both height and width are split.
    shared = make_pipeline(MeshShape(fsdp=8))(**call).frames
    np.testing.assert_allclose(shared, alone, rtol=0, atol=TOLERANCE)


def test_fsdp_gives_every_device_an_eighth_of_a_kernel() -> None:
    pipeline = make_pipeline(MeshShape(fsdp=8))
    for expert in pipeline.parameters.transformers.values():
        kernels = [leaf for leaf in jax.tree.leaves(expert) if leaf.ndim == 3 and leaf.size > 2**14]
        assert len(kernels) >= 10
        for kernel in kernels:
            assert kernel.addressable_shards[0].data.size * 8 == kernel.size


@pytest.mark.slow
def test_layers_one_by_one_compute_what_the_scan_computes(latents: np.ndarray) -> None:
    pipeline = make_pipeline(MeshShape(), replace(DENSE, scan_layers=False))
    found = pipeline(**CALL, output_type="latent").frames
    np.testing.assert_allclose(found, latents, rtol=0, atol=TOLERANCE)
