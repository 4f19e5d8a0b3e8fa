"""Tiny checkpoint folders of the WAN models that are not plain text-to-video.

One maker per row of the family: image to video (2.1 with CLIP, 2.2 with two experts), first and
last frame, text and image in one model with the 2.2 autoencoder, VACE, Animate. Each takes a seed
and any field of `FamilyCheckpoint`; `write_family` writes the folder as the released ones look.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from tests.oracle.tiny_checkpoints import (
    TextSize,
    TransformerSize,
    VaeSize,
    draw_parameters,
    make_scheduler,
    make_text_encoder,
    make_vae,
)
from tests.oracle.vocabulary import Pieces, unigram_pieces, write_tokenizer


@dataclass(frozen=True, kw_only=True)
class Vae22Size:
    """The sizes of a WAN 2.2 VAE; the released one has base 160, decoder base 256 and z 48."""

    base: int = 4
    decoder_base: int = 6
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    res_blocks: int = 2
    channels: int = 48
    temporal: tuple[bool, ...] = (False, True, True)


@dataclass(frozen=True, kw_only=True)
class ClipSize:
    """The sizes of a CLIP vision tower; the released one has width 1280, 32 layers, 224 pixels."""

    width: int = 32
    heads: int = 4
    layers: int = 3
    ffn: int = 64
    image: int = 28
    patch: int = 14
    activation: str = "gelu"

    @property
    def tokens(self) -> int:
        """The number of tokens of an image, class token included."""
        return (self.image // self.patch) ** 2 + 1


@dataclass(frozen=True, kw_only=True)
class FamilyCheckpoint:
    """What a checkpoint folder shall hold; two experts if it has a `boundary_ratio`.

    `model` and `pipeline` are diffusers' classes, `arguments` and `pipeline_arguments` what they
    take apart from the sizes. `clip_prefix` is "vision_model." in the released folders and "" in
    those that transformers 5 writes.
    """

    seed: int
    pipeline: type = WanImageToVideoPipeline
    model: type = WanTransformer3DModel
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pipeline_arguments: Mapping[str, Any] = field(default_factory=dict)
    transformer: TransformerSize = field(default_factory=TransformerSize)
    vae: VaeSize | Vae22Size = field(default_factory=VaeSize)
    text: TextSize = field(default_factory=TextSize)
    clip: ClipSize | None = None
    clip_prefix: str = "vision_model."
    boundary_ratio: float | None = None
    flow_shift: float = 3.0
    dtype: torch.dtype = torch.float32
    shard_size: str = "10GB"


def wan22_i2v(seed: int, **changes: Any) -> FamilyCheckpoint:
    """Returns an image-to-video checkpoint with two experts, as WAN 2.2 I2V A14B has."""
    settings = {"arguments": {"in_channels": 36, "out_channels": 16}, "boundary_ratio": 0.9}
    return FamilyCheckpoint(seed=seed, **settings | changes)


def wan21_i2v(seed: int, **changes: Any) -> FamilyCheckpoint:
    """Returns an image-to-video checkpoint with a CLIP tower, as WAN 2.1 I2V 14B has."""
    return _with_clip(seed, {}, changes)


def wan21_flf2v(seed: int, **changes: Any) -> FamilyCheckpoint:
    """Returns a first-and-last-frame checkpoint: image positions for the tokens of two images."""
    clip = changes.get("clip", ClipSize())
    settings = {"flow_shift": 16.0, **changes}
    return _with_clip(seed, {"pos_embed_seq_len": 2 * clip.tokens}, settings)


def wan22_ti2v(seed: int, **changes: Any) -> FamilyCheckpoint:
    """Returns a checkpoint for text and image with the 2.2 VAE, as WAN 2.2 TI2V 5B has."""
    vae = changes.get("vae", Vae22Size())
    settings = {
        "pipeline": WanPipeline,
        "arguments": {"in_channels": vae.channels, "out_channels": vae.channels},
        "pipeline_arguments": {"expand_timesteps": True},
        "vae": vae,
        "flow_shift": 5.0,
    }
    return FamilyCheckpoint(seed=seed, **settings | changes)


def wan21_vace(
    seed: int, *, control_layers: tuple[int, ...] = (0, 2), **changes: Any
) -> FamilyCheckpoint:
    """Returns a control checkpoint: `control_layers` are the layers that take a hint."""
    settings = {
        "pipeline": WanVACEPipeline,
        "model": WanVACETransformer3DModel,
        "arguments": {"vace_layers": list(control_layers), "vace_in_channels": 96},
        "transformer": TransformerSize(layers=4),
    }
    return FamilyCheckpoint(seed=seed, **settings | changes)


def wan22_vace(
    seed: int, *, control_layers: tuple[int, ...] = (0, 1), **changes: Any
) -> FamilyCheckpoint:
    """Returns a control checkpoint with two experts, as WAN 2.2 VACE-Fun A14B has."""
    settings = {"boundary_ratio": 0.875, "transformer": TransformerSize(layers=3)}
    return wan21_vace(seed, control_layers=control_layers, **settings | changes)


def wan22_animate(
    seed: int, *, face_size: int = 32, every: int = 2, **changes: Any
) -> FamilyCheckpoint:
    """Returns an Animate checkpoint: faces of `face_size` pixels, an adapter `every` few blocks."""
    widths = {str(2**power): max(4, 16 >> (power - 2)) for power in range(2, 11)}
    motion = {
        "motion_encoder_channel_sizes": widths,
        "motion_encoder_size": face_size,
        "motion_style_dim": 24,
        "motion_dim": 6,
        "motion_encoder_dim": 20,
        "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 4,
        "inject_face_latents_blocks": every,
    }
    settings = {
        "pipeline": WanAnimatePipeline,
        "model": WanAnimateTransformer3DModel,
        "transformer": TransformerSize(layers=4),
        **changes,
    }
    return _with_clip(seed, {"latent_channels": 16, **motion}, settings)


def _with_clip(
    seed: int, arguments: Mapping[str, Any], changes: Mapping[str, Any]
) -> FamilyCheckpoint:
    """Returns a checkpoint whose transformer reads CLIP tokens and 36 channels."""
    clip = changes.get("clip", ClipSize())
    size = changes.get("transformer", TransformerSize())
    image = {
        "in_channels": 36,
        "out_channels": 16,
        "image_dim": clip.width,
        "added_kv_proj_dim": size.heads * size.head_dim,
    }
    return FamilyCheckpoint(
        seed=seed, **{"clip": clip, "arguments": {**image, **arguments}, **changes}
    )


def make_vae22(size: Vae22Size, seed: int) -> AutoencoderKLWan:
    """Returns a WAN 2.2 VAE of the given size with drawn parameters and latent statistics."""
    drawn = np.random.default_rng(seed + 1)
    model = AutoencoderKLWan(
        base_dim=size.base,
        decoder_base_dim=size.decoder_base,
        z_dim=size.channels,
        dim_mult=list(size.multipliers),
        num_res_blocks=size.res_blocks,
        temperal_downsample=list(size.temporal),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=2 ** sum(size.temporal),
        scale_factor_spatial=2 ** len(size.multipliers),
        latents_mean=drawn.normal(0.0, 0.2, size.channels).round(4).tolist(),
        latents_std=drawn.uniform(0.4, 1.4, size.channels).round(4).tolist(),
    )
    return draw_parameters(model, seed)


def make_clip(size: ClipSize, seed: int) -> CLIPVisionModel:
    """Returns a CLIP vision tower of the given size with drawn parameters."""
    config = CLIPVisionConfig(
        hidden_size=size.width,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        image_size=size.image,
        patch_size=size.patch,
        hidden_act=size.activation,
        projection_dim=16,
    )
    return draw_parameters(CLIPVisionModel(config), seed)


def make_family_transformer(tiny: FamilyCheckpoint, seed: int) -> torch.nn.Module:
    """Returns a transformer of the checkpoint's class with drawn parameters."""
    size = tiny.transformer
    model = tiny.model(
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        num_layers=size.layers,
        ffn_dim=size.ffn,
        text_dim=tiny.text.width,
        **tiny.arguments,
    )
    return draw_parameters(model, seed)


def write_family(folder: Path, tiny: FamilyCheckpoint, pieces: Pieces | None = None) -> Path:
    """Writes the checkpoint folder as diffusers saves it and returns the folder."""
    tokenizer = write_tokenizer(folder / "tokenizer", pieces or unigram_pieces())
    seed = 10 * tiny.seed
    models = {
        "transformer": make_family_transformer(tiny, seed + 1),
        "text_encoder": make_text_encoder(tiny.text, len(tokenizer), seed + 3),
        "vae": _make_vae(tiny.vae, seed + 4),
    }
    if tiny.boundary_ratio is not None:
        models["transformer_2"] = make_family_transformer(tiny, seed + 2)
    if tiny.clip is not None:
        models["image_encoder"] = make_clip(tiny.clip, seed + 5)
    pipeline = tiny.pipeline(
        tokenizer=tokenizer,
        scheduler=make_scheduler(tiny.flow_shift),
        **({} if tiny.boundary_ratio is None else {"boundary_ratio": tiny.boundary_ratio}),
        **({} if tiny.clip is None else {"image_processor": _processor(tiny.clip)}),
        **tiny.pipeline_arguments,
        **{name: model.to(tiny.dtype) for name, model in models.items()},
    )
    pipeline.save_pretrained(folder, max_shard_size=tiny.shard_size)
    _name_as_released(folder, tiny)
    return folder


def _make_vae(size: VaeSize | Vae22Size, seed: int) -> AutoencoderKLWan:
    return make_vae22(size, seed) if isinstance(size, Vae22Size) else make_vae(size, seed)


def _processor(size: ClipSize) -> CLIPImageProcessor:
    crop = {"height": size.image, "width": size.image}
    return CLIPImageProcessor(size={"shortest_edge": size.image}, crop_size=crop)


def _name_as_released(folder: Path, tiny: FamilyCheckpoint) -> None:
    """Renames what transformers 5 writes to what the released, older folders hold."""
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "T5TokenizerFast"]
    if tiny.clip is not None:
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        _prefix_names(folder / "image_encoder", tiny.clip_prefix)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def _prefix_names(folder: Path, prefix: str) -> None:
    """Puts `prefix` before the tensors' names, in every shard and in the index of shards."""
    for weights in folder.glob("*.safetensors"):
        tensors = {prefix + name: value for name, value in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    for shards in folder.glob("*.index.json"):
        index = json.loads(shards.read_text())
        index["weight_map"] = {prefix + name: file for name, file in index["weight_map"].items()}
        shards.write_text(json.dumps(index))
