"""cuDNN's fused attention, which jax can call on NVIDIA GPUs."""

from typing import Literal

import jax
from jaxtyping import Array, Bool, Float

HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 128


def cudnn_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B S N H"]:
    """Attention by cuDNN, differentiable; "xla" is the same call for other devices."""
    mask = None if valid is None else valid[:, None, None, :]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, implementation=implementation
    )
