"""Euler steps along the flow, at the noise levels of diffusers' FlowMatchEulerDiscreteScheduler."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.schedulers.sampler import check_falling, check_schedule, shifted


class EulerState(NamedTuple):
    """The latents; Euler remembers nothing else."""

    sample: Float[Array, "..."]


class EulerCoefficients(NamedTuple):
    """How far the noise level moves in a step (below 0)."""

    change: np.ndarray | jax.Array


@dataclass(frozen=True, kw_only=True)
class FlowMatchEuler:
    """Samples a flow model in `steps` straight steps whose noise levels are moved up by `shift`."""

    steps: int
    shift: float
    train_timesteps: int = 1000

    def __post_init__(self) -> None:
        check_schedule(steps=self.steps, shift=self.shift, train_timesteps=self.train_timesteps)
        check_falling(self.sigmas, steps=self.steps, shift=self.shift)

    @functools.cached_property
    def sigmas(self) -> np.ndarray:
        """The noise levels, ending at 0.

        diffusers shifts both ends of the training levels (in float32), spaces the steps evenly
        between them, and shifts once more; the second shift is part of what users compare with.
        """
        ends = np.array([self.train_timesteps, 1], np.float32) / np.float32(self.train_timesteps)
        highest, lowest = shifted(ends, float(self.shift)).astype(np.float64)
        even = np.linspace(
            highest * self.train_timesteps, lowest * self.train_timesteps, self.steps
        )
        levels = shifted(even / self.train_timesteps, self.shift)
        return np.append(levels, 0).astype(np.float32)

    @functools.cached_property
    def timesteps(self) -> np.ndarray:
        """The model's timesteps, float32."""
        return self.sigmas[:-1] * np.float32(self.train_timesteps)

    @functools.cached_property
    def coefficients(self) -> EulerCoefficients:
        """The rows of all steps."""
        return EulerCoefficients(change=np.diff(self.sigmas.astype(np.float64)).astype(np.float32))

    def start(self, latents: Float[Array, "..."]) -> EulerState:
        """The state before the first step."""
        return EulerState(sample=jnp.asarray(latents, jnp.float32))

    def advance(
        self, state: EulerState, velocity: Float[Array, "..."], coefficients: EulerCoefficients
    ) -> EulerState:
        """The state after one step; all arithmetic is float32, whatever the model works in."""
        moved = coefficients.change * velocity.astype(jnp.float32)
        return EulerState(sample=state.sample + moved)
