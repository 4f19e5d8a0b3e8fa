"""Guidance of every step: the model's batch, one velocity from its answer, and the plan of a run.

A plan states expert, guidance and scale of every step. It is made on the host before the run.

    step        0   1   2   3   4   5
    expert      high noise  |  low noise         from a timestep or a step index
    guidance    both prompts    |  prompt only   `guidance_end_step`, or a scale of 1
    action      compute | skip | estimate        a step cache, if there is one
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.diffusion.sampler import Sampler
from maxdiffusion.errors import Collector, Problem

NO_GUIDANCE = 1.0
"""Up to this scale the negative prompt has no weight."""


@dataclass(frozen=True, kw_only=True)
class GuidanceScales:
    """Guidance scale of each expert; equal for a model with one transformer."""

    high_noise: float
    low_noise: float

    @property
    def active(self) -> bool:
        """Returns whether any step needs the negative prompt."""
        return max(self.high_noise, self.low_noise) > NO_GUIDANCE


class Guidance(ABC):
    """Makes the model's batch from the latents, and one velocity from the model's answer."""

    @property
    @abstractmethod
    def copies(self) -> int:
        """Rows of the model's batch per video."""

    @abstractmethod
    def model_batch(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "B_guided F Y X C"]:
        """Returns the batch that the model runs on."""

    @abstractmethod
    def combine(
        self, velocity: Float[Array, "B_guided F Y X C"], scale: Float[Array, ""]
    ) -> Float[Array, "B F Y X C"]:
        """Returns the guided velocity."""


@dataclass(frozen=True)
class ClassifierFree(Guidance):
    """Classifier-free guidance over rows [prompts; negative prompts]."""

    @property
    def copies(self) -> int:
        return 2

    def model_batch(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "B_guided F Y X C"]:
        return jnp.concatenate([latents, latents])

    def combine(
        self, velocity: Float[Array, "B_guided F Y X C"], scale: Float[Array, ""]
    ) -> Float[Array, "B F Y X C"]:
        prompted, unprompted = jnp.split(velocity, 2)
        # Each result is rounded to the model's dtype, as in diffusers; the scale is not.
        difference = prompted - unprompted
        scaled = (scale * difference.astype(jnp.float32)).astype(velocity.dtype)
        return unprompted + scaled


@dataclass(frozen=True)
class Unguided(Guidance):
    """The prompt alone."""

    @property
    def copies(self) -> int:
        return 1

    def model_batch(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "B_guided F Y X C"]:
        return latents

    def combine(
        self, velocity: Float[Array, "B_guided F Y X C"], scale: Float[Array, ""]
    ) -> Float[Array, "B F Y X C"]:
        return velocity


class Action(Enum):
    """Computation of a step; a step cache provides the rest.

    An estimate computes the prompt, and estimates the prediction of the negative prompt.
    """

    COMPUTE = "C"
    SKIP = "."
    ESTIMATE = "c"


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One step of a run: its expert, the prompts that it computes, the scale, and the cache.

    `guidance` states the rows of the transformer's batch; a skipped step runs no block on them.
    """

    index: int
    timestep: float
    high_noise: bool
    guidance: Guidance
    guidance_scale: float
    action: Action = Action.COMPUTE

    @property
    def computed_rows(self) -> int:
        """Rows per video that pass through the blocks."""
        return 0 if self.action is Action.SKIP else self.guidance.copies


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All steps of a run."""

    steps: tuple[PlannedStep, ...]

    @property
    def high_noise_steps(self) -> int:
        """Number of steps of the high-noise expert, which come first."""
        return sum(step.high_noise for step in self.steps)

    @property
    def actions(self) -> str:
        """One sign per step: C computed, c prompt computed, dot skipped."""
        return "".join(step.action.value for step in self.steps)

    @property
    def programs(self) -> tuple[tuple[Guidance, Action], ...]:
        """The kinds of step programs that the run needs, in order of their first use."""
        return tuple(dict.fromkeys((step.guidance, step.action) for step in self.steps))

    def __iter__(self) -> Iterator[PlannedStep]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def guidance(self) -> Guidance:
        """Classifier-free guidance if any step needs it; otherwise the prompt alone."""
        return max(self.guidances, key=lambda guidance: guidance.copies)

    @property
    def guidances(self) -> tuple[Guidance, ...]:
        """The kinds of guidance that steps have, in order of their first use."""
        return tuple(dict.fromkeys(step.guidance for step in self.steps))

    def guidances_of(self, *, high_noise: bool) -> tuple[Guidance, ...]:
        """The kinds of guidance that the steps of one expert have."""
        steps = [step for step in self.steps if step.high_noise == high_noise]
        return tuple(dict.fromkeys(step.guidance for step in steps))

    def require_even(self, cache: str, *, steps: int = 1, reason: str = "") -> None:
        """Raises if a step cache finds other guidance in some steps, or fewer steps than it needs.

        `cache` is the key that turns it on, `reason` says why fewer steps are too few.
        """
        problems = []
        if len(self.guidances) > 1:
            rule = "needs the same guidance at every step"
            remedy = (
                "Set both guidance scales above 1 or both to 1, and leave guidance_end_step out"
            )
            problems.append(Problem(name=cache, value=True, rule=rule, remedy=remedy))
        if len(self) < steps:
            rule = f"{cache} skips steps of runs of at least {steps} steps; {reason}"
            remedy = f"Use more steps, or {cache}=false"
            problems.append(
                Problem(name="num_inference_steps", value=len(self), rule=rule, remedy=remedy)
            )
        Collector(problems).raise_if_any()

    def describe(self) -> str:
        """Returns one line, such as `steps: 2 high-noise guided, 2 low-noise prompt only`."""
        if {step.action for step in self.steps} != {Action.COMPUTE}:
            return self._describe_cached()
        both = len({step.high_noise for step in self.steps}) == 2
        parts = []
        for (high_noise, guidance), group in groupby(self.steps, key=_kind):
            expert = "high-noise " if high_noise else "low-noise "
            guided = "guided" if guidance.copies == 2 else "prompt only"
            parts.append(f"{len([*group])} {expert if both else ''}{guided}")
        return f"steps: {', '.join(parts)}"

    def _describe_cached(self) -> str:
        rows = sum(step.computed_rows for step in self.steps)
        most = len(self) * self.guidance.copies
        signs = {
            Action.COMPUTE: "C computed",
            Action.SKIP: ". skipped",
            Action.ESTIMATE: "c prompt computed, negative prompt estimated",
        }
        used = ", ".join(sign for action, sign in signs.items() if action.value in self.actions)
        return (
            f"steps: {self.actions} ({used}); {rows} of {most} forwards through the blocks, "
            f"{most / rows:.2f} times fewer"
        )


def _kind(step: PlannedStep) -> tuple[bool, Guidance]:
    return step.high_noise, step.guidance


def plan_run(
    sampler: Sampler,
    *,
    scales: GuidanceScales,
    boundary_ratio: float | None,
    boundary_step_index: int | None = None,
    guidance_end_step: int | None = None,
) -> RunPlan:
    """Returns the plan of a run.

    The high-noise expert runs for `boundary_step_index` steps or, by default, while the timestep is
    at least `boundary_ratio` of the training steps; always if both are None. Steps from
    `guidance_end_step` on, and those of an expert whose scale is 1, compute the prompt only.
    """
    check_step_numbers(
        steps=len(sampler.timesteps),
        boundary_step_index=boundary_step_index,
        guidance_end_step=guidance_end_step,
    )
    high_noise_steps = boundary_step_index
    if high_noise_steps is None:
        boundary = 0.0 if boundary_ratio is None else boundary_ratio * sampler.train_timesteps
        high_noise_steps = int(np.sum(sampler.timesteps >= boundary))  # timesteps fall
    steps = len(sampler.timesteps)
    end = steps if guidance_end_step is None else guidance_end_step

    def planned(index: int) -> PlannedStep:
        high_noise = index < high_noise_steps
        scale = scales.high_noise if high_noise else scales.low_noise
        guided = scales.active and index < end and scale != NO_GUIDANCE
        return PlannedStep(
            index=index,
            timestep=float(sampler.timesteps[index]),
            high_noise=high_noise,
            guidance=ClassifierFree() if guided else Unguided(),
            guidance_scale=scale if guided else NO_GUIDANCE,
        )

    return RunPlan(steps=tuple(planned(index) for index in range(steps)))


def check_step_numbers(
    *, steps: int, boundary_step_index: int | None, guidance_end_step: int | None
) -> None:
    """Raises every step number that the run does not have."""
    limits = {
        "boundary_step_index": (boundary_step_index, 0),
        "guidance_end_step": (guidance_end_step, 1),
    }
    Collector(
        [
            Problem(
                name=name,
                value=value,
                rule=f"must be from {least} to the {steps} steps of the run",
                remedy="Set guidance scales to 1 to turn guidance off"
                if name == "guidance_end_step"
                else "It is the number of steps of the high-noise expert",
            )
            for name, (value, least) in limits.items()
            if value is not None and not least <= value <= steps
        ]
    ).raise_if_any()
