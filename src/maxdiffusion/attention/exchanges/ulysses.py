"""Ulysses: devices trade heads for sequence, attend over whole sequences, and trade back.

Tensors stay [B, S, N, H] throughout: the all-to-all splits heads and joins tokens, nothing is
transposed.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.exchanges.base import Exchange, Placed, tokens_bytes
from maxdiffusion.attention.fold import (
    fold_batch,
    fold_mask,
    head_groups,
    heads_to_rows,
    rows_to_heads,
    unfold_batch,
)
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.keys import GlobalKeys
from maxdiffusion.attention.on_device import DeviceKernel, KernelSizes
from maxdiffusion.kernels.heads import Places
from maxdiffusion.kernels.splash import pad_length


@dataclass(frozen=True, kw_only=True)
class Ulysses:
    """All-to-all over `axes` around `inner`, a group of heads at a time.

    Groups are independent of each other, so the exchange of one can run under the kernel of
    another. Heads that `degree` does not divide are filled up with zero heads, whose output is
    dropped.
    """

    axes: tuple[str, ...]
    degree: int
    chunks: int
    inner: Exchange

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> Float[Array, "B S N H"]:
        """The attention of this device's queries over all keys."""
        batch, _, heads, _ = q.shape
        mask = keys.mask
        if batch > 1:
            # A batch of 2 would lie in the sublanes of every tile around the exchange.
            q, k, v = (fold_batch(part) for part in (q, k, v))
            mask = None if mask is None else self._filled_rows(fold_mask(mask, heads))
        q, k, v = (pad_length(part, 2, self.degree) for part in (q, k, v))
        outs = []
        for start, stop in head_groups(q.shape[2], self.degree, self.chunks):
            q_group, k_group, v_group = (part[:, :, start:stop] for part in (q, k, v))
            rows = mask if mask is None or batch == 1 else mask[start:stop]
            outs.append(self._group(q_group, k_group, v_group, keys.with_mask(rows), kernel))
        out = jnp.concatenate(outs, axis=2)[:, :, : batch * heads]
        return unfold_batch(out, batch) if batch > 1 else out

    def places(self, batch: int, heads: int) -> Places:
        """An array for each group of heads, with a block for each device."""
        filled = math.ceil(batch * heads / self.degree) * self.degree
        groups = head_groups(filled, self.degree, self.chunks)
        spots = [
            (group, *divmod(index, (stop - start) // self.degree))
            for group, (start, stop) in enumerate(groups)
            for index in range(stop - start)
        ]
        rows = [tuple(spots[row * heads : (row + 1) * heads]) for row in range(batch)]
        return Places(
            arrays=tuple((self.degree, (stop - start) // self.degree) for start, stop in groups),
            heads=tuple(rows),
        )

    def of_placed(
        self, q: Placed, k: Placed, v: Placed, keys: GlobalKeys, kernel: DeviceKernel
    ) -> Placed:
        """The attention of heads that lie in a block for each device, a group at a time."""
        width = kernel.site.head_dim
        outs = []
        for blocks in zip(q, k, v, strict=True):
            with jax.named_scope("exchange"):
                heads = [_joined(self._traded(part), width) for part in blocks]
            out = self.inner(heads[0], heads[1], heads[2], keys, kernel)
            with jax.named_scope("exchange"):
                outs.append(self._traded(out.reshape(blocks[0].shape)))
        return outs

    def _group(
        self,
        q: Float[Array, "1 S N H"],
        k: Float[Array, "1 T N H"],
        v: Float[Array, "1 T N H"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> Float[Array, "1 S N H"]:
        q, k, v = (self._heads_for_tokens(part) for part in (q, k, v))
        if keys.mask is not None and keys.mask.shape[0] > 1:
            keys = keys.with_mask(self._local_rows(keys.mask, q.shape[2]))
            q, k, v = (heads_to_rows(part) for part in (q, k, v))
            out = rows_to_heads(self.inner(q, k, v, keys, kernel))
        else:
            out = self.inner(q, k, v, keys, kernel)
        return self._tokens_for_heads(out)

    @jax.named_scope("exchange")
    def _heads_for_tokens(self, x: Float[Array, "1 S N H"]) -> Float[Array, "1 S N H"]:
        """All tokens of this device's share of the heads, for all heads of its share of tokens.

        Parts for different devices are laid side by side first, heads as columns of [S, N*H] the
        way projections write and kernels read them; what the devices then trade is whole blocks.
        """
        _, tokens, heads, width = x.shape
        columns = x.reshape(tokens, heads * width)
        return _joined(self._traded(jnp.stack(jnp.split(columns, self.degree, axis=1))), width)

    @jax.named_scope("exchange")
    def _tokens_for_heads(self, x: Float[Array, "1 S N H"]) -> Float[Array, "1 S N H"]:
        """The inverse of `_heads_for_tokens`."""
        _, tokens, heads, width = x.shape
        blocks = x.reshape(self.degree, tokens // self.degree, heads * width)
        columns = jnp.concatenate([*self._traded(blocks)], axis=1)
        return columns.reshape(1, tokens // self.degree, heads * self.degree, width)

    def _traded(self, blocks: Float[Array, "K S D"]) -> Float[Array, "K S D"]:
        """Block i of every device on device i, in the order of the devices they came from."""
        return jax.lax.all_to_all(blocks, self.axes, split_axis=0, concat_axis=0, tiled=True)

    def _filled_rows(self, mask: Bool[Array, "K T"]) -> Bool[Array, "K T"]:
        """Mask rows for the zero heads too; those see every key."""
        missing = -mask.shape[0] % self.degree
        return jnp.pad(mask, ((0, missing), (0, 0)), constant_values=True)

    def _local_rows(self, mask: Bool[Array, "K T"], heads: int) -> Bool[Array, "K T"]:
        """The mask rows of the heads that this device gets."""
        start = jax.lax.axis_index(self.axes) * heads
        return jax.lax.dynamic_slice_in_dim(mask, start, heads, axis=0)

    def padded_heads(self, geometry: Geometry) -> int:
        """Folded heads of one tensor shard after filling up."""
        return math.ceil(geometry.local_batch * geometry.local_heads / self.degree) * self.degree

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """The heads of each group that one device gets, over the inner exchange's lengths."""
        groups = head_groups(self.padded_heads(geometry), self.degree, self.chunks)
        return KernelSizes(
            batch=1,
            heads=tuple((stop - start) // self.degree for start, stop in groups),
            q_len=geometry.padded_q_len // (geometry.shape.context // self.degree),
            kv_len=self.inner.kernel_sizes(geometry).kv_len,
        )

    def bytes_sent(self, geometry: Geometry) -> int:
        """q, k, v and the output, but for what stays, plus what the inner exchange sends."""
        context = geometry.shape.context
        tokens = 2 * (geometry.padded_q_len + geometry.padded_kv_len) // context
        filled = self.padded_heads(geometry) / (geometry.local_batch * geometry.local_heads)
        local = tokens_bytes(geometry, tokens) * filled
        inner = self.inner.bytes_sent(geometry) * filled
        return int(local * (self.degree - 1) / self.degree + inner)

    def title(self) -> str:
        """What moves, in a few words."""
        ways = f"all-to-all of heads and tokens over {'x'.join(self.axes)}={self.degree}"
        chunks = f" in {self.chunks} head groups" if self.chunks > 1 else ""
        inner = self.inner.title()
        return f"{ways}{chunks}; inside: {inner}"

    def waste(self, geometry: Geometry) -> str:
        """How many heads are zeros to fill up, or nothing."""
        real = geometry.local_batch * geometry.local_heads
        padded = self.padded_heads(geometry)
        if padded == real:
            return ""
        return f"heads: {padded} for {real} ({(padded - real) / padded:.1%} padding)"


def _joined(blocks: Float[Array, "K S D"], width: int) -> Float[Array, "1 S N H"]:
    """Blocks of tokens, one after the other, by heads."""
    devices, tokens, columns = blocks.shape
    return blocks.reshape(1, devices * tokens, columns // width, width)
