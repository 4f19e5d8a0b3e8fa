"""Ulysses: devices trade heads for sequence, attend over whole sequences, and trade back.

Tensors stay [B, S, N, H] throughout: the all-to-all splits heads and joins tokens, nothing is
transposed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.exchanges.base import HeadsAtHome, Placed, tokens_bytes
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
from maxdiffusion.kernels.heads import HeadPlaces, Places
from maxdiffusion.kernels.heads.places import Place
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
    inner: HeadsAtHome

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
        for start, stop in self.groups(batch * heads):
            q_group, k_group, v_group = (part[:, :, start:stop] for part in (q, k, v))
            rows = mask if mask is None or batch == 1 else mask[start:stop]
            with jax.named_scope("exchange"):
                split = self.split(q_group), self._blocks(k_group), self._blocks(v_group)
            placed = self._group(*split, keys.with_mask(rows), kernel)
            with jax.named_scope("exchange"):
                outs.append(_heads(self.join(placed), q.shape[3]))
        out = jnp.concatenate(outs, axis=2)[:, :, : batch * heads]
        return unfold_batch(out, batch) if batch > 1 else out

    def places(self, batch: int, heads: int) -> HeadPlaces:
        """An array for each group of heads, with a block for each device."""
        return HeadPlaces.alike(self.block_places(batch, heads))

    def block_places(self, batch: int, heads: int) -> Places:
        """The same for keys and values, which always go all at once."""
        groups = self.groups(batch * heads)
        spots = [
            (group, *divmod(index, (stop - start) // self.degree))
            for group, (start, stop) in enumerate(groups)
            for index in range(stop - start)
        ]
        return Places(
            arrays=tuple((self.degree, (stop - start) // self.degree) for start, stop in groups),
            heads=by_batch_row(spots, batch, heads),
        )

    def of_placed(
        self, q: Placed, k: Placed, v: Placed, keys: GlobalKeys, kernel: DeviceKernel
    ) -> Placed:
        """The attention of heads that lie in a block for each device, a group at a time."""
        each = len(q) // len(k)
        groups = [q[first : first + each] for first in range(0, len(q), each)]
        parts = zip(groups, k, v, strict=True)
        return [out for part in parts for out in self._group(*part, keys, kernel)]

    def groups(self, heads: int) -> list[tuple[int, int]]:
        """Starts and stops of the groups of so many heads, after filling up."""
        filled = math.ceil(heads / self.degree) * self.degree
        return head_groups(filled, self.degree, self.chunks)

    def _group(
        self,
        q: Placed,
        k: Float[Array, "K T D"],
        v: Float[Array, "K T D"],
        keys: GlobalKeys,
        kernel: DeviceKernel,
    ) -> Placed:
        """The attention of one group of heads, from arrays of `split` to those for `join`."""
        width = kernel.site.head_dim
        with jax.named_scope("exchange"):
            k_heads, v_heads = (_heads(self._traded(part), width) for part in (k, v))
            queries = [_heads(part, width) for part in self.arrived(q)]
        by_row = keys.mask is not None and keys.mask.shape[0] > 1
        if by_row and keys.mask is not None:
            keys = keys.with_mask(self._local_rows(keys.mask, k_heads.shape[2]))
            k_heads, v_heads = (heads_to_rows(part) for part in (k_heads, v_heads))
            queries = [heads_to_rows(part) for part in queries]
        outs = self.inner.in_turns(queries, k_heads, v_heads, keys, kernel)
        if by_row:
            outs = [rows_to_heads(part) for part in outs]
        with jax.named_scope("exchange"):
            return self.sent_back([part.reshape(*part.shape[:2], -1) for part in outs])

    def split(self, x: Float[Array, "1 S N H"]) -> Placed:
        """The arrays in which the queries of a group of heads are traded."""
        return [self._blocks(x)]

    def arrived(self, placed: Placed) -> Placed:
        """Queries of this device's heads, as columns; each array has kernel calls of its own."""
        return [self._traded(placed[0])]

    def sent_back(self, outs: Placed) -> Placed:
        """What became of the arrays of `split`, given what became of those of `arrived`."""
        return [self._traded(outs[0].reshape(self.degree, -1, outs[0].shape[2]))]

    def join(self, placed: Placed) -> Float[Array, "1 S D"]:
        """The inverse of `split`."""
        return jnp.concatenate([*placed[0]], axis=1)[None]

    def _blocks(self, x: Float[Array, "1 S N H"]) -> Float[Array, "K S D"]:
        """Parts for different devices one after the other, heads as columns of [S, N*H].

        That is how projections write and kernels read them, and what the devices then trade is
        whole blocks.
        """
        columns = x.reshape(x.shape[1], -1)
        return jnp.stack(jnp.split(columns, self.degree, axis=1))

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


def by_batch_row(spots: Sequence[Place], batch: int, heads: int) -> tuple[tuple[Place, ...], ...]:
    """The places of heads that were counted through, by batch row."""
    return tuple(tuple(spots[row * heads : (row + 1) * heads]) for row in range(batch))


def _heads(blocks: Float[Array, "K S D"], width: int) -> Float[Array, "1 S N H"]:
    """Blocks of tokens, one after the other, by heads."""
    devices, tokens, columns = blocks.shape
    return blocks.reshape(1, devices * tokens, columns // width, width)
