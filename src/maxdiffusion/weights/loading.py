"""Strict, streaming loads: each process reads only the slices that its devices hold.

    stored tensors --match--> parameters --plan--> reads --threads--> buffers --> jax arrays

Everything that is wrong with names and shapes is raised at once before a tensor is read. Reads are
a few megabytes each, so the host holds that much per thread beside the parameters themselves.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.weights.boxes import Box, extents, intersect, slices_within, volume
from maxdiffusion.weights.checkpoint_map import CheckpointMap, Transform
from maxdiffusion.weights.matching import Match, match_parameters
from maxdiffusion.weights.placing import DeviceBuffer, HostBuffer, ParameterBuffers
from maxdiffusion.weights.reading import FileReader
from maxdiffusion.weights.safetensors_file import StoredTensor
from maxdiffusion.weights.safetensors_index import StoredWeights

READ_BYTES = 8 << 20
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

    def __post_init__(self) -> None:
        for name, value in (("threads", self.threads), ("read_bytes", self.read_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class _Read:
    """One read: a box of a stored tensor, and the box of the parameter that it becomes."""

    tensor: StoredTensor
    tensor_box: Box
    transform: Transform
    stacked: bool
    target: ParameterBuffers
    target_box: Box
    region: Box  # what of the target box is wanted

    def run(self, reader: FileReader) -> int:
        """Reads, rearranges and places the values; returns their bytes."""
        source = reader.read(self.tensor, self.tensor_box)
        values = self.transform.apply(source)
        values = values[None] if self.stacked else values
        wanted = intersect(self.target_box, self.region)
        assert wanted is not None, (self.target_box, self.region)
        self.target.put(wanted, values[slices_within(wanted, self.target_box)])
        return source.nbytes


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
    matches = match_components(sources)
    buffers = {
        name: [_buffers(match, mesh, options) for match in found] for name, found in matches.items()
    }
    plans = [
        sorted(
            chain.from_iterable(
                map(_reads, found, buffers[name], [options.read_bytes] * len(found))
            ),
            key=lambda read: (read.tensor.file, read.tensor.start, read.tensor_box),
        )
        for name, found in matches.items()
    ]
    with FileReader() as reader:
        _run(plans, reader, options.threads, progress)
        bytes_read = reader.bytes_read
    states = {name: _state(found, buffers[name]) for name, found in matches.items()}
    needed = sum(
        target.needed * match.sources[0].float_dtype.itemsize
        for name, found in matches.items()
        for match, target in zip(found, buffers[name], strict=True)
    )
    seconds = time.perf_counter() - began
    return states, LoadReport(bytes_read=bytes_read, bytes_needed=needed, seconds=seconds)


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


def _buffers(match: Match, mesh: Mesh | None, options: LoadOptions) -> ParameterBuffers:
    variable = match.variable
    sharding = sharding_of(match, mesh)
    return ParameterBuffers(variable.shape, variable.dtype, sharding, options.buffer)


def _reads(match: Match, target: ParameterBuffers, read_bytes: int) -> Iterator[_Read]:
    """Every read that a parameter needs in this process."""
    transform, stacked = match.entry.transform, match.entry.stacked
    for region in target.regions():
        layers, box = (region[0], region[1:]) if stacked else ((0, 1), region)
        for layer in range(*layers):
            tensor = match.sources[layer]
            lead = ((layer, layer + 1),) if stacked else ()
            for part in _parts(transform, box, tensor, read_bytes):
                yield _Read(
                    tensor=tensor,
                    tensor_box=_tensor_box(transform, part),
                    transform=transform,
                    stacked=stacked,
                    target=target,
                    target_box=(*lead, *part),
                    region=region,
                )


def _tensor_box(transform: Transform, box: Box) -> Box:
    """The box of the stored tensor that becomes `box` of the parameter (or of one layer of it)."""
    dimensions = transform.dimensions(len(box))
    return tuple((0, 1) if dimension is None else box[dimension] for dimension in dimensions)


def _parts(transform: Transform, box: Box, tensor: StoredTensor, read_bytes: int) -> Iterator[Box]:
    """`box`, widened to whole units and cut along the slowest dimension of the file into reads."""
    if not box:
        yield box
        return
    unit, (start, stop) = transform.unit, box[-1]
    box = (*box[:-1], (start // unit * unit, -(-stop // unit) * unit))
    dimensions = [d for d in transform.dimensions(len(box)) if d is not None]
    cut = next((d for d in dimensions if extents(box)[d] > 1), dimensions[0])
    start, stop = box[cut]
    row_bytes = volume(box) // (stop - start) * tensor.float_dtype.itemsize
    grain = unit if cut == len(box) - 1 else 1
    step = max(grain, read_bytes // row_bytes // grain * grain)
    for first in range(start, stop, step):
        yield (*box[:cut], (first, min(first + step, stop)), *box[cut + 1 :])


def _run(
    plans: list[list[_Read]], reader: FileReader, threads: int, progress: Progress | None
) -> None:
    """Runs all reads, those of different components in turn; the first error stops the rest."""
    reads = [read for turn in zip_longest(*plans) for read in turn if read is not None]
    sizes = [volume(read.tensor_box) * read.tensor.float_dtype.itemsize for read in reads]
    total, done = sum(sizes), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
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


def _state(matches: list[Match], buffers: list[ParameterBuffers]) -> nnx.State:
    """The variables with their values, in the structure of the abstract state."""
    flat: list[tuple[tuple[Any, ...], nnx.Variable]] = [
        (match.path, match.variable.replace(target.finish()))
        for match, target in zip(matches, buffers, strict=True)
    ]
    return nnx.from_flat_state(flat)
