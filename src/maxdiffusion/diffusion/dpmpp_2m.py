"""DPM-Solver++ 2M for flow models: second-order multistep, data prediction, midpoint rule.

With sigma the share of noise, alpha = 1 - sigma the share of data and lambda = log(alpha / sigma),
a step of width h = lambda_{i+1} - lambda_i is

    data   m_i     = x_i - sigma_i v
    slope  d_i     = (m_i - m_{i-1}) h / (2 (lambda_i - lambda_{i-1}))
    next   x_{i+1} = (sigma_{i+1} / sigma_i) x_i - alpha_{i+1} (exp(-h) - 1) (m_i + d_i)

The slope is left out at the first step, which has no earlier data, and at the last, which ends at
sigma 0. Noise levels are those of diffusers' DPMSolverMultistepScheduler with flow sigmas: they
start at the shifted 0.999, where UniPC starts at 1.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from maxdiffusion.diffusion.sampler import (
    Latents,
    MultistepSampler,
    Schedule,
    Seeds,
    Weight,
    log_snr,
    shifted,
    short_of_noise,
)


class DpmState(NamedTuple):
    """The latents and the last data prediction."""

    sample: Latents
    data: Latents


class DpmCoefficients(NamedTuple):
    """The noise level of a step, and the weight of each array in the next latents."""

    sigma: Weight
    sample: Weight
    data: Weight
    new_data: Weight


@dataclass(frozen=True, kw_only=True)
class DpmPlusPlus2M(MultistepSampler):
    """Samples a flow model with the midpoint rule over two data predictions."""

    def levels(self) -> Schedule:
        """Returns the noise level before every step of the whole schedule."""
        if self.custom_sigmas is not None:
            return short_of_noise(shifted(np.asarray(self.custom_sigmas), self.shift))
        data = np.linspace(1, 1 / self.train_timesteps, self.steps + 1)
        return shifted(1.0 - data, self.shift)[:0:-1]

    @functools.cached_property
    def coefficients(self) -> DpmCoefficients:
        """The rows of all steps."""
        return dpm_coefficients(self.sigmas)

    def start(self, latents: Latents, seeds: Seeds | None = None) -> DpmState:
        """Returns the state before the first step; the unknown data is zero and has weight 0."""
        del seeds
        sample = jnp.asarray(latents, jnp.float32)
        return DpmState(sample=sample, data=jnp.zeros_like(sample))

    def advance(
        self, state: DpmState, velocity: Latents, coefficients: DpmCoefficients
    ) -> DpmState:
        """Returns the state after one step; the arithmetic is float32 for any model dtype."""
        new_data = state.sample - coefficients.sigma * velocity.astype(jnp.float32)
        sample = (
            coefficients.sample * state.sample
            + coefficients.data * state.data
            + coefficients.new_data * new_data
        )
        return DpmState(sample=sample, data=new_data)


def dpm_coefficients(sigmas: Schedule) -> DpmCoefficients:
    """Returns the rows of all steps between the given noise levels, computed in float64."""
    levels = sigmas.astype(np.float64)
    lambdas = log_snr(levels)
    widths = np.diff(lambdas)
    pull = -(1 - levels[1:]) * np.expm1(-widths)
    slopes = np.zeros_like(widths)
    # Half of h over the width before, without the first step and the last.
    slopes[1:-1] = 0.5 * widths[1:-1] / widths[:-2]
    weights = (levels[1:] / levels[:-1], -pull * slopes, pull * (1 + slopes))
    keep, data, new_data = (one.astype(np.float32) for one in weights)
    return DpmCoefficients(sigma=sigmas[:-1].copy(), sample=keep, data=data, new_data=new_data)
