"""Reads boxes of stored tensors: only the bytes of the box, in the longest runs of the file."""

import itertools
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.weights.boxes import Box, extents, volume
from maxdiffusion.weights.safetensors_file import StoredTensor


class FileReader:
    """Open files, read by many threads at once; counts the bytes that were read."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, tensor: StoredTensor, box: Box) -> np.ndarray:
        """The values in `box` of a stored tensor; valid until this thread reads again."""
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
        """At least `size` bytes that belong to this thread; reused, so that pages stay mapped."""
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
    """The (first byte, length) of every stretch of the file that the box is made of, in order."""
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
    """Fills `target` from the file; a short file (it changed after it was checked) is an error."""
    while target:
        count = os.preadv(descriptor, [target], start)
        if count == 0:
            raise ProblemsFound([_changed(tensor, start)])
        target, start = target[count:], start + count


def _changed(tensor: StoredTensor, end: int) -> Problem:
    return Problem(
        name="weights file",
        value=str(tensor.file),
        rule=f"ended at byte {end} inside tensor {tensor.name}, though it was longer before",
        remedy="Do not change the files while they are loaded, and start again",
    )
