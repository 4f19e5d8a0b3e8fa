"""Every attention name gives the latents of one device, through the whole loop on eight devices."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from maxdiffusion import WanPipeline
from maxdiffusion.attention import ATTENTION_NAMES, AttentionOptions, UnsupportedAttention
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.user_request import request_from_arguments

FOLDER = Path(__file__).parents[1] / "goldens" / "wan22_t2v"
# The order of float32 sums differs between kernels and meshes, and nothing else.
TOLERANCE = 5e-5
GPU_ONLY = "cudnn_flash_te"
NAMES = [name for name in ATTENTION_NAMES if name != GPU_ONLY]
SETTINGS = PipelineSettings(
    attention="dot_product", attention_options=AttentionOptions(flash_min_seq_length=0)
)


def request_of(pipeline: WanPipeline):
    """18 tokens, which 4 devices do not divide; both experts take a step."""
    return request_from_arguments(
        pipeline.workshop.spec,
        prompt="a quiet harbour at night",
        negative_prompt="blurred",
        height=48,
        width=32,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=4.0,
        seed=5,
    )


def last_latents(pipeline: WanPipeline, experts) -> np.ndarray:
    *_, (latents, _) = pipeline.denoise(request_of(pipeline), experts)
    return np.asarray(latents)


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    mesh = build_mesh(MeshShape(), devices=jax.devices()[:1])
    pipeline = WanPipeline.from_pretrained(FOLDER, mesh=mesh, settings=SETTINGS)
    return last_latents(pipeline, pipeline.condition(request_of(pipeline)))


@pytest.fixture(scope="module")
def together() -> WanPipeline:
    mesh = build_mesh(MeshShape(data=2, ring=2, ulysses=2))
    return WanPipeline.from_pretrained(FOLDER, mesh=mesh, settings=SETTINGS)


@pytest.fixture(scope="module")
def experts(together):
    return together.condition(request_of(together))


def renamed(pipeline: WanPipeline, attention: str) -> WanPipeline:
    """The same weights on the same mesh, with another attention."""
    settings = replace(pipeline.workshop.settings, attention=attention)
    return WanPipeline(
        workshop=replace(pipeline.workshop, settings=settings),
        parameters=pipeline.parameters,
        tokenizer=PromptTokenizer.load(FOLDER / "tokenizer"),
    )


@pytest.mark.parametrize("attention", NAMES)
def test_a_name_changes_nothing_but_the_work(attention, together, experts, alone):
    found = last_latents(renamed(together, attention), experts)
    np.testing.assert_allclose(found, alone, rtol=0, atol=TOLERANCE)


def test_a_name_for_gpus_is_refused(together, experts):
    with pytest.raises(UnsupportedAttention, match="runs on NVIDIA GPUs only"):
        last_latents(renamed(together, GPU_ONLY), experts)
