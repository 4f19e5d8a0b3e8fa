"""SenCache: repeats the last prediction while latents and time have moved little.

The distance since the last computed step is summed over the steps that repeated it:

    moved += rms(x - x of the last computed step) + |t - t of the last computed step| / 1000

A step repeats the prediction while `moved` is at most 0.1, at most three times in a row. The first
30 % and the last 10 % of the steps, and the first of the low-noise expert, are always computed. The
latents are known on the devices only, so the decision is made there (`lax.cond`), without a
transfer to the host.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from maxdiffusion.diffusion.denoise import CacheShapes, Forward, Kept, StepCache
from maxdiffusion.diffusion.guidance import Action, RunPlan

FIRST_SHARE, LAST_SHARE = 0.3, 0.9
TIME_UNIT = 1000.0


class SenState(NamedTuple):
    """The last computed prediction with its latents and time, and the sums since then.

    `computed` counts the computed steps of the run.
    """

    velocity: Kept
    sample: Kept
    timestep: Kept
    moved: Kept
    repeats: Kept
    computed: Kept


@dataclass(frozen=True, kw_only=True)
class SenCache(StepCache):
    """Repeats predictions, with a decision on the devices at every step."""

    tolerance: float = 0.1
    max_repeats: int = 3

    def planned(self, plan: RunPlan) -> RunPlan:
        """Returns the plan as it is: decisions are made during the run."""
        plan.require_even("use_sen_cache")
        return plan

    def rows(self, plan: RunPlan) -> Bool[np.ndarray, " Q"]:
        """Returns, for every step, whether it is computed in any case."""
        steps = np.arange(len(plan))
        ends = (steps < int(FIRST_SHARE * len(plan))) | (steps >= int(LAST_SHARE * len(plan)))
        return np.asarray(ends | (steps == 0) | (steps == plan.high_noise_steps))

    def state(self, shapes: CacheShapes) -> SenState:
        """Returns the shapes of the state."""
        number = shapes.number
        return SenState(
            velocity=shapes.velocity,
            sample=shapes.sample,
            timestep=number,
            moved=number,
            repeats=number,
            computed=number,
        )

    def predict(
        self, forward: Forward, state: SenState, action: Action
    ) -> tuple[Float[Array, "B F Y X C"], SenState]:
        """Returns the velocity, computed or repeated, and the next state."""
        del action
        sample, timestep = forward.sample, forward.step.timestep
        distance = jnp.sqrt(jnp.mean(jnp.square(sample - state.sample)))
        moved = state.moved + distance + jnp.abs(timestep - state.timestep) / TIME_UNIT
        repeat = (moved <= self.tolerance) & (state.repeats < self.max_repeats)
        repeat = repeat & ~jnp.asarray(forward.step.cache_row)

        def repeated() -> SenState:
            return state._replace(moved=moved, repeats=state.repeats + 1)

        def computed() -> SenState:
            return SenState(
                velocity=forward.guided(forward.velocity()),
                sample=sample,
                timestep=timestep,
                moved=jnp.zeros_like(moved),
                repeats=jnp.zeros_like(moved),
                computed=state.computed + 1,
            )

        kept = jax.lax.cond(repeat, repeated, computed)
        return kept.velocity, kept

    def report(self, state: Any) -> str:
        """Returns the number of computed steps."""
        return f"SenCache: {int(state.computed)} steps computed"
