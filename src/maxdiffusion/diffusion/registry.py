"""Registry of samplers: one row each, found by config name or by diffusers class name.

`scheduler: NAME` in a config and `_class_name` in a checkpoint's scheduler_config.json are looked
up here. Adding a sampler takes one file with a `Sampler` and one row of `SAMPLERS`.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.diffusion.sampler import Sampler
from maxdiffusion.errors import Collector, Problem, ProblemsFound


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a diffusers scheduler: its default there, and its supported values."""

    name: str
    default: object
    supported: tuple[object, ...]

    def accepts(self, config: Mapping[str, object]) -> bool:
        """Returns whether `config` has a supported value."""
        return config.get(self.name, self.default) in self.supported

    def check(self, config: Mapping[str, object]) -> None:
        """Raises if `config` has a value that is not supported."""
        if self.accepts(config):
            return
        value = config.get(self.name, self.default)
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

    `load` returns the sampler's class. `shift_name` is the name of the shift in
    scheduler_config.json. Where two rows share a diffusers class, `selector` is the setting that
    decides between them.
    """

    name: str
    diffusers_class: str
    load: Callable[[], type[Sampler]]
    shift_name: str
    settings: tuple[Setting, ...] = ()
    selector: Setting | None = None

    def reads(self, config: Mapping[str, object]) -> bool:
        """Returns whether this row runs the scheduler of a scheduler_config.json."""
        selected = self.selector is None or self.selector.accepts(config)
        return config.get("_class_name") == self.diffusers_class and selected

    def build(
        self,
        config: Mapping[str, Any],
        steps: int,
        shift: float | None,
        sigmas: Sequence[float] | None,
    ) -> Sampler:
        """Returns the sampler with the settings of `config`; raises those that it lacks."""
        problems = Collector()
        for setting in (*([self.selector] if self.selector else []), *self.settings):
            with problems:
                setting.check(config)
        problems.raise_if_any()
        return self.load()(
            steps=steps,
            shift=config.get(self.shift_name, 1.0) if shift is None else shift,
            train_timesteps=config.get("num_train_timesteps", 1000),
            custom_sigmas=None if sigmas is None else tuple(sigmas),
        )


def _class_in(module: str, name: str) -> Callable[[], type[Sampler]]:
    """Returns the loader of a class of this room, so that a run imports its own sampler only."""

    def load() -> type[Sampler]:
        names = vars(importlib.import_module(f"maxdiffusion.diffusion.{module}"))
        found: type[Sampler] = names[name]
        return found

    return load


_SIGMA_SPACINGS = (
    _off("use_karras_sigmas"),
    _off("use_exponential_sigmas"),
    _off("use_beta_sigmas"),
    _off("use_dynamic_shifting"),
    Setting(name="shift_terminal", default=None, supported=(None, 0)),
)

# Both solvers of the DPM family read a flow model in the same way.
_FLOW_MODEL = (
    Setting(name="prediction_type", default="epsilon", supported=("flow_prediction",)),
    Setting(name="use_flow_sigmas", default=False, supported=(True,)),
    Setting(name="solver_order", default=2, supported=(2,)),
    Setting(name="final_sigmas_type", default="zero", supported=("zero",)),
    _off("thresholding"),
    *_SIGMA_SPACINGS,
)

_EULER = "FlowMatchEulerDiscreteScheduler"
_FLOW_MATCH = (_off("invert_sigmas"), *_SIGMA_SPACINGS)

SAMPLERS: tuple[SamplerEntry, ...] = (
    SamplerEntry(
        name="unipc",
        diffusers_class="UniPCMultistepScheduler",
        load=_class_in("multistep", "UniPC"),
        shift_name="flow_shift",
        settings=(
            *_FLOW_MODEL,
            # diffusers itself reads the last three names as bh2; its bh1 ends in NaN at sigma 0
            Setting(
                name="solver_type", default="bh2", supported=("bh2", "midpoint", "heun", "logrho")
            ),
            Setting(name="predict_x0", default=True, supported=(True,)),
            Setting(name="lower_order_final", default=True, supported=(True,)),
            Setting(name="disable_corrector", default=[], supported=([], None)),
            Setting(name="solver_p", default=None, supported=(None,)),
        ),
    ),
    SamplerEntry(
        name="euler",
        diffusers_class=_EULER,
        load=_class_in("flow_match", "FlowMatchEuler"),
        shift_name="shift",
        settings=_FLOW_MATCH,
        selector=_off("stochastic_sampling"),
    ),
    SamplerEntry(
        name="dpmpp_2m",
        diffusers_class="DPMSolverMultistepScheduler",
        load=_class_in("multistep", "DpmPlusPlus2M"),
        shift_name="flow_shift",
        settings=(
            *_FLOW_MODEL,
            Setting(name="algorithm_type", default="dpmsolver++", supported=("dpmsolver++",)),
            Setting(name="solver_type", default="midpoint", supported=("midpoint",)),
            Setting(name="variance_type", default=None, supported=(None,)),
            _off("use_lu_lambdas"),
        ),
    ),
    SamplerEntry(
        name="lcm",
        diffusers_class="FlowMatchLCMScheduler",
        load=_class_in("flow_match", "FlowMatchLCM"),
        shift_name="shift",
        settings=(
            *_FLOW_MATCH,
            Setting(name="scale_factors", default=None, supported=(None, [])),
        ),
    ),
    SamplerEntry(
        name="euler_stochastic",
        diffusers_class=_EULER,
        load=_class_in("flow_match", "FlowMatchLCM"),
        shift_name="shift",
        settings=_FLOW_MATCH,
        selector=Setting(name="stochastic_sampling", default=False, supported=(True,)),
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
    sigmas: Sequence[float] | None = None,
    samplers: Sequence[SamplerEntry] = SAMPLERS,
) -> Sampler:
    """Returns the sampler that a config names, for a checkpoint with this scheduler config.

    The checkpoint's settings apply if they are of the same sampler.
    """
    entry = find_sampler(name, samplers)
    if entry.reads(scheduler):
        return entry.build(scheduler, steps, shift, sigmas)
    custom = None if sigmas is None else tuple(sigmas)
    return entry.load()(steps=steps, shift=shift, custom_sigmas=custom)


def from_scheduler_config(
    config: Mapping[str, Any],
    steps: int,
    shift: float | None = None,
    *,
    sigmas: Sequence[float] | None = None,
    samplers: Sequence[SamplerEntry] = SAMPLERS,
) -> Sampler:
    """Returns the sampler of a scheduler_config.json; `shift` replaces its own if given.

    `sigmas` are noise levels before the shift, one per step, in place of the sampler's own.
    Settings that change nothing for flow models (betas, timestep spacing, ...) are ignored. Raises
    `ProblemsFound` with every setting that is not supported.
    """
    return _entry_of(config, samplers).build(config, steps, shift, sigmas)


def _entry_of(config: Mapping[str, Any], samplers: Sequence[SamplerEntry]) -> SamplerEntry:
    name = config.get("_class_name")
    of_class = [entry for entry in samplers if entry.diffusers_class == name]
    if of_class:  # one whose selector refuses the config reports its value
        return next((entry for entry in of_class if entry.reads(config)), of_class[0])
    known = " and ".join(dict.fromkeys(entry.diffusers_class for entry in samplers))
    problem = Problem(
        name="scheduler_config.json _class_name",
        value=name,
        rule=f"the supported schedulers are {known}",
        remedy="Use a checkpoint whose scheduler folder names one of them",
    )
    raise ProblemsFound([problem])
