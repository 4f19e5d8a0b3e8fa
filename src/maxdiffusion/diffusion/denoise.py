"""The denoising loop: one compiled step that serves every step, every scale and both experts.

noise -> [ batch of prompts and negatives -> transformer -> guidance -> sampler ] x steps -> latents
                      ^ weights, text, timestep, scale and sampler row are arguments
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention import BlockAttention
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan import TextKeysValues, WanTransformer
from maxdiffusion.pipelines.guidance import Guidance
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.problems import RunFailed
from maxdiffusion.runtime.timing import StepTime
from maxdiffusion.schedulers import Sampler, step_row


class StepInputs(NamedTuple):
    """What changes from step to step; traced, so that no value of it compiles anything anew."""

    timestep: Float[Array, ""]
    guidance_scale: Float[Array, ""]
    sampler_row: Any


@dataclass(frozen=True, kw_only=True)
class StepFunction:
    """The step as a function of arrays alone; everything static is a field."""

    graph: nnx.GraphDef[WanTransformer]
    attention: BlockAttention
    layout: ActivationLayout
    guidance: Guidance
    sampler: Sampler
    dtype: jnp.dtype

    def __call__(
        self, weights: nnx.State, text: TextKeysValues, state: Any, step: StepInputs
    ) -> tuple[Any, Bool[Array, ""]]:
        """The sampler's next state, and whether its latents are finite."""
        transformer = nnx.merge(self.graph, weights)
        batch = self.guidance.model_batch(state.sample.astype(self.dtype))
        timesteps = jnp.full((batch.shape[0],), step.timestep, jnp.float32)
        velocity = transformer(batch, timesteps, text, attention=self.attention, layout=self.layout)
        with jax.named_scope("guidance"):
            guided = self.guidance.combine(velocity, step.guidance_scale)
        with jax.named_scope("sampler"):
            advanced = self.sampler.advance(state, guided, step.sampler_row)
            return advanced, jnp.isfinite(advanced.sample).all()


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One transformer: its name, its weights, its view of the text and its guidance scale."""

    name: str
    weights: nnx.State
    text: TextKeysValues
    guidance_scale: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The high-noise expert above the boundary and the low-noise one below; or one for all."""

    high_noise: Expert
    low_noise: Expert
    boundary: float

    def at(self, timestep: float) -> Expert:
        """The expert for a timestep; the boundary itself belongs to high noise."""
        return self.high_noise if timestep >= self.boundary else self.low_noise


class NotFiniteError(RunFailed):
    """The latents hold NaN or infinity."""

    def __init__(self, *, step: int, steps: int, timestep: float, expert: str):
        super().__init__(
            f"latents are NaN or infinite after step {step + 1} of {steps} "
            f"(timestep {timestep:g}, {expert}). Check the checkpoint's weights, or run with "
            "weights_dtype=float32 activations_dtype=float32 to tell overflow from bad weights."
        )


def step_inputs(sampler: Sampler, step: int, guidance_scale: float) -> StepInputs:
    """The inputs of one step."""
    return StepInputs(
        timestep=jnp.float32(sampler.timesteps[step]),
        guidance_scale=jnp.float32(guidance_scale),
        sampler_row=step_row(sampler.coefficients, step),
    )


def denoise(
    step: Callable[..., tuple[Any, Bool[Array, ""]]],
    state: Any,
    *,
    sampler: Sampler,
    experts: Experts,
) -> Iterator[tuple[Any, StepTime]]:
    """Yields the state after each step, and its time; stops at the first that is not finite.

    The state lives until the next step is asked for: each step reuses the memory of the one before.
    """
    timesteps: Sequence[float] = [float(t) for t in sampler.timesteps]
    for index, timestep in enumerate(timesteps):
        expert = experts.at(timestep)
        MARKS.reach(f"denoise step {index + 1}")
        started = time.perf_counter()
        inputs = step_inputs(sampler, index, expert.guidance_scale)
        with jax.profiler.StepTraceAnnotation("denoise", step_num=index):
            state, finite = step(expert.weights, expert.text, state, inputs)
            is_finite = bool(jax.device_get(finite))  # waits for the step
        if not is_finite:
            raise NotFiniteError(
                step=index, steps=len(timesteps), timestep=timestep, expert=expert.name
            )
        seconds = time.perf_counter() - started
        yield (
            state,
            StepTime(index=index, timestep=timestep, expert=expert.name, seconds=seconds),
        )
