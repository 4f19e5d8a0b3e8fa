"""Taylor cache: continues the last two computed predictions in a straight line.

The guided velocity v changes smoothly from step to step. A skipped step, k steps after the last
computed one, takes the first two terms of its Taylor series in the number of the step:

    v ~ last + k * (last - before) / (steps from `before` to `last`)

Every `interval`-th step is computed, and in any case the first steps of each expert (30 %, at least
three) and the last 10 % of the run. Everything is decided on the host before the run: no ratios are
measured, and a skipped step runs nothing but the sampler. This is TaylorSeer of order 1 on the
output of the model; docs/design/step_caches.md has what else was tried.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.diffusion.denoise import CacheShapes, Forward, Kept, StepCache
from maxdiffusion.diffusion.guidance import Action, PlannedStep, RunPlan

FEWEST_STEPS = 20
FEWEST_FIRST = 3
"""The slope between the first two steps of an expert is no guide to the third."""


class TaylorState(NamedTuple):
    """Guided velocities of the last computed step and of the one before."""

    last: Kept
    before: Kept


@dataclass(frozen=True, kw_only=True)
class TaylorCache(StepCache):
    """Skips whole steps, up to `interval` - 1 in a row."""

    interval: int = 2

    @property
    def program_key(self) -> Hashable:
        """The type: the interval decides on the host which program runs."""
        return type(self)

    def planned(self, plan: RunPlan) -> RunPlan:
        """Returns the plan with skipped steps."""
        reason = "predictions of fewer are too far apart to continue them"
        plan.require_even("use_taylor_cache", steps=FEWEST_STEPS, reason=reason)
        experts = [[*steps] for _, steps in groupby(plan, key=lambda step: step.high_noise)]
        planned = [self._planned(step, steps, len(plan)) for steps in experts for step in steps]
        return RunPlan(steps=tuple(planned))

    def _planned(self, step: PlannedStep, steps: list[PlannedStep], total: int) -> PlannedStep:
        """Returns a step of an expert with its action."""
        since, first = step.index - steps[0].index, max(FEWEST_FIRST, tenths(3, len(steps)))
        at_an_end = since < first or step.index >= total - tenths(1, total)
        computed = at_an_end or (since - first + 1) % self.interval == 0
        return replace(step, action=Action.COMPUTE if computed else Action.SKIP)

    def rows(self, plan: RunPlan) -> Float[np.ndarray, " Q"]:
        """Returns the weight of `last - before` in every step; 0 where it is computed."""
        weights = []
        computed = [0, 0]
        for step in plan:
            if step.action is Action.COMPUTE:
                computed = [computed[1], step.index]
                weights.append(0.0)
            else:
                weights.append((step.index - computed[1]) / (computed[1] - computed[0]))
        return np.asarray(weights, np.float32)

    def state(self, shapes: CacheShapes) -> TaylorState:
        """Returns the shapes of both velocities."""
        return TaylorState(last=shapes.velocity, before=shapes.velocity)

    def predict(
        self, forward: Forward, state: TaylorState, action: Action
    ) -> tuple[Float[Array, "B F Y X C"], TaylorState]:
        """Returns the guided velocity, computed or continued, and the next state."""
        if action is Action.COMPUTE:
            velocity = forward.guided(forward.velocity())
            return velocity, TaylorState(last=velocity, before=state.last)
        with jax.named_scope("continue"):
            last, before = (one.astype(jnp.float32) for one in state)
            velocity = last + jnp.asarray(forward.step.cache_row) * (last - before)
            return velocity.astype(state.last.dtype), state


def tenths(count: int, of: int) -> int:
    """Returns this number of tenths, rounded up to whole steps."""
    return -(-count * of // 10)
