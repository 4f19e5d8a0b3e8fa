"""What converted weights were made from, so that a cache is used only for exactly that."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from maxdiffusion import __version__
from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.weights.checkpoint_map import CheckpointMap
from maxdiffusion.weights.matching import Match


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A weights file: its name, size and time of change, and the hash of its content."""

    name: str
    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that converted weights depend on."""

    package: str  # version
    table: str  # hash of the checkpoint map
    parameters: Mapping[str, str]  # path -> dtype and shape
    files: tuple[SourceFile, ...]

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """The manifest in a file, or None if the file is not one."""
        try:
            content = json.loads(file.read_bytes())
            files = tuple(SourceFile(**fields) for fields in content.pop("files"))
            return cls(files=files, **content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, file: Path) -> None:
        """Writes the manifest; a reader sees the old file or the new one."""
        with replacing(file) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n")


def describe(
    table: CheckpointMap, matches: Iterable[Match], files: Sequence[SourceFile]
) -> Manifest:
    """The manifest of weights that are loaded from `files` with this table."""
    return Manifest(
        package=__version__,
        table=hashlib.sha256(repr(table).encode()).hexdigest(),
        parameters={
            match.entry.parameter: f"{match.variable.dtype}{list(match.variable.shape)}"
            for match in matches
        },
        files=tuple(files),
    )


def hash_files(files: Sequence[Path], known: Iterable[SourceFile] = ()) -> tuple[SourceFile, ...]:
    """The files with their hashes; one of `known` size and time of change is not read again."""
    hashes = {(file.name, file.bytes, file.mtime_ns): file.sha256 for file in known}

    def hashed(path: Path) -> SourceFile:
        name, size, mtime_ns = identity(path)
        digest = hashes.get((name, size, mtime_ns)) or _sha256(path)
        return SourceFile(name=name, bytes=size, mtime_ns=mtime_ns, sha256=digest)

    with ThreadPoolExecutor(min(8, len(files) or 1)) as pool:
        return tuple(pool.map(hashed, files))


def identity(path: Path) -> tuple[str, int, int]:
    """What tells quickly that a file is still the same: name, size and time of change."""
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


def difference(held: Manifest | None, wanted: Manifest) -> str | None:
    """Why weights with the manifest `held` are not the `wanted` ones; None if they are."""
    if held is None:
        return "it has no readable manifest"
    checks: tuple[tuple[str, Any, Any], ...] = (
        ("the package version", held.package, wanted.package),
        ("the weight map", held.table, wanted.table),
        ("the parameters' dtypes or shapes", held.parameters, wanted.parameters),
        ("the set of weights files", _names(held), _names(wanted)),
    )
    for what, old, new in checks:
        if old != new:
            return f"{what} changed"
    old_hashes = {file.name: file.sha256 for file in held.files}
    changed = [file.name for file in wanted.files if old_hashes[file.name] != file.sha256]
    return f"the content of {', '.join(changed)} changed" if changed else None


def _names(manifest: Manifest) -> list[str]:
    return sorted(file.name for file in manifest.files)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
