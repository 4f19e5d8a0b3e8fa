"""Which keys count: the true length and an explicit mask, by global position."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True, kw_only=True)
class KeyShard:
    """The keys one kernel call sees: how many lead keys are real, and an optional mask over them.

    `length` is a Python int where tracing knows it (the whole sequence is here) and a traced scalar
    where it depends on the device (a ring shard); None means that every key is real.
    """

    length: int | Int[Array, ""] | None = None
    mask: Bool[Array, "B T"] | None = None

    def valid(self, batch: int, size: int) -> Bool[Array, "B T"] | None:
        """One mask for both rules, or None where every key counts."""
        if self.length is None:
            return self.mask
        within = jnp.broadcast_to(jnp.arange(size) < self.length, (batch, size))
        return within if self.mask is None else within & self.mask


@dataclass(frozen=True, kw_only=True)
class GlobalKeys:
    """All keys of a sequence: positions from `true_length` on are padding.

    The mask has a row for each batch element (after a fold, for each folded head) and lies whole
    on every device, so that no shard of it ever has to travel with the keys.
    """

    true_length: int
    padded_length: int
    mask: Bool[Array, "B T"] | None = None

    def whole(self) -> KeyShard:
        """The keys of the whole sequence."""
        padded = self.true_length < self.padded_length
        return KeyShard(length=self.true_length if padded else None, mask=self.mask)

    def shard(self, index: Int[Array, ""], shards: int) -> KeyShard:
        """The keys of one of `shards` equal runs of the sequence."""
        size = self.padded_length // shards
        start = index * size
        length = None
        if self.true_length < self.padded_length:
            length = jnp.clip(self.true_length - start, 0, size)
        mask = None
        if self.mask is not None:
            mask = jax.lax.dynamic_slice_in_dim(self.mask, start, size, axis=1)
        return KeyShard(length=length, mask=mask)

    def with_mask(self, mask: Bool[Array, "B T"] | None) -> "GlobalKeys":
        """The same keys under another mask."""
        return GlobalKeys(true_length=self.true_length, padded_length=self.padded_length, mask=mask)
