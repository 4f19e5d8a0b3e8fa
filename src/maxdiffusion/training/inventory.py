"""A list of the files of a folder with their sizes and checksums, to find damage before reading."""

import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

INVENTORY = "files.json"
THREADS, PIECE = 8, 2**24


def write_inventory(folder: Path, parts: Sequence[str]) -> None:
    """Lists the files below these folders of a folder in it."""
    files = sorted(file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    names = [file.relative_to(folder).as_posix() for file in files]
    (folder / INVENTORY).write_text(json.dumps(dict(zip(names, _states(files), strict=True))))


def find_damage(folder: Path) -> str | None:
    """The first file that is not as it was listed, in words; None if all are, or none is listed."""
    inventory = folder / INVENTORY
    if not inventory.exists():
        return None
    try:
        listed = json.loads(inventory.read_text())
    except ValueError:
        return f"{INVENTORY} cannot be read"
    return next(_damaged(folder, listed), None)


def _damaged(folder: Path, listed: dict[str, list[int]]) -> Iterator[str]:
    """Words for the files that are missing or too short, then for those with other content."""
    for name, (size, _) in listed.items():
        file = folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} bytes instead of {size}"
    files = [folder / name for name in listed]
    for name, found in zip(listed, _states(files), strict=True):
        if found != listed[name]:
            yield f"{name} has other content than was written"


def _states(files: Sequence[Path]) -> list[list[int]]:
    with ThreadPoolExecutor(THREADS) as pool:  # zlib and reading let other threads run
        return list(pool.map(_state, files))


def _state(file: Path) -> list[int]:
    """The size and the CRC-32 of a file."""
    size = checksum = 0
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]
