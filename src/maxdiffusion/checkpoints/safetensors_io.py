"""Safetensors files: headers checked first, slices read by their bytes, and a streaming writer.

open_weights   the tensors of a component: one file, or shards with or without an index
read_header    the tensors of one file; read_metadata, its texts
TensorPatch    a change of a tensor that is made while it is read
Box            the part of an array between a start and a stop in every dimension
write_file     writes one tensor at a time, so that no file is ever held in memory
"""

import itertools
import json
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from maxdiffusion.errors import Collector, Problem, ProblemsFound

FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
# Parameters are floats; these sizes let the layout of files with other tensors be checked.
OTHER_ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16"), 2),
    **dict.fromkeys(("U32", "I32"), 4),
    **dict.fromkeys(("U64", "I64", "C64"), 8),
}
# The limit of the format; a longer header means that the first bytes are not a length.
MAX_HEADER_BYTES = 100_000_000
REMEDY = "Download or copy this file again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: its dtype as the format spells it, its shape, and its bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte, from the beginning of the file
    stop: int

    @property
    def float_dtype(self) -> np.dtype:
        """The numpy dtype of a float tensor."""
        return FLOAT_DTYPES[self.dtype]


class _BadFileError(Exception):
    """Says why a file is not a safetensors file."""


def read_header(file: Path) -> tuple[StoredTensor, ...]:
    """Returns the tensors of a file. Raises ProblemsFound if the file is damaged."""
    try:
        header, data_start, size = _parse(file)
        header.pop("__metadata__", None)
        tensors = tuple(_stored(file, name, fields, data_start) for name, fields in header.items())
        _check_layout(tensors, data_start, size)
    except OSError as error:
        problem = _problem(file, f"cannot be read ({error.strerror})", "Check its permissions")
        raise ProblemsFound([problem]) from error
    except _BadFileError as error:
        raise ProblemsFound([_problem(file, str(error), REMEDY)]) from error
    return tensors


def read_metadata(file: Path) -> Mapping[str, str]:
    """Returns the texts that the header of a file holds besides its tensors."""
    metadata = _parse(file)[0].get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def item_size(dtype: str) -> int | None:
    """Returns the bytes of one element, or None for a dtype that the format does not have."""
    if dtype in FLOAT_DTYPES:
        return FLOAT_DTYPES[dtype].itemsize
    return OTHER_ITEM_SIZES.get(dtype)


def _problem(file: Path, rule: str, remedy: str) -> Problem:
    return Problem(name="weights file", value=str(file), rule=rule, remedy=remedy)


def _parse(file: Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header, the offset of the data, and the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8:
            raise _BadFileError(f"is truncated: expected at least 8 bytes, found {size}")
        if length > MAX_HEADER_BYTES:
            raise _BadFileError(f"is corrupt: it claims a header of {length} bytes")
        if 8 + length > size:
            raise _BadFileError(
                f"is truncated: expected at least {8 + length} bytes for its header, found {size}"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise _BadFileError(f"is corrupt: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _BadFileError("is corrupt: its header is not a JSON object")
    return header, 8 + length, size


def _stored(file: Path, name: str, fields: Any, data_start: int) -> StoredTensor:
    """Returns one tensor of the header after checking its fields against each other."""
    try:
        dtype, shape = str(fields["dtype"]), tuple(int(size) for size in fields["shape"])
        start, stop = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _BadFileError(f"is corrupt: tensor {name} lacks a dtype, shape or offsets") from error
    width = item_size(dtype)
    needed = None if width is None else width * math.prod(shape)
    if needed is not None and stop - start != needed:
        raise _BadFileError(
            f"is corrupt: tensor {name} {dtype}{list(shape)} needs {needed} bytes,"
            f" its offsets give {stop - start}"
        )
    span = {"start": data_start + start, "stop": data_start + stop}
    return StoredTensor(name=name, file=file, dtype=dtype, shape=shape, **span)


def _check_layout(tensors: Iterable[StoredTensor], data_start: int, size: int) -> None:
    """Raises unless the tensors fill the file without gaps or overlaps."""
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end or tensor.stop < tensor.start:
            raise _BadFileError(
                f"is corrupt: tensor {tensor.name} has bytes {tensor.start} to {tensor.stop},"
                f" the tensor before it ends at {end}"
            )
        end = tensor.stop
    if end != size:
        state = "truncated" if size < end else "too long"
        raise _BadFileError(f"is {state}: expected {end} bytes, found {size}")


# diffusers' and transformers' own names come before variants (`….fp16.safetensors`).
STEMS = ("diffusion_pytorch_model", "model")
INDEX_SUFFIX = ".safetensors.index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def _same_name(name: str) -> str:
    return name


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """All tensors of a component by name, and the files that hold them.

    The names are diffusers'. Files that spell them otherwise are translated when they are opened
    (`original_files`); `written` returns the spelling of the files, for messages.
    """

    folder: Path  # or the file, where it is one
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    patches: Mapping[str, tuple["TensorPatch", ...]] = field(default_factory=dict, repr=False)
    patch_files: tuple[Path, ...] = ()  # other files that patches read
    patch_notes: tuple[str, ...] = ()  # one for each of them: how its values are used
    written: Callable[[str], str] = field(default=_same_name, repr=False)


def open_weights(folder: Path) -> StoredWeights:
    """Returns the tensors in a component's folder; reads only headers.

    Raises ProblemsFound with everything that is wrong there.
    """
    return _open(folder, _files(folder))


def open_file(file: Path) -> StoredWeights:
    """Returns the tensors of a single file; reads only its header."""
    return _open(file, _Listing(files=(file,)))


def _open(folder: Path, listed: "_Listing") -> StoredWeights:
    problems = Collector(listed.problems)
    tensors: dict[str, StoredTensor] = {}
    for file in listed.files:
        with problems:
            for tensor in read_header(file):
                if tensor.name in tensors:
                    problems.problems.append(_twice(tensor, tensors[tensor.name].file))
                tensors[tensor.name] = tensor
    problems.raise_if_any()
    misplaced = _misplaced(listed.index, tensors)
    if misplaced:
        raise ProblemsFound(misplaced)
    return StoredWeights(folder=folder, files=listed.files, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """The weights files of a folder, the index (tensor -> file name), and absent files."""

    files: tuple[Path, ...] = ()
    index: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def _files(folder: Path) -> _Listing:
    """Returns the files of the first layout that the folder has: index, single file, shards."""
    indices = [folder / f"{stem}{INDEX_SUFFIX}" for stem in STEMS]
    singles = [folder / f"{stem}.safetensors" for stem in STEMS]
    for candidate in (*indices, *singles, *sorted(folder.glob(f"*{INDEX_SUFFIX}"))):
        if candidate.is_file() and candidate.name.endswith(INDEX_SUFFIX):
            return _indexed(candidate)
        if candidate.is_file():
            return _Listing(files=(candidate,))
    files = sorted(folder.glob("*.safetensors"))
    problems = _missing_shards(folder, files) if files else [_no_weights(folder)]
    return _Listing(files=tuple(files), problems=tuple(problems))


def _indexed(index: Path) -> _Listing:
    """Returns the files that an index names."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return _Listing(problems=(_bad_index(index, error),))
    files = [index.parent / name for name in names]
    absent = [file for file in files if not file.is_file()]
    return _Listing(
        files=tuple(file for file in files if file not in absent),
        index=weight_map,
        problems=tuple(_absent(file, f"{index.name} names it") for file in absent),
    )


def _missing_shards(folder: Path, files: list[Path]) -> list[Problem]:
    """Returns one problem for every shard that is absent by the numbers of the others."""
    names = {file.name for file in files}
    series = {
        (match["stem"], int(match["count"])) for name in names if (match := SHARD.fullmatch(name))
    }
    wanted = [
        f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        for stem, count in sorted(series)
        for number in range(1, count + 1)
    ]
    return [
        _absent(folder / name, "the other shards are numbered")
        for name in wanted
        if name not in names
    ]


def _misplaced(named: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> list[Problem]:
    """Returns one problem for every tensor that is not in the file that the index names."""
    return [
        Problem(
            name=f"tensor {name}",
            value=file,
            rule="does not hold the tensor that the index lists for it",
            remedy="Download or copy the index and this file again",
        )
        for name, file in named.items()
        if name not in tensors or tensors[name].file.name != Path(file).name
    ]


def _absent(file: Path, reason: str) -> Problem:
    return Problem(
        name="weights file",
        value=str(file),
        rule=f"is missing, and {reason}",
        remedy="Download or copy this file into the folder",
    )


def _twice(tensor: StoredTensor, other: Path) -> Problem:
    return Problem(
        name=f"tensor {tensor.name}",
        value=str(tensor.file),
        rule=f"is also in {other.name}, and a folder without an index may hold each tensor once",
        remedy="Keep one set of files",
    )


def _bad_index(index: Path, error: Exception) -> Problem:
    return Problem(
        name="weights index",
        value=str(index),
        rule=f"must be JSON with a weight_map from tensors to files ({error!r})",
        remedy="Download or copy this file again",
    )


def _no_weights(folder: Path) -> Problem:
    others = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)
    )
    found = f"; found only {', '.join(others)}" if others else ""
    return Problem(
        name="weights",
        value=str(folder),
        rule=f"has no .safetensors file{found}",
        remedy="Download the safetensors weights of this component into the folder",
    )


DTYPE_NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
ALIGNMENT = 8  # bytes; the format asks for data that starts at a multiple of it


@dataclass(frozen=True, kw_only=True)
class TensorToWrite:
    """A tensor to write: name, dtype and shape, and a function that fetches its values."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    file: Path, tensors: Sequence[TensorToWrite], about: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file with the tensors in the given order; `about` is its metadata."""
    with file.open("wb") as stream:
        stream.write(_header(tensors, about or {}))
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.values().astype(tensor.dtype, copy=False))
            assert values.shape == tensor.shape, (tensor.name, values.shape, tensor.shape)
            stream.write(values.reshape(-1).view(np.uint8).data)


def _header(tensors: Sequence[TensorToWrite], about: Mapping[str, str]) -> bytes:
    # torch readers of the format require this mark.
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    start = 0
    for tensor in tensors:
        fields[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.size],
        }
        start += tensor.size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of a whole array."""
    return tuple((0, size) for size in shape)


def box_of_slices(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box that basic slices (without steps) cut out of an array of `shape`."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def extents(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Returns the number of elements of a box."""
    return math.prod(extents(box))


def intersect(first: Box, second: Box) -> Box | None:
    """Returns the part that two boxes share, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def bounding(boxes: Sequence[Box]) -> Box:
    """Returns the smallest box around all of `boxes`."""
    return tuple(
        (min(start for start, _ in spans), max(stop for _, stop in spans))
        for spans in zip(*boxes, strict=True)
    )


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the slices that cut `box` out of an array that holds `outer`."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )


class TensorReader(ABC):
    """Interface that a load reads tensors through, from many threads at once."""

    bytes_read: int = 0

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def read(self, tensor: StoredTensor, box: Box) -> np.ndarray:
        """Returns the values in `box` of a stored tensor; valid until this thread reads again."""

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""


class TensorPatch(ABC):
    """A change of the values of one tensor, made in float32 while they are read."""

    @abstractmethod
    def apply(self, values: np.ndarray, box: Box, reader: TensorReader) -> np.ndarray:
        """Returns the new values of `box` of the tensor, from its float32 `values` there."""


class FileReader(TensorReader):
    """Reads with `preadv`, the longest contiguous runs first, into a buffer per thread.

    The memory map of safetensors' own reader is as fast, but keeps every page that it touched
    resident and turns a file that became shorter into a bus error (docs/design/weight_loading.md).
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self.bytes_read = 0

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, tensor: StoredTensor, box: Box) -> np.ndarray:
        dtype = tensor.float_dtype
        size = volume(box) * dtype.itemsize
        scratch = self._thread_scratch(size)
        descriptor = self._descriptor(tensor.file)
        filled = 0
        for start, length in byte_runs(tensor, box):
            _fill(descriptor, scratch[filled : filled + length], start, tensor)
            filled += length
        with self._lock:
            self.bytes_read += size
        return np.frombuffer(scratch, np.uint8, size).view(dtype).reshape(extents(box))

    def _thread_scratch(self, size: int) -> memoryview:
        """Returns at least `size` bytes of this thread; reused, so that their pages stay mapped."""
        held: memoryview | None = self._scratch.__dict__.get("view")
        if held is None or len(held) < size:
            held = memoryview(np.empty(size, np.uint8).data).cast("B")
            self._scratch.view = held
        return held

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]


def byte_runs(tensor: StoredTensor, box: Box) -> Iterator[tuple[int, int]]:
    """Yields (first byte, length) of every contiguous run of the file in the box, in order."""
    shape, width = tensor.shape, tensor.float_dtype.itemsize
    split = len(shape)  # dimensions from here on are covered in full
    while split and box[split - 1] == (0, shape[split - 1]):
        split -= 1
    outer, inner = box[: max(split - 1, 0)], box[max(split - 1, 0) :]
    length = volume(inner) * width
    strides = [math.prod(shape[dimension + 1 :]) * width for dimension in range(len(shape))]
    offset = tensor.start + sum(
        start * stride for (start, _), stride in zip(inner, strides[len(outer) :], strict=True)
    )
    for index in itertools.product(*(range(start, stop) for start, stop in outer)):
        yield offset + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


def _fill(descriptor: int, target: memoryview, start: int, tensor: StoredTensor) -> None:
    """Fills `target` from the file. Raises ProblemsFound if the file became shorter."""
    while target:
        count = os.preadv(descriptor, [target], start)
        if count == 0:
            raise ProblemsFound([_changed(tensor, start)])
        target, start = target[count:], start + count


def _changed(tensor: StoredTensor, end: int) -> Problem:
    return Problem(
        name="weights file",
        value=str(tensor.file),
        rule=f"became shorter during the load: it ends at byte {end} inside tensor {tensor.name}",
        remedy="Start again, and do not change the files during a load",
    )
