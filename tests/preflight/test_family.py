"""Jobs of the whole family are planned from a hub id: no download, no image, no video."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from maxdiffusion.config import read_config
from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.settings import sampler
from maxdiffusion.models.clip import ClipVisionConfig
from maxdiffusion.preflight import command
from maxdiffusion.preflight.command import RELEASED, find_spec, plan_on, program_runs
from maxdiffusion.preflight.compile import compile_program, programs_of
from maxdiffusion.preflight.report import residence

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT_PROGRAMS = ["denoise_step", "read_text", "start", "decode", "text_encoder"]
SMALL = ("height=32", "width=32", "num_frames=5", "num_inference_steps=4", "attention=dot_product")


def planned(name, *overrides):
    parsed = read_config([str(CONFIGS / f"{name}.yml"), *overrides])
    return plan_on(parsed, jax.devices()[:1])


@pytest.mark.parametrize(
    ("name", "overrides", "title", "encoded"),
    [
        ("base_wan_i2v_27b", (), "image to video", {"encode of 81 frames": 1}),
        (
            "base_wan_i2v_27b",
            ("last_image_path=none.png", "image_url=none.png"),
            "first and last image to video",
            {"encode of 81 frames": 1},
        ),
        (
            "base_wan_i2v_14b",
            (),
            "image to video",
            {"encode of 81 frames": 1, "encode_image": 1},
        ),
        (
            "base_wan_i2v_14b",
            ("pretrained_model_name_or_path=Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",),
            "first and last image to video",
            {"encode of 81 frames": 1, "encode_image": 1},
        ),
        ("base_wan_ti2v_5b", (), "text to video", {}),
        (
            "base_wan_ti2v_5b",
            ("model_type=I2V",),
            "image to video, first frame known",
            {"encode of 1 frame": 1},
        ),
        ("base_wan_vace_1_3b", (), "control to video", {"encode of 81 frames": 2}),
        (
            "base_wan_vace_14b",
            ('reference_images=["a.png", "b.png"]', "num_frames=5"),
            "control to video, 2 reference images",
            {"encode of 5 frames": 2, "encode of 1 frame": 2},
        ),
        (
            "base_wan_14b",
            ("video_path=none.mp4", "strength=0.5"),
            "video to video, strength 0.5",
            {"encode of 81 frames": 1},
        ),
    ],
)
def test_a_shipped_file_is_planned_without_its_inputs(name, overrides, title, encoded):
    job = planned(name, *overrides, "attention=dot_product")
    assert job.shape.task.title == title
    runs = program_runs(job)
    assert {name: count for name, count in runs.items() if name.startswith("encode")} == encoded
    steps = job.config.num_inference_steps
    assert runs["denoise_step"] == (steps // 2 if "strength=0.5" in overrides else steps)
    made = programs_of(
        job.builder,
        job.shape,
        sampler=sampler(job.config, job.builder.spec),
        attention=job.attention,
    )
    assert [maker.name for maker in made] == [*TEXT_PROGRAMS, *encoded]


def test_specs_are_those_of_the_releases():
    five = find_spec("Wan-AI/Wan2.2-TI2V-5B-Diffusers")
    assert (five.vae.z_dim, five.vae.spatial_factor, five.time_per_token) == (48, 16, True)
    for name, spec in RELEASED.items():
        two = "A14B" in name
        assert len(spec.experts) == (2 if two else 1), name
        assert (spec.image_encoder is not None) == (spec.transformer.image_dim is not None), name
        channels = any(part in name for part in ("-I2V-", "-FLF2V-", "-Animate-"))
        assert spec.image_channels == channels, name
    assert RELEASED["Wan-AI/Wan2.2-I2V-A14B-Diffusers"].boundary_ratio == 0.9


def test_what_a_model_cannot_do_is_refused_without_files_too():
    last = ("model_type=I2V", "image_url=none.png", "last_image_path=none.png")
    with pytest.raises(ProblemsFound, match="knows the first frame alone"):
        planned("base_wan_ti2v_5b", *last, "attention=dot_product")
    with pytest.raises(ProblemsFound, match="leaves none of num_inference_steps"):
        planned("base_wan_14b", *SMALL, "video_path=none.mp4", "strength=0.1")


def test_encoders_are_compiled_and_weighed(monkeypatch):
    spec = find_spec("embedded")
    clip = ClipVisionConfig(width=16, mlp_width=16, layers=2, heads=2, image_size=28)
    transformer = replace(spec.transformer, in_channels=36, image_dim=clip.width)
    tiny = replace(spec, transformer=transformer, image_encoder=clip, image_processor={})
    monkeypatch.setattr(command, "find_spec", lambda location: tiny)
    job = planned("base_wan_i2v_27b", *SMALL)
    made = programs_of(
        job.builder,
        job.shape,
        sampler=sampler(job.config, job.builder.spec),
        attention=job.attention,
    )
    (encoder,) = (maker for maker in made if maker.name == "encode_image")
    program = compile_program(encoder, CHIPS["tpu7x"])
    found = residence(job.builder, [program])
    assert found.weights["image_encoder"] > 0
    assert program.memory.arguments >= found.weights["image_encoder"]
    assert program.memory.outputs == 4 * clip.tokens * clip.width
