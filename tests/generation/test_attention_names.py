"""Every attention name makes, with the model of the package, the video of one device on eight."""

import json

import jax
import numpy as np
import pytest

from maxdiffusion import WanPipeline
from maxdiffusion.attention import ATTENTION_NAMES, AttentionOptions
from maxdiffusion.config.load import read_config
from maxdiffusion.generate_wan import main
from maxdiffusion.generation.generate import generate
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.runtime.progress import configure_logging
from maxdiffusion.runtime.video import read_video
from tests.generation.command_line import TINY

# The order of float32 sums differs between kernels and meshes, and nothing else.
TOLERANCE = 5e-5
GPU_ONLY = "cudnn_flash_te"
COUNTING = "ulysses_ring_custom_fixed_m"
LOSSY = "ulysses_ring_custom_fp8"
NAMES = [name for name in ATTENTION_NAMES if name != GPU_ONLY]
# Queries in float8 move an attention by 2**-4 / sqrt(3) of itself (scores of about unit variance);
# guidance of 4 adds up four predictions and takes three away.
LOST = 7 * 2.0**-4 / 3**0.5
PROMPT = "a red circle moves right on a black background"
NEGATIVE = "a blue square"
# 18 tokens, which 4 devices do not divide; both experts take a step.
SIZES = {"height": 48, "width": 32, "num_frames": 9, "num_inference_steps": 2, "seed": 5}
ARGUMENTS = (
    f"prompt={PROMPT}",
    f"negative_prompt={NEGATIVE}",
    *(f"{name}={value}" for name, value in SIZES.items()),
    *(
        "guidance_scale_high=4.0",
        "guidance_scale_low=4.0",
        "flow_shift=3.0",
        "boundary_ratio=0.875",
    ),
    *("ici_data_parallelism=2", "ici_ring_parallelism=2", "ici_ulysses_parallelism=2"),
    "per_device_batch_size=0.125",
)


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    """The latents of dense attention on one device."""
    options = AttentionOptions(flash_min_seq_length=0)
    pipeline = WanPipeline.from_pretrained(
        "embedded",
        mesh=build_mesh(MeshShape(), devices=jax.devices()[:1]),
        settings=PipelineSettings(attention="dot_product", attention_options=options),
    )
    request = request_from_arguments(
        pipeline.builder.spec,
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        **SIZES,
        guidance_scale=4.0,
        flow_shift=3.0,
        boundary_ratio=0.875,
    )
    *_, (latents, _) = pipeline.denoise(request, pipeline.condition(request))
    return np.asarray(latents)


@pytest.mark.slow
@pytest.mark.parametrize("attention", NAMES)
def test_a_name_changes_nothing_but_the_work(attention, alone, cache, tmp_path, capsys):
    latents = []
    timing_file = tmp_path / "timing.json"
    parsed = read_config(
        [
            str(TINY),
            *ARGUMENTS,
            f"attention={attention}",
            f"output_dir={tmp_path}",
            f"jax_cache_dir={cache}",
            f"report_fast_heads={attention == COUNTING}".lower(),
            f"timing_file={timing_file}",
        ]
    )
    configure_logging()
    generate(parsed, check_latents=lambda finished, request: latents.append(finished))
    said = capsys.readouterr()
    apart = np.linalg.norm(latents[0] - alone) / np.linalg.norm(alone)
    if attention == LOSSY:
        assert 1e-4 < apart < LOST
        assert "lossy: Q.K^T in fp8" in said.out
    else:
        np.testing.assert_allclose(*latents, alone, rtol=0, atol=TOLERANCE)
    frames, _ = read_video(tmp_path / "wan_output_5_0.mp4")
    assert frames.shape == (9, 48, 32, 3)
    assert frames.std() > 1
    assert f"attention {attention}\n" in said.out
    counted = json.loads(timing_file.read_text())["run"]["fast_heads"]
    assert [count["step"] for count in counted] == ([0, 1] if attention == COUNTING else [])
    if attention == COUNTING:
        check_counts(counted, said.out)


def check_counts(counted: list[dict], said: str) -> None:
    """Both experts are counted, every layer of them, and people are told."""
    experts = ["high-noise expert", "low-noise expert"]
    assert [count["expert"] for count in counted] == experts
    for count in counted:
        pairs, layers = count["pairs_of_a_layer"], count["fast_pairs_of_layers"]
        # These weights are small: every head's norms pass the gate.
        assert layers == [pairs] * len(layers)
        total = pairs * len(layers)
        line = f"step {count['step'] + 1} ({count['expert']}): {total} of {total} heads on the fast"
        assert line in said


def test_a_name_for_gpus_is_refused(tmp_path, capsys):
    output = tmp_path / "videos"
    assert main([str(TINY), *ARGUMENTS, f"attention={GPU_ONLY}", f"output_dir={output}"]) == 2
    assert "runs on NVIDIA GPUs only" in capsys.readouterr().err
    assert not output.exists()
