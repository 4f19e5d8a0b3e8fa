"""Pairs of features: each is planned, or refused with its reasons before weights are read."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from maxdiffusion.config.load import read_config
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.generate import load, request_of
from maxdiffusion.generation.job import plan_job, resolve_job
from maxdiffusion.generation.resume import list_videos
from maxdiffusion.generation.settings import LineTasks
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.preflight.command import find_spec
from maxdiffusion.runtime.timing import Timings
from tests.oracle.lora_files import write_lora

ROOT = Path(__file__).parents[2]
GOLDENS = Path(__file__).parents[1] / "goldens"
FILES = {
    "T2V": "base_wan_27b.yml",
    "I2V": "base_wan_i2v_27b.yml",
    "5B": "base_wan_ti2v_5b.yml",
    "VACE": "base_wan_vace_14b.yml",
    "4 steps": "wan22_4step.yml",
    "I2V in 4 steps": "wan22_i2v_4step.yml",
}
CACHES = {
    "mag": "use_magcache=true",
    "cfg": "use_cfg_cache=true",
    "sen": "use_sen_cache=true",
    "taylor": "use_taylor_cache=true",
}
RATIOS = f"mag_ratios_base={[0.99] * 80}"
NO_LORA = "enable_lora=false"
EIGHT = ("ici_data_parallelism=2", "ici_fsdp_parallelism=1")
LIST = ("denoising_step_list=[1000, 750, 500, 250]", "num_inference_steps=4")
EIGHT_BIT = ("use_qwix_quantization=true",)
FORMATS = ("int8", "fp8", "fp8_full")
UNGUIDED = ("guidance_scale_high=1", "guidance_scale_low=1")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model and two or more features; `refused` is part of a reason, empty where it can run."""

    model: str
    overrides: tuple[str, ...]
    refused: str = ""


def pair(model: str, *overrides: str, refused: str = "") -> Pair:
    return Pair(model=model, overrides=overrides, refused=refused)


def each_cache(model: str, *overrides: str, refused: str = "") -> list[Pair]:
    return [
        pair(model, cache, *([RATIOS] if name == "mag" else []), *overrides, refused=refused)
        for name, cache in CACHES.items()
    ]


PAIRS = [
    # Caches and samplers: kept predictions belong to the noise that they were made for.
    *each_cache("T2V", "scheduler=euler"),
    *each_cache("T2V", "scheduler=dpmpp_2m"),
    *each_cache("T2V", "scheduler=lcm", refused="draws new noise at every step"),
    *each_cache("T2V", "scheduler=euler_stochastic", refused="draws new noise at every step"),
    # Caches and few steps.
    *each_cache("T2V", *LIST, refused="step caches run on the sampler's own steps"),
    *each_cache(
        "T2V",
        "sigmas=[1.0, 0.5]",
        "num_inference_steps=2",
        refused="step caches run on the sampler's own steps",
    ),
    *each_cache("4 steps", NO_LORA, refused="step caches run on the sampler's own steps"),
    pair("T2V", CACHES["mag"], RATIOS, "num_inference_steps=4", refused="at least 10 steps"),
    pair("T2V", CACHES["cfg"], "num_inference_steps=3", refused="no step of this run can be"),
    # Caches and guidance.
    *each_cache("T2V", "guidance_end_step=20", refused="guidance"),
    *each_cache("T2V", "guidance_scale_low=1", refused="guidance"),
    pair("T2V", CACHES["mag"], RATIOS, *UNGUIDED),
    pair("T2V", CACHES["sen"], *UNGUIDED),
    pair("T2V", CACHES["taylor"], *UNGUIDED),
    pair("T2V", CACHES["taylor"], "num_inference_steps=19", refused="at least 20 steps"),
    pair("T2V", CACHES["cfg"], *UNGUIDED, refused="needs guidance at every step"),
    # Caches and guidance on a data axis.
    *each_cache("T2V", *EIGHT),
    pair(
        "T2V",
        CACHES["cfg"],
        "ici_data_parallelism=2",
        "ici_fsdp_parallelism=2",
        refused="the data axis",
    ),
    # Two caches.
    pair("T2V", CACHES["mag"], CACHES["sen"], RATIOS, refused="only one step cache can run"),
    # Caches and a video that the run starts from.
    *each_cache("T2V", "video_path=clip.mp4", refused="starts in the middle"),
    # The end of guidance.
    pair("T2V", "guidance_end_step=20", *EIGHT),
    pair("T2V", "guidance_end_step=20", "scheduler=lcm"),
    pair("T2V", "guidance_end_step=20", *UNGUIDED, refused="guidance is off at every step"),
    pair("T2V", "guidance_end_step=41", "num_inference_steps=40", refused="must be from 1 to"),
    pair("4 steps", NO_LORA, "guidance_end_step=2", refused="guidance is off at every step"),
    pair("4 steps", NO_LORA, "guidance_end_step=2", "guidance_scale_high=3"),
    pair(
        "T2V",
        "guidance_end_step=20",
        "ici_data_parallelism=2",
        "ici_fsdp_parallelism=2",
        refused="the data axis",
    ),
    # Samplers and lists of steps.
    *[pair("T2V", f"scheduler={name}", *LIST) for name in ("unipc", "euler", "dpmpp_2m", "lcm")],
    pair("T2V", *LIST, "sigmas=[1.0, 0.75, 0.5, 0.25]", refused="gives the steps as well"),
    pair("T2V", LIST[0], "num_inference_steps=5", refused="denoising_step_list has 4"),
    # Image to video with each of them.
    *each_cache("I2V"),
    *each_cache("I2V", *EIGHT),
    *each_cache("I2V", "scheduler=lcm", refused="draws new noise at every step"),
    pair("I2V", CACHES["mag"], "flow_shift=7", refused="were measured with"),
    pair("I2V", "guidance_end_step=20", *EIGHT),
    pair("I2V in 4 steps", NO_LORA),
    *each_cache("I2V in 4 steps", NO_LORA, refused="step caches run on the sampler's own steps"),
    # The other models.
    *each_cache("5B", "model_type=I2V"),
    pair("5B", "guidance_end_step=20"),
    pair("5B", "boundary_step_index=2", refused="one transformer for all noise levels"),
    *each_cache("VACE"),
    pair("VACE", CACHES["mag"], refused="there are no published ratios"),
    pair("VACE", "guidance_end_step=20", *EIGHT),
    # Adapters: their room with everything that changes programs, and a file that is missing.
    *each_cache("T2V", "lora_rank=8"),
    pair("T2V", "lora_rank=8", *LIST),
    pair("T2V", "lora_rank=8", "guidance_end_step=20", *EIGHT),
    # 8-bit weights: adapters are fused before weights are rounded, or stay in the model's dtype.
    *[pair("T2V", *EIGHT_BIT, f"quantization={name}", "lora_rank=8") for name in FORMATS],
    pair("4 steps", *EIGHT_BIT, "quantization=fp8_full", NO_LORA),
    *each_cache("T2V", *EIGHT_BIT, "quantization=int8", *EIGHT),
    pair("I2V", *EIGHT_BIT, "quantization=int8", "lora_rank=8", "guidance_end_step=20", *EIGHT),
    pair("VACE", *EIGHT_BIT, "quantization=fp8", "lora_rank=8"),
]


def planned(one: Pair):
    """Plans a job of a released model for eight devices, with inputs as if they existed."""
    parsed = read_config([str(ROOT / "configs" / FILES[one.model]), *one.overrides])
    spec = find_spec(parsed.config.pretrained_model_name_or_path)
    tasks = LineTasks(config=parsed.config, spec=spec, described=True)
    return plan_job(parsed, spec, jax.devices(), tasks=tasks)


def name_of(one: Pair) -> str:
    return " ".join([one.model, *(text for text in one.overrides if text != RATIOS)])


@pytest.mark.parametrize("one", PAIRS, ids=name_of)
def test_a_pair_is_planned_or_refused(one):
    if not one.refused:
        planned(one)
        return
    with pytest.raises(ProblemsFound) as caught:
        planned(one)
    said = "\n".join(map(str, caught.value.problems))
    assert one.refused in said


def test_adapters_without_a_file_are_refused():
    with pytest.raises(ProblemsFound, match="must name a LoRA file"):
        resolve_job(read_config([str(ROOT / "configs/wan_tiny.yml"), "enable_lora=true"]))


SMALL = (
    *("height=16", "width=16", "num_frames=1", "num_inference_steps=12", "num_videos=1"),
    *("attention=dot_product", "weights_dtype=float32", "activations_dtype=float32"),
    *("text_encoder_dtype=float32", "max_sequence_length=16", "flow_shift=3", "prompt=a fox"),
    *("guidance_scale_high=3", "guidance_scale_low=3", "vae_decode_chunk=-1"),
)
# float32 sums in another order, over twelve steps; that of tests/pipelines/test_step_caches.py.
TOLERANCE = 5e-5
RUNS = {
    "MagCache, DPM++, data axis": (
        *(CACHES["mag"], f"mag_ratios_base={[0.995] * 24}", "scheduler=dpmpp_2m", *EIGHT),
    ),
    # Its estimates, like the steps after the end of guidance, fold the data axis into the ring.
    "CFG cache, Euler, data axis": (CACHES["cfg"], "scheduler=euler", *EIGHT),
    "four steps, LCM": (*LIST, "scheduler=lcm", "boundary_step_index=2", *UNGUIDED),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A config of the tiny model, and LoRA files for its experts."""
    folder = tmp_path_factory.mktemp("pairs")
    weights = open_wan_folder(GOLDENS / "wan22_t2v")[0].weights["transformer"]
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    for seed, name in enumerate(("high", "low")):
        write_lora(folder / f"{name}.safetensors", shapes, "lightx2v", seed=seed)
    (folder / "job.yml").write_text(
        f"pretrained_model_name_or_path: {GOLDENS / 'wan22_t2v'}\noutput_dir: {folder}\n"
    )
    return folder


def fused(folder: Path) -> tuple[str, ...]:
    table = {
        "lora_model_name_or_path": [str(folder)],
        "high_noise_weight_name": ["high.safetensors"],
        "low_noise_weight_name": ["low.safetensors"],
        "scale": [0.5],
    }
    given = [f"lora_config.{name}={json.dumps(value)}" for name, value in table.items()]
    return ("enable_lora=true", *given)


def pipeline_of(folder: Path, *overrides: str):
    job, model = resolve_job(read_config([str(folder / "job.yml"), *SMALL, *overrides]))
    videos = list_videos(job)
    return load(job, model, videos, Timings()), request_of(job, videos)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_adapters_fused_and_kept_low_rank_agree(adapters, overrides):
    pipeline, request = pipeline_of(adapters, *overrides, *fused(adapters))
    expected = pipeline.final_latents(request)
    kept, request = pipeline_of(adapters, *overrides, "lora_rank=8")
    plain = kept.final_latents(request)
    kept.load_lora_weights(adapters / "high.safetensors", adapter_name="high")
    kept.load_lora_weights(
        adapters / "low.safetensors", adapter_name="low", load_into_transformer_2=True
    )
    kept.set_adapters(["high", "low"], [0.5, 0.5])
    np.testing.assert_allclose(kept.final_latents(request), expected, rtol=0, atol=TOLERANCE)
    assert np.abs(plain - expected).max() > 1e-2
