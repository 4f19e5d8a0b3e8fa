"""What a sampler is: rows of numbers made on the host, and one step of plain arithmetic over them.

    sampler.start(noise) -> state
    for row in sampler.coefficients:                 # one row per step
        velocity = model(state.sample, timestep)
        state = sampler.advance(state, velocity, row)
    state.sample                                     # the finished latents

Everything that depends on the step alone is computed once, on the host, in float64; `advance` takes
its row as an array, so that one compiled step serves every step of every schedule.
"""

import math
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.runtime.problems import Problem, ProblemsFound

Latents = Float[Array, "..."]


class SamplerState(Protocol):
    """A pytree with the latents so far, and whatever the sampler remembers of earlier steps."""

    @property
    def sample(self) -> Latents: ...


class Sampler(Protocol):
    """A schedule of noise levels and the rule that steps from one to the next."""

    @property
    def timesteps(self) -> np.ndarray:
        """What the model is told at every step, [steps]."""
        ...

    @property
    def sigmas(self) -> np.ndarray:
        """The share of noise before every step and after the last, float32 [steps + 1]."""
        ...

    @property
    def coefficients(self) -> Any:
        """A pytree of float32 numpy arrays with one row per step."""
        ...

    def start(self, latents: Latents) -> Any:
        """The state before the first step."""
        ...

    def advance(self, state: Any, velocity: Latents, coefficients: Any) -> Any:
        """The state after one step, given the model's velocity and the step's row."""
        ...


def step_row(coefficients: Any, step: int | jax.Array) -> Any:
    """The row of one step, from the stacked rows of all steps."""
    return jax.tree.map(lambda stacked: stacked[step], coefficients)


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Noise levels moved towards 1 by `shift`; 0 and 1 stay where they are."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def check_schedule(*, steps: object, shift: object, train_timesteps: object) -> None:
    """Refuses numbers from which no schedule can be made, all of them at once."""
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
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def _not_a_count(name: str, value: object, remedy: str) -> Problem:
    rule = "must be a whole number, 1 or more"
    return Problem(name=name, value=value, rule=rule, remedy=remedy)


def _bad_shift(value: object) -> Problem:
    return Problem(
        name="flow_shift",
        value=value,
        rule="must be a finite number above 0",
        remedy="WAN uses 3.0 at 480p, 5.0 at 720p, and 12.0 for WAN 2.2 text-to-video",
    )


def check_falling(sigmas: np.ndarray, *, steps: int, shift: float) -> None:
    """Refuses a schedule whose float32 noise levels do not fall at every step."""
    if np.all(np.diff(sigmas) < 0):
        return
    raise ProblemsFound(
        [
            Problem(
                name="num_inference_steps",
                value=steps,
                rule=f"with flow_shift={shift} two neighbouring noise levels are equal in float32",
                remedy="Use fewer steps or a smaller flow_shift",
            )
        ]
    )
