"""Cache of converted weights in orbax folders.

    <cache>/<component>/manifest.json    cache key, and digests of the weights files
    <cache>/<component>/parameters/      arrays, written by orbax

A cached component is used only if its key equals today's: package version, checkpoint map, dtypes
and shapes of the parameters, and the content of the weights files. Otherwise it is converted again,
and a message says why. A folder is written under another name and renamed when it is complete. The
processes of a job share the folder: the first decides, and each writes and reads its own shards.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.sharding import Mesh

from maxdiffusion import __version__
from maxdiffusion.checkpoints.load import (
    ComponentSource,
    LoadOptions,
    LoadReport,
    Match,
    Progress,
    load_components,
    match_components,
    sharding_of,
)
from maxdiffusion.distributed.coordination import (
    all_gather_str,
    broadcast_from_first,
    new_shared_folder,
)
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.abstract import dotted, values_of
from maxdiffusion.models.checkpoint_map import CheckpointMap
from maxdiffusion.runtime.files import (
    CacheKey,
    FileDigest,
    FilePath,
    as_path,
    digest_files,
    digest_value,
    replacing,
)

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The cache key of converted weights, and the files that they were read from."""

    key: CacheKey
    files: tuple[FileDigest, ...]

    @classmethod
    def of(
        cls,
        table: CheckpointMap,
        matches: Iterable[Match],
        files: Sequence[FileDigest],
        adapters: Sequence[str] = (),
    ) -> "Manifest":
        """Returns the manifest of weights that are loaded from `files` with this table.

        `adapters` describes the content and strength of everything that is fused into them.
        """
        facts = {
            "package version": __version__,
            "weight map": digest_value(repr(table)),
            "parameters": {
                dotted(path): f"{variable.dtype}{list(variable.shape)}"
                for match in matches
                for path, variable in match.variables.items()
            },
            **{f"content of {file.name}": file.sha256 for file in files},
            **({"adapters": [*adapters]} if adapters else {}),
        }
        return cls(key=CacheKey(facts), files=tuple(files))

    @classmethod
    def read(cls, file: FilePath) -> "Manifest | None":
        """Returns the manifest in a file, or None if the file is not one."""
        try:
            content = json.loads(file.read_bytes())
            files = tuple(FileDigest(**fields) for fields in content["files"])
            return cls(key=CacheKey(dict(content["key"])), files=files)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, file: FilePath) -> None:
        """Writes the manifest; a reader sees the old file or the new one."""
        content = {"key": self.key.facts, "files": [asdict(one) for one in self.files]}
        with replacing(file) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")


def difference(held: Manifest | None, wanted: Manifest) -> str | None:
    """Returns why weights with the manifest `held` are not the `wanted` ones, or None."""
    if held is None:
        return "it has no readable manifest"
    return "; ".join(wanted.key.differences(held.key.facts)) or None


def identity(path: Path) -> tuple[str, int, int]:
    """Returns name, size and modification time, to notice a file that changes during a load."""
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


KEY = "pretrained_orbax_dir"
MANIFEST = "manifest.json"
PARAMETERS = "parameters"


@dataclass(frozen=True, kw_only=True)
class CachedLoad:
    """Parameters by component, the cost of conversion, and one message for each component."""

    states: Mapping[str, nnx.State]
    report: LoadReport  # of the components that were converted
    messages: tuple[str, ...]


def load_through_cache(
    sources: Mapping[str, ComponentSource],
    cache: FilePath,
    *,
    mesh: Mesh | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> CachedLoad:
    """Returns the parameters of all components; converts and caches those that the cache lacks."""
    cache = as_path(os.fspath(cache))
    _check(cache)
    slots = {
        name: _Slot(folder=cache / name, source=sources[name], matches=matches)
        for name, matches in match_components(sources).items()
    }
    found = {name: slot.restore(mesh) for name, slot in slots.items()}
    absent = {name: sources[name] for name, (state, _) in found.items() if state is None}
    before = {name: slots[name].identities() for name in absent}
    loaded, report = load_components(absent, mesh=mesh, options=options, progress=progress)
    for name, state in loaded.items():
        slots[name].store(state, before[name])
    return CachedLoad(
        states=loaded | {name: state for name, (state, _) in found.items() if state is not None},
        report=report,
        messages=tuple(f"{name}: {message}" for name, (_, message) in found.items()),
    )


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """The cache folder of one component, and what belongs there."""

    folder: FilePath
    source: ComponentSource
    matches: list[Match]

    def restore(self, mesh: Mesh | None) -> tuple[nnx.State | None, str]:
        """Returns the cached parameters if they are the wanted ones, and a message."""
        there, reason = broadcast_from_first("a cached component", self._scan)
        if not there:
            return None, f"cached in {self.folder}"
        state = None
        if reason is None:
            try:
                state, problem = self._read(mesh), ""
            except Exception as error:  # tensorstore raises errors of many kinds for damaged files
                problem = f"it could not be read ({type(error).__name__})"
            # If one process cannot read it, all convert it again.
            reason = next(filter(None, all_gather_str("a component was read", problem)), None)
        if reason is None:
            return state, f"taken from {self.folder}"
        return None, f"{self.folder} was converted again, because {reason}"

    def _scan(self) -> tuple[bool, str | None]:
        """Returns whether there are cached parameters, and why they are not the wanted ones."""
        return (True, self._refresh()) if self.folder.exists() else (False, None)

    def store(self, state: nnx.State, before: list[tuple[str, int, int]]) -> None:
        """Writes the parameters and their manifest, unless the files changed during the load."""
        first = jax.process_index() == 0
        files = digest_files(self.source.stored.files) if first else ()
        if self.identities() != before:
            raise ProblemsFound([_changed(self.source.stored.folder)])
        values = values_of(state)
        try:
            with new_shared_folder(self.folder) as unfinished:
                with _checkpointer() as checkpointer:
                    checkpointer.save(unfinished / PARAMETERS, values)
                if first:
                    manifest = self._manifest(files)
                    manifest.write(unfinished / MANIFEST)
        except OSError as error:
            rule = f"could not be written ({error.strerror})"
            raise ProblemsFound([_unusable(self.folder, rule)]) from error

    def identities(self) -> list[tuple[str, int, int]]:
        """Returns name, size and modification time of the weights files."""
        stored = self.source.stored
        return [identity(file) for file in (*stored.files, *stored.patch_files)]

    def _manifest(self, files: Sequence[FileDigest]) -> Manifest:
        """Returns the manifest of the weights; adapters are small, and hashed each time."""
        stored = self.source.stored
        adapters = [
            f"{note} ({file.sha256})"
            for note, file in zip(stored.patch_notes, digest_files(stored.patch_files), strict=True)
        ]
        return Manifest.of(self.source.table, self.matches, files, adapters)

    def _refresh(self) -> str | None:
        """Returns why the cached weights do not fit; if they do, stores new modification times."""
        held = Manifest.read(self.folder / MANIFEST)
        files = digest_files(self.source.stored.files, held.files if held else ())
        wanted = self._manifest(files)
        reason = difference(held, wanted)
        if held is not None and reason is None and held.files != files:
            wanted.write(self.folder / MANIFEST)
        return reason

    def _read(self, mesh: Mesh | None) -> nnx.State:
        """Returns the cached parameters; each device reads its own shards."""
        variables = {
            path: variable for match in self.matches for path, variable in match.variables.items()
        }
        abstract = {
            dotted(path): jax.ShapeDtypeStruct(
                variable.shape, variable.dtype, sharding=sharding_of(variable, mesh)
            )
            for path, variable in variables.items()
        }
        with _checkpointer() as checkpointer:
            values = checkpointer.restore(self.folder / PARAMETERS, abstract)
        return nnx.from_flat_state(
            [(path, variable.replace(values[dotted(path)])) for path, variable in variables.items()]
        )


def _checkpointer() -> "ocp.StandardCheckpointer":
    """Returns orbax's writer and reader of arrays."""
    import orbax.checkpoint as ocp  # slow to import, and not needed without a cache

    return ocp.StandardCheckpointer()


def _check(cache: FilePath) -> None:
    """Raises ProblemsFound unless the cache is a folder or can be created."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be created as a folder ({error.strerror})"
        raise ProblemsFound([_unusable(cache, rule)]) from error


def _unusable(folder: FilePath, rule: str) -> Problem:
    remedy = "Name another folder, or leave the setting empty to load without a cache"
    return Problem(name=KEY, value=str(folder), rule=rule, remedy=remedy)


def _changed(folder: FilePath) -> Problem:
    return Problem(
        name="weights",
        value=str(folder),
        rule="changed during the load",
        remedy="Start again, and do not write to the folder during a run",
    )
