"""Loss of a WAN expert: flow matching at a drawn noise level, and what its backward pass keeps.

    noise level s in (0, 1):   x_s = (1 - s) data + s noise,   velocity = noise - data

A sampler visits noise levels u -> shift u / (1 + (shift - 1) u), so training draws u evenly and
shifts it the same way. The two experts of WAN 2.2 meet at a boundary of the *shifted* level.
Rematerialisation decides which activations the backward pass keeps, offloads or computes again.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.attention.backends.base import ATTENTION_LOG_SUM, ATTENTION_OUT
from maxdiffusion.attention.plan import K_NAME, OUT_NAME, Q_NAME, V_NAME
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.abstract import AbstractModel, Values, register_tree
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.models.wan.block import (
    CROSS_CHANGE,
    MLP_CHANGE,
    SELF_CHANGE,
    TextKeysValues,
)
from maxdiffusion.models.wan.transformer import BlockStep
from maxdiffusion.training.image_conditioning import (
    ImageConditioning,
    ImageInput,
    NoImage,
    NoisyClips,
)
from maxdiffusion.training.memory.placement import with_scattered_gradients
from maxdiffusion.training.text import Captions, EncodedBefore, TextReader

HIDDEN_STATES = "hidden_states"  # the input of a block
RESIDUALS = (ATTENTION_OUT, ATTENTION_LOG_SUM)
NAMES = (
    *(HIDDEN_STATES, Q_NAME, K_NAME, V_NAME, OUT_NAME, *RESIDUALS),
    *(SELF_CHANGE, CROSS_CHANGE, MLP_CHANGE),
)
_DEVICE, _HOST = "device", "pinned_host"


class Remat(Enum):
    """Names the policies as the public config does; ATTENTION is ours."""

    NONE = "NONE"
    FULL = "FULL"
    MATMUL_WITHOUT_BATCH = "MATMUL_WITHOUT_BATCH"
    OFFLOAD_MATMUL_WITHOUT_BATCH = "OFFLOAD_MATMUL_WITHOUT_BATCH"
    CUSTOM = "CUSTOM"
    HIDDEN_STATE_WITH_OFFLOAD = "HIDDEN_STATE_WITH_OFFLOAD"
    ATTENTION = "ATTENTION"


@dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """Says which activations of a block are kept for its backward pass.

    `saved` and `offloaded` name what CUSTOM keeps on the device and in host memory. ATTENTION keeps
    the output and the log-sums of attention kernels and nothing else.
    """

    kind: Remat = Remat.NONE
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            Problem(
                name=key,
                value=name,
                rule=f"must be one of {', '.join(NAMES)}",
            )
            for key, names in (
                ("names_which_can_be_saved", self.saved),
                ("names_which_can_be_offloaded", self.offloaded),
            )
            for name in names
            if name not in NAMES
        ]
        if problems:
            raise ProblemsFound(problems)

    def describe(self, attention: AttentionPlan) -> str:
        """Returns the policy, and a note where the attention has nothing that it could keep."""
        named = {
            Remat.ATTENTION: RESIDUALS,
            Remat.CUSTOM: (*self.saved, *self.offloaded),
        }.get(self.kind, ())
        asked = [name for name in RESIDUALS if name in named]
        if not asked or attention.backend.names_residuals:
            return f"remat {self.kind.value}"
        return (
            f"remat {self.kind.value} (no {' or '.join(asked)} in {attention.backend.title}: "
            "the backward pass computes this attention again)"
        )

    def wrap_block(self, step: BlockStep) -> BlockStep:
        """Returns the step of one layer, which keeps for its backward pass what the policy says."""

        def named(tokens: Float[Array, "B S D"], layer: Any) -> tuple[Float[Array, "B S D"], Any]:
            return step(checkpoint_name(tokens, HIDDEN_STATES), layer)

        if self.kind is Remat.NONE:
            return step
        # XLA cannot merge the two passes of a scan body, so no barrier against it is needed.
        return jax.checkpoint(named, policy=self._policy(), prevent_cse=False)

    def _policy(self) -> Callable[..., Any] | None:
        policies = jax.checkpoint_policies
        if self.kind is Remat.MATMUL_WITHOUT_BATCH:
            return policies.dots_with_no_batch_dims_saveable
        if self.kind is Remat.OFFLOAD_MATMUL_WITHOUT_BATCH:
            return policies.offload_dot_with_no_batch_dims(_DEVICE, _HOST)
        if self.kind is Remat.HIDDEN_STATE_WITH_OFFLOAD:
            return self._by_names((), (HIDDEN_STATES,))
        if self.kind is Remat.ATTENTION:
            return self._by_names(RESIDUALS, ())
        if self.kind is Remat.CUSTOM:
            return self._by_names(self.saved, self.offloaded)
        return None

    def _by_names(self, saved: tuple[str, ...], offloaded: tuple[str, ...]) -> Callable[..., Any]:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(saved),
            names_which_can_be_offloaded=list(offloaded),
            offload_src=_DEVICE,
            offload_dst=_HOST,
        )


TRAIN_TIMESTEPS = 1000
BUCKETS = 8  # ranges of noise levels whose losses are reported separately
IMAGE_STREAM = 3  # of a step's PRNG key; its first three are levels, noise and captions


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """The shifted noise levels that a network is trained on, from `low` up to `high`."""

    shift: float = 3.0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift}: must be above 0")
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"levels {self.low} to {self.high}: must be in 0..1 and increasing")

    def of_expert(self, expert: str, boundary: float | None) -> "NoiseLevels":
        """Returns the levels of `transformer` (high noise) or `transformer_2` (low noise)."""
        if boundary is None:
            return self
        if expert == "transformer":
            return NoiseLevels(shift=self.shift, low=boundary, high=1.0)
        return NoiseLevels(shift=self.shift, low=0.0, high=boundary)

    @property
    def share(self) -> float:
        """The share of uniform draws that fall on these levels."""
        return self._even(self.high) - self._even(self.low)

    def _even(self, level: float) -> float:
        """Returns the level before the shift."""
        return level / (self.shift - (self.shift - 1) * level)

    def draw(self, key: PRNGKeyArray, count: int) -> Float[Array, " B"]:
        """Returns `count` levels: one from each equal part of the range, in random order."""
        parts, order = jax.random.split(key)
        drawn = (jnp.arange(count, dtype=jnp.float32) + jax.random.uniform(parts, (count,))) / count
        start, end = self._even(self.low), self._even(self.high)
        even = start + (end - start) * jax.random.permutation(order, drawn)
        shifted = self.shift * even / (1 + (self.shift - 1) * even)
        # Rounding must not carry a level over the boundary to the other expert.
        highest = np.nextafter(np.float32(self.high), np.float32(0))
        return jnp.clip(shifted, np.float32(self.low), highest)


def timestep_of(level_B: Float[Array, " B"]) -> Float[Array, " B"]:
    """Returns the timestep that samplers pass for a noise level: floor(1000 s)."""
    return jnp.floor(level_B * TRAIN_TIMESTEPS)


@runtime_checkable
class LossWeighting(Protocol):
    """Weights the loss of a sample by its own noise level alone."""

    def __call__(self, level_B: Float[Array, " B"]) -> Float[Array, " B"]:
        """Returns the weight of every sample."""


@dataclass(frozen=True, kw_only=True)
class EvenWeighting:
    """Weights every level by 1."""

    def __call__(self, level_B: Float[Array, " B"]) -> Float[Array, " B"]:
        return jnp.ones_like(level_B)


@dataclass(frozen=True, kw_only=True)
class BellWeighting:
    """Weights middle levels most: a bell around 1/2, 0 at both ends, with mean 1.

    The mean is over the 1000 shifted levels of the schedule, so a weight does not depend on the
    rest of the batch.
    """

    shift: float = 3.0

    def __call__(self, level_B: Float[Array, " B"]) -> Float[Array, " B"]:
        even = np.linspace(1, 0, TRAIN_TIMESTEPS, endpoint=False)
        schedule = self.shift * even / (1 + (self.shift - 1) * even)
        lowest = np.exp(-0.5)
        mean = np.mean(np.exp(-2 * (schedule - 0.5) ** 2) - lowest)
        return (jnp.exp(-2 * (level_B - 0.5) ** 2) - lowest) / mean


@register_tree
@dataclass(frozen=True, kw_only=True)
class NoisySample:
    """Noisy latents, their velocity (the target) and their noise levels."""

    latents: Float[Array, "B F Y X C"]
    velocity: Float[Array, "B F Y X C"]
    level: Float[Array, " B"]


def add_noise(
    data: Float[Array, "B F Y X C"], level_B: Float[Array, " B"], key: PRNGKeyArray
) -> NoisySample:
    """Returns the data with noise of the given levels, and the velocity from data to noise."""
    noise = jax.random.normal(key, data.shape, jnp.float32)
    share = level_B[:, None, None, None, None]
    return NoisySample(
        latents=(1 - share) * data + share * noise, velocity=noise - data, level=level_B
    )


def sample_losses(
    predicted: Float[Array, "B F Y X C"], sample: NoisySample, counted: Float[Array, "B F"]
) -> Float[Array, " B"]:
    """Returns the mean squared error of every sample over its `counted` frames (1), in float32.

    Not yet weighted.
    """
    error = predicted.astype(jnp.float32) - sample.velocity
    by_frame = jnp.mean(jnp.square(error), axis=(2, 3, 4))
    return jnp.sum(by_frame * counted, axis=1) / jnp.sum(counted, axis=1)


@register_tree
@dataclass(frozen=True, kw_only=True)
class BucketLosses:
    """Sums of unweighted losses by noise level, and the number of samples in each."""

    totals: Float[Array, " Q"]
    counts: Float[Array, " Q"]

    @classmethod
    def of(cls, losses_B: Float[Array, " B"], level_B: Float[Array, " B"]) -> "BucketLosses":
        """Returns the losses of a batch, each in the bucket of its level."""
        bucket_B = jnp.clip((level_B * BUCKETS).astype(jnp.int32), 0, BUCKETS - 1)
        return cls(
            totals=jax.ops.segment_sum(losses_B, bucket_B, BUCKETS),
            counts=jax.ops.segment_sum(jnp.ones_like(losses_B), bucket_B, BUCKETS),
        )

    def means(self) -> dict[str, float]:
        """Returns the mean loss of every bucket that has samples, by its range of timesteps."""
        width = TRAIN_TIMESTEPS // BUCKETS
        totals, counts = np.asarray(self.totals), np.asarray(self.counts)
        return {
            f"{width * bucket}-{width * (bucket + 1)}": float(total / count)
            for bucket, (total, count) in enumerate(zip(totals, counts, strict=True))
            if count
        }


HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"


class TrainedExperts(Enum):
    """Selects what a run trains: one network for all levels, both experts, or one of them."""

    SHARED = "shared"
    BOTH = "both"
    HIGH_NOISE = "high_noise"
    LOW_NOISE = "low_noise"


@dataclass(frozen=True, kw_only=True)
class ExpertSchedule:
    """The experts of a run; with both, each gets steps in proportion to its share of draws.

    `boundary` is the shifted noise level where they meet; None: a model with one transformer. An
    expert is trained for `turn` steps at a time.
    """

    levels: NoiseLevels
    boundary: float | None
    trained: TrainedExperts = TrainedExperts.BOTH
    turn: int = 1

    def __post_init__(self) -> None:
        if self.boundary is not None and not 0 < self.boundary < 1:
            raise ValueError(f"boundary={self.boundary}: must be between 0 and 1")
        if self.turn < 1:
            raise ValueError(f"turn={self.turn}: must be at least 1")
        if self.boundary is None and self.trained is not TrainedExperts.SHARED:
            raise ValueError(
                f"trained={self.trained.value!r}: a model without a boundary has one transformer; "
                "use 'shared'"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the trained transformers."""
        return {
            TrainedExperts.SHARED: (HIGH_NOISE,),
            TrainedExperts.BOTH: (HIGH_NOISE, LOW_NOISE),
            TrainedExperts.HIGH_NOISE: (HIGH_NOISE,),
            TrainedExperts.LOW_NOISE: (LOW_NOISE,),
        }[self.trained]

    def levels_of(self, name: str) -> NoiseLevels:
        """Returns the noise levels of a transformer."""
        if self.trained is TrainedExperts.SHARED:
            return self.levels
        return self.levels.of_expert(name, self.boundary)

    def at(self, step: int) -> str:
        """Returns the transformer that is trained after `step` finished steps."""
        if len(self.names) == 1:
            return self.names[0]
        share, turn = self.levels_of(HIGH_NOISE).share, step // self.turn
        high = math.floor((turn + 1) * share) > math.floor(turn * share)
        return HIGH_NOISE if high else LOW_NOISE


@register_tree
@dataclass(frozen=True, kw_only=True)
class ClipBatch:
    """Normalised latents of clips, and their captions: tokens or text embeddings.

    `image` is the encoded video of first frames and mid grey, `image_tokens` what CLIP makes of
    them, for models that need it.
    """

    latents: Float[Array | np.ndarray, "B F Y X C"]
    captions: Captions | EncodedBefore
    image: Float[Array | np.ndarray, "B F Y X C"] | None = None
    image_tokens: Float[Array | np.ndarray, "B I O"] | None = None


@dataclass(frozen=True, kw_only=True)
class WanLoss:
    """Weighted squared error of one expert's velocity over its noise levels."""

    expert: str
    transformer: AbstractModel[WanTransformer]
    text: TextReader
    attention: BlockAttention
    layout: ActivationLayout
    levels: NoiseLevels
    weighting: LossWeighting
    image: ImageConditioning = field(default_factory=NoImage)
    remat: RematPolicy = field(default_factory=RematPolicy)

    def __call__(
        self, values: Mapping[str, Values], batch: ClipBatch, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], BucketLosses]:
        level_key, noise_key, text_key = jax.random.split(key, 3)
        levels = self.levels.draw(level_key, batch.latents.shape[0])
        sample = add_noise(jnp.asarray(batch.latents, jnp.float32), levels, noise_key)
        image = self._image(sample, batch, key)
        model = self.transformer.merge(values[self.expert])
        rows = self.text(values, batch.captions, text_key)
        text = model.text_keys_values(
            rows.astype(model.dtype), _tokens(batch, model.dtype), layout=self.layout
        )
        predicted = self._velocity(model, sample, image, text)
        losses = sample_losses(predicted, sample, image.counted)
        return jnp.mean(losses * self.weighting(levels)), BucketLosses.of(losses, levels)

    def _image(self, sample: NoisySample, batch: ClipBatch, key: PRNGKeyArray) -> ImageInput:
        clips = NoisyClips(
            noisy=sample.latents,
            clean=jnp.asarray(batch.latents, jnp.float32),
            timestep=timestep_of(sample.level),
            image=None if batch.image is None else jnp.asarray(batch.image, jnp.float32),
        )
        return self.image(clips, jax.random.fold_in(key, IMAGE_STREAM))

    def _velocity(
        self, model: WanTransformer, sample: NoisySample, image: ImageInput, text: TextKeysValues
    ) -> Float[Array, "B F Y X C"]:
        return model(
            image.conditioning.model_input(sample.latents).astype(model.dtype),
            timestep_of(sample.level),
            text,
            attention=self.attention,
            layout=self.layout,
            known_frames=image.conditioning.known_frames,
            known_timestep_B=image.known_timestep,
            wrap_block=self._wrap_block,
        )

    def _wrap_block(self, step: BlockStep) -> BlockStep:
        mesh = self.layout.mesh
        return self.remat.wrap_block(step if mesh is None else with_scattered_gradients(step, mesh))


def _tokens(batch: ClipBatch, dtype: jnp.dtype) -> Float[Array, "B I O"] | None:
    """Returns the image tokens of a batch, in the dtype of the model."""
    return None if batch.image_tokens is None else jnp.asarray(batch.image_tokens).astype(dtype)
