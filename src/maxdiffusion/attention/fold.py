"""Batch folded into heads: each (batch, head) pair is an attention of its own."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def fold_batch(x: Float[Array, "B S N H"]) -> Float[Array, "1 S K H"]:
    """[B, S, N, H] as [1, S, B*N, H], the heads of the first batch element first."""
    batch, tokens, heads, width = x.shape
    # Side by side as columns of [S, N*H], which a TPU tiles without padding: a transpose would not.
    columns = jnp.concatenate([*x.reshape(batch, tokens, heads * width)], axis=1)
    return columns.reshape(1, tokens, batch * heads, width)


def unfold_batch(x: Float[Array, "1 S K H"], batch: int) -> Float[Array, "B S N H"]:
    """The inverse of `fold_batch`."""
    _, tokens, rows, width = x.shape
    columns = jnp.split(x.reshape(tokens, rows * width), batch, axis=1)
    return jnp.stack(columns).reshape(batch, tokens, rows // batch, width)


def fold_mask(mask: Bool[Array, "B T"], heads: int) -> Bool[Array, "K T"]:
    """The mask of each folded head: row b*N + n is row b of the batch's mask."""
    return jnp.repeat(mask, heads, axis=0)


def heads_to_rows(x: Float[Array, "1 S K H"]) -> Float[Array, "K S 1 H"]:
    """Every folded head as a batch row with one head, so that it can have its own mask."""
    return x.transpose(2, 1, 0, 3)


def rows_to_heads(x: Float[Array, "K S 1 H"]) -> Float[Array, "1 S K H"]:
    """The inverse of `heads_to_rows`."""
    return x.transpose(2, 1, 0, 3)


def head_groups(heads: int, degree: int, chunks: int) -> list[tuple[int, int]]:
    """Starts and stops of up to `chunks` runs of heads; all but the last are equal, none is empty.

    `degree` divides every run: 40 heads over 8 devices in 2 chunks are (0, 16) and (16, 40).
    """
    assert heads % degree == 0, (heads, degree)
    units = heads // degree
    count = min(chunks, units)
    size = units // count * degree
    starts = [index * size for index in range(count)]
    return [*zip(starts, [*starts[1:], heads], strict=True)]
