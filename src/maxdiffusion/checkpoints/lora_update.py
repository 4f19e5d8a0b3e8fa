"""Brings the parameters of a transformer in line with LoRA adapters that changed.

Only the parameters that differ are replaced:

    rooms    pairs of linear maps with room for adapters (`lora_down`, `lora_up` of a `Linear`) are
             kept low-rank: the factors of all adapters side by side, zeros behind them
    others   differences, and pairs without room, are fused: the parameter is read from its files
             again, with everything that changes it

A room has the same shape for every adapter, so that nothing is compiled again.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from maxdiffusion.checkpoints.load import (
    ComponentSource,
    Flat,
    ParameterPath,
    load_parameters,
    scale_of,
)
from maxdiffusion.checkpoints.lora import Adapter, Change, LowRank
from maxdiffusion.checkpoints.safetensors_io import FileReader, StoredTensor, TensorReader, whole
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.models.abstract import dotted
from maxdiffusion.models.checkpoint_map import CheckpointMap, Entry

DOWN, UP = "lora_down", "lora_up"
Changes = dict[str, tuple[Change, ...]]  # by the tensor's name
Pairs = dict[str, tuple[LowRank, ...]]  # by the tensor's name


def without_rooms(abstract: nnx.State) -> nnx.State:
    """Returns the parameters that checkpoints hold."""
    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state([(path, one) for path, one in flat if path[-1] not in (DOWN, UP)])


def with_rooms(state: nnx.State, abstract: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Returns loaded parameters with empty rooms, where the model has any."""
    held: Flat = dict(nnx.to_flat_state(state))
    for path, variable in nnx.to_flat_state(abstract):
        if path[-1] in (DOWN, UP):
            held[path] = _placed(variable, np.zeros(variable.shape, np.float32), mesh)
    return nnx.from_flat_state([*held.items()])


@dataclass(frozen=True, kw_only=True)
class AdaptedTransformer:
    """A transformer in files, its abstract parameters (rooms included), and its mesh."""

    source: ComponentSource
    abstract: nnx.State
    mesh: Mesh | None

    def update(self, held: Flat, before: Sequence[Adapter], after: Sequence[Adapter]) -> nnx.State:
        """Returns the parameters with the adapters `after`; `held` are those with `before`.

        Parameters to replace are removed from `held` first, so that their memory is free; where
        `held` is empty, everything is read.
        """
        kept, fused = self._split(after)
        kept_before, fused_before = self._split(before)
        entries = self._entries(_differing(fused, fused_before), every=not held)
        rooms = self._entries(_differing(kept, kept_before), every=not held)
        rooms = [entry for entry in rooms if self._room(entry)]
        replaced = {entry.parameter for entry in entries}
        for path in [path for path in held if dotted(path) in replaced]:
            del held[path]
        if entries:
            held |= dict(nnx.to_flat_state(self._read(entries, fused)))
        held |= self._factors(rooms, kept)
        return nnx.from_flat_state([*held.items()])

    def factors(self, adapters: Sequence[Adapter]) -> nnx.State:
        """Returns the rooms alone, filled with these adapters."""
        kept, _ = self._split(adapters)
        rooms = [entry for entry in self.source.table.entries if self._room(entry)]
        return nnx.from_flat_state([*self._factors(rooms, kept).items()])

    def _split(self, adapters: Sequence[Adapter]) -> tuple[Pairs, Changes]:
        """Returns the pairs that stay in rooms, and all other changes, by tensor."""
        kept: Pairs = {}
        fused: Changes = {}
        for adapter in adapters:
            for name, changes in adapter.lora.scaled(adapter.strength).items():
                for change in changes:
                    roomy = adapter.low_rank and name in self._ranks
                    if roomy and isinstance(change, LowRank):
                        kept[name] = (*kept.get(name, ()), change)
                    else:
                        fused[name] = (*fused.get(name, ()), change)
        return kept, fused

    def _room(self, entry: Entry) -> tuple[tuple[ParameterPath, nnx.Variable], ...]:
        """Returns the factors of an entry's linear map; none if it has no room for adapters."""
        module, _, leaf = entry.parameter.rpartition(".")
        if leaf != "kernel":
            return ()
        flat = nnx.to_flat_state(self.abstract)
        named = {dotted(path): (path, one) for path, one in flat if path[-1] in (DOWN, UP)}
        return tuple(
            named[f"{module}.{part}"] for part in (DOWN, UP) if f"{module}.{part}" in named
        )

    @functools.cached_property
    def _ranks(self) -> dict[str, int]:
        """The rank of the room of every tensor that has one."""
        table = self.source.table
        return {
            name: room[0][1].shape[-1]
            for entry in table.entries
            if (room := self._room(entry))
            for name in table.sources(entry)
        }

    def check(self, adapters: Sequence[Adapter]) -> None:
        """Raises unless these adapters fit into the rooms together."""
        kept, _ = self._split(adapters)
        needed = {name: sum(pair.rank for pair in pairs) for name, pairs in kept.items()}
        over = {name: rank for name, rank in needed.items() if rank > self._ranks[name]}
        if over:
            name = max(over, key=lambda name: over[name])
            rule = f"the active adapters have rank {over[name]} together (in {name})"
            remedy = f"Set lora_rank to at least {over[name]}, or activate fewer adapters"
            value = self._ranks[name]
            raise ProblemsFound([Problem(name="lora_rank", value=value, rule=rule, remedy=remedy)])

    def _entries(self, names: set[str], *, every: bool) -> list[Entry]:
        table = self.source.table
        return [
            entry for entry in table.entries if every or not names.isdisjoint(table.sources(entry))
        ]

    def _read(self, entries: Sequence[Entry], changes: Changes) -> nnx.State:
        """Returns the parameters of some entries, read with all that is fused into them."""
        source = self.source
        wanted = {entry.parameter for entry in entries}
        wanted |= {scale_of(parameter) for parameter in wanted}
        flat = nnx.to_flat_state(source.abstract)
        patches = {**source.stored.patches}
        for name, added in changes.items():
            patches[name] = (*patches.get(name, ()), *added)
        part = ComponentSource(
            stored=replace(source.stored, patches=patches),
            table=_only(source.table, entries),
            abstract=nnx.from_flat_state([one for one in flat if dotted(one[0]) in wanted]),
        )
        return load_parameters(part, mesh=self.mesh)[0]

    def _factors(self, entries: Sequence[Entry], kept: Pairs) -> Flat:
        """Returns the factors of some linear maps, on the mesh."""
        made: Flat = {}
        with FileReader() as reader:
            for entry in entries:
                (down_path, down), (up_path, up) = self._room(entry)
                names = self.source.table.sources(entry)
                downs, ups = np.zeros(down.shape, np.float32), np.zeros(up.shape, np.float32)
                for layer, name in enumerate(names):
                    for at, pair in _side_by_side(kept.get(name, ())):
                        part = slice(at, at + pair.rank)
                        downs[layer, :, part] = _values(pair.down, reader).T
                        factor = _values(pair.up, reader) * np.float32(pair.strength)
                        # Rows of `up` are features of the output: rearranged as the kernel's are.
                        ups[layer, part] = entry.transform.apply(factor)
                made[down_path] = _placed(down, downs, self.mesh)
                made[up_path] = _placed(up, ups, self.mesh)
        return made


def _differing(new: Mapping[str, Any], old: Mapping[str, Any]) -> set[str]:
    return {name for name in {*new, *old} if new.get(name) != old.get(name)}


def _only(table: CheckpointMap, entries: Sequence[Entry]) -> CheckpointMap:
    """Returns the map of some entries, which leaves all other tensors alone."""
    return replace(table, entries=tuple(entries), ignored=(".*",))


def _side_by_side(pairs: Sequence[LowRank]) -> Iterator[tuple[int, LowRank]]:
    """Yields each pair with the rank at which it starts."""
    start = 0
    for pair in pairs:
        yield start, pair
        start += pair.rank


def _values(tensor: StoredTensor, reader: TensorReader) -> np.ndarray:
    return reader.read(tensor, whole(tensor.shape)).astype(np.float32)


def _placed(variable: nnx.Variable, values: np.ndarray, mesh: Mesh | None) -> nnx.Variable:
    """Returns a parameter with these values on the mesh, in the dtype of the model."""
    cast = values.astype(variable.dtype)
    if mesh is None:
        return variable.replace(jax.device_put(cast))
    dims = tuple(variable.get_metadata().get("dims", ()))
    sharding = parameter_sharding(mesh, dims, variable.shape)
    placed = jax.make_array_from_callback(cast.shape, sharding, lambda index: cast[index])
    return variable.replace(placed)
