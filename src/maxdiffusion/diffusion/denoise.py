"""Denoising loop: one compiled step serves every step, every guidance scale and both experts.

Steps that compute the prompt only, in a run that also has guided ones, have a program of their own.

noise -> [ batch of prompts and negatives -> transformer -> guidance -> sampler ] x steps -> latents
                      ^ weights, text, timestep, scale and sampler row are arguments
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention import BlockAttention
from maxdiffusion.diffusion import Sampler, step_row
from maxdiffusion.diffusion.guidance import Guidance, PlannedStep, RunPlan
from maxdiffusion.errors import RunFailed
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan import Conditioning, TextKeysValues, WanTransformer
from maxdiffusion.runtime.progress import PROGRESS
from maxdiffusion.runtime.timing import StepTime

Weights = nnx.State[Any, Any]
"""Parameters of a model."""


@partial(jax.jit, static_argnames="dims")
def draw_noise(seed: Array | np.uint32, dims: tuple[int, int, int, int]) -> Float[Array, "F Y X C"]:
    """Returns standard normal latents of one video, `dims` being frames, rows, columns, channels.

    A function of seed and size alone, the same on every mesh. They are drawn channels first, as the
    public implementation does for one video: the same seed starts from the same noise there.
    """
    frames, rows, columns, channels = dims
    size = (channels, frames, rows, columns)
    return jnp.moveaxis(jax.random.normal(jax.random.key(seed), size, jnp.float32), 0, -1)


def initial_noise(
    seeds: Sequence[int], dims: tuple[int, int, int, int]
) -> Float[np.ndarray, "B F Y X C"]:
    """Returns standard normal latents on the host, video i from `seeds[i]`.

    Each video is drawn by itself, so that its bits do not depend on the others.
    """
    return np.stack([np.asarray(draw_noise(np.uint32(seed), dims)) for seed in seeds])


class StepInputs(NamedTuple):
    """Inputs that change from step to step; traced, so that no value compiles the step again."""

    timestep: Float[Array, ""]
    guidance_scale: Float[Array, ""]
    sampler_row: Any


@dataclass(frozen=True, kw_only=True)
class StepFunction:
    """One denoising step as a function of arrays; everything static is a field."""

    graph: nnx.GraphDef[WanTransformer]
    attention: BlockAttention
    layout: ActivationLayout
    guidance: Guidance
    sampler: Sampler
    dtype: jnp.dtype

    def __call__(
        self,
        weights: Weights,
        text: TextKeysValues,
        state: Any,
        step: StepInputs,
        conditioning: Conditioning,
    ) -> tuple[Any, Bool[Array, ""]]:
        """Returns the sampler's next state, and whether its latents are finite."""
        transformer = nnx.merge(self.graph, weights)
        rows = self.guidance.model_batch
        batch = rows(conditioning.model_input(state.sample).astype(self.dtype))
        timesteps = jnp.full((batch.shape[0],), step.timestep, jnp.float32)
        velocity = transformer(
            batch,
            timesteps,
            text,
            attention=self.attention,
            layout=self.layout,
            known_frames=conditioning.known_frames,
            control=conditioning.control_for(rows, self.dtype),
            pose=conditioning.pose_for(rows, self.dtype),
        )
        with jax.named_scope("guidance"):
            guided = self.guidance.combine(velocity, step.guidance_scale)
        with jax.named_scope("sampler"):
            advanced = self.sampler.advance(state, guided, step.sampler_row)
            # A sampler works on each latent by itself: known frames do not reach the others.
            advanced = advanced._replace(sample=conditioning.with_known(advanced.sample))
            return advanced, jnp.isfinite(advanced.sample).all()


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One transformer: its name, weights, and text keys and values for each kind of guidance."""

    name: str
    weights: Weights
    texts: Mapping[Guidance, TextKeysValues]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The high-noise expert and the low-noise one, or one for both.

    Both see the same conditioning. `source` are the latents of videos that the first noise is mixed
    into; None to start from noise.
    """

    high_noise: Expert
    low_noise: Expert
    conditioning: Conditioning
    source: Float[np.ndarray, "B F Y X C"] | None = None

    def of(self, step: PlannedStep) -> Expert:
        """Returns the expert of a step."""
        return self.high_noise if step.high_noise else self.low_noise


class NotFiniteError(RunFailed):
    """The latents contain NaN or infinity."""

    def __init__(self, *, step: int, steps: int, timestep: float, expert: str):
        super().__init__(
            f"latents are NaN or infinite after step {step + 1} of {steps} "
            f"(timestep {timestep:g}, {expert}). Check the checkpoint's weights, or run with "
            "weights_dtype=float32 activations_dtype=float32 to tell overflow from bad weights."
        )


def step_inputs(sampler: Sampler, step: int, guidance_scale: float) -> StepInputs:
    """Returns the inputs of one step."""
    return StepInputs(
        timestep=jnp.float32(sampler.timesteps[step]),
        guidance_scale=jnp.float32(guidance_scale),
        sampler_row=step_row(sampler.coefficients, step),
    )


StepProgram = Callable[..., tuple[Any, Bool[Array, ""]]]
"""A compiled `StepFunction`."""


def denoise(
    program_of: Callable[[PlannedStep], StepProgram],
    state: Any,
    *,
    sampler: Sampler,
    plan: RunPlan,
    experts: Experts,
) -> Iterator[tuple[Any, StepTime]]:
    """Yields the state after each step and the step's time; raises `NotFiniteError`.

    A state is valid until the next step: each step reuses the memory of the one before.
    """
    for planned in plan:
        index, expert = planned.index, experts.of(planned)
        PROGRESS.checkpoint(f"denoise step {index + 1}")
        started = time.perf_counter()
        inputs = step_inputs(sampler, index, planned.guidance_scale)
        step, text = program_of(planned), expert.texts[planned.guidance]
        with jax.profiler.StepTraceAnnotation("denoise", step_num=index):
            state, finite = step(expert.weights, text, state, inputs, experts.conditioning)
            is_finite = bool(jax.device_get(finite))  # waits for the step
        if not is_finite:
            raise NotFiniteError(
                step=index, steps=len(plan), timestep=planned.timestep, expert=expert.name
            )
        seconds = time.perf_counter() - started
        yield (
            state,
            StepTime(index=index, timestep=planned.timestep, expert=expert.name, seconds=seconds),
        )
