"""Euler steps along the flow, at the noise levels of diffusers' FlowMatchEulerDiscreteScheduler.

x <- x + (sigma_{i+1} - sigma_i) v
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from maxdiffusion.diffusion.sampler import Latents, Sampler, Schedule, shifted


class EulerState(NamedTuple):
    """The latents; Euler needs nothing of earlier steps."""

    sample: Latents


class EulerCoefficients(NamedTuple):
    """Change of the noise level in a step (below 0)."""

    change: Float[np.ndarray | jax.Array, "..."]


@dataclass(frozen=True, kw_only=True)
class FlowMatchEuler(Sampler):
    """Samples a flow model in straight steps."""

    @functools.cached_property
    def sigmas(self) -> Schedule:
        """The noise levels, ending at 0.

        diffusers shifts both ends of the training levels (in float32), spaces the steps evenly
        between them, and shifts once more. The second shift is kept to match its results.
        """
        ends = np.array([self.train_timesteps, 1], np.float32) / np.float32(self.train_timesteps)
        highest, lowest = shifted(ends, float(self.shift)).astype(np.float64)
        even = np.linspace(
            highest * self.train_timesteps, lowest * self.train_timesteps, self.steps
        )
        levels = shifted(even / self.train_timesteps, self.shift)
        return np.append(levels, 0).astype(np.float32)

    @functools.cached_property
    def timesteps(self) -> Schedule:
        """The model's timesteps, float32."""
        return np.asarray(self.sigmas[:-1] * np.float32(self.train_timesteps))

    @functools.cached_property
    def coefficients(self) -> EulerCoefficients:
        """The rows of all steps."""
        return EulerCoefficients(change=np.diff(self.sigmas.astype(np.float64)).astype(np.float32))

    def start(self, latents: Latents) -> EulerState:
        """Returns the state before the first step."""
        return EulerState(sample=jnp.asarray(latents, jnp.float32))

    def advance(
        self, state: EulerState, velocity: Latents, coefficients: EulerCoefficients
    ) -> EulerState:
        """Returns the state after one step; the arithmetic is float32 for any model dtype."""
        moved = coefficients.change * velocity.astype(jnp.float32)
        return EulerState(sample=state.sample + moved)
