"""The noise that a video starts from: a function of its seed and size alone, on every mesh."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.pipelines.shapes import LatentShape


@partial(jax.jit, static_argnames="shape")
def noise_of(seed: Array | np.uint32, shape: LatentShape) -> Float[Array, "F Y X C"]:
    """Standard normal latents of one video.

    Drawn channels first, as the public implementation does for one video, so that the same seed
    starts from the same noise there and here.
    """
    size = (shape.channels, shape.frames, shape.rows, shape.columns)
    return jnp.moveaxis(jax.random.normal(jax.random.key(seed), size, jnp.float32), 0, -1)


def initial_noise(seeds: Sequence[int], shape: LatentShape) -> Float[np.ndarray, "B F Y X C"]:
    """Standard normal latents, video i from `seeds[i]`, on the host.

    Each video is drawn by itself, so that its bits do not depend on the others.
    """
    return np.stack([np.asarray(noise_of(np.uint32(seed), shape)) for seed in seeds])
