"""Norm and rotation of heads as plain array code."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxdiffusion.kernels.heads.columns import Columns


def heads_of(columns: Columns, head_dim: int) -> Float[Array, "B S N H"]:
    """The heads that the columns stand for."""
    values = columns.values
    if columns.gain is not None:
        values = rms_norm(values, columns.gain, eps=columns.eps)
    heads_BSNH = values.reshape(*values.shape[:2], -1, head_dim)
    if columns.cosines is None or columns.sines is None:
        return heads_BSNH
    return rotate(heads_BSNH, columns.cosines, columns.sines)


@jax.named_scope("norm")
def rms_norm(
    x: Float[Array, "... D"], gain_D: Float[Array, " D"], *, eps: float
) -> Float[Array, "... D"]:
    """x over its root mean square along its features, times a gain; float32, one rounding."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * gain_D.astype(jnp.float32)).astype(x.dtype)


@jax.named_scope("rope")
def rotate(
    heads_BSNH: Float[Array, "B S N H"],
    cosines_SK: Float[Array, "S K"],
    sines_SK: Float[Array, "S K"],
) -> Float[Array, "B S N H"]:
    """`heads_BSNH` turned by position in float32; feature i is paired with feature i + H/2."""
    cosines, sines = cosines_SK[:, None, :], sines_SK[:, None, :]
    first, second = jnp.split(heads_BSNH.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, first * sines + second * cosines]
    return jnp.concatenate(turned, axis=-1).astype(heads_BSNH.dtype)
