"""Compiled programs on disk: a header of JSON that says what the payload is, then the payload.

magic | length of the header, 8 bytes | header: key, bytes and SHA-256 of the payload | payload

Nothing is unpickled, and the payload is handed on only after key, length and digest agree.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from maxdiffusion.runtime.atomic import replacing

MAGIC = b"maxdiffusion executable 1\n"
LONGEST_HEADER = 2**24
Key = Mapping[str, Any]


class UnusableFile(ValueError):
    """A file that holds no program that may be run here; the message says why."""


def write_executable(path: Path, key: Key, payload: bytes) -> None:
    """Writes a program under its key, whole or not at all."""
    facts = {"key": key, "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    header = json.dumps(facts, sort_keys=True).encode()
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "big") + header)
        file.write(payload)


def read_executable(path: Path, key: Key) -> bytes:
    """The payload of a file that was written under exactly this key; else UnusableFile."""
    try:
        with path.open("rb") as file:
            header = _header(file)
            payload = file.read()
    except OSError as error:
        raise UnusableFile(f"it cannot be read: {error.strerror}") from error
    changed = differences(header["key"], key)
    if changed:
        raise UnusableFile(f"it is of another key: {'; '.join(changed)}")
    if len(payload) != header["bytes"]:
        raise UnusableFile(f"it has {len(payload)} bytes of program, not {header['bytes']}")
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise UnusableFile("its program is not the one that was written (SHA-256 differs)")
    return payload


def read_key(path: Path) -> Key:
    """The key that a file was written under; UnusableFile if it is none of ours."""
    try:
        with path.open("rb") as file:
            return _header(file)["key"]
    except OSError as error:
        raise UnusableFile(f"it cannot be read: {error.strerror}") from error


def differences(old: Key, new: Key) -> list[str]:
    """What two keys do not share, in words; long values by their digests."""
    names = [*new, *(name for name in old if name not in new)]
    return [
        f"{name} was {_short(old.get(name))}, now {_short(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _header(file: BinaryIO) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise UnusableFile("it is not a program that maxdiffusion wrote")
    size = int.from_bytes(file.read(8), "big")
    try:
        header = json.loads(file.read(size) if size <= LONGEST_HEADER else b"")
    except ValueError as error:
        raise UnusableFile("its header is damaged") from error
    kinds = {"key": dict, "bytes": int, "sha256": str}
    if not isinstance(header, dict) or any(
        not isinstance(header.get(name), kind) for name, kind in kinds.items()
    ):
        raise UnusableFile("its header is damaged")
    return header


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
