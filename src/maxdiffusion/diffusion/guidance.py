"""Guidance: the model's batch made from the latents, and one velocity from its answer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

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
