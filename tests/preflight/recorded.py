"""Texts of real compilations, kept in the folder `data`."""

import gzip
from pathlib import Path

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> str:
    """The text of that name."""
    return gzip.decompress((DATA / f"{name}.gz").read_bytes()).decode()


def unpack(pattern: str, folder: Path) -> None:
    """Writes the texts that fit a pattern into a folder, under the names that libtpu gives."""
    for path in DATA.glob(f"{pattern}.gz"):
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
