"""Registry of samplers: one row each, found by config name or by diffusers class name.

`scheduler: NAME` in a config and `_class_name` in a checkpoint's scheduler_config.json are looked
up here. Adding a sampler takes one file with a `Sampler` and one row of `SAMPLERS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.diffusion.flow_match_euler import FlowMatchEuler
from maxdiffusion.diffusion.sampler import Sampler
from maxdiffusion.diffusion.unipc import UniPC
from maxdiffusion.errors import Collector, Problem, ProblemsFound


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a diffusers scheduler: its default there, and its supported values."""

    name: str
    default: object
    supported: tuple[object, ...]

    def check(self, config: Mapping[str, object]) -> None:
        """Raises if `config` has a value that is not supported."""
        value = config.get(self.name, self.default)
        if value in self.supported:
            return
        allowed = " or ".join(map(repr, self.supported))
        source = "" if self.name in config else " (the default of a missing setting)"
        problem = Problem(
            name=f"scheduler_config.json {self.name}",
            value=value,
            rule=f"only {allowed} is supported{source}",
            remedy="Change it there, or use the scheduler_config.json of a released WAN model",
        )
        raise ProblemsFound([problem])


def _off(name: str) -> Setting:
    return Setting(name=name, default=False, supported=(False, None))


@dataclass(frozen=True, kw_only=True)
class SamplerEntry:
    """A row of the registry: a sampler, its names, and the diffusers settings that it supports.

    `shift_name` is the name of the shift in scheduler_config.json.
    """

    name: str
    diffusers_class: str
    sampler: type[Sampler]
    shift_name: str
    settings: tuple[Setting, ...] = ()


_SIGMA_SPACINGS = (
    _off("use_karras_sigmas"),
    _off("use_exponential_sigmas"),
    _off("use_beta_sigmas"),
    _off("use_dynamic_shifting"),
    Setting(name="shift_terminal", default=None, supported=(None, 0)),
)

SAMPLERS: tuple[SamplerEntry, ...] = (
    SamplerEntry(
        name="unipc",
        diffusers_class="UniPCMultistepScheduler",
        sampler=UniPC,
        shift_name="flow_shift",
        settings=(
            Setting(name="prediction_type", default="epsilon", supported=("flow_prediction",)),
            Setting(name="use_flow_sigmas", default=False, supported=(True,)),
            Setting(name="solver_order", default=2, supported=(2,)),
            # diffusers itself reads the last three names as bh2
            Setting(
                name="solver_type", default="bh2", supported=("bh2", "midpoint", "heun", "logrho")
            ),
            Setting(name="predict_x0", default=True, supported=(True,)),
            Setting(name="lower_order_final", default=True, supported=(True,)),
            Setting(name="final_sigmas_type", default="zero", supported=("zero",)),
            Setting(name="disable_corrector", default=[], supported=([], None)),
            Setting(name="solver_p", default=None, supported=(None,)),
            _off("thresholding"),
            *_SIGMA_SPACINGS,
        ),
    ),
    SamplerEntry(
        name="euler",
        diffusers_class="FlowMatchEulerDiscreteScheduler",
        sampler=FlowMatchEuler,
        shift_name="shift",
        settings=(_off("invert_sigmas"), _off("stochastic_sampling"), *_SIGMA_SPACINGS),
    ),
)


def find_sampler(name: str, samplers: Sequence[SamplerEntry] = SAMPLERS) -> SamplerEntry:
    """Returns the row of the sampler that a config names."""
    for entry in samplers:
        if entry.name == name:
            return entry
    known = ", ".join(repr(entry.name) for entry in samplers)
    problem = Problem(name="scheduler", value=name, rule=f"must be one of {known}")
    raise ProblemsFound([problem])


def sampler_named(
    name: str,
    scheduler: Mapping[str, Any],
    *,
    steps: int,
    shift: float,
    samplers: Sequence[SamplerEntry] = SAMPLERS,
) -> Sampler:
    """Returns the sampler that a config names, for a checkpoint with this scheduler config.

    The checkpoint's settings apply if they are of the same sampler.
    """
    entry = find_sampler(name, samplers)
    if scheduler.get("_class_name") == entry.diffusers_class:
        return from_scheduler_config(scheduler, steps, shift, samplers=samplers)
    return entry.sampler(steps=steps, shift=shift)


def from_scheduler_config(
    config: Mapping[str, Any],
    steps: int,
    shift: float | None = None,
    *,
    samplers: Sequence[SamplerEntry] = SAMPLERS,
) -> Sampler:
    """Returns the sampler of a scheduler_config.json; `shift` replaces its own if given.

    Settings that change nothing for flow models (betas, timestep spacing, ...) are ignored. Raises
    `ProblemsFound` with every setting that is not supported.
    """
    entry = _entry_of_class(config.get("_class_name"), samplers)
    problems = Collector()
    for setting in entry.settings:
        with problems:
            setting.check(config)
    problems.raise_if_any()
    return entry.sampler(
        steps=steps,
        shift=config.get(entry.shift_name, 1.0) if shift is None else shift,
        train_timesteps=config.get("num_train_timesteps", 1000),
    )


def _entry_of_class(name: object, samplers: Sequence[SamplerEntry]) -> SamplerEntry:
    for entry in samplers:
        if entry.diffusers_class == name:
            return entry
    known = " and ".join(entry.diffusers_class for entry in samplers)
    problem = Problem(
        name="scheduler_config.json _class_name",
        value=name,
        rule=f"the supported schedulers are {known}",
        remedy="Use a checkpoint whose scheduler folder names one of them",
    )
    raise ProblemsFound([problem])
