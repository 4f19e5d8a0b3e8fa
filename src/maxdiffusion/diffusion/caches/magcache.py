"""MagCache: skips steps while the residual of all blocks is known to change little.

The residual R is what all blocks add to the tokens. Its magnitude falls from step to step by a
ratio that hardly depends on the prompt, so ratios measured once tell how far a kept R is off:

    acc *= ratio of the step        err += |1 - acc|        for prompt and negative prompt
    skip  if err < threshold for both, and at most `max_skips` steps in a row

A skipped step adds the kept R to its tokens and runs the output head. Decisions depend on the
ratios alone. They are made on the host before the run, once for both prompts, and start afresh at
the expert boundary. The first share of each expert's steps (`retention`) is always computed.

`MagCalibration` computes every step and measures the ratios.
"""

import functools
import importlib.resources
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxdiffusion.diffusion.denoise import CacheShapes, Forward, Kept, StepCache
from maxdiffusion.diffusion.guidance import Action, RunPlan
from maxdiffusion.errors import Problem, ProblemsFound

FEWEST_STEPS = 10
RATIOS_FILE = "mag_ratios.json"


@dataclass(frozen=True, kw_only=True)
class MagRatios:
    """Ratios of a model: (prompt, negative prompt) of each step."""

    values: tuple[tuple[float, float], ...]

    @classmethod
    def interleaved(cls, numbers: Sequence[float]) -> "MagRatios":
        """Returns the ratios of a list [prompt, negative, prompt, negative, ...]."""
        if len(numbers) % 2 or len(numbers) < 2 * FEWEST_STEPS or min(numbers) <= 0:
            problem = Problem(
                name="mag_ratios_base",
                value=f"{len(numbers)} numbers",
                rule="must be a ratio above 0 for prompt and negative prompt in turn, for at least "
                f"{FEWEST_STEPS} steps",
                remedy="Leave it empty for the published ratios, or run calibrate_cache",
            )
            raise ProblemsFound([problem])
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return cls(values=tuple((float(one), float(two)) for one, two in pairs))

    @classmethod
    def published(cls, name: str) -> "MagRatios":
        """Returns the ratios that MagCache's authors publish for a model."""
        return cls.interleaved(published_ratios()[name]["ratios"])

    def for_steps(self, steps: int) -> Float[np.ndarray, "Q A"]:
        """Returns the ratios of a run of `steps` steps: those of the nearest measured steps."""
        values = np.asarray(self.values)
        nearest = [round(step * (len(values) - 1) / max(1, steps - 1)) for step in range(steps)]
        return values[nearest]


@functools.cache
def published_ratios() -> dict[str, Any]:
    """Returns the published ratios: per model a list, and shift and boundary it belongs to."""
    text = importlib.resources.files("maxdiffusion.assets").joinpath(RATIOS_FILE).read_text()
    entries: dict[str, Any] = json.loads(text)
    return entries


@dataclass(frozen=True, kw_only=True)
class MagCache(StepCache):
    """Skips whole steps by measured ratios of magnitudes."""

    ratios: MagRatios
    threshold: float = 0.04
    max_skips: int = 2
    retention: float = 0.2

    @property
    def program_key(self) -> Hashable:
        """The type: its fields decide on the host which program runs."""
        return type(self)

    def planned(self, plan: RunPlan) -> RunPlan:
        """Returns the plan with skipped steps."""
        reason = "few-step models have none to spare"
        plan.require_even("use_magcache", steps=FEWEST_STEPS, reason=reason)
        computed = self.computed_steps(len(plan), plan.high_noise_steps, plan.guidance.copies)
        return RunPlan(
            steps=tuple(
                replace(step, action=Action.COMPUTE if compute else Action.SKIP)
                for step, compute in zip(plan, computed, strict=True)
            )
        )

    def computed_steps(self, steps: int, high_noise_steps: int, copies: int) -> tuple[bool, ...]:
        """Returns, for every step, whether its blocks are computed."""
        ratios = self.ratios.for_steps(steps)[:, :copies]
        acc, err, skips = np.ones(copies), np.zeros(copies), 0
        computed = []
        for step in range(steps):
            acc, skips = acc * ratios[step], skips + 1
            err = err + np.abs(1 - acc)
            skip = bool((err < self.threshold).all()) and skips <= self.max_skips
            compute = not skip or self._retained(step, steps, high_noise_steps)
            if compute:
                acc, err, skips = np.ones(copies), np.zeros(copies), 0
            computed.append(compute)
        return tuple(computed)

    def _retained(self, step: int, steps: int, high_noise_steps: int) -> bool:
        """Returns whether a step is one of the first of its expert, which are always computed."""
        if step < high_noise_steps:
            return step < max(1, int(high_noise_steps * self.retention))
        of_low_noise = int((steps - high_noise_steps) * self.retention)
        return step < high_noise_steps + max(1, of_low_noise)

    def rows(self, plan: RunPlan) -> Any:
        """Returns nothing: the actions say everything."""
        del plan
        return ()

    def state(self, shapes: CacheShapes) -> Any:
        """Returns the shape of the residual."""
        return shapes.tokens

    def predict(
        self, forward: Forward, state: Float[Array, "B_guided S D"], action: Action
    ) -> tuple[Float[Array, "B F Y X C"], Float[Array, "B_guided S D"]]:
        """Returns the guided velocity, and the residual of the last computed step."""
        if action is Action.SKIP:
            return forward.guided(forward.velocity_from(state)), state
        velocity, residual = forward.velocity_and_residual()
        return forward.guided(velocity), residual


class CalibrationState(NamedTuple):
    """The residual of the last step, and the measured ratios of all steps so far."""

    residual: Kept
    ratios: Kept


@dataclass(frozen=True, kw_only=True)
class MagCalibration(StepCache):
    """Measures ratios: the mean over tokens of |R| of a step over |R| of the step before.

    `tokens` are those of a video; padding behind them does not count.
    """

    steps: int
    tokens: int

    def planned(self, plan: RunPlan) -> RunPlan:
        """Returns the plan as it is: every step is computed."""
        if len(plan.guidances) > 1:
            problem = Problem(
                name="calibrate_cache",
                value=plan.describe(),
                rule="needs the same guidance at every step",
                remedy="Set both guidance scales above 1 or both to 1, and leave guidance_end_step "
                "out",
            )
            raise ProblemsFound([problem])
        return plan

    def rows(self, plan: RunPlan) -> Int[np.ndarray, " Q"]:
        """Returns the number of every step."""
        return np.arange(len(plan), dtype=np.int32)

    def state(self, shapes: CacheShapes) -> CalibrationState:
        """Returns the shapes of the residual, and of a ratio for every step and row."""
        size, number = (self.steps, shapes.tokens.shape[0]), shapes.number
        ratios = jax.ShapeDtypeStruct(size, number.dtype, sharding=number.sharding)
        return CalibrationState(residual=shapes.tokens, ratios=ratios)

    def predict(
        self, forward: Forward, state: CalibrationState, action: Action
    ) -> tuple[Float[Array, "B F Y X C"], CalibrationState]:
        """Returns the guided velocity, the residual, and the ratios with that of the step."""
        del action
        velocity, residual = forward.velocity_and_residual()
        step = jnp.asarray(forward.step.cache_row)
        ratio = jnp.mean(self._lengths(residual) / self._lengths(state.residual), axis=1)
        ratio = jnp.where(step == 0, 1.0, ratio)
        kept = CalibrationState(residual=residual, ratios=state.ratios.at[step].set(ratio))
        return forward.guided(velocity), kept

    def _lengths(self, residual: Float[Array, "B_guided S D"]) -> Float[Array, "B_guided T"]:
        wide = residual[:, : self.tokens].astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(wide), axis=-1))


def interleaved_means(ratios: Float[np.ndarray, "Q B"], videos: int) -> list[float]:
    """Returns the means over videos, prompt and negative prompt in turn.

    Columns are prompts, then negative prompts. Without guidance there are prompts only, whose
    ratios then stand for both.
    """
    copies = ratios.shape[1] // videos
    means = ratios.reshape(len(ratios), copies, videos).mean(axis=2)
    both = means if copies == 2 else np.repeat(means, 2, axis=1)
    return [round(float(ratio), 5) for ratio in both.reshape(-1)]
