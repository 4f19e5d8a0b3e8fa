"""Multistep solvers of second order over lambda, for flow models: UniPC and DPM-Solver++ 2M.

With sigma the share of noise, alpha = 1 - sigma the share of data and lambda = log(alpha / sigma),
both predict the clean video, m_i = x_i - sigma_i v, and use the predictions of earlier steps. Every
part of a step is linear in the arrays, so a step is a row of weights.

UniPC (B2(h), data prediction) is WAN's default sampler:

    corrector  x_i <- from (x_{i-1}, m_{i-2}, m_{i-1}, m_i)  repeats the last step, its end known
    predictor  x_{i+1} from (x_i, m_{i-1}, m_i)

The first step has nothing to correct; the first and the last predictor are of order 1.

DPM-Solver++ 2M (midpoint rule), for a step of width h = lambda_{i+1} - lambda_i:

    slope      d_i     = (m_i - m_{i-1}) h / (2 (lambda_i - lambda_{i-1}))
    next       x_{i+1} = (sigma_{i+1} / sigma_i) x_i - alpha_{i+1} (exp(-h) - 1) (m_i + d_i)

The slope is left out at the first step, which has no earlier data, and at the last, which ends at
sigma 0. Noise levels are those of diffusers' schedulers with flow sigmas: DPMSolverMultistep starts
at the shifted 0.999, where UniPC starts at 1.
"""

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxdiffusion.diffusion.sampler import Latents, Sampler, Schedule, Seeds, Weight, shifted

# At sigma = 1 no data is left and lambda is infinite, so the first level stops just short of it.
SHORT_OF_NOISE = 1e-6


@dataclass(frozen=True, kw_only=True)
class MultistepSampler(Sampler):
    """Base of the solvers that step over lambda, the log of the signal-to-noise ratio."""

    @abstractmethod
    def levels(self) -> Schedule:
        """Returns the noise level before every step of the whole schedule."""

    @functools.cached_property
    def _levels(self) -> Schedule:
        return self.levels()[self.first_step :]

    @functools.cached_property
    def timesteps(self) -> Schedule:
        """The model's timesteps: noise levels times `train_timesteps`, truncated to integers."""
        return (self._levels * self.train_timesteps).astype(np.int64)

    @functools.cached_property
    def sigmas(self) -> Schedule:
        """The noise levels, ending at 0."""
        return np.append(self._levels, 0).astype(np.float32)


def log_snr(levels: Schedule) -> Schedule:
    """Returns lambda = log(alpha / sigma) of noise levels that end at 0, where it is +inf."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(1 - levels) - np.log(levels))


def short_of_noise(levels: Schedule) -> Schedule:
    """Returns the levels with a first level of 1 lowered to just below 1."""
    if abs(levels[0] - 1) >= SHORT_OF_NOISE:
        return levels
    return np.concatenate([levels[:1] - SHORT_OF_NOISE, levels[1:]])


class UniPCState(NamedTuple):
    """The latents, the corrected latents one step ago, and the last two data predictions."""

    sample: Latents
    previous: Latents
    data: Latents
    older_data: Latents


class Corrector(NamedTuple):
    """The weight of each array in the corrected latents."""

    sample: Weight
    previous: Weight
    older_data: Weight
    data: Weight
    new_data: Weight


class Predictor(NamedTuple):
    """The weight of each array in the next latents."""

    sample: Weight
    data: Weight
    new_data: Weight


Row = TypeVar("Row", Corrector, Predictor)


class UniPCCoefficients(NamedTuple):
    """The numbers that `advance` needs of a step."""

    sigma: Weight
    corrector: Corrector
    predictor: Predictor


@dataclass(frozen=True, kw_only=True)
class UniPC(MultistepSampler):
    """Samples a flow model with a predictor and a corrector per step."""

    def levels(self) -> Schedule:
        """Returns the noise level before every step of the whole schedule."""
        even = np.linspace(1, 1 / self.train_timesteps, self.steps + 1)[:-1]
        before = even if self.custom_sigmas is None else np.asarray(self.custom_sigmas)
        return short_of_noise(shifted(before, self.shift))

    @functools.cached_property
    def coefficients(self) -> UniPCCoefficients:
        """The rows of all steps."""
        return unipc_coefficients(self.sigmas)

    def start(self, latents: Latents, seeds: Seeds | None = None) -> UniPCState:
        """Returns the state before the first step; unknown arrays are zero and have weight 0."""
        del seeds
        sample = jnp.asarray(latents, jnp.float32)
        nothing = jnp.zeros_like(sample)
        return UniPCState(sample=sample, previous=nothing, data=nothing, older_data=nothing)

    def advance(
        self, state: UniPCState, velocity: Latents, coefficients: UniPCCoefficients
    ) -> UniPCState:
        """Returns the state after one step; the arithmetic is float32 for any model dtype."""
        sigma, corrector, predictor = coefficients
        new_data = state.sample - sigma * velocity.astype(jnp.float32)
        corrected = (
            corrector.sample * state.sample
            + corrector.previous * state.previous
            + corrector.older_data * state.older_data
            + corrector.data * state.data
            + corrector.new_data * new_data
        )
        sample = (
            predictor.sample * corrected
            + predictor.data * state.data
            + predictor.new_data * new_data
        )
        return UniPCState(sample=sample, previous=corrected, data=new_data, older_data=state.data)


def unipc_coefficients(sigmas: Schedule) -> UniPCCoefficients:
    """Returns the rows of all steps between the given noise levels, computed in float64."""
    levels = sigmas.astype(np.float64)
    lambdas = log_snr(levels)
    steps = len(levels) - 1
    orders = [min(2, step + 1, steps - step) for step in range(steps)]
    correctors = [_no_correction()]
    for step in range(1, steps):
        correctors.append(_corrector(levels, lambdas, step - 1, orders[step - 1]))
    predictors = [_predictor(levels, lambdas, step, orders[step]) for step in range(steps)]
    return UniPCCoefficients(
        sigma=sigmas[:-1].copy(), corrector=_stack(correctors), predictor=_stack(predictors)
    )


def _step_weights(levels: Schedule, lambdas: Schedule, step: int) -> tuple[float, float, float]:
    """Returns the weights of latents and newest data over a step, and its width in lambda."""
    width = lambdas[step + 1] - lambdas[step]
    return levels[step + 1] / levels[step], (1 - levels[step + 1]) * np.expm1(-width), width


def _predictor(levels: Schedule, lambdas: Schedule, step: int, order: int) -> Predictor:
    keep, pull, width = _step_weights(levels, lambdas, step)
    if order == 1:
        return Predictor(sample=keep, data=0.0, new_data=-pull)
    ratio = (lambdas[step - 1] - lambdas[step]) / width
    slope = 0.5 * pull / ratio
    return Predictor(sample=keep, data=-slope, new_data=slope - pull)


def _corrector(levels: Schedule, lambdas: Schedule, step: int, order: int) -> Corrector:
    keep, pull, width = _step_weights(levels, lambdas, step)
    if order == 1:
        return Corrector(
            sample=0.0, previous=keep, older_data=0.0, data=-0.5 * pull, new_data=-0.5 * pull
        )
    ratio = (lambdas[step - 1] - lambdas[step]) / width
    old, new = _second_order_weights(ratio, width)
    slope, end = pull * old / ratio, pull * new
    return Corrector(
        sample=0.0, previous=keep, older_data=-slope, data=slope + end - pull, new_data=-end
    )


def _second_order_weights(ratio: float, width: float) -> Schedule:
    """Returns the two weights that make the corrector second order, for B(h) = exp(h) - 1."""
    base = np.expm1(-width)
    first = -base / width - 1
    second = 2 * (-first / width - 0.5)
    return np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], np.array([first, second]) / base)


def _no_correction() -> Corrector:
    return Corrector(sample=1.0, previous=0.0, older_data=0.0, data=0.0, new_data=0.0)


def _stack(rows: list[Row]) -> Row:
    """Returns one row of arrays over steps, from the rows of every step."""
    stacked: Row = jax.tree.map(lambda *numbers: np.asarray(numbers, np.float32), *rows)
    return stacked


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
