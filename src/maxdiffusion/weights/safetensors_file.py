"""The header of one safetensors file: which tensors it holds, and where their bytes are."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxdiffusion.runtime.problems import Problem

FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
# Only so that files which also hold such tensors can be measured; parameters are floats.
OTHER_ITEM_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16"), 2),
    **dict.fromkeys(("U32", "I32"), 4),
    **dict.fromkeys(("U64", "I64", "C64"), 8),
}
# The limit of the format itself; a longer header means that the first bytes are not a length.
MAX_HEADER_BYTES = 100_000_000
REMEDY = "Download or copy this file again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: its type in the words of the format, its shape, and its bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte, from the beginning of the file
    stop: int

    @property
    def float_dtype(self) -> np.dtype:
        """The numpy type of a float tensor."""
        return FLOAT_DTYPES[self.dtype]


class _BadFileError(Exception):
    """Why a file is not a safetensors file."""


def read_header(file: Path) -> tuple[tuple[StoredTensor, ...], tuple[Problem, ...]]:
    """The tensors of a file; or no tensors and the problem that makes the file unusable."""
    try:
        header, data_start, size = _parse(file)
        header.pop("__metadata__", None)
        tensors = tuple(_stored(file, name, fields, data_start) for name, fields in header.items())
        _check_layout(tensors, data_start, size)
    except OSError as error:
        return (), (_problem(file, f"cannot be read ({error.strerror})", "Check its permissions"),)
    except _BadFileError as error:
        return (), (_problem(file, str(error), REMEDY),)
    return tensors, ()


def item_size(dtype: str) -> int | None:
    """The bytes of one number, or None for a type that the format does not name."""
    if dtype in FLOAT_DTYPES:
        return FLOAT_DTYPES[dtype].itemsize
    return OTHER_ITEM_SIZES.get(dtype)


def _problem(file: Path, rule: str, remedy: str) -> Problem:
    return Problem(name="weights file", value=str(file), rule=rule, remedy=remedy)


def _parse(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts, and the size of the file."""
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
    """One tensor of the header, its fields checked against each other."""
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
    """Raises unless the tensors follow each other without gaps and end where the file ends."""
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end or tensor.stop < tensor.start:
            raise _BadFileError(
                f"is corrupt: tensor {tensor.name} has bytes {tensor.start} to {tensor.stop},"
                f" its neighbour ends at {end}"
            )
        end = tensor.stop
    if end != size:
        state = "truncated" if size < end else "too long"
        raise _BadFileError(f"is {state}: expected {end} bytes, found {size}")
