"""Writes safetensors files one tensor at a time, so that no file is ever held in memory."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxdiffusion.weights.safetensors_file import FLOAT_DTYPES

WORDS: Mapping[np.dtype, str] = {dtype: word for word, dtype in FLOAT_DTYPES.items()}
ALIGNMENT = 8  # bytes; the format asks for data that starts at a multiple of it


@dataclass(frozen=True, kw_only=True)
class TensorToWrite:
    """A tensor's name, type and shape, and how to get its values when their turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """How many bytes the tensor takes."""
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
    # Readers of the format in torch look for this mark.
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    start = 0
    for tensor in tensors:
        fields[tensor.name] = {
            "dtype": WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.size],
        }
        start += tensor.size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
