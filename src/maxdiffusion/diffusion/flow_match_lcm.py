"""Multistep consistency sampling: predict the data, then add fresh noise of the next level.

x <- (1 - sigma_{i+1}) (x - sigma_i v) + sigma_{i+1} noise_i

This is the step of diffusers' FlowMatchLCMScheduler, of FlowMatchEulerDiscreteScheduler with
`stochastic_sampling`, and of models distilled by distribution matching (DMD). The noise of a step
is a function of the video's seed and the step, so a run has the same noise on every mesh.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from maxdiffusion.diffusion.flow_match_euler import flow_match_sigmas
from maxdiffusion.diffusion.sampler import Latents, Sampler, Schedule, Seeds
from maxdiffusion.errors import Problem, ProblemsFound

Weight = Any
"""A number on host or device: of one step, or of all steps stacked."""


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
class FlowMatchLCM(Sampler):
    """Samples a consistency or DMD model: data, new noise, data, ..."""

    @functools.cached_property
    def sigmas(self) -> Schedule:
        """The noise levels, ending at 0; those of `FlowMatchEuler`."""
        return flow_match_sigmas(self)

    @functools.cached_property
    def timesteps(self) -> Schedule:
        """The model's timesteps, float32 and not truncated."""
        return np.asarray(self.sigmas[:-1] * np.float32(self.train_timesteps))

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
