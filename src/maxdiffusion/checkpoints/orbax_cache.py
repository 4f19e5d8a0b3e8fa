"""Converted weights kept in an orbax folder, used only for exactly what they were made from.

    <cache>/<component>/manifest.json    what the weights were made from
    <cache>/<component>/parameters/      the arrays, written by orbax

A component's folder is written under another name and renamed when it is complete, so one that was
cut short is never looked at. One that does not fit is made anew, and the messages say why. The
processes of a job share the folder: the first decides, and each writes and reads what it holds.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax.sharding import Mesh

from maxdiffusion.runtime.coordination import exchange, from_first
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.weights.atomic import new_shared_folder
from maxdiffusion.weights.loading import (
    ComponentSource,
    LoadOptions,
    LoadReport,
    Progress,
    load_components,
    match_components,
    sharding_of,
)
from maxdiffusion.weights.manifest import Manifest, describe, difference, hash_files, identity
from maxdiffusion.weights.matching import Match, dotted

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

KEY = "pretrained_orbax_dir"
MANIFEST = "manifest.json"
PARAMETERS = "parameters"


@dataclass(frozen=True, kw_only=True)
class CachedLoad:
    """Parameters by component, what their conversion cost, and one line for each component."""

    states: Mapping[str, nnx.State]
    report: LoadReport  # of the components that the cache did not have
    messages: tuple[str, ...]


def load_through_cache(
    sources: Mapping[str, ComponentSource],
    cache: Path,
    *,
    mesh: Mesh | None = None,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> CachedLoad:
    """The parameters of all components; those that the cache lacks are loaded and kept there."""
    cache = place(os.fspath(cache))
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
        slots[name].keep(state, before[name])
    return CachedLoad(
        states=loaded | {name: state for name, (state, _) in found.items() if state is not None},
        report=report,
        messages=tuple(f"{name}: {message}" for name, (_, message) in found.items()),
    )


@dataclass(frozen=True, kw_only=True)
class _Slot:
    """One component's place in the cache, and what belongs there."""

    folder: Path
    source: ComponentSource
    matches: list[Match]

    def restore(self, mesh: Mesh | None) -> tuple[nnx.State | None, str]:
        """The kept parameters if they are the wanted ones, and what to say about them."""
        there, reason = from_first("a kept component", self._look)
        if not there:
            return None, f"kept in {self.folder}"
        state = None
        if reason is None:
            try:
                state, problem = self._read(mesh), ""
            except Exception as error:  # tensorstore raises errors of many kinds for damaged files
                problem = f"it could not be read ({type(error).__name__})"
            # What one process cannot read, all make anew.
            reason = next(filter(None, exchange("a component was read", problem)), None)
        if reason is None:
            return state, f"taken from {self.folder}"
        return None, f"{self.folder} was made anew, because {reason}"

    def _look(self) -> tuple[bool, str | None]:
        """Whether there are kept parameters, and why they are not the wanted ones."""
        return (True, self._refresh()) if self.folder.exists() else (False, None)

    def keep(self, state: nnx.State, before: list[tuple[str, int, int]]) -> None:
        """Writes the parameters and their manifest; the files must not have changed meanwhile."""
        first = jax.process_index() == 0
        files = hash_files(self.source.stored.files) if first else ()
        if self.identities() != before:
            raise ProblemsFound([_changed(self.source.stored.folder)])
        values = {dotted(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
        try:
            with new_shared_folder(self.folder) as unfinished:
                with _checkpointer() as checkpointer:
                    checkpointer.save(unfinished / PARAMETERS, values)
                if first:
                    describe(self.source.table, self.matches, files).write(unfinished / MANIFEST)
        except OSError as error:
            rule = f"could not be written ({error.strerror})"
            raise ProblemsFound([_unusable(self.folder, rule)]) from error

    def identities(self) -> list[tuple[str, int, int]]:
        """Name, size and time of change of the weights files."""
        return [identity(file) for file in self.source.stored.files]

    def _refresh(self) -> str | None:
        """Why the kept weights do not fit; if they do, new times of change are noted."""
        held = Manifest.read(self.folder / MANIFEST)
        files = hash_files(self.source.stored.files, held.files if held else ())
        wanted = describe(self.source.table, self.matches, files)
        reason = difference(held, wanted)
        if held is not None and reason is None and held.files != files:
            replace(held, files=files).write(self.folder / MANIFEST)
        return reason

    def _read(self, mesh: Mesh | None) -> nnx.State:
        """The kept parameters, each device reading what it holds."""
        abstract = {
            match.entry.parameter: jax.ShapeDtypeStruct(
                match.variable.shape, match.variable.dtype, sharding=sharding_of(match, mesh)
            )
            for match in self.matches
        }
        with _checkpointer() as checkpointer:
            values = checkpointer.restore(self.folder / PARAMETERS, abstract)
        return nnx.from_flat_state(
            [
                (match.path, match.variable.replace(values[match.entry.parameter]))
                for match in self.matches
            ]
        )


def _checkpointer() -> "ocp.StandardCheckpointer":
    """Orbax's writer and reader of arrays."""
    import orbax.checkpoint as ocp  # slow to import, and most loads do without a cache

    return ocp.StandardCheckpointer()


def _check(cache: Path) -> None:
    """Raises unless the cache can be used by this job."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"is not a folder that can be made ({error.strerror})"
        raise ProblemsFound([_unusable(cache, rule)]) from error


def _unusable(folder: Path, rule: str) -> Problem:
    remedy = "Name another folder, or leave the setting empty to load without a cache"
    return Problem(name=KEY, value=str(folder), rule=rule, remedy=remedy)


def _changed(folder: Path) -> Problem:
    return Problem(
        name="weights",
        value=str(folder),
        rule="changed while they were loaded",
        remedy="Do not write to the folder during a run, and start again",
    )
