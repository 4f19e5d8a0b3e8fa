"""Builds the values of a training from the fields of a config."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxdiffusion.attention import AttentionProblem
from maxdiffusion.config import Config
from maxdiffusion.config.validate import AUTO, check_object_storage, check_on_disk, check_writable
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.job import resolve_mesh
from maxdiffusion.generation.settings import attention_options
from maxdiffusion.mesh import MeshDevice, build_mesh
from maxdiffusion.mesh.mesh import slice_index
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.training.data.batches import SyntheticClips
from maxdiffusion.training.data.latent_cache import CaptionedClips
from maxdiffusion.training.data.synthetic import ClipFormat
from maxdiffusion.training.data.video_folder import ClipSize, VideoClips, videos_in
from maxdiffusion.training.image_conditioning import image_conditioning
from maxdiffusion.training.lora.adapters import lora_settings
from maxdiffusion.training.loss import (
    BellWeighting,
    EvenWeighting,
    ExpertSchedule,
    NoiseLevels,
    Remat,
    RematPolicy,
    TrainedExperts,
)
from maxdiffusion.training.memory.moments import MomentsFormat
from maxdiffusion.training.memory.placement import SPREAD, StatePlacement
from maxdiffusion.training.step import Clipping, Decay, LearningRate, Optimiser
from maxdiffusion.training.wan import BatchShape, TextSource, WanTraining

logger = logging.getLogger(__name__)
CAPTION_BUCKETS = (32, 64, 128, 256)


def training_mesh(
    config: Config, heads: int | None, devices: Sequence[MeshDevice] | None = None
) -> Mesh:
    """Returns the mesh of a config over these devices; None: the available ones."""
    held = jax.devices() if devices is None else devices
    slices = len({*map(slice_index, held)})
    split = resolve_mesh(config, len(held), slices, heads)
    return build_mesh(split.ici, dcn=split.dcn, devices=held)


def check_folders(config: Config, **required: str) -> None:
    """Checks the folders that must be given (by field name) and all that training writes to."""
    rule = "training needs a folder of its own"
    problems = Collector(
        [
            Problem(name=name, value="", rule=rule, remedy=f"Set {name}=FOLDER")
            for name, path in required.items()
            if not path
        ]
    )
    written = {**required, "export_dir": config.export_dir, "output_dir": config.output_dir}
    for name, path in written.items():
        with problems:
            check_writable(name, path, Path(path))
    with problems:
        check_object_storage(**written, jax_cache_dir=config.jax_cache_dir)
    with problems:
        check_on_disk(metrics_file=config.metrics_file, tensorboard_dir=config.tensorboard_dir)
    problems.raise_if_any()


def optimiser(config: Config) -> Optimiser:
    """Returns AdamW and its learning rate."""
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
        moments=MomentsFormat(config.moments_dtype),
    )


def clipping_of(config: Config) -> tuple[Clipping, float]:
    """Returns the kind of gradient clipping, and its limit."""
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
    """Returns the schedule of the trained experts."""
    one = spec.boundary_ratio is None
    trained = TrainedExperts.SHARED if one else TrainedExperts(config.train_experts)
    return ExpertSchedule(
        levels=NoiseLevels(shift=config.flow_shift),
        boundary=None if one else config.boundary_ratio,
        trained=trained,
        turn=config.expert_turn_steps,
    )


def windows(config: Config) -> CaptionedClips:
    """Returns the clips that an autoencoder trains on: whole ones, or a window of each."""
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
    """Returns the clips of a config."""
    if config.dataset_type == "videos":
        folder = Path(config.train_data_dir).expanduser()
        return VideoClips(videos=videos_in(folder), size=clip_size(config))
    if config.dataset_type != "synthetic":
        rule = "frames come from `synthetic` or from `videos`, a folder with captions"
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
    """Returns the size of clips without buckets."""
    return ClipSize(frames=config.num_frames, height=config.height, width=config.width)


def batch_shape(
    config: Config, latent: tuple[int, int, int], tokens: int, devices: int | None = None
) -> BatchShape:
    """Returns the shape of a batch; `devices` are those of the mesh, None: the available ones."""
    return BatchShape(
        clips=config.global_batch_size or devices or len(jax.devices()),
        latent=latent,
        caption_tokens=tokens,
        text_length=config.max_sequence_length,
        accumulation=config.gradient_accumulation_steps,
    )


def wan_training(
    config: Config,
    spec: WanSpec,
    batch: BatchShape,
    text: TextSource,
    devices: Sequence[MeshDevice] | None = None,
) -> WanTraining:
    """Returns the training of a config on these devices; None: the available ones."""
    rate = config.text_encoder_learning_rate / config.learning_rate
    mesh = training_mesh(config, spec.transformer.heads, devices)
    placement = state_placement(config)
    placement.check(mesh)
    spread = config.weight_placement == "shard"
    sized = spec.with_scan(config.scan_layers).with_spread_weights(spread)
    attention, mesh, note = training_attention(config, spec, batch, mesh)
    if note:
        logger.info(note)
    return WanTraining(
        transformer=sized.transformer,
        text_encoder=spec.text_encoder,
        batch=batch,
        experts=experts(config, spec),
        weighting=(
            EvenWeighting()
            if config.disable_training_weights
            else BellWeighting(shift=config.flow_shift)
        ),
        optimiser=optimiser(config),
        mesh=mesh,
        text=text,
        image=image_conditioning(config, spec),
        caption_dropout=config.caption_dropout,
        text_rate=rate if config.train_text_encoder else 0.0,
        dtype=np.dtype(config.activations_dtype),
        remat=RematPolicy(
            kind=Remat(config.remat_policy),
            saved=config.names_which_can_be_saved,
            offloaded=config.names_which_can_be_offloaded,
        ),
        lora=lora_settings(config, spec.transformer),
        weights_dtype=np.dtype(config.weights_dtype),
        placement=placement,
        attention=attention,
        attention_options=attention_options(config),
    )


def state_placement(config: Config) -> StatePlacement:
    """Returns where the state of a training is kept."""
    return StatePlacement(
        spread=config.optimizer_state_sharding == SPREAD,
        optimizer_memory=config.optimizer_state_memory,
        idle_memory=config.idle_expert_memory,
    )


def training_attention(
    config: Config, spec: WanSpec, batch: BatchShape, mesh: Mesh
) -> tuple[str, Mesh, str]:
    """Returns the attention and its mesh; `auto` takes the best estimate that has a gradient."""
    if config.attention != AUTO:
        return config.attention, mesh, ""
    # The cost model is loaded for `auto` alone.
    from maxdiffusion.costs.training import choose_attention

    transformer = spec.transformer
    tokens = transformer.tokens(batch.latent)
    problem = AttentionProblem(
        batch=batch.piece,
        q_len=tokens,
        kv_len=tokens,
        heads=transformer.heads,
        head_dim=transformer.head_dim,
        dtype=np.dtype(config.activations_dtype),
    )
    return choose_attention(
        problem,
        transformer,
        mesh,
        options=attention_options(config),
        text_length=batch.caption_tokens + 1,
        keeps_split=config.ulysses_shards != -1 or config.ici_ring_parallelism is not None,
    )


def caption_length(captions: CaptionedClips, tokenize: Callable[[str], Any], limit: int) -> int:
    """Returns the length to which captions are padded: the bucket of the longest one."""
    longest = max(len(tokenize(captions.caption(index))) for index in range(len(captions)))
    fitting = [size for size in CAPTION_BUCKETS if longest <= size < limit]
    return fitting[0] if fitting else limit - 1
