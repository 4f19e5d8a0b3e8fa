"""How a prediction is steered by the prompt: one batch of two, or not at all."""

from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Float


class Guidance(Protocol):
    """Makes the model's batch from the latents, and one velocity from the model's answer."""

    @property
    def copies(self) -> int:
        """How many rows of the model's batch belong to one video."""
        ...

    def model_batch(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "G F Y X C"]:
        """The batch that the model is run on."""
        ...

    def combine(
        self, velocity: Float[Array, "G F Y X C"], scale: Float[Array, ""]
    ) -> Float[Array, "B F Y X C"]:
        """The velocity to follow."""
        ...


@dataclass(frozen=True)
class ClassifierFree:
    """Prompt and negative prompt side by side: rows [prompts; negative prompts]."""

    copies: int = 2

    def model_batch(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "G F Y X C"]:
        return jnp.concatenate([latents, latents])

    def combine(
        self, velocity: Float[Array, "G F Y X C"], scale: Float[Array, ""]
    ) -> Float[Array, "B F Y X C"]:
        prompted, unprompted = jnp.split(velocity, 2)
        # Each operation is rounded to the model's dtype, as diffusers does; the scale is not.
        difference = prompted - unprompted
        scaled = (scale * difference.astype(jnp.float32)).astype(velocity.dtype)
        return unprompted + scaled


@dataclass(frozen=True)
class Unguided:
    """The prompt alone."""

    copies: int = 1

    def model_batch(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "G F Y X C"]:
        return latents

    def combine(
        self, velocity: Float[Array, "G F Y X C"], scale: Float[Array, ""]
    ) -> Float[Array, "B F Y X C"]:
        return velocity
