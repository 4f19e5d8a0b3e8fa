"""Samplers at the noise levels of diffusers' flow-matching schedulers: Euler and consistency steps.

    FlowMatchEuler   x <- x + (sigma_{i+1} - sigma_i) v
    FlowMatchLCM     x <- (1 - sigma_{i+1}) (x - sigma_i v) + sigma_{i+1} noise_i

Euler follows the flow in straight steps, as FlowMatchEulerDiscreteScheduler. The consistency step
predicts the data, then adds fresh noise of the next level. It is that of FlowMatchLCMScheduler, of
FlowMatchEulerDiscreteScheduler with `stochastic_sampling`, and of models distilled by distribution
matching (DMD). The noise of a step is a function of the video's seed and the step, so a run has the
same noise on every mesh.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from maxdiffusion.diffusion.sampler import Latents, Sampler, Schedule, Seeds, Weight, shifted
from maxdiffusion.errors import Problem, ProblemsFound


@dataclass(frozen=True, kw_only=True)
class FlowMatchSampler(Sampler):
    """Base of both: their noise levels and timesteps."""

    @functools.cached_property
    def sigmas(self) -> Schedule:
        """The noise levels, ending at 0.

        diffusers shifts both ends of the training levels (in float32), spaces the steps evenly
        between them, and shifts once more. The second shift is kept to match its results. Custom
        levels are shifted once, in float32: [1, 0.75, 0.5, 0.25] with shift 5 are the four steps of
        distilled models, which no number of evenly spaced steps gives.
        """
        count, shift = self.train_timesteps, float(self.shift)
        if self.custom_sigmas is not None:
            levels = shifted(np.asarray(self.custom_sigmas, np.float32), shift)
            return np.append(levels, np.float32(0)).astype(np.float32)[self.first_step :]
        ends = np.array([count, 1], np.float32) / np.float32(count)
        highest, lowest = shifted(ends, shift).astype(np.float64)
        even = np.linspace(highest * count, lowest * count, self.steps)
        levels = shifted(even / count, shift)
        return np.append(levels, 0).astype(np.float32)[self.first_step :]

    @functools.cached_property
    def timesteps(self) -> Schedule:
        """The model's timesteps, float32 and not truncated."""
        return np.asarray(self.sigmas[:-1] * np.float32(self.train_timesteps))


class EulerState(NamedTuple):
    """The latents; Euler needs nothing of earlier steps."""

    sample: Latents


class EulerCoefficients(NamedTuple):
    """Change of the noise level in a step (below 0)."""

    change: Float[np.ndarray | jax.Array, "..."]


@dataclass(frozen=True, kw_only=True)
class FlowMatchEuler(FlowMatchSampler):
    """Samples a flow model in straight steps."""

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


class LcmState(NamedTuple):
    """The latents and the seed of every video."""

    sample: Latents
    seeds: Seeds


class LcmCoefficients(NamedTuple):
    """The noise levels before and after a step, and its number."""

    sigma: Weight
    next_sigma: Weight
    step: Weight


@dataclass(frozen=True, kw_only=True)
class FlowMatchLCM(FlowMatchSampler):
    """Samples a consistency or DMD model: data, new noise, data, ..."""

    @property
    def draws_noise(self) -> bool:
        """True."""
        return True

    @functools.cached_property
    def coefficients(self) -> LcmCoefficients:
        """The rows of all steps."""
        return LcmCoefficients(
            sigma=self.sigmas[:-1].copy(),
            next_sigma=self.sigmas[1:].copy(),
            step=np.arange(self.first_step, self.steps, dtype=np.uint32),
        )

    def start(self, latents: Latents, seeds: Seeds | None = None) -> LcmState:
        """Returns the state before the first step; raises without one seed per video."""
        if seeds is None or len(seeds) != len(latents):
            problem = Problem(
                name="seeds",
                value=None if seeds is None else len(seeds),
                rule=f"this sampler draws noise and needs one seed for each of the {len(latents)} "
                "videos",
            )
            raise ProblemsFound([problem])
        return LcmState(
            sample=jnp.asarray(latents, jnp.float32), seeds=jnp.asarray(seeds, jnp.uint32)
        )

    def advance(
        self, state: LcmState, velocity: Latents, coefficients: LcmCoefficients
    ) -> LcmState:
        """Returns the state after one step, with noise drawn for the step."""
        noise = step_noise(jnp.asarray(state.seeds), coefficients.step, state.sample.shape[1:])
        return self.advance_with_noise(state, velocity, coefficients, noise=noise)

    def advance_with_noise(
        self,
        state: LcmState,
        velocity: Latents,
        coefficients: LcmCoefficients,
        *,
        noise: Float[Array, "..."],
    ) -> LcmState:
        """Returns the state after one step with this noise; the arithmetic is float32."""
        sigma, next_sigma, _ = coefficients
        data = state.sample - sigma * velocity.astype(jnp.float32)
        sample = (1 - next_sigma) * data + next_sigma * noise
        return LcmState(sample=sample, seeds=state.seeds)


def step_noise(
    seeds: UInt32[Array, " B"], step: UInt32[Array, ""] | np.uint32, shape: tuple[int, ...]
) -> Float[Array, "B ..."]:
    """Returns standard normal noise of one step, that of each video from its own seed.

    The first latents are drawn from the seed's key itself; folding in the step's number gives keys
    that differ from it and from each other.
    """

    def of_one(seed: UInt32[Array, ""]) -> Float[Array, "..."]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.normal(key, shape, jnp.float32)

    return jax.vmap(of_one)(seeds)
