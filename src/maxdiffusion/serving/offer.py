"""Requests that the loaded model can fulfil: sizes, inputs, adapters, presets, defaults.

config + facts of the model --> Offer --> the table of request fields (`fields.py`)
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from maxdiffusion.config import Config

SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})(?:x([0-9]{1,5}))?")
OF_MODEL = {
    "wan2.2": ("guidance_scale_high", "guidance_scale_low", "boundary_ratio"),
    "wan2.1": ("guidance_scale",),
}
CONFIG_FIELDS = (
    *("prompt", "negative_prompt", "seed", "width", "height", "num_frames", "fps"),
    *("num_inference_steps", "scheduler", "flow_shift"),
)
STEP_FIELDS = ("denoising_step_list", "sigmas", "boundary_step_index", "guidance_end_step")
"""Fields of few-step recipes: presets may set them, single requests may not."""
ADAPTER = "lora_"
"""Request fields of adapters begin with this word."""


@dataclass(frozen=True, kw_only=True, order=True)
class Size:
    """Width, height and frames of a video."""

    width: int
    height: int
    frames: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @classmethod
    def parse(cls, text: str, frames: int | None = None) -> "Size | None":
        """Returns the size that a text spells; `frames` completes WIDTHxHEIGHT."""
        found = SIZE.fullmatch(text)
        if found is None or (found[3] is None and frames is None):
            return None
        return cls(width=int(found[1]), height=int(found[2]), frames=int(found[3] or frames or 0))

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return self.width * self.height * self.frames


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Requests that the loaded model can fulfil.

    `inputs` are the images and videos that a request may bring, with whether it must; `levels` are
    the noise levels of a few-step config, which replace the number of steps. `check` raises
    `ProblemsFound` for fields that are valid each, but together do not suit the model, the sampler
    or the step cache.
    """

    model: str
    model_name: str
    sizes: tuple[Size, ...]
    compiles_other_sizes: bool
    size_multiple: int
    frame_step: int
    most_pixels: int
    schedulers: tuple[str, ...]
    max_steps: int
    defaults: Mapping[str, Any]
    levels: tuple[float, ...] = ()
    inputs: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], None] = lambda fields: None

    @classmethod
    def of(cls, config: Config, **facts: Any) -> "Offer":
        """Returns the offer of a config; `facts` come from the model."""
        inputs, adapters = facts.get("inputs", {}), facts.get("adapters", ())
        names = (*CONFIG_FIELDS, *OF_MODEL[config.model_name], *fields_of_inputs(inputs))
        defaults = {name: config.values[name] for name in names}
        defaults |= {f"{ADAPTER}{name}": 1.0 for name in adapters}
        if isinstance(config.prompt, tuple):
            defaults["prompt"] = config.prompt[0]
        levels = config.sigmas or config.denoising_step_list
        if levels:
            defaults["num_inference_steps"] = len(levels)
        if "conditioning_scale" in defaults and isinstance(config.conditioning_scale, tuple):
            defaults["conditioning_scale"] = config.conditioning_scale[0]
        return cls(
            model=config.pretrained_model_name_or_path,
            model_name=config.model_name,
            compiles_other_sizes=config.serve_other_sizes == "compile",
            max_steps=config.serve_max_steps,
            defaults=defaults,
            levels=levels,
            presets=presets_of(config, defaults),
            **facts,
        )

    @property
    def config_fields(self) -> tuple[str, ...]:
        """Config fields that a request may set."""
        return (*CONFIG_FIELDS, *OF_MODEL[self.model_name], *fields_of_inputs(self.inputs))


def fields_of_inputs(inputs: Mapping[str, bool]) -> tuple[str, ...]:
    """Returns the config fields that say how inputs are used."""
    if "input_mask" in inputs:
        return ("conditioning_scale", "image_fit")
    if "input_video" in inputs:
        return ("strength", "image_fit")
    return ("image_fit",) if inputs else ()


def presets_of(config: Config, defaults: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the presets of a config; without any, three numbers of steps."""
    if config.serve_presets:
        return {name: _table(name, values) for name, values in config.serve_presets.items()}
    usual = defaults["num_inference_steps"]
    if config.sigmas or config.denoising_step_list:
        return {"standard": {}}
    return {
        "draft": {"num_inference_steps": max(2, round(usual / 3))},
        "standard": {"num_inference_steps": usual},
        "fine": {"num_inference_steps": min(config.serve_max_steps, usual * 2)},
    }


def _table(name: str, values: object) -> Mapping[str, Any]:
    from maxdiffusion.errors import Problem, ProblemsFound

    if isinstance(values, Mapping):
        return {str(field): value for field, value in values.items()}
    rule = "a preset must be a table of fields and values"
    raise ProblemsFound([Problem(name=f"serve_presets.{name}", value=values, rule=rule)])
