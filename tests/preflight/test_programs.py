"""Programs of a job and the memory of a run, on CPU devices in place of TPUs."""

import math

import jax
import pytest

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.diffusion import UniPC
from maxdiffusion.diffusion.caches.magcache import MagCache, MagRatios
from maxdiffusion.diffusion.guidance import ClassifierFree, GuidanceScales, plan_run
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.programs import ProgramBuilder, ProgramShape
from maxdiffusion.pipelines.request import VideoShape, latent_shape
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.preflight.command import find_spec
from maxdiffusion.preflight.compile import (
    CompiledProgram,
    Memory,
    ProgramMaker,
    compile_all,
    compile_program,
    other_steps_of,
    programs_of,
    step_name,
)
from maxdiffusion.preflight.report import residence, state_bytes

CHIP = CHIPS["tpu7x"]


def builder(shape=MeshShape(data=2)):  # noqa: B008 - a frozen value
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    settings = PipelineSettings(attention="dot_product")
    return ProgramBuilder(spec=find_spec("embedded"), settings=settings, mesh=mesh)


def program_shape(made):
    video = VideoShape(height=32, width=32, num_frames=1)
    latent = latent_shape(video, made.spec.vae, made.spec.transformer)
    return ProgramShape(videos=1, latent=latent, guidance=ClassifierFree(), text_length=16)


def makers_of(made):
    shape, sampler = program_shape(made), UniPC(steps=2, shift=3.0)
    return programs_of(made, shape, sampler=sampler, attention=made.attention(shape))


def test_all_programs_of_a_generation_are_there():
    made = builder()
    makers = makers_of(made)
    assert [maker.name for maker in makers] == [
        *("denoise_step", "read_text", "start", "decode", "text_encoder")
    ]


def test_a_program_is_compiled_and_weighed(caplog):
    made = builder()
    makers = makers_of(made)
    with caplog.at_level("INFO"):
        (start,) = compile_all(makers[2:3], CHIP)
    latents = 4 * math.prod(program_shape(made).latent.dims)
    assert start.memory.arguments == latents
    assert start.memory.peak >= start.memory.arguments + start.memory.outputs
    assert "ENTRY" in start.text
    assert caplog.messages[0] == "[1/1] compiling start ..."
    assert caplog.messages[1].startswith("[1/1] start: ")


def test_a_refusal_of_the_compiler_names_the_program():
    def refuse():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM")

    with pytest.raises(ProblemsFound, match="denoise_step='compile error'"):
        compile_program(ProgramMaker(name="denoise_step", compile=refuse), CHIP)


def test_weights_count_once_and_split_weights_by_their_part():
    whole, split = builder(), builder(MeshShape(fsdp=2))
    alone = state_bytes(whole.models.transformer.on(whole.mesh))
    assert alone == sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(whole.models.transformer.parameters)
    )
    assert alone / 2 <= state_bytes(split.models.transformer.on(split.mesh)) < 0.7 * alone


def compiled(name, *, outputs=0, temporaries=0):
    memory = Memory(arguments=7, outputs=outputs, temporaries=temporaries, code=1)
    return CompiledProgram(name=name, text="", memory=memory, flops=0, seconds=0)


def test_the_peak_is_all_weights_what_is_kept_and_what_a_program_adds():
    step = compiled("denoise_step", outputs=5, temporaries=1000)
    found = residence(builder(), (step, compiled("read_text", outputs=30), compiled("start")))
    assert found.kept == 2 * 30  # of both experts
    assert found.peak == sum(found.weights.values()) + 60 + 5 + 1000 + 1
    assert found.peak_program == "denoise_step"
    assert set(found.weights) == {"transformer", "transformer_2", "vae", "text_encoder"}


def test_steps_that_compute_less_have_programs_of_their_own():
    made = builder(MeshShape(data=2, ring=2))
    shape, sampler = program_shape(made), UniPC(steps=12, shift=3.0)
    scales = GuidanceScales(high_noise=4.0, low_noise=4.0)
    cut = plan_run(sampler, scales=scales, boundary_ratio=None, guidance_end_step=5)
    others = other_steps_of(made, shape, sampler=sampler, plan=cut, cache=None)
    assert [maker.name for maker in others] == [
        *("denoise_step of the prompt only", "read_text of the prompt only")
    ]
    assert [step_name(step, shape) for step in cut].count("denoise_step") == 5
    cache = MagCache(ratios=MagRatios.interleaved([1.0] * 24))
    plan = cache.planned(plan_run(sampler, scales=scales, boundary_ratio=None))
    (skipped,) = other_steps_of(made, shape, sampler=sampler, plan=plan, cache=cache)
    assert skipped.name == "denoise_step without blocks"
    whole = programs_of(made, shape, sampler=sampler, attention=made.attention(shape), cache=cache)[
        0
    ]
    flops = [compile_program(maker, CHIP).flops for maker in (whole, skipped)]
    # Embeddings and head remain of a model with few layers.
    assert flops[1] < 0.3 * flops[0]
