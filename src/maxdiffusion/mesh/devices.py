"""Which device stands where in the mesh: neighbours along the last axes share a chip."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from maxdiffusion.mesh.axes import AXES, MeshShape


def snake_order(coords: tuple[int, ...]) -> tuple[int, ...]:
    """A sort key that walks a grid like a snake, so that every step goes to a neighbouring chip.

    `coords` is (x, y, z). Odd rows and planes are walked backwards; within a 2x2 or 2x2x2 block the
    walk also closes, so that a ring over it needs no long way home.
    """
    key: list[int] = []
    backwards = 0
    for coordinate in reversed(coords):
        key.append(-coordinate if backwards % 2 else coordinate)
        backwards += coordinate
    return tuple(key)


def hardware_order(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Devices by slice, then along a snake of chips, with the cores of one chip side by side."""

    def key(device: jax.Device) -> tuple[object, ...]:
        if device.platform != "tpu":
            return (device.process_index, device.id)
        return (slice_index(device), *snake_order(tuple(device.coords)), device.core_on_chip)

    return sorted(devices, key=key)


def slice_index(device: jax.Device) -> int:
    """The slice (the set of chips joined by ICI) that a device belongs to."""
    if device.platform != "tpu":
        return 0
    try:
        return device.slice_index
    except AttributeError:  # a device of a topology that is only described, which is one slice
        return 0


def build_mesh(
    ici: MeshShape, *, dcn: MeshShape | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh of five axes; `ici` is its shape in a slice, `dcn` how slices multiply each axis.

    The order of axes is from slow to fast links: data outermost, then fsdp, ring, ulysses, tensor,
    so that ulysses (or tensor, where used) falls on the two cores of a chip and a ring on its
    neighbours.
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


def single_device_mesh(device: jax.Device | None = None) -> Mesh:
    """A mesh of one device: every axis of size 1."""
    return build_mesh(MeshShape(), devices=[device or jax.devices()[0]])
