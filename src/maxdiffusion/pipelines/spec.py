"""What a checkpoint folder says about itself, read before any weight is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from maxdiffusion.models.umt5 import Umt5Config
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.weights.folder import ModelFolder, inspect_model_folder, listed_components

COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
SECOND_EXPERT = "transformer_2"
TRAIN_TIMESTEPS = 1000
Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class WanSpec:
    """The parts of a WAN text-to-video checkpoint and how they are put together."""

    transformer: WanTransformerConfig
    vae: WanVaeConfig
    text_encoder: Umt5Config
    scheduler: Mapping[str, Any]
    boundary_ratio: float | None  # None: one transformer for all timesteps

    @property
    def experts(self) -> tuple[str, ...]:
        """The transformer folders, high noise first."""
        return ("transformer",) if self.boundary_ratio is None else ("transformer", SECOND_EXPERT)

    def with_scan(self, scan_layers: bool) -> "WanSpec":
        """The same with the blocks in a loop, or written out."""
        return replace(self, transformer=replace(self.transformer, scan_layers=scan_layers))

    def with_spread_weights(self, spread: bool) -> "WanSpec":
        """The same with the blocks' weights spread over the devices of a sequence, or whole."""
        return replace(self, transformer=replace(self.transformer, spread_weights=spread))


def open_wan_folder(location: str | Path) -> tuple[ModelFolder, WanSpec]:
    """The folder of a WAN text-to-video model and its spec; all problems are raised at once."""
    folder, problems = inspect_model_folder(location, needed=COMPONENTS)
    if folder is not None and _has_second_expert(folder.index):
        folder, problems = inspect_model_folder(location, needed=(*COMPONENTS, SECOND_EXPERT))
    if folder is None or problems:
        raise ProblemsFound(problems)
    return folder, read_spec(folder)


def read_spec(folder: ModelFolder) -> WanSpec:
    """The spec of a folder; everything that keeps it from being run is reported at once."""
    problems = list(_pipeline_problems(folder))

    def parsed(component: str, parse: Callable[[Mapping[str, Any]], Config]) -> Config | None:
        try:
            return parse(folder.configs[component])
        except ProblemsFound as error:
            problems.extend(error.problems)
            return None

    transformer = parsed("transformer", WanTransformerConfig.from_diffusers)
    vae = parsed("vae", WanVaeConfig.from_diffusers)
    text_encoder = parsed("text_encoder", Umt5Config.from_transformers)
    if _has_second_expert(folder.index):
        second = parsed(SECOND_EXPERT, WanTransformerConfig.from_diffusers)
        if transformer is not None and second is not None and transformer != second:
            problems.append(_experts_differ(folder))
    if transformer and vae and text_encoder:
        problems.extend(_misfits(transformer, vae, text_encoder))
    if problems or transformer is None or vae is None or text_encoder is None:
        raise ProblemsFound(problems)
    return WanSpec(
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        scheduler=folder.configs["scheduler"],
        boundary_ratio=folder.index.get("boundary_ratio"),
    )


def _has_second_expert(index: Mapping[str, Any]) -> bool:
    return index.get("boundary_ratio") is not None or SECOND_EXPERT in listed_components(index)


def _pipeline_problems(folder: ModelFolder) -> Iterator[Problem]:
    """What in model_index.json is not WAN text-to-video as it is run here."""
    kind = folder.index.get("_class_name")
    if kind != "WanPipeline":
        yield Problem(
            name="model_index.json _class_name",
            value=kind,
            rule="only WanPipeline (text-to-video) is run here",
            remedy="Name a WAN 2.1 or 2.2 text-to-video checkpoint",
        )
    if folder.index.get("expand_timesteps"):
        yield Problem(
            name="model_index.json expand_timesteps",
            value=True,
            rule="a timestep per token (WAN 2.2 TI2V-5B) is not run here",
            remedy="Name WAN 2.2 T2V-A14B or a WAN 2.1 text-to-video checkpoint",
        )
    ratio = folder.index.get("boundary_ratio")
    if ratio is None and SECOND_EXPERT in listed_components(folder.index):
        yield Problem(
            name="model_index.json boundary_ratio",
            value=None,
            rule="a model with two experts needs the share of noise where they change",
            remedy="Set it to a number between 0 and 1, such as 0.875",
        )
    elif ratio is not None and not (isinstance(ratio, int | float) and 0 < ratio < 1):
        yield Problem(
            name="model_index.json boundary_ratio",
            value=ratio,
            rule="must lie between 0 and 1",
            remedy="Set it to a number such as 0.875",
        )


def _experts_differ(folder: ModelFolder) -> Problem:
    first, second = folder.configs["transformer"], folder.configs[SECOND_EXPERT]
    keys = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
    return Problem(
        name="transformer_2/config.json",
        value={key: second.get(key) for key in keys},
        rule="both experts must have the same sizes, since one program runs them",
        remedy="Take both experts from one release",
    )


def _misfits(
    transformer: WanTransformerConfig, vae: WanVaeConfig, text_encoder: Umt5Config
) -> Iterator[Problem]:
    """Sizes that two parts of one model must share, and do not."""
    for name, value, rule, expected in (
        ("transformer in_channels", transformer.in_channels, "the VAE's z_dim", vae.z_dim),
        ("transformer out_channels", transformer.out_channels, "the VAE's z_dim", vae.z_dim),
        ("transformer text_dim", transformer.text_dim, "the text width", text_encoder.width),
    ):
        if value != expected:
            yield Problem(
                name=name,
                value=value,
                rule=f"must equal {rule}, {expected}",
                remedy="Take all parts from one text-to-video release",
            )
