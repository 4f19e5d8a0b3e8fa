"""Flow matching: how noisy, how weighted, and how far off the predicted velocity is.

    noise level s in (0, 1):   x_s = (1 - s) data + s noise,   velocity = noise - data

A sampler visits noise levels u -> shift u / (1 + (shift - 1) u), so training draws u evenly and
shifts it the same way. The two experts of WAN 2.2 meet at a boundary of the *shifted* level.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

TRAIN_TIMESTEPS = 1000
BUCKETS = 8  # equal parts of the noise levels, whose losses are reported apart


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """Which noise levels a network is trained on: shifted ones, from `low` up to `high`."""

    shift: float = 3.0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift}: must be above 0")
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"levels {self.low} to {self.high}: must lie in 0..1 and rise")

    def of_expert(self, expert: str, boundary: float | None) -> "NoiseLevels":
        """The levels of `transformer` (high noise) or `transformer_2` (low noise)."""
        if boundary is None:
            return self
        if expert == "transformer":
            return NoiseLevels(shift=self.shift, low=boundary, high=1.0)
        return NoiseLevels(shift=self.shift, low=0.0, high=boundary)

    @property
    def share(self) -> float:
        """The share of an even draw that falls on these levels."""
        return self._even(self.high) - self._even(self.low)

    def _even(self, level: float) -> float:
        """The level before the shift."""
        return level / (self.shift - (self.shift - 1) * level)

    def draw(self, key: PRNGKeyArray, count: int) -> Float[Array, " B"]:
        """`count` levels: one from each of `count` equal parts of the range, in random order."""
        parts, order = jax.random.split(key)
        places = (jnp.arange(count) + jax.random.uniform(parts, (count,))) / count
        start, end = self._even(self.low), self._even(self.high)
        even = start + (end - start) * jax.random.permutation(order, places)
        shifted = self.shift * even / (1 + (self.shift - 1) * even)
        # Rounding must not carry a level over the boundary to the other expert.
        highest = np.nextafter(np.float32(self.high), np.float32(0))
        return jnp.clip(shifted, np.float32(self.low), highest)


def timestep_of(level_B: Float[Array, " B"]) -> Float[Array, " B"]:
    """The timestep that samplers give a network for a noise level: 1000 s, cut to a whole one."""
    return jnp.floor(level_B * TRAIN_TIMESTEPS)


class LossWeighting(Protocol):
    """Weighs the loss of a sample by its own noise level alone."""

    def __call__(self, level_B: Float[Array, " B"]) -> Float[Array, " B"]:
        """The weight of every sample."""


@dataclass(frozen=True, kw_only=True)
class EvenWeighting:
    """Every level counts the same."""

    def __call__(self, level_B: Float[Array, " B"]) -> Float[Array, " B"]:
        return jnp.ones_like(level_B)


@dataclass(frozen=True, kw_only=True)
class BellWeighting:
    """Middle levels count most: a bell around 1/2, from 0 at both ends, with mean 1.

    The mean is taken over the 1000 shifted levels of the schedule, once: a sample weighs the same
    whatever else is in its batch.
    """

    shift: float = 3.0

    def __call__(self, level_B: Float[Array, " B"]) -> Float[Array, " B"]:
        even = np.linspace(1, 0, TRAIN_TIMESTEPS, endpoint=False)
        schedule = self.shift * even / (1 + (self.shift - 1) * even)
        lowest = np.exp(-0.5)
        mean = np.mean(np.exp(-2 * (schedule - 0.5) ** 2) - lowest)
        return (jnp.exp(-2 * (level_B - 0.5) ** 2) - lowest) / mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NoisySample:
    """Noisy latents, what the network should say of them, and how noisy they are."""

    latents: Float[Array, "B F Y X C"]
    velocity: Float[Array, "B F Y X C"]
    level: Float[Array, " B"]


def add_noise(
    data: Float[Array, "B F Y X C"], level_B: Float[Array, " B"], key: PRNGKeyArray
) -> NoisySample:
    """The data with noise of the given levels, and the velocity from data to noise."""
    noise = jax.random.normal(key, data.shape, jnp.float32)
    share = level_B[:, None, None, None, None]
    return NoisySample(
        latents=(1 - share) * data + share * noise, velocity=noise - data, level=level_B
    )


def sample_losses(predicted: Float[Array, "B F Y X C"], sample: NoisySample) -> Float[Array, " B"]:
    """The mean squared error of every sample, in float32, not yet weighted."""
    error = predicted.astype(jnp.float32) - sample.velocity
    return jnp.mean(jnp.square(error), axis=(1, 2, 3, 4))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BucketLosses:
    """Sums of unweighted losses by noise level, and how many samples each sum has."""

    totals: Float[Array, " K"]
    counts: Float[Array, " K"]

    @classmethod
    def of(cls, losses_B: Float[Array, " B"], level_B: Float[Array, " B"]) -> "BucketLosses":
        """The losses of a batch, each in the bucket of its level."""
        bucket_B = jnp.clip((level_B * BUCKETS).astype(jnp.int32), 0, BUCKETS - 1)
        return cls(
            totals=jax.ops.segment_sum(losses_B, bucket_B, BUCKETS),
            counts=jax.ops.segment_sum(jnp.ones_like(losses_B), bucket_B, BUCKETS),
        )

    def means(self) -> dict[str, float]:
        """The mean loss of every bucket that has samples, by its range of timesteps."""
        width = TRAIN_TIMESTEPS // BUCKETS
        totals, counts = np.asarray(self.totals), np.asarray(self.counts)
        return {
            f"{width * bucket}-{width * (bucket + 1)}": float(total / count)
            for bucket, (total, count) in enumerate(zip(totals, counts, strict=True))
            if count
        }
