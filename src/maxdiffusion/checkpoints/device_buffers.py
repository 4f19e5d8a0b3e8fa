"""Buffers that parameters are read into, and the collectives that complete them.

A process has one buffer for every distinct slice that its devices hold. A slice that several
processes hold is read once in the job (`Route`):

    OWN          held by this process alone: read here
    PARTS        large: each process reads another part, and the devices all-gather them
    FROM_FIRST   small: the first process reads it and broadcasts it, many in one message
"""

import functools
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Int

from maxdiffusion.checkpoints.safetensors_io import (
    Box,
    bounding,
    box_of_slices,
    extents,
    intersect,
    slices_within,
    volume,
)

# Numpy copies a transposed matrix one element per cache line; tiles use whole lines while they are
# cached. Of three sizes this one took the least processor time (scripts/bench_load.py to bfloat16
# in reads of 4 MB, 2-core AMD EPYC).
TILE_ROWS, TILE_COLUMNS = 512, 32
# Numpy copies its own integers faster than the small floats of ml_dtypes.
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ALIGNMENT = 64  # bytes; jax on CPU adopts an array with this alignment without a copy


def copy_values(target: np.ndarray, values: np.ndarray) -> None:
    """Copies `values` to `target`, cast to its dtype; a transposed matrix goes tile by tile."""
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


class SliceBuffer(ABC):
    """One slice of a parameter, filled in parts, then held by some devices."""

    @abstractmethod
    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: Sequence[jax.Device]): ...

    @abstractmethod
    def put(self, index: tuple[slice, ...], values: np.ndarray) -> None:
        """Writes a part; parts do not overlap, and several threads may write."""

    @abstractmethod
    def arrays(self) -> list[jax.Array]:
        """Returns the filled slice, once for each device."""


class HostBuffer(SliceBuffer):
    """A slice for CPU devices, in host memory that jax adopts without a copy."""

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


class DeviceBuffer(SliceBuffer):
    """A slice for accelerators; parts are sent one by one, so the host never holds all of it."""

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
            # Otherwise the host runs ahead of the transfers and holds every part.
            self._values.block_until_ready()

    def _zeros(self) -> jax.Array:
        if self._values is None:
            self._values = jnp.zeros(self._shape, self._dtype, device=self._devices[0])
        return self._values

    def arrays(self) -> list[jax.Array]:
        # The other devices copy from the first one.
        return [jax.device_put(self._zeros(), device) for device in self._devices]


@functools.partial(jax.jit, donate_argnums=0)
def _write(whole: jax.Array, part: jax.Array, starts: tuple[Int[Array, ""], ...]) -> jax.Array:
    """Returns `whole` with `part` written at `starts`, in place."""
    return jax.lax.dynamic_update_slice(whole, part, starts)


def holders_here(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[jax.Device]]:
    """Returns the distinct slices that this process holds, and the devices of each."""
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = box_of_slices(index or (slice(None),) * len(shape), shape)
        holders.setdefault(box, []).append(device)
    return holders


def held_elements(sharding: Sharding, shape: tuple[int, ...]) -> int:
    """Returns the number of elements that this process holds, each counted once."""
    return sum(volume(box) for box in holders_here(sharding, shape))


class ParameterBuffers:
    """The buffers of all slices of one parameter that this process holds."""

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
        """The number of elements that this process holds, each counted once."""
        return sum(volume(box) for box in self._buffers)

    def regions(self) -> list[Box]:
        """Returns the boxes to read: one around all slices if they fill it, else each slice."""
        around = bounding(list(self._buffers))
        return [around] if volume(around) == self.needed else list(self._buffers)

    def put(self, box: Box, values: np.ndarray) -> None:
        """Writes the values of `box` to every slice that overlaps it."""
        for held, buffer in self._buffers.items():
            if (shared := intersect(box, held)) is not None:
                buffer.put(slices_within(shared, held), values[slices_within(shared, box)])
                with self._lock:
                    self._missing -= volume(shared)

    def finish(self) -> jax.Array:
        """Returns the parameter after all of it was put."""
        assert self._missing == 0, f"{self._missing} of {self.needed} elements were not read"
        arrays = [array for buffer in self._buffers.values() for array in buffer.arrays()]
        return jax.make_array_from_single_device_arrays(
            self.shape, self._sharding, arrays, dtype=self._dtype
        )


BATCH_BYTES = 256 << 20  # sent at once; a larger array is sent alone


class Way(Enum):
    """Names the routes by which a parameter reaches the processes that hold it."""

    OWN = "own"
    PARTS = "parts"
    FROM_FIRST = "from the first process"


@dataclass(frozen=True, kw_only=True)
class Route:
    """The final sharding of a parameter, and the sharding in which this process reads it.

    `reading` is None on a process that reads nothing of it.
    """

    way: Way
    final: Sharding
    reading: Sharding | None


def route(final: Sharding, shape: tuple[int, ...], nbytes: int, *, small_bytes: int) -> Route:
    """Returns the route on which the job reads the fewest bytes."""
    if jax.process_count() == 1 or final.is_fully_addressable or _is_distinct(final, shape):
        return Route(way=Way.OWN, final=final, reading=final)
    if nbytes > small_bytes:
        for finer in _finer(final, shape):
            if _is_distinct(finer, shape):
                return Route(way=Way.PARTS, final=final, reading=finer)
    here = SingleDeviceSharding(jax.local_devices()[0]) if jax.process_index() == 0 else None
    return Route(way=Way.FROM_FIRST, final=final, reading=here)


def _is_distinct(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Returns whether no two processes hold the same elements."""
    holders: dict[str, set[int]] = {}
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in placed.items():
        holders.setdefault(str(index), set()).add(device.process_index)
    return all(len(processes) == 1 for processes in holders.values())


def _finer(final: Sharding, shape: tuple[int, ...]) -> Iterator[NamedSharding]:
    """Yields the sharding with one dimension split further, over as many axes as possible first."""
    assert isinstance(final, NamedSharding), final
    mesh = final.mesh
    entries = [*final.spec, *[None] * (len(shape) - len(final.spec))]
    held = [
        () if entry is None else (entry,) if isinstance(entry, str) else entry for entry in entries
    ]
    used = {axis for axes in held for axis in axes}
    free = [axis for axis in mesh.axis_names if axis not in used and mesh.shape[axis] > 1]
    for count, dimension in itertools.product(range(len(free), 0, -1), range(len(shape))):
        axes = (*held[dimension], *free[:count])
        if shape[dimension] % math.prod(mesh.shape[axis] for axis in axes) == 0:
            split = [*held[:dimension], axes, *held[dimension + 1 :]]
            yield NamedSharding(mesh, PartitionSpec(*(entry or None for entry in split)))


def all_gather_parts(arrays: list[jax.Array], finals: Sequence[Sharding]) -> list[jax.Array]:
    """Returns the arrays in their final shardings; a collective of all processes.

    Empties `arrays` on the way, so that each part is freed after it was gathered.
    """
    placed: list[jax.Array] = []
    sizes = [array.nbytes for array in arrays]
    arrays.reverse()  # so that the first can be taken from the end
    for batch in _batches(finals, sizes):
        moved = jax.jit(_same, out_shardings=batch)
        placed += jax.block_until_ready(moved([arrays.pop() for _ in batch]))
    return placed


def broadcast_arrays(
    arrays: Sequence[np.ndarray | None],
    wanted: Sequence[tuple[tuple[int, ...], np.dtype, Sharding]],
) -> list[jax.Array]:
    """Returns the arrays of the first process on all; the others pass None for each."""
    placed: list[jax.Array] = []
    pairs = list(zip(arrays, wanted, strict=True))
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in wanted]
    for batch in _batches(list(zip(pairs, sizes, strict=True)), sizes):
        total = sum(size for _, size in batch)
        # As bytes: the broadcast is a sum with zeros, which would lose the sign of -0.
        sent = [
            np.ascontiguousarray(held).view(np.uint8).ravel()
            for (held, _), _ in batch
            if held is not None
        ]
        message = np.concatenate(sent) if sent else np.zeros(total, np.uint8)
        message = np.asarray(multihost_utils.broadcast_one_to_all(message))
        start = 0
        for (_, (shape, dtype, final)), size in batch:
            values = message[start : start + size].view(dtype).reshape(shape)
            placed.append(_placed(values, final))
            start += size
    return placed


def _same(arrays: Any) -> Any:
    return arrays


def _placed(values: np.ndarray, sharding: Sharding) -> jax.Array:
    """Returns a global array with the parts of `values` that this process holds."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _batches(items: Iterable[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Yields runs of items that fit into a batch; a larger item is alone."""
    batch: list[Any] = []
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and held + size > BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch
