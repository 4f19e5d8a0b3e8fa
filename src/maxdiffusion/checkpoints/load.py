"""Strict, streaming loads: each process reads only the slices that its devices hold.

    stored tensors --match--> parameters --read plan--> reads --threads--> buffers --> jax arrays

Parameters that several processes hold are read once in the job and then sent to the others
(`device_buffers`). All problems of names and shapes are raised before a tensor is read. A read is a
few megabytes, so the host needs that much per thread in addition to the parameters.

Weights that a model keeps in 8 bits are read one parameter after the other, all layers of it, and
quantized on the devices that hold it: no more than one of them is ever there in its wide dtype.
"""

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from maxdiffusion.checkpoints.device_buffers import (
    DeviceBuffer,
    HostBuffer,
    ParameterBuffers,
    Route,
    Way,
    all_gather_parts,
    broadcast_arrays,
    held_elements,
    route,
)
from maxdiffusion.checkpoints.safetensors_io import (
    FLOAT_DTYPES,
    Box,
    FileReader,
    StoredTensor,
    StoredWeights,
    TensorPatch,
    TensorReader,
    extents,
    intersect,
    slices_within,
    volume,
)
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.models.abstract import KERNEL, SCALE, dotted
from maxdiffusion.models.checkpoint_map import CheckpointMap, Entry, Transform

ParameterPath = tuple[Any, ...]
Flat = dict[ParameterPath, nnx.Variable]  # parameters


@dataclass(frozen=True, kw_only=True)
class Match:
    """A parameter (an abstract variable) and the stored tensors that it is made of.

    A parameter in 8 bits has a `scale` too, which is made of the same tensors.
    """

    path: ParameterPath
    variable: nnx.Variable
    entry: Entry
    sources: tuple[StoredTensor, ...]
    patches: tuple[tuple[TensorPatch, ...], ...]  # of each source
    scale: nnx.Variable | None = None

    @property
    def variables(self) -> dict[ParameterPath, nnx.Variable]:
        """The variables that the tensors become, by their paths."""
        made = {self.path: self.variable}
        return made if self.scale is None else made | {(*self.path[:-1], SCALE): self.scale}

    @property
    def read_as(self) -> np.dtype:
        """The dtype that the tensors are read in."""
        if self.scale is None:
            return np.dtype(self.variable.dtype)
        return np.dtype(self.variable.get_metadata()["read_as"])


def match_parameters(
    stored: StoredWeights, table: CheckpointMap, abstract: nnx.State
) -> list[Match]:
    """Returns the sources of every parameter.

    Raises ProblemsFound with all tensors that are missing, unexpected or of another shape.
    """
    variables = {dotted(path): (path, value) for path, value in nnx.to_flat_state(abstract)}
    scales = {path for path in variables if path.endswith(f".{SCALE}")}
    differing = sorted((set(variables) - scales) ^ set(table.parameters))
    assert not differing, f"model and checkpoint map differ in {differing}"
    tensors, unexpected = _by_canonical_name(stored, table)
    problems = Collector([_unexpected(stored, name) for name in unexpected])
    matches = []
    for entry in table.entries:
        path, variable = variables[entry.parameter]
        shape, names = entry.source_shape(variable.shape), table.sources(entry)
        assert not entry.stacked or variable.shape[0] == len(names), (entry, variable.shape)
        for name in names:
            with problems:
                _check_tensor(stored, name, tensors.get(name), shape)
        found = tuple(tensors[name] for name in names if name in tensors)
        patches = tuple(stored.patches.get(name, ()) for name in names)
        _, scale = variables.get(scale_of(entry.parameter), (None, None))
        matches.append(
            Match(
                path=path,
                variable=variable,
                entry=entry,
                sources=found,
                patches=patches,
                scale=scale,
            )
        )
    problems.raise_if_any()
    return matches


def scale_of(parameter: str) -> str:
    """Returns the dotted path of the scale that a parameter has if it is in 8 bits."""
    module, _, leaf = parameter.rpartition(".")
    return f"{module}.{SCALE}" if leaf == KERNEL else ""


def source_shapes(table: CheckpointMap, abstract: nnx.State) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every checkpoint tensor that a model needs."""
    shapes = {dotted(path): value.shape for path, value in nnx.to_flat_state(abstract)}
    return {
        name: entry.source_shape(shapes[entry.parameter])
        for entry in table.entries
        for name in table.sources(entry)
    }


def _by_canonical_name(
    stored: StoredWeights, table: CheckpointMap
) -> tuple[Mapping[str, StoredTensor], list[str]]:
    """Returns the tensors that the map knows, under its names, and the unexpected names."""
    known = {name for entry in table.entries for name in table.sources(entry)}
    tensors: dict[str, StoredTensor] = {}
    unexpected = []
    for name, tensor in stored.tensors.items():
        canonical = table.canonical(name)
        if canonical not in known:
            if not table.ignores(name):
                unexpected.append(name)
        elif name == canonical or canonical not in tensors:
            # A tied tensor may be stored under both of its names: prefer the one in the map.
            tensors[canonical] = tensor
    return tensors, unexpected


def _check_tensor(
    stored: StoredWeights, name: str, tensor: StoredTensor | None, shape: tuple[int, ...]
) -> None:
    """Raises ProblemsFound unless a parameter of `shape` can be made of the tensor."""
    if tensor is None:
        value, rule = "missing", f"the model needs it, with shape {list(shape)}"
    elif tensor.shape != shape:
        value, rule = "mis-shaped", f"must have shape {list(shape)}, found {list(tensor.shape)}"
    elif tensor.dtype not in FLOAT_DTYPES:
        value, rule = tensor.dtype, f"must be one of {', '.join(FLOAT_DTYPES)}"
    else:
        return
    raise ProblemsFound([_problem(stored, name, value, rule)])


def _unexpected(stored: StoredWeights, name: str) -> Problem:
    shape = list(stored.tensors[name].shape)
    rule = f"the model has no such parameter (shape {shape})"
    return _problem(stored, name, "unexpected", rule)


def _problem(stored: StoredWeights, name: str, value: str, rule: str) -> Problem:
    return Problem(
        name=f"{stored.folder.name}: {stored.written(name)}",
        value=value,
        rule=rule,
        remedy="Use weights and config.json of the same model",
    )


@dataclass(frozen=True, kw_only=True)
class Read:
    """Reads one box of a stored tensor into the box of the parameter that it becomes."""

    tensor: StoredTensor
    patches: tuple[TensorPatch, ...]
    tensor_box: Box
    transform: Transform
    stacked: bool
    target: ParameterBuffers
    target_box: Box
    region: Box  # the wanted part of the target box

    @property
    def size(self) -> int:
        """The bytes to read."""
        return volume(self.tensor_box) * self.tensor.float_dtype.itemsize

    def run(self, reader: TensorReader) -> int:
        """Reads, patches and rearranges the values, and stores them; returns their bytes."""
        source = reader.read(self.tensor, self.tensor_box)
        if self.patches:
            source = source.astype(np.float32)  # a copy: patches may read, too
        for patch in self.patches:
            source = patch.apply(source, self.tensor_box, reader)
        values = self.transform.apply(source)
        values = values[None] if self.stacked else values
        wanted = intersect(self.target_box, self.region)
        assert wanted is not None, (self.target_box, self.region)
        self.target.put(wanted, values[slices_within(wanted, self.target_box)])
        return self.size


def read_plan(match: Match, target: ParameterBuffers, read_bytes: int) -> Iterator[Read]:
    """Yields every read that a parameter needs in this process."""
    transform, stacked = match.entry.transform, match.entry.stacked
    for region in target.regions():
        layers, box = (region[0], region[1:]) if stacked else ((0, 1), region)
        for layer in range(*layers):
            tensor = match.sources[layer]
            lead = ((layer, layer + 1),) if stacked else ()
            for part in _parts(transform, box, tensor, read_bytes):
                yield Read(
                    tensor=tensor,
                    patches=match.patches[layer],
                    tensor_box=_tensor_box(transform, part),
                    transform=transform,
                    stacked=stacked,
                    target=target,
                    target_box=(*lead, *part),
                    region=region,
                )


def _tensor_box(transform: Transform, box: Box) -> Box:
    """Returns the box of the stored tensor that becomes `box` of the parameter (or of a layer)."""
    dimensions = transform.dimensions(len(box))
    return tuple((0, 1) if dimension is None else box[dimension] for dimension in dimensions)


def _parts(transform: Transform, box: Box, tensor: StoredTensor, read_bytes: int) -> Iterator[Box]:
    """Yields `box`, widened to whole units, in reads cut along the file's slowest dimension."""
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


READ_BYTES = 4 << 20
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, kw_only=True)
class ComponentSource:
    """The stored weights of a component, its checkpoint map and its abstract parameters."""

    stored: StoredWeights
    table: CheckpointMap
    abstract: nnx.State


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Bytes and seconds that a load cost this process."""

    bytes_read: int
    bytes_needed: int  # of the slices that its devices hold, each once, as stored
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """The rate of the load."""
        return self.bytes_read / 1e9 / self.seconds


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of a load; the defaults suit local disks and network file systems."""

    threads: int = min(32, 2 * (os.cpu_count() or 1))
    read_bytes: int = READ_BYTES
    buffer: type[HostBuffer] | type[DeviceBuffer] | None = None  # None: by the kind of the devices
    small_bytes: int = 4 << 20  # parameters up to this size are sent together by one process
    reader: Callable[[], TensorReader] = FileReader

    def __post_init__(self) -> None:
        if self.small_bytes < 0:
            raise ValueError(f"small_bytes={self.small_bytes}: must be at least 0")
        for name, value in (("threads", self.threads), ("read_bytes", self.read_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")


class _Slot(NamedTuple):
    """A parameter and the buffers that it is read into."""

    match: Match
    route: Route
    buffers: ParameterBuffers | None  # None: this process reads nothing of it


def load_parameters(
    source: ComponentSource,
    *,
    mesh: Mesh | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> tuple[nnx.State, LoadReport]:
    """Returns the parameters of one component on the mesh (None: one device), and the cost."""
    states, report = load_components({"": source}, mesh=mesh, options=options, progress=progress)
    return states[""], report


def load_components(
    sources: Mapping[str, ComponentSource],
    *,
    mesh: Mesh | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, nnx.State], LoadReport]:
    """Returns the parameters of several components, loaded concurrently, and the cost."""
    options = options or LoadOptions()
    began = time.perf_counter()
    batches = _batches(match_components(sources))
    needed = [_stored_bytes(batch, mesh) for batch in batches]
    states: dict[str, Flat] = {name: {} for name in sources}
    with options.reader() as reader:
        for index, batch in enumerate(batches):
            seen = _part_of(progress, sum(needed[:index]), sum(needed[index + 1 :]))
            for name, loaded in _load_batch(batch, mesh, reader, options, seen).items():
                states[name] |= loaded
        bytes_read = reader.bytes_read
    report = LoadReport(
        bytes_read=bytes_read,
        bytes_needed=sum(needed),
        seconds=time.perf_counter() - began,
    )
    return {name: nnx.from_flat_state([*flat.items()]) for name, flat in states.items()}, report


def _batches(matches: Mapping[str, list[Match]]) -> list[dict[str, list[Match]]]:
    """Returns what is read at once: all parameters in their own dtype, then each of the others."""
    as_stored = {
        name: [match for match in found if match.scale is None] for name, found in matches.items()
    }
    quantized = [
        {name: [match]}
        for name, found in matches.items()
        for match in found
        if match.scale is not None
    ]
    return [as_stored, *quantized]


def _stored_bytes(batch: Mapping[str, list[Match]], mesh: Mesh | None) -> int:
    """Returns the stored bytes of the slices that this process holds, whichever one reads them."""
    total = 0
    for match in (match for found in batch.values() for match in found):
        stored = sum(tensor.float_dtype.itemsize for tensor in match.sources)
        held = held_elements(sharding_of(match.variable, mesh), match.variable.shape)
        total += held // len(match.sources) * stored
    return total


def _part_of(progress: Progress | None, before: int, after: int) -> Progress | None:
    """Returns the progress of a batch as part of a load with these bytes before and after it."""
    if progress is None:
        return None
    return lambda done, total: progress(before + done, before + total + after)


def _load_batch(
    batch: Mapping[str, list[Match]],
    mesh: Mesh | None,
    reader: TensorReader,
    options: LoadOptions,
    progress: Progress | None,
) -> dict[str, Flat]:
    """Returns the parameters of one batch, by component."""
    slots = {
        name: [_slot(match, mesh, options) for match in found] for name, found in batch.items()
    }
    _run([_plan(found, options) for found in slots.values()], reader, options, progress)
    arrays = _finished([slot for found in slots.values() for slot in found])
    loaded: dict[str, Flat] = {name: {} for name in slots}
    for name, found in slots.items():
        for slot in found:
            loaded[name] |= _filled(slot.match, arrays.pop(id(slot)), mesh)
    return loaded


def _filled(match: Match, array: jax.Array, mesh: Mesh | None) -> Flat:
    """Returns the variables that a parameter becomes; this is where weights are quantized."""
    if match.scale is None:
        return {match.path: match.variable.replace(array)}
    shardings = tuple(sharding_of(variable, mesh) for variable in match.variables.values())
    quantize = _quantizer(match.variable.get_metadata()["weight_format"], shardings)
    # Otherwise the next parameter is read while the wide form of this one is still there.
    made = jax.block_until_ready(quantize(array))
    return {
        path: variable.replace(value)
        for (path, variable), value in zip(match.variables.items(), made, strict=True)
    }


@functools.cache
def _quantizer(weight_format: Any, shardings: tuple[Sharding, ...]) -> Callable[..., Any]:
    """Returns the program that makes values and scales in these shardings."""
    return jax.jit(weight_format.quantized, out_shardings=shardings)


def match_components(sources: Mapping[str, ComponentSource]) -> dict[str, list[Match]]:
    """Returns the matches of every component. Raises ProblemsFound with the problems of all."""
    found: dict[str, list[Match]] = {}
    problems = Collector()
    for name, source in sources.items():
        with problems:
            found[name] = match_parameters(source.stored, source.table, source.abstract)
    problems.raise_if_any()
    return found


def sharding_of(variable: nnx.Variable, mesh: Mesh | None) -> Sharding:
    """Returns the sharding of a parameter; one without names of dimensions is replicated."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    dims = tuple(variable.get_metadata().get("dims", ()))
    return parameter_sharding(mesh, dims, variable.shape)


def _slot(match: Match, mesh: Mesh | None, options: LoadOptions) -> _Slot:
    shape, dtype = match.variable.shape, match.read_as
    size, final = math.prod(shape) * dtype.itemsize, sharding_of(match.variable, mesh)
    way = route(final, shape, size, small_bytes=options.small_bytes)
    if way.reading is None:
        return _Slot(match, way, None)
    return _Slot(match, way, ParameterBuffers(shape, dtype, way.reading, options.buffer))


def _plan(slots: list[_Slot], options: LoadOptions) -> list[Read]:
    """Returns the reads of a component, in the order of its files."""
    reads = [
        read
        for slot in slots
        if slot.buffers is not None
        for read in read_plan(slot.match, slot.buffers, options.read_bytes)
    ]
    return sorted(reads, key=lambda read: (read.tensor.file, read.tensor.start, read.tensor_box))


def _run(
    plans: list[list[Read]], reader: TensorReader, options: LoadOptions, progress: Progress | None
) -> None:
    """Runs all reads, alternating between components; the first error stops the rest."""
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
    """Returns the parameter of every slot by the slot's id, in its final sharding."""
    ways: dict[Way, list[_Slot]] = {way: [] for way in Way}
    for slot in slots:
        ways[slot.route.way].append(slot)
    read = {id(slot): slot.buffers.finish() for slot in slots if slot.buffers is not None}
    own, parts, sent = ways[Way.OWN], ways[Way.PARTS], ways[Way.FROM_FIRST]
    arrays = {id(slot): read[id(slot)] for slot in own}
    if parts:
        moved = all_gather_parts(
            [read.pop(id(slot)) for slot in parts], [slot.route.final for slot in parts]
        )
        arrays |= {id(slot): array for slot, array in zip(parts, moved, strict=True)}
    if sent:
        held = [np.asarray(read[id(slot)]) if id(slot) in read else None for slot in sent]
        wanted = [
            (slot.match.variable.shape, slot.match.read_as, slot.route.final) for slot in sent
        ]
        moved = broadcast_arrays(held, wanted)
        arrays |= {id(slot): array for slot, array in zip(sent, moved, strict=True)}
    return arrays
