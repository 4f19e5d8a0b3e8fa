"""Rotary positions of video tokens: tables of cosines and sines, made on the host."""

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
) -> tuple[Float[Array, "S K"], Float[Array, "S K"]]:
    """Cosines and sines for every token and pair of features; pairs go by frame, row, column.

    A program holds one small table per axis and spreads it over the tokens itself: the whole table
    would be 19 MB for the 75,600 tokens of a 720p video. Angles are float64 until the last step, so
    that a table does not depend on its length.
    """
    cosines: list[Array] = []
    sines: list[Array] = []
    for axis, (size, width) in enumerate(zip(grid_FYX, axis_widths(head_dim), strict=True)):
        frequencies = THETA ** -(np.arange(0, width, 2, dtype=np.float64) / width)
        angles = np.outer(np.arange(size, dtype=np.float64), frequencies)
        shape = [1, 1, 1, frequencies.size]
        shape[axis] = size
        for tables, function in ((cosines, np.cos), (sines, np.sin)):
            table = jnp.asarray(function(angles).astype(np.float32).reshape(shape))
            tables.append(jnp.broadcast_to(table, (*grid_FYX, frequencies.size)))
    return _by_token(cosines), _by_token(sines)


def _by_token(tables: list[Float[Array, "F Y X K"]]) -> Float[Array, "S K"]:
    table_FYXK = jnp.concatenate(tables, axis=-1)
    return table_FYXK.reshape(-1, table_FYXK.shape[-1])
