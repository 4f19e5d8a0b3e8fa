"""Sampler interface: coefficients computed once on the host, and one step of plain arithmetic.

    state = sampler.start(noise, seeds)
    for step, timestep in enumerate(sampler.timesteps):
        velocity = model(state.sample, timestep)
        state = sampler.advance(state, velocity, step_row(sampler.coefficients, step))
    state.sample                                     # the finished latents

Everything that depends on the step alone is computed in float64 on the host. `advance` takes the
row of its step as arrays, so that one compiled step serves every step of every schedule.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Num, UInt32

from maxdiffusion.errors import Problem, ProblemsFound

Latents = Float[Array, "..."]
Schedule = Num[np.ndarray, "..."]
"""One number per step, or per noise level."""
Weight = Any
"""A number on host or device: of one step, or of all steps stacked."""
Seeds = UInt32[Array | np.ndarray, " B"]
"""The seed of every video, for samplers that draw noise at each step."""


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """A schedule of `steps` noise levels, shifted towards 1, and the rule to step along it.

    A state is a pytree with the latents so far (`state.sample`) and whatever the sampler needs of
    earlier steps. `custom_sigmas` are noise levels before the shift, one per step, that replace
    those of the sampler. A sampler that starts late leaves out the steps before `first_step`.
    """

    steps: int
    shift: float
    train_timesteps: int = 1000
    custom_sigmas: tuple[float, ...] | None = None
    first_step: int = 0

    def __post_init__(self) -> None:
        check_schedule(steps=self.steps, shift=self.shift, train_timesteps=self.train_timesteps)
        if self.custom_sigmas is not None:
            check_custom_sigmas(self.custom_sigmas, self.steps)
        check_falling(self.sigmas, steps=self.steps, shift=self.shift)

    @property
    def draws_noise(self) -> bool:
        """True if every step adds fresh noise."""
        return False

    @property
    @abstractmethod
    def timesteps(self) -> Schedule:
        """The timestep that the model gets at every step that runs."""

    @property
    @abstractmethod
    def sigmas(self) -> Schedule:
        """The share of noise before every step that runs, and after the last; float32."""

    @property
    @abstractmethod
    def coefficients(self) -> Any:
        """A pytree of float32 numpy arrays with one row per step."""

    @abstractmethod
    def start(self, latents: Latents, seeds: Seeds | None = None) -> Any:
        """Returns the state before the first step; only samplers that draw noise read `seeds`."""

    @abstractmethod
    def advance(self, state: Any, velocity: Latents, coefficients: Any) -> Any:
        """Returns the state after one step, given the model's velocity and the step's row."""


def step_row(coefficients: Any, step: int | jax.Array) -> Any:
    """Returns the row of one step, from the stacked rows of all steps."""
    return jax.tree.map(lambda stacked: stacked[step], coefficients)


def shifted(sigmas: Schedule, shift: float) -> Schedule:
    """Returns noise levels moved towards 1 by `shift`; 0 and 1 stay as they are."""
    return np.asarray(shift * sigmas / (1 + (shift - 1) * sigmas))


def check_custom_sigmas(sigmas: Sequence[float], steps: int) -> None:
    """Raises everything that keeps `sigmas` from being the noise levels of `steps` steps."""
    numbers = [float(one) for one in sigmas if _is_positive(one)]
    rules = {
        "must be numbers above 0 and at most 1": len(numbers) == len(sigmas)
        and all(one <= 1 for one in numbers),
        "must fall from each step to the next": all(np.diff(numbers) < 0),
        f"must be one number for each of the {steps} steps": len(sigmas) == steps,
    }
    remedy = "Give levels before the shift, such as [1.0, 0.75, 0.5, 0.25]"
    problems = [
        Problem(name="sigmas", value=tuple(sigmas), rule=rule, remedy=remedy)
        for rule, kept in rules.items()
        if not kept
    ]
    if problems:
        raise ProblemsFound(problems)


def check_schedule(*, steps: object, shift: object, train_timesteps: object) -> None:
    """Raises every number that no schedule can be made from."""
    found = [
        None if _is_count(steps) else _not_a_count("num_inference_steps", steps, "WAN uses 40"),
        None if _is_positive(shift) else _bad_shift(shift),
        None
        if _is_count(train_timesteps)
        else _not_a_count("num_train_timesteps", train_timesteps, "WAN uses 1000"),
    ]
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise ProblemsFound(problems)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0


def _not_a_count(name: str, value: object, remedy: str) -> Problem:
    return Problem(name=name, value=value, rule="must be a positive integer", remedy=remedy)


def _bad_shift(value: object) -> Problem:
    return Problem(
        name="flow_shift",
        value=value,
        rule="must be a finite number above 0",
        remedy="WAN uses 3.0 at 480p, 5.0 at 720p, and 12.0 for WAN 2.2 text-to-video",
    )


def check_falling(sigmas: Schedule, *, steps: int, shift: float) -> None:
    """Raises if the float32 noise levels do not fall at every step."""
    if np.all(np.diff(sigmas) < 0):
        return
    rule = f"with flow_shift={shift} two neighbouring noise levels are equal in float32"
    remedy = "Use fewer steps or a smaller flow_shift"
    problem = Problem(name="num_inference_steps", value=steps, rule=rule, remedy=remedy)
    raise ProblemsFound([problem])
