"""Reads encoded clips from the tfrecord files of the public project, without tensorflow.

    file      (length u64, masked CRC-32C of it u32, record, masked CRC-32C of it u32) ...
    record    protobuf `Example`: features by name, a serialized `TensorProto` in each
    latents                  [C F Y X], normalised
    encoder_hidden_states    [T E], zero after the end of the caption

`list_records` finds the records of a file and the shapes of their tensors by reading a few bytes of
each; `read_clip` reads one record at once and verifies its checksum. Both work on a disk and in
object storage.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import google_crc32c
import ml_dtypes
import numpy as np

from maxdiffusion.errors import RunFailed
from maxdiffusion.runtime.files import FilePath, read_range, size_in_bytes

LATENTS, TEXT = "latents", "encoder_hidden_states"
HEADER, FOOTER = 12, 4  # bytes around a record
# `DataType` of tensorflow's types.proto: float32, float64, bfloat16, float16.
DTYPES: Mapping[int, np.dtype] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype(np.float16),
}
Read = Callable[[int, int], bytes]  # start, count -> bytes
Span = tuple[int, int]  # start and end of bytes


class BadRecord(RunFailed):
    """A tfrecord file is damaged, or holds something else than encoded clips."""


# Protobuf's wire format

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES = 10  # at most


def fields(read: Read, span: Span) -> Iterator[tuple[int, Span | int]]:
    """Yields number and content of every field of a message: a span of bytes, or an integer."""
    at, end = span
    while at < end:
        tag, at = _varint(read, at, end)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = _varint(read, at, end)
            yield number, value
            continue
        if kind == BYTES:
            length, at = _varint(read, at, end)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise BadRecord(f"a field of kind {kind} is no part of an Example")
        if at + length > end:
            raise BadRecord("a field ends after its message")
        yield number, (at, at + length)
        at += length


def _varint(read: Read, at: int, end: int) -> tuple[int, int]:
    """Returns an integer of 7 bits a byte, and the place after it."""
    value = 0
    for place, byte in enumerate(read(at, min(VARINT_BYTES, end - at))):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise BadRecord("a number is cut short")


def _only(read: Read, span: Span, number: int) -> Span:
    """Returns the bytes of the one field of that number."""
    found = [content for one, content in fields(read, span) if one == number]
    if len(found) != 1 or isinstance(found[0], int):
        raise BadRecord(f"field {number} of a message is there {len(found)} times")
    return found[0]


def features(read: Read, record: Span) -> dict[str, Span]:
    """Returns the bytes of every feature of an Example that is one string of bytes."""
    found = {}
    for number, entry in fields(read, _only(read, record, 1)):
        if number != 1 or isinstance(entry, int):
            continue
        start, end = _only(read, entry, 1)
        name = read(start, end - start).decode()
        for kind, values in fields(read, _only(read, entry, 2)):
            if kind == 1 and not isinstance(values, int):  # 2 and 3: lists of numbers
                found[name] = _only(read, values, 1)
    return found


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Dtype and shape of a serialized `TensorProto`, and the place of its content."""

    dtype: np.dtype
    shape: tuple[int, ...]
    content: Span

    @classmethod
    def at(cls, read: Read, span: Span) -> "Tensor":
        """Returns the tensor in these bytes."""
        dtype, shape, content = 0, [], None
        for number, value in fields(read, span):
            if number == 1 and isinstance(value, int):
                dtype = value
            elif number == 2 and not isinstance(value, int):
                shape = [_size(read, dim) for one, dim in fields(read, value) if one == 2]
            elif number in (4, 5) and not isinstance(value, int):
                content = value  # raw bytes, or packed floats, which are the same bytes
        if dtype not in DTYPES:
            raise BadRecord(f"a tensor has the type {dtype}, and floats are needed (1, 2, 14, 19)")
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if content is None or content[1] - content[0] != size:
            held = 0 if content is None else content[1] - content[0]
            raise BadRecord(f"a tensor of shape {tuple(shape)} has {held} bytes, not {size}")
        return cls(dtype=DTYPES[dtype], shape=tuple(shape), content=content)

    def values(self, record: bytes) -> np.ndarray:
        """Returns the tensor in float32; one that is stored so is not copied."""
        dtype, count = self.dtype.newbyteorder("<"), math.prod(self.shape)
        found = np.frombuffer(record, dtype, count=count, offset=self.content[0])
        return found.reshape(self.shape).astype(np.float32, copy=False)


def _size(read: Read, dim: Span | int) -> int:
    """Returns the size of a dimension; protobuf leaves out a size of 0."""
    assert not isinstance(dim, int)
    sizes = [value for number, value in fields(read, dim) if number == 1]
    return next((size for size in sizes if isinstance(size, int)), 0)


# Files


def masked_crc(content: bytes) -> int:
    """Returns the checksum of tfrecord files: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Record:
    """The place of a record in its file, and the shapes of its tensors.

    `full` states that a caption fills all rows, which leaves no row of padding.
    """

    start: int
    length: int
    latents: tuple[int, ...]
    text: tuple[int, ...]
    full: bool


def list_records(file: FilePath) -> Iterator[Record]:
    """Yields the records of a file. Raises BadRecord, which names the file and the place."""
    size, at = size_in_bytes(file), 0
    while at < size:
        try:
            length = _length(read_range(file, at, HEADER))
            end = at + HEADER + length + FOOTER
            if end > size:
                raise BadRecord("the file ends within a record")
            record = _described(file, at + HEADER, length)
        except BadRecord as error:
            remedy = "Write the file again, or move it out of the folder."
            raise BadRecord(f"{file}: record at byte {at}: {error}. {remedy}") from error
        yield record
        at = end


def _length(header: bytes) -> int:
    """Returns the length of a record, which has a checksum of its own."""
    length, crc = struct.unpack("<QI", header) if len(header) == HEADER else (0, -1)
    if masked_crc(header[:8]) != crc:
        raise BadRecord("its length has another checksum; the file is damaged or compressed")
    return int(length)


def _described(file: FilePath, start: int, length: int) -> Record:
    def read(at: int, count: int) -> bytes:
        return read_range(file, start + at, count)

    tensors = _tensors(read, length)
    text = tensors[TEXT]
    row = text.dtype.itemsize * text.shape[-1]
    last = read(text.content[1] - row, row)
    return Record(
        start=start,
        length=length,
        latents=tensors[LATENTS].shape,
        text=text.shape,
        full=any(last),
    )


def _tensors(read: Read, length: int) -> dict[str, Tensor]:
    """Returns the two tensors of a record."""
    held = features(read, (0, length))
    missing = [name for name in (LATENTS, TEXT) if name not in held]
    if missing:
        raise BadRecord(f"it has no {' and no '.join(missing)}, but {', '.join(held) or 'nothing'}")
    tensors = {name: Tensor.at(read, held[name]) for name in (LATENTS, TEXT)}
    for name, rank in ((LATENTS, 4), (TEXT, 2)):
        shape = tensors[name].shape
        if len(shape) != rank or 0 in shape:
            raise BadRecord(f"{name} has the shape {shape}: must have {rank} dimensions")
    return tensors


def read_clip(file: FilePath, record: Record) -> dict[str, np.ndarray]:
    """Returns latents [F Y X C] and text [T E] of a record. Raises BadRecord if it is damaged."""
    content = read_range(file, record.start, record.length + FOOTER)
    body, footer = content[: record.length], content[record.length :]
    if footer != struct.pack("<I", masked_crc(body)):
        raise BadRecord(f"{file}: record at byte {record.start - HEADER} has another checksum")
    tensors = _tensors(lambda at, count: body[at : at + count], record.length)
    latents = np.ascontiguousarray(np.moveaxis(tensors[LATENTS].values(body), 0, -1))
    return {LATENTS: latents, TEXT: tensors[TEXT].values(body)}
