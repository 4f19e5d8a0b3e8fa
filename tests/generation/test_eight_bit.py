"""8-bit weights from the config to the devices: formats, refusals, plans, cache keys, meshes."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion import WanPipeline
from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.generate import start_up_plan
from maxdiffusion.generation.job import check_config, plan_job
from maxdiffusion.generation.settings import precision
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.models.wan.eight_bit import FLOAT8, INT8, Activations, WeightFormat
from maxdiffusion.pipelines.aot_cache import AotCache
from maxdiffusion.pipelines.settings import PipelineSettings, Precision
from maxdiffusion.pipelines.spec import open_wan_folder, wan_models
from maxdiffusion.preflight.command import find_spec
from maxdiffusion.preflight.report import state_bytes
from maxdiffusion.training.train import check_not_quantized
from tests.generation.command_line import TINY

ON = "use_qwix_quantization=true"
INT8_PER_TOKEN = WeightFormat(dtype=INT8, activations=Activations.PER_TOKEN)


def parsed(*arguments: str):
    return read_config([str(TINY), *arguments])


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ((), "TPU7x", None),
        ((ON, "quantization=int8"), "cpu", WeightFormat(dtype=INT8)),
        ((ON, "quantization=int8"), "TPU7x", WeightFormat(dtype=INT8)),
        ((ON, "quantization=int8"), "TPU v6 lite", INT8_PER_TOKEN),
        (
            (ON, "quantization=int8", "quantize_activations=never"),
            "TPU v6 lite",
            WeightFormat(dtype=INT8),
        ),
        ((ON, "quantization=int8", "quantize_activations=always"), "cpu", INT8_PER_TOKEN),
        ((ON, "quantization=fp8"), "TPU v6 lite", WeightFormat(dtype=FLOAT8)),
        (
            (ON, "quantization=fp8"),
            "TPU7x",
            WeightFormat(dtype=FLOAT8, activations=Activations.PER_TOKEN),
        ),
        (
            (ON, "quantization=fp8_full"),
            "cpu",
            WeightFormat(dtype=FLOAT8, activations=Activations.PER_TOKEN),
        ),
    ],
)
def test_public_keys_and_the_chip_give_the_format(arguments, kind, expected):
    assert precision(parsed(*arguments).config, kind).weight_format == expected


@pytest.mark.parametrize(
    ("weight_format", "expected"),
    [
        (None, "bfloat16"),
        (WeightFormat(dtype=INT8), "bfloat16"),
        (INT8_PER_TOKEN, "int8"),
        (WeightFormat(dtype=FLOAT8, activations=Activations.PER_TOKEN), "float8_e4m3fn"),
    ],
)
def test_bounds_follow_the_dtype_of_both_operands(weight_format, expected):
    assert replace(Precision.of("bfloat16"), weight_format=weight_format).product_dtype == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantization=int8",), "quantization='int8': has no effect without use_qwix_quantiz"),
        ((ON,), "use_qwix_quantization=True: needs a format. Set quantization=int8"),
        (
            (ON, "quantization=fp8_full", "quantize_activations=never"),
            "quantize_activations='never': contradicts quantization='fp8_full'",
        ),
        (("quantize_activations=always",), "quantize_activations='always': contradicts quantiz"),
    ],
)
def test_fields_without_meaning_together_are_refused(tmp_path, arguments, message):
    config = parsed(*arguments, f"output_dir={tmp_path}").config
    with pytest.raises(ProblemsFound, match=message):
        check_config(config, device_count=1)


def test_training_refuses_8_bit_weights():
    with pytest.raises(ProblemsFound, match="quantization='fp8': training updates weights in fl"):
        check_not_quantized(parsed(ON, "quantization=fp8").config)
    check_not_quantized(parsed().config)


@cache
def planned(*arguments: str):
    spec = open_wan_folder("embedded")[1]
    return plan_job(parsed(*arguments), spec, jax.devices()[:1])


def test_the_plan_names_what_is_lossy(tmp_path):
    job = planned(ON, "quantization=int8", f"output_dir={tmp_path}")
    lossy = "lossy: int8 weights of blocks, activations not quantized"
    assert lossy in start_up_plan(job).splitlines()
    exact = planned(f"output_dir={tmp_path}")
    assert "lossy" not in start_up_plan(exact)


def test_every_mode_has_programs_of_its_own(tmp_path):
    modes = [
        (),
        (ON, "quantization=int8"),
        (ON, "quantization=int8", "quantize_activations=always"),
        (ON, "quantization=fp8"),
        (ON, "quantization=fp8_full"),
    ]
    jobs = [planned(*mode, f"output_dir={tmp_path}") for mode in modes]
    keys = {str(AotCache.of(tmp_path, job.builder).surroundings) for job in jobs}
    assert len(keys) == len(modes)


def test_bytes_of_a_released_model_are_about_half():
    """What preflight reports for one expert of A14B: 14.29 G parameters."""
    spec, mesh = (
        find_spec("Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
        build_mesh(MeshShape(), devices=jax.devices()[:1]),
    )
    exact = Precision.of("bfloat16")
    whole, eight_bit = (
        state_bytes(wan_models(spec, one).transformer.on(mesh))
        for one in (exact, replace(exact, weight_format=WeightFormat(dtype=INT8)))
    )
    config = spec.transformer
    maps = 8 * config.model_dim**2 + 2 * config.model_dim * config.ffn_dim
    outputs = 9 * config.model_dim + config.ffn_dim
    assert whole - eight_bit == config.layers * (maps - 4 * outputs)
    assert 0.5 < eight_bit / whole < 0.52


SIZE = {
    "prompt": "a red circle moves right on a white background",
    "negative_prompt": "",
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 2,
    "seed": 3,
    "output_type": "latent",
}


def latents(weight_format: WeightFormat, shape: MeshShape) -> np.ndarray:
    """Returns the final latents of the embedded model; both of its experts take a step."""
    settings = PipelineSettings(
        attention="dot_product", precision=Precision(weight_format=weight_format)
    )
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    pipeline = WanPipeline.from_pretrained("embedded", mesh=mesh, settings=settings)
    kernel = pipeline.parameters.transformers["transformer"]["blocks"]["ffn"]["up"]["kernel"]
    assert kernel[...].dtype == jnp.int8
    return pipeline(**SIZE).frames


@pytest.mark.slow
def test_eight_devices_make_the_video_of_one():
    """Weights are equal to the bit; float32 sums differ in their order, as without quantization."""
    on_one, on_eight = MeshShape(), MeshShape(fsdp=2, ring=2, tensor=2)
    alone, shared = (latents(WeightFormat(dtype=INT8), mesh) for mesh in (on_one, on_eight))
    np.testing.assert_allclose(shared, alone, rtol=0, atol=5e-5)
    # Sums of int8 products are exact; others now and then let an activation round the other way.
    # Rounding activations moves latents by 0.05 on average, and this may move them by a hundredth.
    alone, shared = (latents(INT8_PER_TOKEN, mesh) for mesh in (on_one, on_eight))
    assert np.abs(shared - alone).mean() < 5e-4
