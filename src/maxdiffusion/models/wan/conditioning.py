"""Conditioning: what a denoising step is given besides noise, time and text.

    channels    concatenated to the latents: mask and encoded image (14B image-to-video), ...
    known       latent frames without noise, in front; their tokens have time 0 (TI2V-5B)
    control     a control video for the control blocks (VACE)
    pose        poses of all frames but the first, added to their tokens (Animate)

All of it stays the same from step to step. A text-to-video model has none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ControlInput:
    """A control video in latent space, and how strongly each control layer heeds it."""

    # As a pytree it also holds descriptions of arrays in their place.
    __no_type_check__: ClassVar[bool] = True

    video: Float[Array, "B F Y X C"]
    scales: Float[Array, " L"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """The visual conditions of a batch of videos; a part that a model lacks is None."""

    # As a pytree it also holds descriptions of arrays, and arrays of the host.
    __no_type_check__: ClassVar[bool] = True

    channels: Float[Array, "B F Y X C"] | None = None
    known: Float[Array, "B F Y X C"] | None = None
    control: ControlInput | None = None
    pose: Float[Array, "B F Y X C"] | None = None

    @property
    def known_frames(self) -> int:
        """Number of latent frames without noise."""
        return 0 if self.known is None else self.known.shape[1]

    def with_known(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "B F Y X C"]:
        """Returns latents whose first frames are the known ones."""
        if self.known is None:
            return latents
        return jnp.concatenate([self.known, latents[:, self.known_frames :]], axis=1)

    def model_input(self, latents: Float[Array, "B F Y X C"]) -> Float[Array, "B F Y X I"]:
        """Returns what the transformer reads: known frames in place, channels appended."""
        latents = self.with_known(latents)
        if self.channels is None:
            return latents
        return jnp.concatenate([latents, self.channels], axis=-1)

    def control_for(
        self, batch: Callable[[Float[Array, "B F Y X C"]], Array], dtype: jnp.dtype
    ) -> ControlInput | None:
        """Returns the control video for the rows of the model's batch, in its dtype."""
        if self.control is None:
            return None
        return replace(self.control, video=batch(self.control.video.astype(dtype)))

    def pose_for(
        self, batch: Callable[[Float[Array, "B F Y X C"]], Array], dtype: jnp.dtype
    ) -> Float[Array, "B F Y X C"] | None:
        """Returns the poses for the rows of the model's batch, in its dtype."""
        return None if self.pose is None else batch(jnp.asarray(self.pose).astype(dtype))
