"""Whole runs of the family on eight devices against one, an attention name of each scheme."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from maxdiffusion.attention import AttentionOptions
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines import pipeline_named
from maxdiffusion.pipelines.settings import PipelineSettings
from tests.oracle.tiny_checkpoints import TransformerSize, VaeSize
from tests.oracle.tiny_family import (
    FamilyCheckpoint,
    Vae22Size,
    wan21_i2v,
    wan21_vace,
    wan22_i2v,
    wan22_ti2v,
    write_family,
)

pytestmark = pytest.mark.slow
# Meshes and kernels change the order of float32 sums alone: velocities stay within 1e-5 of each
# other, times 2 * 2 - 1 by guidance, averaged over the steps.
TOLERANCE = 5e-5
DENSE = PipelineSettings(attention="dot_product")
# The kernels run at any length: these tokens are fewer than they are worth.
KERNELS = AttentionOptions(flash_min_seq_length=0)
# Four heads: up to four ulysses devices.
TRANSFORMER = TransformerSize(heads=4, head_dim=32, layers=2, ffn=64)
SIZES: Mapping[str, Any] = {
    "transformer": TRANSFORMER,
    "vae": VaeSize(base=4, multipliers=(1, 1, 2, 2), res_blocks=1),
}
CALL = {"prompt": "a fox", "negative_prompt": "grey", "num_frames": 5, "num_inference_steps": 2}


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 56, 3), np.uint8)
    return Image.fromarray(pixels)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its inputs, and the attention and mesh that it runs on."""

    model: FamilyCheckpoint
    pipeline: str
    attention: str
    mesh: MeshShape
    inputs: Mapping[str, Any] = field(default_factory=dict)


IMAGE = {"image": picture(1)}
CASES = {
    "2.2 I2V, ring": Case(
        model=wan22_i2v(41, **SIZES),
        pipeline="WanImageToVideoPipeline",
        attention="tokamax_ring_custom",
        mesh=MeshShape(data=2, ring=4),
        inputs={**IMAGE, "last_image": picture(2)},
    ),
    "2.1 I2V with CLIP, ulysses": Case(
        model=wan21_i2v(42, **SIZES),
        pipeline="WanImageToVideoPipeline",
        attention="ulysses",
        mesh=MeshShape(fsdp=2, ulysses=4),
        inputs=IMAGE,
    ),
    "5B image, both rings ways": Case(
        model=wan22_ti2v(43, transformer=TRANSFORMER, vae=Vae22Size(res_blocks=1)),
        pipeline="WanImageToVideoPipeline",
        attention="ulysses_ring_custom_bidir",
        mesh=MeshShape(ring=4, ulysses=2),
        inputs=IMAGE,
    ),
    "VACE with references, ulysses and ring": Case(
        model=wan21_vace(44, control_layers=(0, 1), **SIZES),
        pipeline="WanVACEPipeline",
        attention="ulysses_ring_custom",
        mesh=MeshShape(ring=2, ulysses=2, tensor=2),
        inputs={"reference_images": [picture(3), picture(4)], "conditioning_scale": [0.5, 1.0]},
    ),
}


def latents_of(case: Case, folder: Path, shape: MeshShape, settings: PipelineSettings) -> Any:
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    made = pipeline_named(case.pipeline).from_pretrained(folder, mesh=mesh, settings=settings)
    call = {**CALL, "height": 32, "width": 96, "guidance_scale": 2.0, "seed": 5}
    return made(**call, **case.inputs, output_type="latent").frames


@pytest.mark.parametrize("name", CASES)
def test_eight_devices_give_the_latents_of_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = write_family(tmp_path / "model", case.model)
    expected = latents_of(case, folder, MeshShape(), DENSE)
    settings = PipelineSettings(attention=case.attention, attention_options=KERNELS)
    found = latents_of(case, folder, case.mesh, settings)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert np.std(expected) > 0.1
