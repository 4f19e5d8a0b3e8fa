"""Projected heads with their pending norm and RoPE, the layout of heads in arrays, and a reference.

`ProjectedHeads` is a projection's output with the norm and rotation still to be done, `HeadLayout`
says where each head goes in the arrays of an all-to-all, and `heads_of` is the reference: the same
as plain array code, differentiable, on any device.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ProjectedHeads:
    """Heads side by side as columns; `gain` asks for a norm first, `cosines` for a rotation.

    The norm is x over its root mean square along all columns, times the gain; the rotation turns
    feature i of a head with feature i + H/2.
    """

    # As a pytree it also holds descriptions of arrays instead.
    __no_type_check__: ClassVar[bool] = True

    values: Float[Array, "B S D"]
    gain: Float[Array, " D"] | None = None
    cosines: Float[Array, "S R"] | None = None
    sines: Float[Array, "S R"] | None = None
    eps: float = field(default=0.0, metadata={"static": True})

    @property
    def finished(self) -> bool:
        """Returns whether the columns are heads already."""
        return self.gain is None and self.cosines is None


HeadPosition = tuple[int, int, int]
PAD = -1


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The position of every head: `heads[b][n]` is (array, block, slot) of head n of batch row b.

    Array i is [blocks, S, slots * H] with (blocks, slots) = `arrays[i]`. A slot that no head goes
    to holds zeros.
    """

    arrays: tuple[tuple[int, int], ...]
    heads: tuple[tuple[HeadPosition, ...], ...]

    @classmethod
    def identity(cls, batch: int, heads: int) -> "HeadLayout":
        """Returns the layout that moves no head: one array [B, S, N * H]."""
        rows = tuple(tuple((0, row, head) for head in range(heads)) for row in range(batch))
        return cls(arrays=((batch, heads),), heads=rows)

    @property
    def batch(self) -> int:
        """Batch rows of the columns."""
        return len(self.heads)

    @property
    def head_count(self) -> int:
        """Heads of one batch row."""
        return len(self.heads[0])

    @property
    def moves(self) -> bool:
        """Returns whether any head moves."""
        return self != HeadLayout.identity(self.batch, self.head_count)

    def slots(self) -> list[HeadPosition]:
        """Every slot, in the order of the arrays."""
        return [
            (array, block, slot)
            for array, (blocks, slots) in enumerate(self.arrays)
            for block in range(blocks)
            for slot in range(slots)
        ]

    def order(self) -> list[int]:
        """The head in each of `slots`, those of the first batch row counted first, or PAD."""
        every = [position for row in self.heads for position in row]
        at = {position: head for head, position in enumerate(every)}
        return [at.get(position, PAD) for position in self.slots()]

    def empty_slots(self) -> list[HeadPosition]:
        """Slots that no head goes to."""
        pairs = zip(self.slots(), self.order(), strict=True)
        return [position for position, head in pairs if head == PAD]


@dataclass(frozen=True, kw_only=True)
class QKVLayout:
    """Layout of the heads of q and the output, and of those of k and v.

    `order` are the heads in `queries.slots()`, or PAD, where those depend on the device.
    """

    queries: HeadLayout
    keys: HeadLayout
    order: Int[Array, " J"] | None = None

    @classmethod
    def alike(cls, layout: HeadLayout) -> "QKVLayout":
        """The same layout for all of them."""
        return cls(queries=layout, keys=layout)


def heads_of(columns: ProjectedHeads, head_dim: int) -> Float[Array, "B S N H"]:
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
    gain = jnp.broadcast_to(gain_D.astype(jnp.float32), x.shape)
    return (wide * inverse * gain).astype(x.dtype)


@jax.named_scope("rope")
def rotate(
    heads_BSNH: Float[Array, "B S N H"],
    cosines_SR: Float[Array, "S R"],
    sines_SR: Float[Array, "S R"],
) -> Float[Array, "B S N H"]:
    """`heads_BSNH` turned by position in float32; feature i is paired with feature i + H/2."""
    cosines, sines = cosines_SR[None, :, None, :], sines_SR[None, :, None, :]
    first, second = jnp.split(heads_BSNH.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, first * sines + second * cosines]
    return jnp.concatenate(turned, axis=-1).astype(heads_BSNH.dtype)


def pending_gradient(
    columns: ProjectedHeads, d_heads: Float[Array, "B S D"], head_dim: int
) -> ProjectedHeads:
    """Returns the gradient of the columns, gain and angles from that of their heads, as columns.

    It is computed in float32 and rounded once; roundings of the forward pass count as identities.
    """

    def wide_heads(wide: ProjectedHeads) -> Float[Array, "B S N H"]:
        return heads_of(wide, head_dim)

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), columns)
    heads, transpose = jax.vjp(wide_heads, wide)
    (gradient,) = transpose(d_heads.astype(jnp.float32).reshape(heads.shape))
    rounded: ProjectedHeads = jax.tree.map(lambda x, y: x.astype(y.dtype), gradient, columns)
    return rounded
