"""Masks of keys by global position, and the fold of batch into heads that masks follow.

A key is attended if it is before the true length and the explicit mask allows it. After a fold,
each (batch, head) pair is an attention of its own with its own row of the mask.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class LocalKVMask:
    """Mask of the keys of one kernel call: the first `length` of them, where `mask` allows.

    `length` is a Python int if tracing knows it (all keys are local) and a traced scalar if it
    depends on the device (a ring shard); None means that no key is padding.
    """

    length: int | Int[Array, ""] | None = None
    mask: Bool[Array, "B T"] | None = None

    def valid(self, batch: int, size: int) -> Bool[Array, "B T"] | None:
        """Returns one mask for both rules, or None if every key is attended."""
        if self.length is None:
            return self.mask
        within = jnp.broadcast_to(jnp.arange(size) < self.length, (batch, size))
        return within if self.mask is None else within & self.mask


@dataclass(frozen=True, kw_only=True)
class KVMask:
    """Mask of all keys of a sequence: positions from `true_length` on are padding.

    The mask has a row for each batch element (after a fold, for each folded head) and is
    replicated, so that no shard of it is sent with the keys.
    """

    true_length: int
    padded_length: int
    mask: Bool[Array, "B T"] | None = None

    def whole(self) -> LocalKVMask:
        """Returns the mask of the whole sequence."""
        padded = self.true_length < self.padded_length
        return LocalKVMask(length=self.true_length if padded else None, mask=self.mask)

    def shard(self, index: Int[Array, ""], shards: int) -> LocalKVMask:
        """Returns the mask of one of `shards` equal runs of the sequence."""
        size = self.padded_length // shards
        start = index * size
        length = None
        if self.true_length < self.padded_length:
            length = jnp.clip(self.true_length - start, 0, size)
        mask = None
        if self.mask is not None:
            mask = jax.lax.dynamic_slice_in_dim(self.mask, start, size, axis=1)
        return LocalKVMask(length=length, mask=mask)

    @property
    def by_row(self) -> bool:
        """Returns whether rows have different masks, so that folded heads need one each."""
        return self.mask is not None and self.mask.shape[0] > 1

    def with_mask(self, mask: Bool[Array, "B T"] | None) -> "KVMask":
        """Returns the same keys under another mask."""
        return KVMask(true_length=self.true_length, padded_length=self.padded_length, mask=mask)


def fold_batch(x: Float[Array, "B S N H"]) -> Float[Array, "1 S K H"]:
    """Returns [B, S, N, H] as [1, S, B*N, H], the heads of the first batch element first."""
    batch, tokens, heads, width = x.shape
    # Columns of [S, N*H] are tiled by a TPU without padding; a transpose would be padded.
    columns = jnp.concatenate([*x.reshape(batch, tokens, heads * width)], axis=1)
    return columns.reshape(1, tokens, batch * heads, width)


def unfold_batch(x: Float[Array, "1 S K H"], batch: int) -> Float[Array, "B S N H"]:
    """Returns the inverse of `fold_batch`."""
    _, tokens, rows, width = x.shape
    columns = jnp.split(x.reshape(tokens, rows * width), batch, axis=1)
    return jnp.stack(columns).reshape(batch, tokens, rows // batch, width)


def fold_mask(mask: Bool[Array, "B T"], heads: int) -> Bool[Array, "K T"]:
    """Returns the mask of each folded head: row b*N + n is row b of the batch's mask."""
    return jnp.repeat(mask, heads, axis=0)


def heads_to_rows(x: Float[Array, "1 S K H"]) -> Float[Array, "K S 1 H"]:
    """Returns every folded head as a batch row with one head, so that it has its own mask."""
    return x.transpose(2, 1, 0, 3)


def rows_to_heads(x: Float[Array, "K S 1 H"]) -> Float[Array, "1 S K H"]:
    """Returns the inverse of `heads_to_rows`."""
    return x.transpose(2, 1, 0, 3)


def head_groups(heads: int, degree: int, chunks: int) -> list[tuple[int, int]]:
    """Returns starts and stops of up to `chunks` runs of heads, equal but for a longer last one.

    `degree` divides every run: 40 heads over 8 devices in 2 chunks are (0, 16) and (16, 40).
    """
    assert heads % degree == 0, (heads, degree)
    units = heads // degree
    count = min(chunks, units)
    size = units // count * degree
    starts = [index * size for index in range(count)]
    return [*zip(starts, [*starts[1:], heads], strict=True)]
