"""From the keys of a config to the values that a pipeline is built from."""

from pathlib import Path

import jax.numpy as jnp

from maxdiffusion.attention import AttentionOptions, FlashBlockSizes
from maxdiffusion.attention.tuned_sites import TunedSite, read_tuned_sites
from maxdiffusion.config.config import Config
from maxdiffusion.config.validation import guidance_scales
from maxdiffusion.models.vae import Tiling
from maxdiffusion.pipelines.guidance import ClassifierFree, Unguided
from maxdiffusion.pipelines.programs import ProgramShape
from maxdiffusion.pipelines.settings import Decoding, PipelineSettings, Precision
from maxdiffusion.pipelines.shapes import VideoShape, latent_shape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.schedulers import FlowMatchEuler, Sampler, UniPC, from_scheduler_config


def pipeline_settings(config: Config) -> PipelineSettings:
    """Precision, attention and decoding as the config asks for them."""
    return PipelineSettings(
        precision=precision(config),
        attention=config.attention,
        attention_options=attention_options(config),
        scan_layers=config.scan_layers,
        decoding=decoding(config),
        text_length=config.max_sequence_length,
    )


def precision(config: Config) -> Precision:
    """The dtypes of every part."""
    return Precision(
        weights=jnp.dtype(config.weights_dtype),
        activations=jnp.dtype(config.activations_dtype),
        text_encoder=jnp.dtype(config.text_encoder_dtype),
        vae=jnp.dtype(config.vae_dtype),
        vae_weights=jnp.dtype(config.vae_weights_dtype),
        matmul=config.precision.lower(),
    )


def attention_options(config: Config) -> AttentionOptions:
    """Everything about attention but its name."""
    return AttentionOptions(
        block_sizes=FlashBlockSizes.from_mapping(config.flash_block_sizes),
        use_base2_exp=config.use_base2_exp,
        use_experimental_scheduler=config.use_experimental_scheduler,
        ulysses_attention_chunks=config.ulysses_attention_chunks,
        flash_min_seq_length=config.flash_min_seq_length,
        tuned_sites=tuned_sites(config),
    )


def tuned_sites(config: Config) -> tuple[TunedSite, ...]:
    """The tiles that searches have found; none before the first one has written its file."""
    path = Path(config.tuned_blocks_file)
    if not config.tuned_blocks_file or (config.enable_tile_search and not path.exists()):
        return ()
    return read_tuned_sites(path)


def decoding(config: Config) -> Decoding:
    """How the VAE decodes."""
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


def video_shape(config: Config) -> VideoShape:
    """The size of the videos."""
    return VideoShape(height=config.height, width=config.width, num_frames=config.num_frames)


def program_shape(config: Config, spec: WanSpec, videos: int) -> ProgramShape:
    """What the programs of a config are compiled for, with `videos` at once."""
    return ProgramShape(
        videos=videos,
        latent=latent_shape(video_shape(config), spec.vae, spec.transformer),
        guidance=ClassifierFree() if guidance_scales(config).active else Unguided(),
        text_length=config.max_sequence_length,
    )


def sampler(config: Config, spec: WanSpec) -> Sampler:
    """The sampler of the config; UniPC keeps to the settings of the checkpoint's own."""
    steps, shift = config.num_inference_steps, config.flow_shift
    if config.scheduler == "euler":
        return FlowMatchEuler(steps=steps, shift=shift)
    if spec.scheduler.get("_class_name") == "UniPCMultistepScheduler":
        return from_scheduler_config(spec.scheduler, steps, shift)
    return UniPC(steps=steps, shift=shift)
