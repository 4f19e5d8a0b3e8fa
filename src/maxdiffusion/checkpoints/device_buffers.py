"""Buffers for the parts of a parameter, one for each different slice that devices hold."""

import functools
import threading
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from maxdiffusion.weights.boxes import (
    Box,
    bounding,
    box_of_slices,
    extents,
    intersect,
    slices_within,
    volume,
)

# Numpy copies a transposed matrix one element per cache line; in tiles whole lines are used while
# they are in the cache. Of three sizes tried this one cost the least processor time (the checkpoint
# of scripts/bench_load.py to bfloat16 in reads of 4 MB, 2-core AMD EPYC).
TILE_ROWS, TILE_COLUMNS = 512, 32
# Numpy moves its own integers faster than the small floats, which it does not know.
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ALIGNMENT = 64  # bytes; jax on CPU takes an array over without a copy when it starts there


def copy_values(target: np.ndarray, values: np.ndarray) -> None:
    """Writes `values` to `target`, cast to its dtype; a transposed matrix goes tile by tile."""
    if values.ndim < 2 or values.strides[-1] <= values.strides[-2]:
        np.copyto(target, values, casting="unsafe")
        return
    if values.dtype != target.dtype:
        values = values.astype(target.dtype, order="K")
    word = WORDS[target.itemsize]
    target, values = target.view(word), values.view(word)
    for row in range(0, values.shape[-2], TILE_ROWS):
        for column in range(0, values.shape[-1], TILE_COLUMNS):
            tile = (..., slice(row, row + TILE_ROWS), slice(column, column + TILE_COLUMNS))
            target[tile] = values[tile]


class SliceBuffer(Protocol):
    """One slice of a parameter, filled part by part, then held by some devices."""

    def put(self, index: tuple[slice, ...], values: np.ndarray) -> None:
        """Writes a part; parts do not overlap, and may come from several threads."""
        ...

    def arrays(self) -> list[jax.Array]:
        """The filled slice, once for each device."""
        ...


class HostBuffer:
    """A slice for CPU devices: memory of the host, taken over by jax without a copy."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: Sequence[jax.Device]):
        self._devices = devices
        size = volume(tuple((0, size) for size in shape)) * dtype.itemsize
        memory = np.empty(size + ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % ALIGNMENT
        self._values = memory[first : first + size].view(dtype).reshape(shape)

    def put(self, index: tuple[slice, ...], values: np.ndarray) -> None:
        copy_values(self._values[index], values)

    def arrays(self) -> list[jax.Array]:
        return [jax.device_put(self._values, device) for device in self._devices]


class DeviceBuffer:
    """A slice for accelerators: parts are sent one by one, and the host never holds it whole."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: Sequence[jax.Device]):
        self._shape, self._dtype, self._devices = shape, dtype, devices
        self._lock = threading.Lock()
        self._values: jax.Array | None = None

    def put(self, index: tuple[slice, ...], values: np.ndarray) -> None:
        part = np.empty(values.shape, self._dtype)
        copy_values(part, values)
        sent = jax.device_put(part, self._devices[0])
        with self._lock:
            if part.shape == self._shape:
                self._values = sent
            else:
                starts = tuple(np.int32(piece.start) for piece in index)
                self._values = _write(self._zeros(), sent, starts)
            # The host may run far ahead of the transfers, and would then hold every part.
            self._values.block_until_ready()

    def _zeros(self) -> jax.Array:
        if self._values is None:
            self._values = jnp.zeros(self._shape, self._dtype, device=self._devices[0])
        return self._values

    def arrays(self) -> list[jax.Array]:
        # Read and sent once; the other holders copy from the first device.
        return [jax.device_put(self._zeros(), device) for device in self._devices]


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: jax.Array, part: jax.Array, starts: tuple[np.int32, ...]) -> jax.Array:
    """`whole` with `part` written at `starts`, in place."""
    return jax.lax.dynamic_update_slice(whole, part, starts)


def holders_here(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[jax.Device]]:
    """The different slices that devices of this process hold, and which do."""
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = box_of_slices(index or (slice(None),) * len(shape), shape)
        holders.setdefault(box, []).append(device)
    return holders


def held_elements(sharding: Sharding, shape: tuple[int, ...]) -> int:
    """How many elements this process holds, each counted once."""
    return sum(volume(box) for box in holders_here(sharding, shape))


class ParameterBuffers:
    """All slices of one parameter that this process holds."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: Sharding,
        kind: type[HostBuffer] | type[DeviceBuffer] | None = None,
    ):
        self.shape, self._dtype, self._sharding = shape, dtype, sharding
        holders = holders_here(sharding, shape)
        if kind is None:
            on_host = all(d.platform == "cpu" for held in holders.values() for d in held)
            kind = HostBuffer if on_host else DeviceBuffer
        self._buffers: dict[Box, SliceBuffer] = {
            box: kind(extents(box), dtype, devices) for box, devices in holders.items()
        }
        self._lock = threading.Lock()
        self._missing = self.needed

    @property
    def needed(self) -> int:
        """How many elements this process holds, each counted once."""
        return sum(volume(box) for box in self._buffers)

    def regions(self) -> list[Box]:
        """The boxes to read: one around all slices if they fill it, else each slice."""
        around = bounding(list(self._buffers))
        return [around] if volume(around) == self.needed else list(self._buffers)

    def put(self, box: Box, values: np.ndarray) -> None:
        """Writes the values of `box` to every slice that it meets."""
        for held, buffer in self._buffers.items():
            if (shared := intersect(box, held)) is not None:
                buffer.put(slices_within(shared, held), values[slices_within(shared, box)])
                with self._lock:
                    self._missing -= volume(shared)

    def finish(self) -> jax.Array:
        """The parameter, once all of it was put."""
        assert self._missing == 0, f"{self._missing} of {self.needed} elements were not read"
        arrays = [array for buffer in self._buffers.values() for array in buffer.arrays()]
        return jax.make_array_from_single_device_arrays(
            self.shape, self._sharding, arrays, dtype=self._dtype
        )
