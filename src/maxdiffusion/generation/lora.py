"""LoRA files of a config: the public `lora_config`, whose lists have one entry per file.

    model with one transformer    weight_name, scale
    model with two experts        high_noise_weight_name and low_noise_weight_name (an empty name
                                  leaves that expert as it is), scale for both or
                                  high_noise_scale and low_noise_scale; weight_name for both

Imported only where `enable_lora` is true.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.weights import LoraChoice, with_lora

FIELD = "lora_config"
LOCATIONS = "lora_model_name_or_path"
OF_EXPERTS = ("high_noise", "low_noise")


def fuse_lora_files(config: Config, folder: ModelFolder, spec: WanSpec) -> ModelFolder:
    """Returns the folder with the LoRA files of a config fused into its transformers."""
    choices = lora_choices(config.lora_config, spec.experts)
    return with_lora(folder, spec, choices, strict=config.lora_strict)


def lora_choices(table: Mapping[str, Any], experts: Sequence[str]) -> tuple[LoraChoice, ...]:
    """Returns the files and strengths of a `lora_config`; raises everything wrong with it."""
    locations = table.get(LOCATIONS, ())
    problems = Collector(_wrong_lists(table, len(locations)))
    with problems:
        if not any(locations):
            raise _problem(LOCATIONS, list(locations), "must name a LoRA file for enable_lora")
    if len(experts) == 1:
        for name in (
            f"{expert}_{kind}" for expert in OF_EXPERTS for kind in ("weight_name", "scale")
        ):
            with problems:
                if any(table.get(name, ())):
                    raise _problem(name, table[name], "this model has one transformer")
    problems.raise_if_any()
    choices = [
        choice
        for index, location in enumerate(locations)
        for component, prefix in zip(experts, OF_EXPERTS, strict=False)
        if (choice := _choice(table, index, location, component, prefix)) is not None
    ]
    return tuple(choices)


def _choice(
    table: Mapping[str, Any], index: int, location: str, component: str, prefix: str
) -> LoraChoice | None:
    """Returns the file of one entry for one transformer, or None if it has none for it."""
    own = table.get(f"{prefix}_weight_name", ())
    others = any(table.get(f"{expert}_weight_name", ()) for expert in OF_EXPERTS)
    shared = _entry(table.get("weight_name", ()), index, "")
    name = _entry(own, index, "") or shared
    if others and not name:
        return None
    scale = _entry(table.get("scale", ()), index, 1.0)
    strength = _entry(table.get(f"{prefix}_scale", ()), index, scale)
    return LoraChoice(
        component=component,
        location=location,
        weight_name=name,
        strength=float(strength),
        name=_entry(table.get("adapter_name", ()), index, ""),
    )


def _entry(values: Sequence[Any], index: int, default: Any) -> Any:
    return values[index] if values else default


def _wrong_lists(table: Mapping[str, Any], count: int) -> list[Problem]:
    """Returns a problem for every list that has another length than that of the files."""
    return [
        Problem(
            name=f"{FIELD}.{name}",
            value=list(values),
            rule=f"must have {count} entries, one for each of {LOCATIONS}, or none",
            remedy="Add or remove entries",
        )
        for name, values in table.items()
        if name not in ("rank", "from_pt") and values and len(values) != count
    ]


def _problem(name: str, value: object, rule: str) -> ProblemsFound:
    remedy = "Correct lora_config, or set enable_lora: false"
    return ProblemsFound([Problem(name=f"{FIELD}.{name}", value=value, rule=rule, remedy=remedy)])
