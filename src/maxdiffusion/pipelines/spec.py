"""Describes the models of a checkpoint before any weight is read.

WanSpec             sizes of the models, from the configs of a checkpoint folder
WanModels           the models as graphs and abstract parameters
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from maxdiffusion.checkpoints.diffusers_folder import (
    ModelFolder,
    listed_components,
    open_model_folder,
    read_model_index,
)
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.abstract import AbstractModel
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.vae import WanVae, WanVaeConfig
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.models.wan.config import MASK_CHANNELS
from maxdiffusion.pipelines.settings import Precision

if TYPE_CHECKING:
    from maxdiffusion.models.clip import ClipVisionConfig, ClipVisionEncoder

COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
SECOND_EXPERT = "transformer_2"
IMAGE_ENCODER = ("image_encoder", "image_processor")
"""Components of a model that attends to image tokens."""
PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "WanVACEPipeline", "WanAnimatePipeline")
TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True, kw_only=True)
class WanSpec:
    """Configs of the models of a WAN checkpoint, and of its scheduler.

    `image_encoder` and `image_processor` belong to models that attend to image tokens.
    `time_per_token` marks a model whose first frame may be known (WAN 2.2 TI2V-5B).
    """

    transformer: WanTransformerConfig
    vae: WanVaeConfig
    text_encoder: Umt5Config
    scheduler: Mapping[str, Any]
    boundary_ratio: float | None  # None: one transformer for all timesteps
    time_per_token: bool = False
    image_encoder: "ClipVisionConfig | None" = None
    image_processor: Mapping[str, Any] | None = None

    @property
    def experts(self) -> tuple[str, ...]:
        """Transformer folders, high noise first."""
        return ("transformer",) if self.boundary_ratio is None else ("transformer", SECOND_EXPERT)

    @property
    def image_channels(self) -> bool:
        """True if the transformer's input has a mask and an encoded image behind the latents."""
        return self.transformer.in_channels == 2 * self.vae.z_dim + MASK_CHANNELS

    @property
    def animates(self) -> bool:
        """True if the transformer takes poses and faces."""
        return self.transformer.face is not None

    @property
    def components(self) -> tuple[str, ...]:
        """Components with weights, the transformers first."""
        image = () if self.image_encoder is None else ("image_encoder",)
        return (*self.experts, "vae", "text_encoder", *image)

    def with_scan(self, scan_layers: bool) -> "WanSpec":
        """Returns the spec with the blocks in a scan, or unrolled."""
        return replace(self, transformer=replace(self.transformer, scan_layers=scan_layers))

    def with_spread_weights(self, spread: bool) -> "WanSpec":
        """Returns the spec with the blocks' weights sharded over a sequence's devices, or not."""
        return replace(self, transformer=replace(self.transformer, spread_weights=spread))

    def with_adapter_rank(self, rank: int) -> "WanSpec":
        """Returns the spec with room of this rank for LoRA adapters in every block."""
        return replace(self, transformer=replace(self.transformer, adapter_rank=rank))


@dataclass(frozen=True, kw_only=True)
class TransformerFiles:
    """Locations of transformers that replace those of a folder; empty text = not given.

    `second` is the low-noise expert of a model with two, unless `first` is a folder with both.
    """

    first: str = ""
    second: str = ""

    def __bool__(self) -> bool:
        return bool(self.first or self.second)


def open_wan_folder(
    location: str | Path, transformers: TransformerFiles | None = None
) -> tuple[ModelFolder, WanSpec]:
    """Returns the folder of a WAN model and its spec; raises all problems.

    Weights of its transformers are taken from `transformers`, if they are given.
    """
    index = read_model_index(location)
    listed = listed_components(index)
    second = (SECOND_EXPERT,) if _has_second_expert(index) else ()
    image = IMAGE_ENCODER if IMAGE_ENCODER[0] in listed else ()
    replaced = ("transformer", *second) if transformers else ()
    folder = open_model_folder(
        location, needed=(*COMPONENTS, *second, *image), configs_only=replaced
    )
    spec = read_spec(folder)
    if transformers:
        # Both for such files alone.
        from maxdiffusion.checkpoints.original_files import find_transformers, with_transformers
        from maxdiffusion.models.wan.checkpoint import transformer_map

        named = transformers.first, transformers.second
        paths = find_transformers(*named, spec.experts, base=folder.root)
        abstract = wan_models(spec, Precision()).transformer.parameters
        folder = with_transformers(folder, paths, transformer_map(spec.transformer), abstract)
    return folder, spec


def read_spec(folder: ModelFolder) -> WanSpec:
    """Returns the spec of a folder; raises everything that keeps it from running."""
    problems, configs = Collector(), folder.configs
    with problems:
        _check_index(folder.index)
    with problems:
        transformer = WanTransformerConfig.from_diffusers(configs["transformer"])
    with problems:
        vae = WanVaeConfig.from_diffusers(configs["vae"])
    with problems:
        text_encoder = Umt5Config.from_transformers(configs["text_encoder"])
    image_encoder = None
    with problems:
        if IMAGE_ENCODER[0] in configs:
            from maxdiffusion.models.clip import ClipVisionConfig  # for WAN 2.1 image-to-video

            image_encoder = ClipVisionConfig.from_transformers(configs[IMAGE_ENCODER[0]])
    with problems:
        if _has_second_expert(folder.index):
            _check_second_expert(configs["transformer"], configs[SECOND_EXPERT])
    problems.raise_if_any()
    spec = WanSpec(
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        scheduler=folder.configs["scheduler"],
        boundary_ratio=folder.index.get("boundary_ratio"),
        time_per_token=bool(folder.index.get("expand_timesteps")),
        image_encoder=image_encoder,
        image_processor=configs.get(IMAGE_ENCODER[1]),
    )
    _check_sizes(spec)
    return spec


def _has_second_expert(index: Mapping[str, Any]) -> bool:
    return index.get("boundary_ratio") is not None or SECOND_EXPERT in listed_components(index)


def _check_index(index: Mapping[str, Any]) -> None:
    """Raises everything in model_index.json that is not supported."""
    problems: list[Problem] = []
    kind = index.get("_class_name")
    if kind not in PIPELINES:
        problems.append(
            Problem(
                name="model_index.json _class_name",
                value=kind,
                rule=f"must be one of {', '.join(PIPELINES)}",
                remedy="Name a WAN 2.1 or 2.2 checkpoint in diffusers' layout",
            )
        )
    ratio = index.get("boundary_ratio")
    if ratio is None and SECOND_EXPERT in listed_components(index):
        problems.append(
            Problem(
                name="model_index.json boundary_ratio",
                value=None,
                rule="a model with two experts needs the share of noise where they change",
                remedy="Set it to a number between 0 and 1, such as 0.875",
            )
        )
    elif ratio is not None and not (isinstance(ratio, int | float) and 0 < ratio < 1):
        problems.append(
            Problem(
                name="model_index.json boundary_ratio",
                value=ratio,
                rule="must be between 0 and 1",
                remedy="Set it to a number such as 0.875",
            )
        )
    Collector(problems).raise_if_any()


def _check_second_expert(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raises unless the second expert has the sizes of the first."""
    parse = WanTransformerConfig.from_diffusers
    if parse(second) == parse(first):
        return
    keys = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
    problem = Problem(
        name="transformer_2/config.json",
        value={key: second.get(key) for key in keys},
        rule="both experts must have the same sizes, since one program runs them",
        remedy="Take both experts from one release",
    )
    raise ProblemsFound([problem])


def _check_sizes(spec: WanSpec) -> None:
    """Raises every size that two components must share and do not."""
    transformer, z_dim = spec.transformer, spec.vae.z_dim
    inputs = (z_dim, 2 * z_dim + MASK_CHANNELS)
    control = 2 * z_dim + spec.vae.spatial_factor**2
    image_width = None if spec.image_encoder is None else spec.image_encoder.width
    shared: tuple[tuple[str, object, str, Collection[object]], ...] = (
        (
            "transformer in_channels",
            transformer.in_channels,
            f"the VAE's z_dim, or twice that and {MASK_CHANNELS} of a mask",
            inputs,
        ),
        ("transformer out_channels", transformer.out_channels, "the VAE's z_dim", (z_dim,)),
        (
            "transformer text_dim",
            transformer.text_dim,
            "the text width",
            (spec.text_encoder.width,),
        ),
        (
            "transformer image_dim",
            transformer.image_dim,
            "the width of the image encoder",
            (image_width,),
        ),
        (
            "transformer vace_in_channels",
            transformer.control_channels,
            "two encoded videos and the pixels of a mask, or none",
            (None, control),
        ),
    )
    remedy = "Take all parts from one release"
    Collector(
        [
            Problem(
                name=name,
                value=value,
                rule=f"must equal {rule}: {' or '.join(map(str, allowed))}",
                remedy=remedy,
            )
            for name, value, rule, allowed in shared
            if value not in allowed
        ]
    ).raise_if_any()


@dataclass(frozen=True, kw_only=True)
class WanModels:
    """The kinds of model; both experts share one graph."""

    transformer: AbstractModel[WanTransformer]
    vae: AbstractModel[WanVae]
    text_encoder: AbstractModel[Umt5Encoder]
    image_encoder: "AbstractModel[ClipVisionEncoder] | None" = None


def wan_models(spec: WanSpec, precision: Precision) -> WanModels:
    """Returns the models of a spec, in the given precision."""
    return WanModels(
        transformer=AbstractModel.of(
            lambda rngs: WanTransformer(
                spec.transformer,
                dtype=precision.activations,
                param_dtype=precision.weights,
                weight_format=precision.weight_format,
                rngs=rngs,
            )
        ),
        vae=AbstractModel.of(
            lambda rngs: WanVae(
                spec.vae, dtype=precision.vae, param_dtype=precision.vae_weights, rngs=rngs
            )
        ),
        text_encoder=AbstractModel.of(
            lambda rngs: Umt5Encoder(
                spec.text_encoder,
                dtype=precision.text_encoder,
                param_dtype=precision.text_encoder,
                rngs=rngs,
            )
        ),
        image_encoder=_image_encoder(spec),
    )


def _image_encoder(spec: WanSpec) -> "AbstractModel[ClipVisionEncoder] | None":
    """Returns the image encoder of a model that has one, in float32 as diffusers loads it."""
    config = spec.image_encoder
    if config is None:
        return None
    from maxdiffusion.models.clip import ClipVisionEncoder

    return AbstractModel.of(
        lambda rngs: ClipVisionEncoder(
            config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs
        )
    )
