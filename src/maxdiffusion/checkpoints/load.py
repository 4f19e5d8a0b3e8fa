"""Strict, streaming loads: each process reads only the slices that its devices hold.

    stored tensors --match--> parameters --plan--> reads --threads--> buffers --> jax arrays

What several processes hold is read by one of them and spread (`spreading.py`). Everything that is
wrong with names and shapes is raised at once before a tensor is read. Reads are a few megabytes
each, so the host holds that much per thread beside the parameters themselves.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.weights.checkpoint_map import CheckpointMap
from maxdiffusion.weights.matching import Match, match_parameters
from maxdiffusion.weights.placing import (
    DeviceBuffer,
    HostBuffer,
    ParameterBuffers,
    held_elements,
)
from maxdiffusion.weights.reading import FileReader
from maxdiffusion.weights.reads import Read, parameter_reads
from maxdiffusion.weights.safetensors_index import StoredWeights
from maxdiffusion.weights.spreading import Route, Way, route, spread_from_first, spread_parts

READ_BYTES = 4 << 20
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, kw_only=True)
class ComponentSource:
    """What a component is loaded from, and the abstract parameters that it becomes."""

    stored: StoredWeights
    table: CheckpointMap
    abstract: nnx.State


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load cost this process."""

    bytes_read: int
    bytes_needed: int  # of the slices that its devices hold, each once, as stored
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """The speed of the load."""
        return self.bytes_read / 1e9 / self.seconds


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a load runs; the defaults suit local disks and network file systems."""

    threads: int = min(32, 2 * (os.cpu_count() or 1))
    read_bytes: int = READ_BYTES
    buffer: type[HostBuffer] | type[DeviceBuffer] | None = None  # None: by the kind of the devices
    small_bytes: int = 4 << 20  # up to so many are not worth a program of their own to spread

    def __post_init__(self) -> None:
        if self.small_bytes < 0:
            raise ValueError(f"small_bytes={self.small_bytes}: must be at least 0")
        for name, value in (("threads", self.threads), ("read_bytes", self.read_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")


class _Slot(NamedTuple):
    """A parameter and the buffers that it is loaded into."""

    match: Match
    route: Route
    buffers: ParameterBuffers | None  # None: this process reads nothing of it

    @property
    def bytes_needed(self) -> int:
        """The stored bytes of what this process holds, whoever reads them."""
        stored = sum(tensor.float_dtype.itemsize for tensor in self.match.sources)
        held = held_elements(self.route.final, self.match.variable.shape)
        return held // len(self.match.sources) * stored


def load_parameters(
    source: ComponentSource,
    *,
    mesh: Mesh | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> tuple[nnx.State, LoadReport]:
    """The parameters of one component, placed on the mesh (None: one device)."""
    states, report = load_components({"": source}, mesh=mesh, options=options, progress=progress)
    return states[""], report


def load_components(
    sources: Mapping[str, ComponentSource],
    *,
    mesh: Mesh | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, nnx.State], LoadReport]:
    """The parameters of several components, loaded side by side, and what it cost."""
    options = options or LoadOptions()
    began = time.perf_counter()
    slots = {
        name: [_slot(match, mesh, options) for match in matches]
        for name, matches in match_components(sources).items()
    }
    with FileReader() as reader:
        _run([_plan(found, options) for found in slots.values()], reader, options, progress)
        bytes_read = reader.bytes_read
    arrays = _finished([slot for found in slots.values() for slot in found])
    states = {name: _state(found, arrays) for name, found in slots.items()}
    report = LoadReport(
        bytes_read=bytes_read,
        bytes_needed=sum(slot.bytes_needed for found in slots.values() for slot in found),
        seconds=time.perf_counter() - began,
    )
    return states, report


def match_components(sources: Mapping[str, ComponentSource]) -> dict[str, list[Match]]:
    """Stored tensors for every parameter of all components; raises everything that is wrong."""
    found = {
        name: match_parameters(source.stored, source.table, source.abstract)
        for name, source in sources.items()
    }
    problems = [problem for _, wrong in found.values() for problem in wrong]
    if problems:
        raise ProblemsFound(problems)
    return {name: matches for name, (matches, _) in found.items()}


def sharding_of(match: Match, mesh: Mesh | None) -> Sharding:
    """Where a parameter lives."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return parameter_sharding(mesh, match.dims, match.variable.shape)


def _slot(match: Match, mesh: Mesh | None, options: LoadOptions) -> _Slot:
    variable = match.variable
    size = math.prod(variable.shape) * variable.dtype.itemsize
    way = route(sharding_of(match, mesh), variable.shape, size, small_bytes=options.small_bytes)
    if way.reading is None:
        return _Slot(match, way, None)
    buffers = ParameterBuffers(variable.shape, variable.dtype, way.reading, options.buffer)
    return _Slot(match, way, buffers)


def _plan(slots: list[_Slot], options: LoadOptions) -> list[Read]:
    """The reads of a component, in the order of its files."""
    reads = [
        read
        for slot in slots
        if slot.buffers is not None
        for read in parameter_reads(slot.match, slot.buffers, options.read_bytes)
    ]
    return sorted(reads, key=lambda read: (read.tensor.file, read.tensor.start, read.tensor_box))


def _run(
    plans: list[list[Read]], reader: FileReader, options: LoadOptions, progress: Progress | None
) -> None:
    """Runs all reads, those of different components in turn; the first error stops the rest."""
    reads = [read for turn in zip_longest(*plans) for read in turn if read is not None]
    total, done = sum(read.size for read in reads), 0
    with ThreadPoolExecutor(options.threads, thread_name_prefix="weights") as pool:
        pending = {pool.submit(read.run, reader) for read in reads}
        try:
            while pending:
                finished, pending = wait(pending, return_when=FIRST_EXCEPTION, timeout=0.2)
                done += sum(future.result() for future in finished)
                if progress is not None:
                    progress(done, total)
        finally:
            for future in pending:
                future.cancel()


def _finished(slots: list[_Slot]) -> dict[int, jax.Array]:
    """The parameter of every slot (by its id), where it is to lie."""
    ways: dict[Way, list[_Slot]] = {way: [] for way in Way}
    for slot in slots:
        ways[slot.route.way].append(slot)
    read = {id(slot): slot.buffers.finish() for slot in slots if slot.buffers is not None}
    own, parts, sent = ways[Way.OWN], ways[Way.PARTS], ways[Way.FROM_FIRST]
    arrays = {id(slot): read[id(slot)] for slot in own}
    if parts:
        moved = spread_parts(
            [read.pop(id(slot)) for slot in parts], [slot.route.final for slot in parts]
        )
        arrays |= {id(slot): array for slot, array in zip(parts, moved, strict=True)}
    if sent:
        held = [np.asarray(read[id(slot)]) if id(slot) in read else None for slot in sent]
        wanted = [
            (slot.match.variable.shape, slot.match.variable.dtype, slot.route.final)
            for slot in sent
        ]
        moved = spread_from_first(held, wanted)
        arrays |= {id(slot): array for slot, array in zip(sent, moved, strict=True)}
    return arrays


def _state(slots: list[_Slot], arrays: Mapping[int, jax.Array]) -> nnx.State:
    """The variables with their values, in the structure of the abstract state."""
    flat: list[tuple[tuple[Any, ...], nnx.Variable]] = [
        (slot.match.path, slot.match.variable.replace(arrays[id(slot)])) for slot in slots
    ]
    return nnx.from_flat_state(flat)
