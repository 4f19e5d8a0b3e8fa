"""The noise that a video starts from: a function of its seed and size alone, on every mesh."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.pipelines.shapes import LatentShape


def initial_noise(seeds: Sequence[int], shape: LatentShape) -> Float[Array, "B F Y X C"]:
    """Standard normal latents, video i from `seeds[i]`.

    Drawn channels first, as the public implementation does for one video, so that the same seed
    starts from the same noise there and here.
    """

    def one(seed: int) -> Float[Array, "F Y X C"]:
        size = (shape.channels, shape.frames, shape.rows, shape.columns)
        return jnp.moveaxis(jax.random.normal(jax.random.key(seed), size, jnp.float32), 0, -1)

    return jnp.stack([one(seed) for seed in seeds])
