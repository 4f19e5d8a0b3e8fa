"""Rotary positions of video tokens: tables made on the host, and the rotation itself."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

THETA = 10_000.0


def axis_widths(head_dim: int) -> tuple[int, int, int]:
    """How many features of a head turn with the frame, the row and the column."""
    space = 2 * (head_dim // 6)
    return head_dim - 2 * space, space, space


def rotation_tables(
    grid_FYX: tuple[int, int, int], head_dim: int
) -> tuple[Float[np.ndarray, "S K"], Float[np.ndarray, "S K"]]:
    """Cosines and sines for every token and pair of features; pairs go by frame, row, column.

    Angles are float64 until the last step, so that a table does not depend on its length.
    """
    angles = []
    for axis, (size, width) in enumerate(zip(grid_FYX, axis_widths(head_dim), strict=True)):
        frequencies = THETA ** -(np.arange(0, width, 2, dtype=np.float64) / width)
        shape = [1, 1, 1, frequencies.size]
        shape[axis] = size
        along = np.outer(np.arange(size, dtype=np.float64), frequencies).reshape(shape)
        angles.append(np.broadcast_to(along, (*grid_FYX, frequencies.size)))
    angles_SK = np.concatenate(angles, axis=-1).reshape(-1, head_dim // 2)
    return np.cos(angles_SK).astype(np.float32), np.sin(angles_SK).astype(np.float32)


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
