"""From the keys of a config to the values that a training is built from."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiffusion.commands.pipeline_settings import attention_options
from maxdiffusion.config.config import Config
from maxdiffusion.config.output_checks import disk_problems, storage_problems, writing_problems
from maxdiffusion.config.validation import resolve_mesh
from maxdiffusion.mesh import build_mesh
from maxdiffusion.mesh.devices import slice_index
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.training.clips import ClipFormat
from maxdiffusion.training.experts import ExpertSchedule, TrainedExperts
from maxdiffusion.training.flow_matching import BellWeighting, EvenWeighting, NoiseLevels
from maxdiffusion.training.latent_cache import CaptionedClips
from maxdiffusion.training.optimiser import Clipping, Decay, LearningRate, Optimiser
from maxdiffusion.training.remat import Remat, RematPolicy
from maxdiffusion.training.sources import SyntheticClips
from maxdiffusion.training.video_folder import ClipSize, VideoClips, videos_in
from maxdiffusion.training.wan_training import BatchShape, TextSource, WanTraining

CAPTION_BUCKETS = (32, 64, 128, 256)


def training_mesh(config: Config, heads: int | None) -> Mesh:
    """The mesh that a config asks for on the devices that are there."""
    devices = jax.devices()
    slices = len({*map(slice_index, devices)})
    split = resolve_mesh(config, len(devices), slices, heads)
    return build_mesh(split.ici, dcn=split.dcn)


def folder_problems(config: Config, *names: str) -> Iterator[Problem]:
    """Problems with the keys that must name folders, and with other places that are written to."""
    for name in names:
        if not config.values[name]:
            rule, remedy = "training needs a folder of its own", f"Set {name}=FOLDER"
            yield Problem(name=name, value="", rule=rule, remedy=remedy)
    for name in (*names, "export_dir", "output_dir"):
        yield from writing_problems(name, config.values[name], Path(config.values[name]))
    yield from storage_problems(config, *names, "export_dir", "output_dir", "jax_cache_dir")
    yield from disk_problems(config, "metrics_file", "tensorboard_dir")


def optimiser(config: Config) -> Optimiser:
    """AdamW and its rate."""
    schedule = config.learning_rate_schedule_steps
    rate = LearningRate(
        peak=config.learning_rate,
        steps=max(1, config.max_train_steps if schedule < 1 else schedule),
        warmup_share=config.warmup_steps_fraction,
        decay=Decay(config.learning_rate_decay),
    )
    clipping, limit = clipping_of(config)
    return Optimiser(
        learning_rate=rate,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        clipping=clipping,
        clip_at=limit,
        ema_decay=config.ema_decay,
    )


def clipping_of(config: Config) -> tuple[Clipping, float]:
    """What of the gradient is limited, and to what."""
    by_norm, by_value = config.opt_enable_grad_global_norm_clipping, config.opt_enable_grad_clipping
    if by_norm and by_value:
        rule = "gradients are clipped by their norm or by value, not both"
        remedy = "Set one of the two to false"
        name = "opt_enable_grad_clipping"
        raise ProblemsFound([Problem(name=name, value=True, rule=rule, remedy=remedy)])
    if by_norm:
        return Clipping.GLOBAL_NORM, config.max_grad_norm
    return (Clipping.VALUE, config.max_grad_value) if by_value else (Clipping.NONE, 1.0)


def experts(config: Config, spec: WanSpec) -> ExpertSchedule:
    """Which transformer is trained when."""
    one = spec.boundary_ratio is None
    trained = TrainedExperts.SHARED if one else TrainedExperts(config.train_experts)
    return ExpertSchedule(
        levels=NoiseLevels(shift=config.flow_shift),
        boundary=None if one else config.boundary_ratio,
        trained=trained,
    )


def windows(config: Config) -> CaptionedClips:
    """The clips that an autoencoder trains on: those of the config, or a window of each."""
    whole = clips(config)
    if not config.synthetic_window:
        return whole
    wrong = not isinstance(whole, SyntheticClips) or config.synthetic_window > config.height
    if wrong or config.synthetic_window % 16:
        rule = f"must be 0, or for synthetic clips a multiple of 16 up to height={config.height}"
        name, remedy = "synthetic_window", "Use synthetic_window=0"
        value = config.synthetic_window
        raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])
    assert isinstance(whole, SyntheticClips)
    return replace(whole, window=config.synthetic_window)


def clips(config: Config) -> CaptionedClips:
    """The clips that a config names."""
    if config.dataset_type == "videos":
        folder = Path(config.train_data_dir).expanduser()
        return VideoClips(videos=videos_in(folder), size=clip_size(config))
    if config.dataset_type != "synthetic":
        rule = "clips come from `synthetic` or from `videos`, a folder with captions"
        remedy = "Use dataset_type=synthetic, or dataset_type=videos train_data_dir=FOLDER"
        name = "dataset_type"
        raise ProblemsFound(
            [Problem(name=name, value=config.dataset_type, rule=rule, remedy=remedy)]
        )
    if config.height != config.width:
        rule, remedy = "synthetic clips are square", f"Use height={config.width}"
        raise ProblemsFound([Problem(name="height", value=config.height, rule=rule, remedy=remedy)])
    clip = ClipFormat(
        frames=config.num_frames, size=config.height, pair_share=config.synthetic_pair_share
    )
    return SyntheticClips(clip=clip, count=config.synthetic_clips, seed=config.seed)


def clip_size(config: Config) -> ClipSize:
    """The one size that clips have where there are no buckets."""
    return ClipSize(frames=config.num_frames, height=config.height, width=config.width)


def batch_shape(config: Config, latent: tuple[int, int, int], tokens: int) -> BatchShape:
    """How much is trained on at once."""
    return BatchShape(
        clips=config.global_batch_size or len(jax.devices()),
        latent=latent,
        caption_tokens=tokens,
        text_length=config.max_sequence_length,
        accumulation=config.gradient_accumulation_steps,
    )


def wan_training(config: Config, spec: WanSpec, batch: BatchShape, text: TextSource) -> WanTraining:
    """The training of a config."""
    rate = config.text_encoder_learning_rate / config.learning_rate
    return WanTraining(
        transformer=spec.with_scan(config.scan_layers).transformer,
        text_encoder=spec.text_encoder,
        batch=batch,
        experts=experts(config, spec),
        weighting=(
            EvenWeighting()
            if config.disable_training_weights
            else BellWeighting(shift=config.flow_shift)
        ),
        optimiser=optimiser(config),
        mesh=training_mesh(config, spec.transformer.heads),
        text=text,
        caption_dropout=config.caption_dropout,
        text_rate=rate if config.train_text_encoder else 0.0,
        dtype=np.dtype(config.activations_dtype),
        remat=RematPolicy(
            kind=Remat(config.remat_policy),
            saved=config.names_which_can_be_saved,
            offloaded=config.names_which_can_be_offloaded,
        ),
        attention=config.attention,
        attention_options=attention_options(config),
    )


def caption_length(captions: CaptionedClips, tokenize: Callable[[str], Any], limit: int) -> int:
    """The bucket that the longest caption fits into."""
    longest = max(len(tokenize(captions.caption(index))) for index in range(len(captions)))
    fitting = [size for size in CAPTION_BUCKETS if longest <= size < limit]
    return fitting[0] if fitting else limit - 1
