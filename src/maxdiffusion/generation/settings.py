"""Returns the values that a pipeline and a run are built from, given a config.

model      precision, attention options, decoding, sampler, guidance, sizes
caches     `jax_cache_dir` (jax's own), `aot_cache_dir` (whole programs)
profile    steps to trace
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from maxdiffusion.attention import AttentionOptions, BlockSizes
from maxdiffusion.attention.options import TunedBlocks, read_tuned_blocks
from maxdiffusion.config import Config
from maxdiffusion.config.validate import check_writable
from maxdiffusion.diffusion import Sampler, sampler_named
from maxdiffusion.diffusion.guidance import GuidanceScales, RunPlan, plan_run
from maxdiffusion.models.vae import Tiling
from maxdiffusion.pipelines.programs import ProgramBuilder, ProgramShape
from maxdiffusion.pipelines.request import VideoShape, latent_shape
from maxdiffusion.pipelines.settings import Decoding, MatmulPrecision, PipelineSettings, Precision
from maxdiffusion.pipelines.spec import TRAIN_TIMESTEPS, TransformerFiles, WanSpec
from maxdiffusion.pipelines.tasks.base import Task, TextToVideo
from maxdiffusion.runtime.files import FilePath, as_path
from maxdiffusion.runtime.profiling import ProfilePlan

WAN_2_1_GUIDANCE = 5.0
"""The guidance scale that WAN 2.1 is published with."""
PROFILE_FOLDER = "profile"
MATMUL_PRECISIONS: Mapping[str, MatmulPrecision] = {
    "DEFAULT": "default",
    "HIGH": "high",
    "HIGHEST": "highest",
}


def pipeline_settings(config: Config, attention: str) -> PipelineSettings:
    """Returns precision, attention and decoding; `attention` is the name that `auto` stands for."""
    return PipelineSettings(
        precision=precision(config),
        attention=attention,
        attention_options=attention_options(config),
        scan_layers=config.scan_layers,
        decoding=decoding(config),
        text_length=config.max_sequence_length,
    )


def precision(config: Config) -> Precision:
    """Returns the dtypes of every part."""
    return Precision(
        weights=jnp.dtype(config.weights_dtype),
        activations=jnp.dtype(config.activations_dtype),
        text_encoder=jnp.dtype(config.text_encoder_dtype),
        vae=jnp.dtype(config.vae_dtype),
        vae_weights=jnp.dtype(config.vae_weights_dtype),
        matmul=MATMUL_PRECISIONS[config.precision],
    )


def attention_options(config: Config) -> AttentionOptions:
    """Returns everything about attention but its name."""
    return AttentionOptions(
        block_sizes=BlockSizes.from_mapping(config.flash_block_sizes),
        use_base2_exp=config.use_base2_exp,
        use_experimental_scheduler=config.use_experimental_scheduler,
        ulysses_attention_chunks=config.ulysses_attention_chunks,
        flash_min_seq_length=config.flash_min_seq_length,
        tuned_blocks=tuned_blocks(config),
    )


def tuned_blocks(config: Config) -> tuple[TunedBlocks, ...]:
    """Returns the block sizes that searches have found; none before the first wrote its file."""
    path = Path(config.tuned_blocks_file)
    if not config.tuned_blocks_file or (config.enable_tile_search and not path.exists()):
        return ()
    return read_tuned_blocks(path)


def decoding(config: Config) -> Decoding:
    """Returns how the VAE decodes."""
    tiling = Tiling(
        tile_height=config.vae_tile_height,
        tile_width=config.vae_tile_width,
        stride_height=config.vae_tile_stride_height,
        stride_width=config.vae_tile_stride_width,
    )
    return Decoding(
        chunk=config.vae_decode_chunk,
        tiling=tiling if config.vae_tiling else None,
        spatial_devices=config.vae_spatial,
    )


def transformer_files(config: Config) -> TransformerFiles:
    """Returns the files that replace the transformers of the folder."""
    return TransformerFiles(
        first=config.wan_transformer_pretrained_model_name_or_path,
        second=config.wan_transformer_2_pretrained_model_name_or_path,
    )


def video_shape(config: Config) -> VideoShape:
    """Returns the size of the videos."""
    return VideoShape(height=config.height, width=config.width, num_frames=config.num_frames)


def program_shape(
    config: Config,
    spec: WanSpec,
    videos: int,
    *,
    video: VideoShape | None = None,
    task: Task | None = None,
) -> ProgramShape:
    """Returns the sizes that programs are compiled for, with `videos` at once.

    `video` is the size of the config's videos unless it is given, `task` text-to-video.
    """
    task = task or TextToVideo()
    return ProgramShape(
        videos=videos,
        latent=latent_shape(video or video_shape(config), spec.vae, spec.transformer, task),
        guidance=run_plan(config, spec).guidance,
        text_length=config.max_sequence_length,
        task=task,
    )


def guidance_scales(config: Config, spec: WanSpec | None = None) -> GuidanceScales:
    """Returns the guidance scale of each expert; Animate has a field of its own."""
    if spec is not None and spec.animates:
        scale = config.animate_guidance_scale
        return GuidanceScales(high_noise=scale, low_noise=scale)
    if config.model_name == "wan2.2":
        return GuidanceScales(
            high_noise=config.guidance_scale_high, low_noise=config.guidance_scale_low
        )
    scale = WAN_2_1_GUIDANCE if config.guidance_scale is None else config.guidance_scale
    return GuidanceScales(high_noise=scale, low_noise=scale)


def sampler(config: Config, spec: WanSpec) -> Sampler:
    """Returns the sampler of the config, with the checkpoint's settings of the same sampler."""
    levels = config.sigmas or tuple(t / TRAIN_TIMESTEPS for t in config.denoising_step_list)
    return sampler_named(
        config.scheduler,
        spec.scheduler,
        steps=len(levels) or config.num_inference_steps,
        shift=config.flow_shift,
        sigmas=levels or None,
    )


def run_plan(config: Config, spec: WanSpec) -> RunPlan:
    """Returns expert, guidance and scale of every step."""
    return plan_run(
        sampler(config, spec),
        scales=guidance_scales(config, spec),
        boundary_ratio=config.boundary_ratio if len(spec.experts) == 2 else None,
        boundary_step_index=config.boundary_step_index,
        guidance_end_step=config.guidance_end_step,
    )


def use_compilation_cache(config: Config) -> None:
    """Points jax's compilation cache to `jax_cache_dir`, if the config names one."""
    if config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.jax_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def use_aot_cache(builder: ProgramBuilder, config: Config) -> ProgramBuilder:
    """Returns the builder that loads programs from `aot_cache_dir` and stores what it compiles."""
    if not config.aot_cache_dir:
        return builder
    from maxdiffusion.pipelines.aot_cache import AotCache  # for `aot_cache_dir` alone

    return replace(builder, compile=AotCache.of(aot_cache_folder(config), builder))


def fill_aot_cache(builder: ProgramBuilder, config: Config) -> ProgramBuilder:
    """Returns the builder that compiles every program and stores it in `aot_cache_dir`."""
    if not config.aot_cache_dir:
        return builder
    from maxdiffusion.pipelines.aot_cache import AotCache  # for `aot_cache_dir` alone

    return replace(builder, compile=AotCache.of(aot_cache_folder(config), builder).fill)


def aot_cache_folder(config: Config) -> FilePath:
    """Returns the folder of compiled programs; raises if it cannot be written."""
    folder = as_path(config.aot_cache_dir)
    check_writable("aot_cache_dir", config.aot_cache_dir, folder)
    return folder


def profile_plan(config: Config) -> ProfilePlan | None:
    """Returns the steps to profile and where to write them; None without `enable_profiler`."""
    if not config.enable_profiler:
        return None
    return ProfilePlan(
        folder=os.path.join(os.path.expanduser(config.output_dir), PROFILE_FOLDER),
        skip=config.skip_first_n_steps_for_profiler,
        steps=config.profiler_steps,
    )


def profile_notes(config: Config) -> tuple[str, ...]:
    """Returns the lines of a start-up plan about the profile."""
    plan = profile_plan(config)
    return () if plan is None else (plan.describe(),)
