"""Runs whose steps differ: guidance that ends early, experts by step index, prompt-only experts."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from maxdiffusion import WanPipeline
from maxdiffusion.diffusion.guidance import Unguided
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.settings import PipelineSettings

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parents[1] / "goldens"
# float32 sums in another order, over four steps; that of the goldens.
TOLERANCE = 5e-5
CALL = {
    "prompt": "A red fox runs through deep snow.",
    "negative_prompt": "blurred",
    "height": 48,
    "width": 32,
    "num_frames": 5,
    "guidance_scale": 4.0,
    "flow_shift": 5.0,
    "seed": 3,
    "output_type": "latent",
}
LEVELS = [1.0, 0.75, 0.5, 0.25]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns the checkpoint with two experts and Euler, which keeps nothing of earlier steps."""
    copy = tmp_path_factory.mktemp("euler") / "model"
    shutil.copytree(GOLDENS / "wan22_t2v", copy)
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    (copy / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    return copy


def on_mesh(folder: Path, shape: MeshShape, attention: str = "dot_product") -> WanPipeline:
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    settings = PipelineSettings(attention=attention)
    return WanPipeline.from_pretrained(folder, mesh=mesh, settings=settings)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> WanPipeline:
    return on_mesh(folder, MeshShape())


def test_after_the_cut_off_only_the_prompt_is_computed(pipeline: WanPipeline) -> None:
    found = pipeline(**CALL, sigmas=LEVELS, boundary_step_index=4, guidance_end_step=2).frames
    request = request_from_arguments(
        pipeline.builder.spec,
        **{name: value for name, value in CALL.items() if name != "output_type"},
        sigmas=LEVELS,
        boundary_step_index=4,
    )
    steps = pipeline.denoise(request, pipeline.condition(request))
    after_two = [np.asarray(next(steps)[0]) for _ in range(2)][-1]
    rest = CALL | {"guidance_scale": 1.0, "latents": np.moveaxis(after_two, -1, 1)}
    expected = pipeline(**rest, sigmas=LEVELS[2:], boundary_step_index=2).frames
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_an_expert_of_scale_one_needs_no_negative_prompt(pipeline: WanPipeline) -> None:
    call = CALL | {"sigmas": LEVELS, "boundary_step_index": 2}
    near_one = pipeline(**call, guidance_scale_2=1.0 + 1e-6).frames
    np.testing.assert_allclose(
        pipeline(**call, guidance_scale_2=1.0).frames, near_one, rtol=0, atol=TOLERANCE
    )


def test_the_step_index_moves_the_boundary(pipeline: WanPipeline) -> None:
    call = CALL | {"sigmas": LEVELS, "guidance_scale": 1.0}
    by_time = pipeline(**call).frames  # 1000, 937.5 | 833.3, 625 around 875
    np.testing.assert_array_equal(pipeline(**call, boundary_step_index=2).frames, by_time)
    assert np.abs(pipeline(**call, boundary_step_index=1).frames - by_time).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "attention", "ring"),
    [
        (MeshShape(data=2, ring=2, ulysses=2), "dot_product", 4),
        (MeshShape(data=2, ulysses=2), "ulysses_ring", 2),
    ],
)
def test_a_data_axis_shares_the_sequence_after_the_cut_off(
    folder: Path, pipeline: WanPipeline, shape: MeshShape, attention: str, ring: int
) -> None:
    call = CALL | {"sigmas": LEVELS, "guidance_end_step": 2, "boundary_step_index": 1}
    expected = pipeline(**call).frames
    meshed = on_mesh(folder, shape, attention)
    np.testing.assert_allclose(meshed(**call).frames, expected, rtol=0, atol=TOLERANCE)
    (single,) = [one for one in meshed._attention if one.guidance == Unguided()]
    mesh = meshed.builder.folded_for(single).mesh
    assert (mesh.shape["data"], mesh.shape["ring"]) == (1, ring)


def test_a_data_axis_that_cannot_join_the_ring_is_refused(folder: Path) -> None:
    meshed = on_mesh(folder, MeshShape(data=2, fsdp=2))
    with pytest.raises(ProblemsFound, match=r"batch=1: the data axis \(2\) must divide it"):
        meshed(**CALL, sigmas=LEVELS, guidance_end_step=2)
