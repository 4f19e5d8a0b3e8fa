"""Fields that must change the keys of cached programs and weights, and fields that must not.

Programs: what a compiled step depends on; numbers of a run are arguments of its programs. Weights:
what the arrays on disk depend on.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from maxdiffusion.attention import BlockSizes
from maxdiffusion.attention.options import TunedBlocks
from maxdiffusion.checkpoints.load import match_components
from maxdiffusion.checkpoints.orbax_cache import _Slot
from maxdiffusion.config.load import read_config
from maxdiffusion.diffusion.caches.sen_cache import SenCache
from maxdiffusion.generation.generate import request_of
from maxdiffusion.generation.job import open_model, plan_job
from maxdiffusion.generation.resume import list_videos
from maxdiffusion.pipelines.aot_cache import AotCache, program_facts
from maxdiffusion.pipelines.weights import component_sources
from maxdiffusion.runtime.files import digest_files
from tests.config.writing import write
from tests.oracle.lora_files import write_lora

GOLDENS = Path(__file__).parents[1] / "goldens"
BASE = (
    *("height=16", "width=16", "num_frames=1", "num_inference_steps=12", "num_videos=1"),
    *("attention=dot_product", "weights_dtype=float32", "activations_dtype=float32"),
    *("max_sequence_length=16", "flow_shift=3", "flash_min_seq_length=0"),
    *("guidance_scale_high=3", "guidance_scale_low=3", "prompt=a fox", "output_dir=videos"),
)
RATIOS = f"mag_ratios_base={[0.99] * 24}"
MAGCACHE = ("use_magcache=true", RATIOS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@functools.cache
def job_of(config: str, *overrides: str):
    parsed = read_config([config, *BASE, *overrides])
    model, spec = open_model(parsed, jax.devices())
    return plan_job(parsed, spec, jax.devices()), model


@pytest.fixture(scope="module")
def config(folder):
    return write(folder, f"pretrained_model_name_or_path: {GOLDENS / 'wan22_t2v'}\n")


def shared_facts(job):
    """The part of a program's key that all programs of a job have in common."""
    return AotCache.of(Path("programs"), job.builder).surroundings


@functools.cache
def steps_of(config: str, *overrides: str):
    """The part of the key that states the operations, for every kind of step of a job."""
    job, _ = job_of(config, *overrides)
    request = request_of(job, list_videos(job)[: job.shape.videos])
    found = {}
    for guidance, action in request.plan.programs:
        shape = job.shape.with_guidance(guidance)
        builder = job.builder.folded_for(shape)
        lowered = builder.lower_denoise_step(
            shape,
            request.sampler,
            builder.attention(shape),
            cache=request.step_cache,
            action=action,
        )
        found[guidance.copies, action] = program_facts("denoise_step", lowered)["operations"]
    return found


SETTINGS = {
    "attention": "attention=ulysses",
    "block sizes": "flash_block_sizes.block_q=256",
    "exponential": "use_base2_exp=false",
    "scheduler of the compiler": "use_experimental_scheduler=true",
    "overlapped chunks": "ulysses_attention_chunks=2",
    "shortest sequence": "flash_min_seq_length=64",
    "dtype of weights": "weights_dtype=bfloat16",
    "dtype of activations": "activations_dtype=bfloat16",
    "dtype of the text encoder": "text_encoder_dtype=float32",
    "dtype of the VAE": "vae_dtype=bfloat16",
    "dtype of the VAE's weights": "vae_weights_dtype=bfloat16",
    "precision of products": "precision=HIGHEST",
    "scanned layers": "scan_layers=false",
    "room for adapters": "lora_rank=4",
    "8-bit weights": "use_qwix_quantization=true quantization=int8",
    "text length": "max_sequence_length=32",
    "frames of a VAE chunk": "vae_decode_chunk=4",
    "VAE tiles": "vae_tiling=true",
    "devices of the VAE": "vae_spatial=2",
    "data axis": "ici_data_parallelism=2",
    "tensor axis": "ici_tensor_parallelism=2",
    "fsdp axis": "ici_fsdp_parallelism=2",
    "split of the context": "ulysses_shards=2",
}


@pytest.mark.parametrize("override", SETTINGS.values(), ids=SETTINGS)
def test_settings_change_the_key_of_every_program(config, override):
    assert shared_facts(job_of(config)[0]) != shared_facts(job_of(config, *override.split())[0])


def test_tiles_of_a_search_change_the_key(config):
    builder = job_of(config)[0].builder
    problem = builder.attention(job_of(config)[0].shape).self_attention.local
    keys = set()
    for size in (256, 512):
        row = TunedBlocks(
            kernel="flash", problem=problem, blocks=BlockSizes(block_q=size), seconds=1.0, how=""
        )
        options = replace(builder.settings.attention_options, tuned_blocks=(row,))
        settings = replace(builder.settings, attention_options=options)
        cache = AotCache.of(Path("programs"), replace(builder, settings=settings))
        keys.add(cache.surroundings["settings"])
    assert len(keys | {shared_facts(job_of(config)[0])["settings"]}) == 3


OPERATIONS = {
    "height": ("height=32",),
    "width": ("width=32",),
    "frames": ("num_frames=5",),
    "videos at once": ("num_videos=2", "per_device_batch_size=0.25"),
    "placement of weights": ("weight_placement=shard",),
    "Euler": ("scheduler=euler",),
    "DPM++": ("scheduler=dpmpp_2m",),
    "LCM": ("scheduler=lcm",),
    "MagCache": MAGCACHE,
    "CFG cache": ("use_cfg_cache=true",),
    "SenCache": ("use_sen_cache=true",),
    "Taylor cache": ("use_taylor_cache=true", "num_inference_steps=20"),
    "no guidance": ("guidance_scale_high=1", "guidance_scale_low=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", OPERATIONS.values(), ids=OPERATIONS)
def test_sizes_samplers_and_caches_change_the_operations(config, overrides):
    assert not set(steps_of(config).values()) & set(steps_of(config, *overrides).values())


@pytest.mark.slow
def test_guidance_that_ends_early_needs_one_more_program(config):
    plain, cut = steps_of(config), steps_of(config, "guidance_end_step=6")
    assert len(cut) == 2
    assert plain.items() < cut.items()


@pytest.mark.slow
def test_the_tolerance_of_sen_cache_is_part_of_its_program(config):
    job, _ = job_of(config)
    request = request_of(job, list_videos(job)[:1])
    plan = job.builder.attention(job.shape)
    caches = (SenCache(tolerance=0.1), SenCache(tolerance=0.2), SenCache(max_repeats=2))
    found = {
        program_facts(
            "denoise_step",
            job.builder.lower_denoise_step(job.shape, request.sampler, plan, cache=cache),
        )["operations"]
        for cache in caches
    }
    assert len(found) == 3


ARGUMENTS = {
    "prompt": ("prompt=a cat",),
    "negative prompt": ("negative_prompt=blurred",),
    "seed": ("seed=7",),
    "output folder": ("output_dir=elsewhere",),
    "output name": ("output_name=x.mp4",),
    "guidance scales": ("guidance_scale_high=4", "guidance_scale_low=2"),
    "shift": ("flow_shift=7",),
    "number of steps": ("num_inference_steps=20",),
    "sigmas": ("sigmas=[1.0, 0.5]", "num_inference_steps=2"),
    "step list": ("denoising_step_list=[1000, 500]", "num_inference_steps=2"),
    "boundary": ("boundary_ratio=0.5",),
    "boundary as a step": ("boundary_step_index=3",),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ARGUMENTS.values(), ids=ARGUMENTS)
def test_numbers_of_a_run_are_arguments_of_its_programs(config, overrides):
    assert shared_facts(job_of(config)[0]) == shared_facts(job_of(config, *overrides)[0])
    assert steps_of(config) == steps_of(config, *overrides)


@pytest.mark.slow
def test_thresholds_of_magcache_choose_among_the_same_programs(config):
    other = (*MAGCACHE, "magcache_thresh=0.2", "magcache_K=4", "retention_ratio=0.3")
    assert steps_of(config, *MAGCACHE) == steps_of(config, *other)


@pytest.mark.slow
def test_the_interval_of_the_taylor_cache_chooses_among_the_same_programs(config):
    taylor = OPERATIONS["Taylor cache"]
    assert steps_of(config, *taylor) == steps_of(config, *taylor, "taylor_cache_interval=3")


def weights_key(config, *overrides):
    """The keys of the converted weights of every component."""
    job, model = job_of(config, *overrides)
    sources = component_sources(model, job.builder)
    return {
        name: _Slot(folder=Path(name), source=sources[name], matches=matches)
        ._manifest(digest_files(sources[name].stored.files))
        .key.facts
        for name, matches in match_components(sources).items()
    }


@functools.cache
def plain_weights_key(config):
    return weights_key(config)


def changed(config, *overrides, before=()):
    one = weights_key(config, *before) if before else plain_weights_key(config)
    two = weights_key(config, *overrides)
    return {name for name in one if json.dumps(one[name]) != json.dumps(two[name])}


EXPERTS = {"transformer", "transformer_2"}
WEIGHTS = {
    "weights_dtype=bfloat16": EXPERTS,
    "text_encoder_dtype=float32": {"text_encoder"},
    "vae_weights_dtype=bfloat16": {"vae"},
    "use_qwix_quantization=true quantization=int8": EXPERTS,
    "use_qwix_quantization=true quantization=fp8": EXPERTS,
    # Not part of the arrays on disk.
    "lora_rank=4": set(),
    "scan_layers=false": set(),
    "attention=ulysses": set(),
    "ici_tensor_parallelism=2": set(),
    "weight_placement=shard": set(),
    "activations_dtype=bfloat16": set(),
    "scheduler=euler": set(),
    "use_sen_cache=true": set(),
    "height=32": set(),
    "prompt=a cat": set(),
    "seed=7": set(),
    "output_dir=elsewhere": set(),
}


@pytest.mark.parametrize(("override", "components"), WEIGHTS.items(), ids=WEIGHTS)
def test_fields_that_change_converted_weights(config, override, components):
    words = override.split() if "quantization" in override else [override]
    assert changed(config, *words) == components


@pytest.fixture
def lora(tmp_path, config):
    """A LoRA file for one expert, and the overrides that fuse it."""
    weights = job_of(config)[1].weights["transformer"]
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
    file = tmp_path / "a.safetensors"

    def save(seed):
        write_lora(file, shapes, "diffusers", seed=seed)

    save(0)
    job_of.cache_clear()  # the name may be that of an older file
    table = {"lora_model_name_or_path": [str(file.parent)], "high_noise_weight_name": [file.name]}
    given = (
        "enable_lora=true",
        *(f"lora_config.{key}={json.dumps(one)}" for key, one in table.items()),
    )
    return file, given, save


def test_adapters_of_one_expert_change_its_weights_alone(config, lora):
    _, given, _ = lora
    assert changed(config, *given) == {"transformer"}


def test_strengths_change_the_key(config, lora):
    _, given, _ = lora
    assert changed(config, *given, "lora_config.scale=[0.5]", before=given) == {"transformer"}


def test_the_content_of_an_adapter_counts_and_not_its_name(config, lora):
    file, given, save = lora
    before = weights_key(config, *given)
    assert weights_key(config, *given) == before
    size = file.stat().st_size
    save(1)
    job_of.cache_clear()
    assert file.stat().st_size == size
    assert weights_key(config, *given)["transformer"] != before["transformer"]


def test_alphas_next_to_an_adapter_count(config, lora):
    file, given, _ = lora
    settings, keys = file.parent / "adapter_config.json", []
    for alpha in (4, 8):
        settings.write_text(json.dumps({"lora_alpha": alpha}))
        job_of.cache_clear()
        keys.append(weights_key(config, *given)["transformer"])
    assert keys[0] != keys[1]


def test_adapters_are_arguments_of_programs(config, lora):
    _, given, _ = lora
    assert shared_facts(job_of(config)[0]) == shared_facts(job_of(config, *given)[0])
