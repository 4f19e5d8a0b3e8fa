"""CFG cache: computes the prompt only, and estimates the prediction of the negative prompt.

The difference between the two predictions changes slowly. Most steps in the middle of a run keep
it from the step before, in frequencies over height and width, and scale one of two bands:

    negative ~ prompt + irfft2(weight * rfft2(kept negative - kept prompt))

Every fifth step computes both. The kept prompt is that of the last step, computed or estimated.
A step of a guided run costs half of its blocks.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.diffusion.denoise import CacheShapes, Forward, Kept, StepCache
from maxdiffusion.diffusion.guidance import Action, ClassifierFree, RunPlan, Unguided
from maxdiffusion.errors import Problem, ProblemsFound

INTERVAL = 5
BOOST = 1.2
TALL = 720
"""Videos of at least this height end the estimates earlier."""


class CfgState(NamedTuple):
    """The last predictions of prompt and negative prompt, before guidance."""

    prompted: Kept
    unprompted: Kept


class BandWeights(NamedTuple):
    """Weights of low and high frequencies in an estimate."""

    low: Any
    high: Any


@dataclass(frozen=True, kw_only=True)
class CfgCache(StepCache):
    """Estimates the negative prompt's prediction in most steps; `height` is in pixels."""

    height: int

    @property
    def program_key(self) -> Hashable:
        """The type: its fields decide on the host which program runs."""
        return type(self)

    def planned(self, plan: RunPlan) -> RunPlan:
        """Returns the plan with estimated steps."""
        if plan.guidances != (ClassifierFree(),):
            problem = Problem(
                name="use_cfg_cache",
                value=True,
                rule="needs guidance at every step",
                remedy="Set both guidance scales above 1, and leave guidance_end_step out",
            )
            raise ProblemsFound([problem])
        estimated = self.estimated_steps(len(plan), plan.high_noise_steps)
        if not any(estimated):
            problem = Problem(
                name="use_cfg_cache",
                value=True,
                rule=f"no step of this run can be estimated: it has {len(plan)} steps, "
                f"{plan.high_noise_steps} of them of the high-noise expert",
                remedy="Use more steps, or use_cfg_cache=false",
            )
            raise ProblemsFound([problem])
        return RunPlan(
            steps=tuple(
                replace(step, action=Action.ESTIMATE, guidance=Unguided()) if estimate else step
                for step, estimate in zip(plan, estimated, strict=True)
            )
        )

    def estimated_steps(self, steps: int, high_noise_steps: int) -> tuple[bool, ...]:
        """Returns, for every step, whether the negative prompt is estimated.

        With two experts, only steps of the low-noise one are, and not its first.
        """
        two_experts = high_noise_steps < steps
        start, end = steps // 3, int(0.9 * steps) if self.height >= TALL else steps - 2
        if two_experts and self.height < TALL:
            end = steps - 1
        first = high_noise_steps + 1 if two_experts else 1
        return tuple(
            step >= first and start <= step < end and (step - start) % INTERVAL != 0
            for step in range(steps)
        )

    def rows(self, plan: RunPlan) -> BandWeights:
        """Returns the weights: one expert boosts low frequencies first, then high ones."""
        steps = len(plan)
        early = np.arange(steps) < steps // 2
        if plan.high_noise_steps < steps:
            early = np.zeros(steps, bool)
        return BandWeights(
            low=np.where(early, BOOST, 1.0).astype(np.float32),
            high=np.where(early, 1.0, BOOST).astype(np.float32),
        )

    def state(self, shapes: CacheShapes) -> CfgState:
        """Returns the shapes of both predictions."""
        return CfgState(prompted=shapes.velocity, unprompted=shapes.velocity)

    def predict(
        self, forward: Forward, state: CfgState, action: Action
    ) -> tuple[Float[Array, "B F Y X C"], CfgState]:
        """Returns the guided velocity and the predictions that it is made of."""
        velocity = forward.velocity()
        if action is Action.COMPUTE:
            prompted, unprompted = jnp.split(velocity, 2)
            return forward.guided(velocity), CfgState(prompted=prompted, unprompted=unprompted)
        with jax.named_scope("estimate"):
            unprompted = estimated(velocity, state, forward.step.cache_row)
        both = jnp.concatenate([velocity, unprompted])
        guided = ClassifierFree().combine(both, forward.step.guidance_scale)
        return guided, CfgState(prompted=velocity, unprompted=state.unprompted)


def estimated(
    prompted: Float[Array, "B F Y X C"], state: CfgState, weights: BandWeights
) -> Float[Array, "B F Y X C"]:
    """Returns the estimated prediction of the negative prompt."""
    wide = jnp.float32
    difference = state.unprompted.astype(wide) - state.prompted.astype(wide)
    rows, columns = difference.shape[2:4]
    low = jnp.asarray(low_band(rows, columns // 2 + 1))[None, None, :, :, None]
    spectrum = jnp.fft.rfft2(difference, axes=(2, 3))
    weight = jnp.where(low, weights.low, weights.high).astype(spectrum.dtype)
    change = jnp.fft.irfft2(spectrum * weight, s=(rows, columns), axes=(2, 3))
    return (prompted.astype(wide) + change.astype(wide)).astype(prompted.dtype)


def low_band(rows: int, columns: int) -> np.ndarray:
    """Returns the mask of low frequencies in a spectrum of `rows` x `columns` (of rfft2)."""
    cut_rows, cut_columns = max(1, rows // 4), max(1, columns // 4)
    row, column = np.arange(rows), np.arange(columns)
    of_rows = (row < cut_rows) | (row >= rows - cut_rows + 1)
    return of_rows[:, None] & (column < cut_columns)[None, :]
