"""Weights that several processes hold are read once in the job, and spread by the devices' links.

large   each process reads another part of it; devices gather the parts
small   the first process reads it, and sends it to all others in one go
own     what only this process holds, it reads itself
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

BATCH_BYTES = 256 << 20  # sent at once; what is larger goes alone


class Way(Enum):
    """How a parameter comes to the processes that hold it."""

    OWN = "own"
    PARTS = "parts"
    FROM_FIRST = "from the first process"


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a parameter is to lie, how it gets there, and where this process reads it to.

    `reading` is None on a process that reads nothing of it.
    """

    way: Way
    final: Sharding
    reading: Sharding | None


def route(final: Sharding, shape: tuple[int, ...], nbytes: int, *, small_bytes: int) -> Route:
    """The way on which the fewest bytes are read."""
    if jax.process_count() == 1 or final.is_fully_addressable or _is_distinct(final, shape):
        return Route(way=Way.OWN, final=final, reading=final)
    if nbytes > small_bytes:
        for finer in _finer(final, shape):
            if _is_distinct(finer, shape):
                return Route(way=Way.PARTS, final=final, reading=finer)
    here = SingleDeviceSharding(jax.local_devices()[0]) if jax.process_index() == 0 else None
    return Route(way=Way.FROM_FIRST, final=final, reading=here)


def _is_distinct(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether no two processes hold the same elements."""
    holders: dict[str, set[int]] = {}
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in placed.items():
        holders.setdefault(str(index), set()).add(device.process_index)
    return all(len(processes) == 1 for processes in holders.values())


def _finer(final: Sharding, shape: tuple[int, ...]) -> Iterator[NamedSharding]:
    """The same sharding with one dimension split further, over more axes first."""
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


def spread_parts(arrays: list[jax.Array], finals: Sequence[Sharding]) -> list[jax.Array]:
    """The arrays moved to where they are to lie; all processes must call it alike.

    `arrays` is emptied on the way: what was moved does not lie beside what it became.
    """
    spread: list[jax.Array] = []
    sizes = [array.nbytes for array in arrays]
    arrays.reverse()  # so that the first can be taken from the end
    for batch in _batches(finals, sizes):
        moved = jax.jit(_same, out_shardings=batch)
        spread += jax.block_until_ready(moved([arrays.pop() for _ in batch]))
    return spread


def spread_from_first(
    arrays: Sequence[np.ndarray | None],
    wanted: Sequence[tuple[tuple[int, ...], np.dtype, Sharding]],
) -> list[jax.Array]:
    """The arrays that the first process has, on all; the others give None for each."""
    spread: list[jax.Array] = []
    pairs = list(zip(arrays, wanted, strict=True))
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in wanted]
    for batch in _batches(list(zip(pairs, sizes, strict=True)), sizes):
        total = sum(size for _, size in batch)
        # As bytes: a sum with zeros, which is how they travel, would lose the sign of -0.
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
            spread.append(_placed(values, final))
            start += size
    return spread


def _same(arrays: Any) -> Any:
    return arrays


def _placed(values: np.ndarray, sharding: Sharding) -> jax.Array:
    """The parts of `values` that this process holds, as part of the whole."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _batches(items: Iterable[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Runs of items whose sizes add up to no more than a batch; what is larger goes alone."""
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
