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


def check_schedule(*, steps: int, shift: float, train_timesteps: int) -> None:
    """Refuses numbers from which no schedule can be made, all of them at once."""
    problems = []
    for name, value in (("num_inference_steps", steps), ("num_train_timesteps", train_timesteps)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            problems.append(
                Problem(
                    name=name,
                    value=value,
                    rule="must be a whole number, 1 or more",
                    remedy="Set it to 40, for example"
                    if name == "num_inference_steps"
                    else "Use 1000",
                )
            )
    if isinstance(shift, bool) or not math.isfinite(shift) or shift <= 0:
        problems.append(
            Problem(
                name="flow_shift",
                value=shift,
                rule="must be a finite number above 0",
                remedy="WAN uses 3.0 at 480p, 5.0 at 720p, and 12.0 for WAN 2.2 text-to-video",
            )
        )
    if problems:
        raise ProblemsFound(problems)


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
