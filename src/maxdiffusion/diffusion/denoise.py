"""Denoising loop: one compiled step serves every step, every guidance scale and both experts.

Steps that compute the prompt only, in a run that also has guided ones, have a program of their own,
and so have steps that reuse a `StepCache`.

noise -> [ batch of prompts and negatives -> transformer -> guidance -> sampler ] x steps -> latents
                      ^ weights, text, timestep, scale and sampler row are arguments
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from maxdiffusion.diffusion.guidance import Action, Guidance, PlannedStep, RunPlan
from maxdiffusion.errors import Collector, Problem, RunFailed
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan import Conditioning, TextKeysValues, WanTransformer
from maxdiffusion.models.wan.transformer import AroundBlocks, computed
from maxdiffusion.runtime.progress import PROGRESS
from maxdiffusion.runtime.timing import StepTime

logger = logging.getLogger(__name__)

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
    cache_row: Any = ()


class LoopState(NamedTuple):
    """State that the loop carries from step to step: the sampler's, and that of a step cache."""

    sampler: Any
    cache: Any = ()

    @property
    def sample(self) -> Float[Array, "B F Y X C"]:
        """The latents so far."""
        sample: Float[Array, "B F Y X C"] = self.sampler.sample
        return sample


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The transformer on the inputs of one step, in the parts that a step cache may skip."""

    transformer: WanTransformer
    text: TextKeysValues
    sample: Float[Array, "B F Y X C"]
    step: StepInputs
    conditioning: Conditioning
    static: "StepFunction"

    def velocity(self, around_blocks: AroundBlocks = computed) -> Float[Array, "B_guided F Y X O"]:
        """Returns the velocity of every row; `around_blocks` may replace the blocks."""
        static, rows, conditioning = (
            self.static,
            self.static.guidance.model_batch,
            self.conditioning,
        )
        batch = rows(conditioning.model_input(self.sample).astype(static.dtype))
        return self.transformer(
            batch,
            jnp.full((batch.shape[0],), self.step.timestep, jnp.float32),
            self.text,
            attention=static.attention,
            layout=static.layout,
            known_frames=conditioning.known_frames,
            control=conditioning.control_for(rows, static.dtype),
            pose=conditioning.pose_for(rows, static.dtype),
            around_blocks=around_blocks,
        )

    def velocity_and_residual(
        self,
    ) -> tuple[Float[Array, "B_guided F Y X O"], Float[Array, "B_guided S D"]]:
        """Returns the velocity, and what all blocks together added to the tokens."""
        kept: list[Array] = []

        def keep_residual(tokens: Array, compute: Callable[[], Array]) -> Array:
            through = compute()
            kept.append(through - tokens)
            return through

        return self.velocity(keep_residual), kept[0]

    def velocity_from(
        self, residual: Float[Array, "B_guided S D"]
    ) -> Float[Array, "B_guided F Y X O"]:
        """Returns the velocity with this residual in place of the blocks."""
        return self.velocity(lambda tokens, compute: tokens + residual)

    def guided(self, velocity: Float[Array, "B_guided F Y X O"]) -> Float[Array, "B F Y X O"]:
        """Returns the guided velocity of each video.

        On TPUs, rows of a batch that is sharded over the data axis are gathered first. Else XLA
        leaves a video on the device of one of them, and sums three float32 latents after the
        sampler.
        """
        layout = self.static.layout
        with jax.named_scope("guidance"):
            rows = layout.constrain(velocity) if layout.on_tpus else velocity
            return self.static.guidance.combine(rows, self.step.guidance_scale)


Kept = Any
"""An array in the state of a step cache, or its shape."""


@dataclass(frozen=True, kw_only=True)
class CacheShapes:
    """Arrays that a step cache may keep, as shapes with shardings; `number` is a float32."""

    tokens: jax.ShapeDtypeStruct
    velocity: jax.ShapeDtypeStruct
    sample: jax.ShapeDtypeStruct
    number: jax.ShapeDtypeStruct


class StepCache(ABC):
    """Reuses parts of earlier steps, so that a step computes less. All caches are lossy.

    A cache is a value. It changes the plan of a run on the host, and predicts the velocity of a
    step inside its program, where `action` is static. Its state is zeros before the first step.
    """

    @property
    def program_key(self) -> Hashable:
        """Fields that the programs of a cache depend on; all of them, unless a cache says less."""
        return self

    def planned_for(self, plan: RunPlan, sampler: Sampler) -> RunPlan:
        """Returns the plan with the action of every step; raises if the run does not suit it."""
        rules = {
            "this sampler draws new noise at every step, and kept predictions belong to the noise "
            "before": sampler.draws_noise,
            "step caches need a whole run, and this one starts in the middle": sampler.first_step,
        }
        name, value = "step cache", type(self).__name__
        Collector(
            [Problem(name=name, value=value, rule=rule) for rule, broken in rules.items() if broken]
        ).raise_if_any()
        return self.planned(plan)

    @abstractmethod
    def planned(self, plan: RunPlan) -> RunPlan:
        """Returns the plan with the action of every step; raises if its steps do not suit it."""

    @abstractmethod
    def rows(self, plan: RunPlan) -> Any:
        """Returns a pytree of numpy arrays with one row per step, for `StepInputs.cache_row`."""

    @abstractmethod
    def state(self, shapes: CacheShapes) -> Any:
        """Returns the shapes of the state."""

    @abstractmethod
    def predict(
        self, forward: Forward, state: Any, action: Action
    ) -> tuple[Float[Array, "B F Y X C"], Any]:
        """Returns the guided velocity of a step and the next state."""

    def report(self, state: Any) -> str:
        """Returns a line on a finished run, or an empty text if the plan has said everything."""
        del state
        return ""


@dataclass(frozen=True, kw_only=True)
class StepFunction:
    """One denoising step as a function of arrays; everything static is a field."""

    graph: nnx.GraphDef[WanTransformer]
    attention: BlockAttention
    layout: ActivationLayout
    guidance: Guidance
    sampler: Sampler
    dtype: jnp.dtype
    cache: StepCache | None = None
    action: Action = Action.COMPUTE

    def __call__(
        self,
        weights: Weights,
        text: TextKeysValues,
        state: LoopState,
        step: StepInputs,
        conditioning: Conditioning,
    ) -> tuple[LoopState, Bool[Array, ""]]:
        """Returns the next state, and whether its latents are finite."""
        forward = Forward(
            transformer=nnx.merge(self.graph, weights),
            text=text,
            sample=state.sample,
            step=step,
            conditioning=conditioning,
            static=self,
        )
        if self.cache is None:
            velocity, kept = forward.guided(forward.velocity()), state.cache
        else:
            velocity, kept = self.cache.predict(forward, state.cache, self.action)
        with jax.named_scope("sampler"):
            advanced = self.sampler.advance(state.sampler, velocity, step.sampler_row)
            # A sampler works on each latent by itself: known frames do not reach the others.
            advanced = advanced._replace(sample=conditioning.with_known(advanced.sample))
            finite = jnp.isfinite(advanced.sample).all()
            return LoopState(sampler=advanced, cache=kept), finite


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


def step_inputs(sampler: Sampler, step: PlannedStep, cache_rows: Any = ()) -> StepInputs:
    """Returns the inputs of one step; `cache_rows` are the rows of all steps."""
    return StepInputs(
        timestep=jnp.float32(sampler.timesteps[step.index]),
        guidance_scale=jnp.float32(step.guidance_scale),
        sampler_row=step_row(sampler.coefficients, step.index),
        cache_row=step_row(cache_rows, step.index),
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
    cache: StepCache | None = None,
) -> Iterator[tuple[Any, StepTime]]:
    """Yields the state after each step and the step's time; raises `NotFiniteError`.

    A state is valid until the next step: each step reuses the memory of the one before.
    """
    cache_rows = () if cache is None else cache.rows(plan)
    for planned in plan:
        index, expert = planned.index, experts.of(planned)
        PROGRESS.checkpoint(f"denoise step {index + 1}")
        started = time.perf_counter()
        inputs = step_inputs(sampler, planned, cache_rows)
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
    report = "" if cache is None else cache.report(state.cache)
    if report:
        logger.info(report)
