"""What a text encoder made of one prompt, in a safetensors file.

    rows [T E]: one row for each token; metadata: what they were made with, and their SHA-256

The zero rows that fill a text up to its length are left out. Rows are handed on only after the key,
the shape and the digest agree.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.weights.safetensors_file import FLOAT_DTYPES
from maxdiffusion.weights.safetensors_writer import TensorToWrite, write_file

CONTENT = "maxdiffusion prompt embeddings 1"
ROWS = "rows"
LONGEST_HEADER = 2**24
Key = Mapping[str, Any]
Rows = Float[np.ndarray, "T E"]


class UnusableRows(ValueError):
    """A file that does not hold the rows that are wanted; the message says why."""


def key_text(key: Key) -> str:
    """A key as text that is the same for the same key."""
    return json.dumps(key, sort_keys=True)


def file_name(key: Key) -> str:
    """The name of the file of a key."""
    return f"prompt-{hashlib.sha256(key_text(key).encode()).hexdigest()[:24]}.safetensors"


def digest(rows: Rows) -> str:
    """The SHA-256 of rows."""
    return hashlib.sha256(np.ascontiguousarray(rows).view(np.uint8).data).hexdigest()


def write_rows(path: Path, key: Key, rows: Rows) -> None:
    """Writes rows under their key, whole or not at all."""
    tensor = TensorToWrite(name=ROWS, dtype=rows.dtype, shape=rows.shape, values=lambda: rows)
    about = {"content": CONTENT, "key": key_text(key), "sha256": digest(rows)}
    with replacing(path) as unfinished:
        write_file(unfinished, [tensor], about)


def read_rows(path: Path, key: Key) -> Rows:
    """The rows of a file that was written under exactly this key; else UnusableRows."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UnusableRows("there is no such file") from None
    except OSError as error:
        raise UnusableRows(f"it cannot be read: {error.strerror}") from error
    about, tensor, data = _parsed(content)
    if about.get("content") != CONTENT:
        raise UnusableRows("it holds no prompt embeddings that maxdiffusion wrote")
    if about.get("key") != key_text(key):
        raise UnusableRows("it is of another prompt, length, dtype or text encoder")
    dtype, shape = FLOAT_DTYPES.get(str(tensor.get("dtype"))), tensor.get("shape")
    if dtype is None or tensor.get("data_offsets") != [0, len(data)]:
        raise UnusableRows("it is damaged: it does not end where its header says")
    try:
        rows = np.frombuffer(data, dtype).reshape(shape)
    except (ValueError, TypeError) as error:
        raise UnusableRows(f"it is damaged: {error}") from error
    if digest(rows) != about.get("sha256"):
        raise UnusableRows("it is damaged: its rows are not those that were written")
    return rows


def _parsed(content: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Metadata, the description of the rows, and the bytes after the header."""
    size = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + size] if size <= LONGEST_HEADER else b"")
    except ValueError as error:
        raise UnusableRows("it is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise UnusableRows("it is damaged: its header is not a JSON object")
    about, tensor = header.get("__metadata__"), header.get(ROWS)
    if not isinstance(about, dict) or not isinstance(tensor, dict):
        raise UnusableRows("it holds no prompt embeddings that maxdiffusion wrote")
    return about, tensor, content[8 + size :]
