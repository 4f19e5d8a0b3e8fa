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

from maxdiffusion.diffusion.sampler import Latents, Sampler, Schedule, Seeds, shifted


class EulerState(NamedTuple):
    """The latents; Euler needs nothing of earlier steps."""

    sample: Latents


class EulerCoefficients(NamedTuple):
    """Change of the noise level in a step (below 0)."""

    change: Float[np.ndarray | jax.Array, "..."]


def flow_match_sigmas(sampler: Sampler) -> Schedule:
    """Returns the noise levels of diffusers' flow-matching schedulers, ending at 0.

    They shift both ends of the training levels (in float32), space the steps evenly between them,
    and shift once more. The second shift is kept to match their results. Custom levels are shifted
    once, in float32: [1, 0.75, 0.5, 0.25] with shift 5 are the four steps of distilled models,
    which no number of evenly spaced steps gives.
    """
    count, shift = sampler.train_timesteps, float(sampler.shift)
    if sampler.custom_sigmas is not None:
        levels = shifted(np.asarray(sampler.custom_sigmas, np.float32), shift)
        return np.append(levels, np.float32(0)).astype(np.float32)[sampler.first_step :]
    ends = np.array([count, 1], np.float32) / np.float32(count)
    highest, lowest = shifted(ends, shift).astype(np.float64)
    even = np.linspace(highest * count, lowest * count, sampler.steps)
    levels = shifted(even / count, shift)
    return np.append(levels, 0).astype(np.float32)[sampler.first_step :]


@dataclass(frozen=True, kw_only=True)
class FlowMatchEuler(Sampler):
    """Samples a flow model in straight steps."""

    @functools.cached_property
    def sigmas(self) -> Schedule:
        """The noise levels, ending at 0."""
        return flow_match_sigmas(self)

    @functools.cached_property
    def timesteps(self) -> Schedule:
        """The model's timesteps, float32 and not truncated."""
        return np.asarray(self.sigmas[:-1] * np.float32(self.train_timesteps))

    @functools.cached_property
    def coefficients(self) -> EulerCoefficients:
        """The rows of all steps."""
        return EulerCoefficients(change=np.diff(self.sigmas.astype(np.float64)).astype(np.float32))

    def start(self, latents: Latents, seeds: Seeds | None = None) -> EulerState:
        """Returns the state before the first step."""
        del seeds
        return EulerState(sample=jnp.asarray(latents, jnp.float32))

    def advance(
        self, state: EulerState, velocity: Latents, coefficients: EulerCoefficients
    ) -> EulerState:
        """Returns the state after one step; the arithmetic is float32 for any model dtype."""
        moved = coefficients.change * velocity.astype(jnp.float32)
        return EulerState(sample=state.sample + moved)
