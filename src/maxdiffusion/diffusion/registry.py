"""From the scheduler_config.json of a diffusers checkpoint to a sampler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.schedulers.flow_match_euler import FlowMatchEuler
from maxdiffusion.schedulers.sampler import Sampler
from maxdiffusion.schedulers.unipc import UniPC


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a diffusers scheduler: its default there, and the values that are supported."""

    name: str
    default: object
    supported: tuple[object, ...]

    def problem(self, config: Mapping[str, object]) -> Problem | None:
        """What is wrong with the setting in `config`, if anything."""
        value = config.get(self.name, self.default)
        if value in self.supported:
            return None
        allowed = " or ".join(map(repr, self.supported))
        source = "" if self.name in config else " (the default of a missing setting)"
        return Problem(
            name=f"scheduler_config.json {self.name}",
            value=value,
            rule=f"only {allowed} is supported{source}",
            remedy="Change it there, or use the scheduler_config.json of a released WAN model",
        )


def _off(name: str) -> Setting:
    return Setting(name=name, default=False, supported=(False, None))


@dataclass(frozen=True, kw_only=True)
class SchedulerClass:
    """A diffusers scheduler class: the sampler it stands for and the settings it may have."""

    sampler: Callable[..., Sampler]
    shift_name: str
    settings: tuple[Setting, ...]


_SIGMA_SPACINGS = (
    _off("use_karras_sigmas"),
    _off("use_exponential_sigmas"),
    _off("use_beta_sigmas"),
    _off("use_dynamic_shifting"),
    Setting(name="shift_terminal", default=None, supported=(None, 0)),
)

SCHEDULER_CLASSES: Mapping[str, SchedulerClass] = {
    "UniPCMultistepScheduler": SchedulerClass(
        sampler=UniPC,
        shift_name="flow_shift",
        settings=(
            Setting(name="prediction_type", default="epsilon", supported=("flow_prediction",)),
            Setting(name="use_flow_sigmas", default=False, supported=(True,)),
            Setting(name="solver_order", default=2, supported=(2,)),
            # diffusers itself reads the three last names as bh2
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
    "FlowMatchEulerDiscreteScheduler": SchedulerClass(
        sampler=FlowMatchEuler,
        shift_name="shift",
        settings=(_off("invert_sigmas"), _off("stochastic_sampling"), *_SIGMA_SPACINGS),
    ),
}


def from_scheduler_config(
    config: Mapping[str, object], steps: int, shift: float | None = None
) -> Sampler:
    """The sampler that `config` describes, for `steps` steps; `shift` replaces its own if given.

    Settings that change nothing for flow models (betas, timestep spacing, ...) are not looked at.
    Raises `ProblemsFound` with every setting that is not supported.
    """
    kind = _scheduler_class(config)
    found = [problem for each in kind.settings if (problem := each.problem(config)) is not None]
    if found:
        raise ProblemsFound(found)
    return kind.sampler(
        steps=steps,
        shift=config.get(kind.shift_name, 1.0) if shift is None else shift,
        train_timesteps=config.get("num_train_timesteps", 1000),
    )


def _scheduler_class(config: Mapping[str, object]) -> SchedulerClass:
    name = config.get("_class_name")
    if isinstance(name, str) and name in SCHEDULER_CLASSES:
        return SCHEDULER_CLASSES[name]
    raise ProblemsFound(
        [
            Problem(
                name="scheduler_config.json _class_name",
                value=name,
                rule=f"the supported schedulers are {' and '.join(SCHEDULER_CLASSES)}",
                remedy="Use a checkpoint whose scheduler folder names one of them",
            )
        ]
    )
