"""Compiler options of programs: what they keep off a CPU's memory, and where they apply."""

from dataclasses import replace

import jax
import pytest

from maxdiffusion.diffusion import UniPC
from maxdiffusion.diffusion.guidance import ClassifierFree
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.models.umt5 import Umt5Config
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.pipelines.programs import (
    ProgramBuilder,
    ProgramShape,
    compile_lowered,
    compiler_options,
)
from maxdiffusion.pipelines.request import VideoShape, latent_shape
from maxdiffusion.pipelines.settings import PipelineSettings, Precision
from maxdiffusion.pipelines.spec import WanSpec

# Weights are by far the largest arrays: 16 tokens, 8 layers of 5.8 M parameters.
SIZES = WanTransformerConfig(layers=8, heads=4, head_dim=128, ffn_dim=4096, text_dim=128)
WIDTH = SIZES.heads * SIZES.head_dim
# Float32 weights of a layer in a step: q, k, v, out; q, out of the text; two of the MLP.
LAYER_BYTES = 4 * (6 * WIDTH * WIDTH + 2 * WIDTH * SIZES.ffn_dim)  # 22 MiB


@pytest.fixture(scope="module")
def lowered_step():
    builder = ProgramBuilder(
        spec=WanSpec(
            transformer=SIZES,
            vae=WanVaeConfig(),
            text_encoder=replace(Umt5Config(), width=128),
            scheduler={},
            boundary_ratio=None,
        ),
        settings=PipelineSettings(precision=Precision.of("bfloat16"), attention="dot_product"),
        mesh=single_device_mesh(jax.devices()[0]),
    )
    video = VideoShape(height=64, width=64, num_frames=1)
    shape = ProgramShape(
        videos=1,
        latent=latent_shape(video, builder.spec.vae, SIZES),
        guidance=ClassifierFree(),
        text_length=16,
    )
    sampler = UniPC(steps=2, shift=3.0)
    return builder.lower_denoise_step(shape, sampler, builder.attention(shape))


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_a_cpu_step_holds_the_float32_weights_of_a_layer_and_not_of_all(lowered_step):
    kept = temporaries(compile_lowered(lowered_step))
    hoisted = temporaries(lowered_step.compile())
    assert kept < LAYER_BYTES  # 11.3 MiB: the weights of a layer are converted one after another
    assert hoisted > SIZES.layers * LAYER_BYTES  # 188.6 MiB: what the option prevents


def test_only_programs_for_cpus_have_options():
    assert compiler_options("cpu")["xla_disable_hlo_passes"] == "while-loop-invariant-code-motion"
    assert compiler_options("tpu") == compiler_options("tpu", "denoise_step") == {}
    assert compiler_options("tpu", "decode") == compiler_options("tpu", "encode") != {}
