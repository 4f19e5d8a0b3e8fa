"""UniPC of order 2 (B2(h), data prediction) for flow models, as WAN samples by default.

With sigma the share of noise, alpha = 1 - sigma the share of data and lambda = log(alpha / sigma),
a step from sigma_i to sigma_{i+1} does three things, all of them linear in the arrays:

    data       m_i  = x_i - sigma_i v                        what the model says the clean video is
    corrector  x_i <- from (x_{i-1}, m_{i-2}, m_{i-1}, m_i)  the last step redone, knowing its end
    predictor  x_{i+1} from (x_i, m_{i-1}, m_i)

The first step has nothing to correct, and the first and the last predictor are of order 1.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.schedulers.sampler import check_falling, check_schedule, shifted

# At sigma = 1 no data is left and lambda is infinite, so the first level stops just short of it.
SHORT_OF_NOISE = 1e-6

Weight = Any  # a number on host or device: of one step, or of all steps stacked


class UniPCState(NamedTuple):
    """The latents, the corrected latents one step ago, and the last two data predictions."""

    sample: Float[Array, "..."]
    previous: Float[Array, "..."]
    data: Float[Array, "..."]
    older_data: Float[Array, "..."]


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
    """Everything that `advance` needs to know of a step."""

    sigma: Weight
    corrector: Corrector
    predictor: Predictor


@dataclass(frozen=True, kw_only=True)
class UniPC:
    """Samples a flow model in `steps` steps whose noise levels are moved up by `shift`."""

    steps: int
    shift: float
    train_timesteps: int = 1000

    def __post_init__(self) -> None:
        check_schedule(steps=self.steps, shift=self.shift, train_timesteps=self.train_timesteps)
        check_falling(self.sigmas, steps=self.steps, shift=self.shift)

    @functools.cached_property
    def _levels(self) -> np.ndarray:
        even = np.linspace(1, 1 / self.train_timesteps, self.steps + 1)[:-1]
        levels = shifted(even, self.shift)
        if abs(levels[0] - 1) < SHORT_OF_NOISE:
            levels[0] -= SHORT_OF_NOISE
        return levels

    @functools.cached_property
    def timesteps(self) -> np.ndarray:
        """The model's timesteps, whole numbers cut off (not rounded) from the noise levels."""
        return (self._levels * self.train_timesteps).astype(np.int64)

    @functools.cached_property
    def sigmas(self) -> np.ndarray:
        """The noise levels, ending at 0."""
        return np.append(self._levels, 0).astype(np.float32)

    @functools.cached_property
    def coefficients(self) -> UniPCCoefficients:
        """The rows of all steps."""
        return unipc_coefficients(self.sigmas)

    def start(self, latents: Float[Array, "..."]) -> UniPCState:
        """The state before the first step; what is not known yet is zero and weighs nothing."""
        sample = jnp.asarray(latents, jnp.float32)
        nothing = jnp.zeros_like(sample)
        return UniPCState(sample=sample, previous=nothing, data=nothing, older_data=nothing)

    def advance(
        self, state: UniPCState, velocity: Float[Array, "..."], coefficients: UniPCCoefficients
    ) -> UniPCState:
        """The state after one step; all arithmetic is float32, whatever the model works in."""
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


def unipc_coefficients(sigmas: np.ndarray) -> UniPCCoefficients:
    """The rows of all steps between the given noise levels, computed in float64."""
    levels = sigmas.astype(np.float64)
    with np.errstate(divide="ignore"):  # the last level is 0, its lambda +inf
        lambdas = np.log(1 - levels) - np.log(levels)
    steps = len(levels) - 1
    orders = [min(2, step + 1, steps - step) for step in range(steps)]
    correctors = [_no_correction()]
    for step in range(1, steps):
        correctors.append(_corrector(levels, lambdas, step - 1, orders[step - 1]))
    predictors = [_predictor(levels, lambdas, step, orders[step]) for step in range(steps)]
    return UniPCCoefficients(
        sigma=sigmas[:-1].copy(), corrector=_stack(correctors), predictor=_stack(predictors)
    )


def _step_weights(levels: np.ndarray, lambdas: np.ndarray, step: int) -> tuple[float, float, float]:
    """The weights of latents and of newest data over one step, and the step's width in lambda."""
    width = lambdas[step + 1] - lambdas[step]
    return levels[step + 1] / levels[step], (1 - levels[step + 1]) * np.expm1(-width), width


def _predictor(levels: np.ndarray, lambdas: np.ndarray, step: int, order: int) -> Predictor:
    keep, pull, width = _step_weights(levels, lambdas, step)
    if order == 1:
        return Predictor(sample=keep, data=0.0, new_data=-pull)
    ratio = (lambdas[step - 1] - lambdas[step]) / width
    slope = 0.5 * pull / ratio
    return Predictor(sample=keep, data=-slope, new_data=slope - pull)


def _corrector(levels: np.ndarray, lambdas: np.ndarray, step: int, order: int) -> Corrector:
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


def _second_order_weights(ratio: float, width: float) -> np.ndarray:
    """The two numbers that make the corrector exact to second order, for B(h) = exp(h) - 1."""
    base = np.expm1(-width)
    first = -base / width - 1
    second = 2 * (-first / width - 0.5)
    return np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], np.array([first, second]) / base)


def _no_correction() -> Corrector:
    return Corrector(sample=1.0, previous=0.0, older_data=0.0, data=0.0, new_data=0.0)


def _stack(rows: list[Row]) -> Row:
    """One row of arrays over steps, from the rows of every step."""
    return jax.tree.map(lambda *numbers: np.asarray(numbers, np.float32), *rows)
