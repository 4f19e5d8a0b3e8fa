"""The device mesh: five axes, and the axes over which each dimension of an array is sharded.

    data > fsdp > ring > ulysses > tensor       from slow to fast links
    context = ring x ulysses                    the devices that share one sequence

Devices are ordered so that neighbours along the last axes are close. Layers name the dimensions of
their arrays ("batch", "sequence", "heads"); the axis rules map these names to mesh axes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "ring", "ulysses", "tensor")
CONTEXT_AXES = ("ring", "ulysses")


@runtime_checkable
class MeshDevice(Protocol):
    """The part of `jax.Device` that planning reads; a described TPU has it too."""

    @property
    def platform(self) -> str:
        """Returns cpu, gpu or tpu."""
        ...

    @property
    def device_kind(self) -> str:
        """Returns the name of the chip."""
        ...

    @property
    def id(self) -> int:
        """Returns a number that no other device has."""
        ...

    @property
    def process_index(self) -> int:
        """Returns the process that the device belongs to."""
        ...


@runtime_checkable
class TpuCore(MeshDevice, Protocol):
    """A device with a place in a grid of chips."""

    @property
    def coords(self) -> Sequence[int]:
        """Returns (x, y, z) of the chip."""
        ...

    @property
    def core_on_chip(self) -> int:
        """Returns the number of the core within its chip."""
        ...


@runtime_checkable
class InSlice(MeshDevice, Protocol):
    """A device that knows its slice; those of a described topology, which is one slice, do not."""

    @property
    def slice_index(self) -> int:
        """Returns the number of the slice."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the five axes. A sequence is sharded over `context`, the pair (ring, ulysses)."""

    data: int = 1
    fsdp: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {axis}={size!r}: sizes are whole numbers from 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the five sizes in the order of AXES."""
        return (self.data, self.fsdp, self.ring, self.ulysses, self.tensor)

    @property
    def context(self) -> int:
        """Returns the number of devices that share one sequence."""
        return self.ring * self.ulysses

    @property
    def devices(self) -> int:
        """Returns the number of devices in the mesh."""
        return math.prod(self.sizes)


def snake_order(coords: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a sort key of (x, y, z) for a boustrophedon walk: each step goes to a neighbour.

    Odd rows and planes are walked backwards. Within a 2x2 or 2x2x2 block the walk is also closed,
    so that a ring over it has no long hop.
    """
    key: list[int] = []
    backwards = 0
    for coordinate in reversed(coords):
        key.append(-coordinate if backwards % 2 else coordinate)
        backwards += coordinate
    return tuple(key)


def hardware_order(devices: Iterable[MeshDevice]) -> list[MeshDevice]:
    """Sorts devices by slice, then by `snake_order` of chips, then by core of the chip."""

    def key(device: MeshDevice) -> tuple[object, ...]:
        if device.platform != "tpu":
            return (device.process_index, device.id)
        assert isinstance(device, TpuCore), device
        return (slice_index(device), *snake_order(tuple(device.coords)), device.core_on_chip)

    return sorted(devices, key=key)


def slice_index(device: MeshDevice) -> int:
    """Returns the slice, a set of chips joined by ICI, that a device belongs to."""
    return device.slice_index if device.platform == "tpu" and isinstance(device, InSlice) else 0


def build_mesh(
    ici: MeshShape, *, dcn: MeshShape | None = None, devices: Sequence[MeshDevice] | None = None
) -> Mesh:
    """Builds the mesh of shape `ici` within a slice times `dcn` across slices.

    The axes go from slow to fast links, so that ulysses (or tensor, if used) falls on the two cores
    of a chip and a ring on neighbouring chips.
    """
    dcn = dcn or MeshShape()
    ordered = hardware_order(jax.devices() if devices is None else devices)
    needed = ici.devices * dcn.devices
    if len(ordered) != needed:
        raise ValueError(f"mesh {ici} x {dcn}: needs {needed} devices, there are {len(ordered)}")
    slices = [list(group) for _, group in groupby(ordered, key=slice_index)]
    if dcn.devices > 1 and len(slices) != dcn.devices:
        raise ValueError(f"dcn sizes {dcn}: need {dcn.devices} slices, there are {len(slices)}")
    grid = np.asarray(ordered, dtype=object).reshape(*dcn.sizes, *ici.sizes)
    interleaved = [axis for pair in zip(range(5), range(5, 10), strict=True) for axis in pair]
    sizes = [outer * inner for outer, inner in zip(dcn.sizes, ici.sizes, strict=True)]
    return Mesh(
        grid.transpose(interleaved).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def with_data_in_ring(mesh: Mesh) -> Mesh | None:
    """Returns the same devices, in the same order, with those of the data axis added to the ring.

    None if that is not possible: axes between the two would change the order, and slices are too
    far apart for a ring.
    """
    data, fsdp, ring, ulysses, tensor = mesh.devices.shape
    slices = {slice_index(device) for device in mesh.devices[:, 0, 0, 0, 0]}
    if data == 1 or fsdp > 1 or len(slices) > 1:
        return None
    devices = mesh.devices.reshape(1, 1, data * ring, ulysses, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def single_device_mesh(device: jax.Device | None = None) -> Mesh:
    """Returns a mesh of one device, with every axis of size 1."""
    return build_mesh(MeshShape(), devices=[device or jax.devices()[0]])


AxisRules = Mapping[str, tuple[str, ...]]

# The model width of weights that are sharded over fsdp and context, and gathered layer by layer.
FSDP_CONTEXT = "fsdp_context"
# A text encoder reads one text at a time, so its vocabulary and columns are sharded over all axes.
PARAMETER_AXIS_RULES: AxisRules = {
    "model": ("fsdp",),
    FSDP_CONTEXT: ("fsdp", *CONTEXT_AXES),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": AXES,
    "columns": AXES,
}
# Features that come out of a sharded weight stay sharded. "frames" are pictures that an encoder
# reads one by one.
ACTIVATION_AXIS_RULES: AxisRules = {
    "batch": ("data", "fsdp"),
    "sequence": CONTEXT_AXES,
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "columns": AXES,
    "frames": AXES,
}


def axes_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along `axes` of `mesh`."""
    return math.prod(mesh.shape[axis] for axis in axes)


def fitting_axes(mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Returns the longest leading part of `axes` whose device count divides `size`."""
    for count in range(len(axes), 0, -1):
        if size % axes_size(mesh, axes[:count]) == 0:
            return axes[:count]
    return ()


def partition_spec(
    mesh: Mesh, rules: AxisRules, *, dims: tuple[str, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    """Returns the spec of an array with trailing dimensions `dims`; leading ones are not sharded.

    A dimension is not sharded along axes that do not divide it.
    """
    stacked = len(shape) - len(dims)
    assert stacked >= 0, (dims, shape)
    entries = [
        fitting_axes(mesh, rules.get(dim, ()), size) or None
        for dim, size in zip(dims, shape[stacked:], strict=True)
    ]
    return PartitionSpec(*[None] * stacked, *entries)


def parameter_sharding(mesh: Mesh, dims: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of a weight; dimensions of stacked layers come before `dims`."""
    return NamedSharding(mesh, partition_spec(mesh, PARAMETER_AXIS_RULES, dims=dims, shape=shape))


# Tiles in which matrix products read stacked bfloat16 weights, by kind of device. A compiler that
# gets them in other tiles copies all of them before the first layer of every run, and Layout.AUTO
# does not choose tiles (docs/design/weight_layouts.md). Devices that are not here read the default.
WEIGHT_TILES: Mapping[str, tuple[tuple[int, ...], ...]] = {"tpu7x": ((16, 128), (2, 1))}


def parameter_layout(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Layout | None:
    """Returns the device layout of the matrices of stacked layers; None for the default.

    Sharded matrices have the default: XLA (jax 0.10.2) ignores tiles of arguments that it shards.
    """
    tiles = WEIGHT_TILES.get(sharding.mesh.devices.flat[0].device_kind.lower())
    if tiles is None or len(shape) != 3 or dtype != jnp.bfloat16:
        return None
    if not sharding.is_fully_replicated or shape[1] % tiles[0][0] or shape[2] % tiles[0][1]:
        return None
    return Layout(major_to_minor=(0, 1, 2), tiling=tiles)


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """Shards activations over the mesh by the names of their dimensions; not without a mesh."""

    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.axis_names != AXES:
            raise ValueError(f"mesh axes {self.mesh.axis_names}: must be {AXES}, in this order")

    def constrain(self, array: jax.Array, *dims: str) -> jax.Array:
        """Returns `array` with a sharding constraint by its trailing dimensions."""
        if self.mesh is None or self.mesh.size == 1:
            return array
        return _constrained(array, self.sharding(dims, array.shape))

    def sharding(self, dims: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of an activation with the trailing dimensions `dims`."""
        assert self.mesh is not None
        spec = partition_spec(self.mesh, ACTIVATION_AXIS_RULES, dims=dims, shape=shape)
        return NamedSharding(self.mesh, spec)

    @property
    def on_tpus(self) -> bool:
        """Returns whether the devices of the mesh are TPUs."""
        return self.mesh is not None and bool(self.mesh.devices.flat[0].platform == "tpu")

    @property
    def runs_kernels(self) -> bool:
        """Returns whether Pallas kernels can run on the shards of activations: on TPUs."""
        explicit = self.mesh is not None and AxisType.Explicit in self.mesh.axis_types
        return self.on_tpus and not explicit

    def on_shards(
        self, function: Callable[..., jax.Array], *arrays: tuple[jax.Array, tuple[str, ...]]
    ) -> jax.Array:
        """Returns `function` of the shards of arrays with these dimensions, on every device.

        The result has the dimensions of the first array. Pallas calls carry no replication types,
        so shard_map cannot check them.
        """
        specs = tuple(self.sharding(dims, array.shape).spec for array, dims in arrays)
        inside_set_mesh = not jax.sharding.get_abstract_mesh().empty
        run = jax.shard_map(
            function,
            mesh=None if inside_set_mesh else self.mesh,
            in_specs=specs,
            out_specs=specs[0],
            check_vma=False,
        )
        result: jax.Array = run(*(array for array, _ in arrays))
        return result

    def gathered(self, weight: jax.Array, dims: tuple[str, ...]) -> jax.Array:
        """Returns a weight all-gathered over the context, as a matmul needs it."""
        if self.mesh is None or FSDP_CONTEXT not in dims:
            return weight
        gathered = tuple("model" if dim == FSDP_CONTEXT else dim for dim in dims)
        return _constrained(weight, parameter_sharding(self.mesh, gathered, weight.shape))


def _constrained(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    constrained: jax.Array = jax.lax.with_sharding_constraint(array, sharding)
    return constrained
