"""Words for array dimensions, and the mesh axes that each word is split over."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.mesh.axes import AXES, CONTEXT_AXES

SPREAD = "spread"
# Weights are split by their own features over `tensor` and by the model width over `fsdp`; those
# whose width is `spread` lie over all devices of a sequence, and are gathered layer by layer.
# A text encoder reads one text at a time: all devices of the mesh share its `words` and `columns`.
PARAMETER_AXES: Mapping[str, tuple[str, ...]] = {
    "model": ("fsdp",),
    SPREAD: ("fsdp", *CONTEXT_AXES),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "words": AXES,
    "columns": AXES,
}
# Activations are split by batch and sequence; features that come out of a split weight stay split.
ACTIVATION_AXES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": CONTEXT_AXES,
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "columns": AXES,
}


def axes_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """The number of devices along `axes` of `mesh`."""
    return math.prod(mesh.shape[axis] for axis in axes)


def fitting_axes(mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The longest leading run of `axes` whose device count divides `size`."""
    for count in range(len(axes), 0, -1):
        if size % axes_size(mesh, axes[:count]) == 0:
            return axes[:count]
    return ()


def partition_spec(
    mesh: Mesh, table: Mapping[str, tuple[str, ...]], dims: tuple[str, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """The spec for an array whose trailing dimensions are called `dims`; leading ones stay whole.

    A dimension that its axes do not divide is kept whole along the axes that do not fit.
    """
    stacked = len(shape) - len(dims)
    assert stacked >= 0, (dims, shape)
    entries = [
        fitting_axes(mesh, table.get(dim, ()), size) or None
        for dim, size in zip(dims, shape[stacked:], strict=True)
    ]
    return PartitionSpec(*[None] * stacked, *entries)


def parameter_sharding(mesh: Mesh, dims: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Where a weight lives; `dims` are the words of one layer, stacked layers come before them."""
    return NamedSharding(mesh, partition_spec(mesh, PARAMETER_AXES, dims, shape))


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """Pins activations to the mesh by words for their dimensions; without a mesh, does nothing."""

    mesh: Mesh | None = None
    axes: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: ACTIVATION_AXES, hash=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.axis_names != AXES:
            raise ValueError(
                f"mesh axes {self.mesh.axis_names}: the axes are {AXES}, in this order"
            )

    def constrain(self, array: jax.Array, *dims: str) -> jax.Array:
        """`array`, placed by the words for all of its dimensions."""
        if self.mesh is None or self.mesh.size == 1:
            return array
        return jax.lax.with_sharding_constraint(array, self.sharding(dims, array.shape))

    def sharding(self, dims: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """The place of an activation; dimensions before those named stay whole."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, partition_spec(self.mesh, self.axes, dims, shape))

    def gathered(self, weight: jax.Array, dims: tuple[str, ...]) -> jax.Array:
        """A weight as a product takes it: of a spread width, every device has all."""
        if self.mesh is None or SPREAD not in dims:
            return weight
        whole = tuple("model" if dim == SPREAD else dim for dim in dims)
        place = parameter_sharding(self.mesh, whole, weight.shape)
        return jax.lax.with_sharding_constraint(weight, place)

    @property
    def sequence_multiple(self) -> int:
        """What a sequence length must be a multiple of to be split evenly."""
        return 1 if self.mesh is None else axes_size(self.mesh, CONTEXT_AXES)
