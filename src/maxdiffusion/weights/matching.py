"""Brings stored tensors and parameters together by name and shape; what is left is a problem."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxdiffusion.runtime.problems import Problem
from maxdiffusion.weights.checkpoint_map import CheckpointMap, Entry
from maxdiffusion.weights.safetensors_file import FLOAT_DTYPES, StoredTensor
from maxdiffusion.weights.safetensors_index import StoredWeights


@dataclass(frozen=True, kw_only=True)
class Match:
    """One parameter (an abstract variable) and the stored tensors that it is made of."""

    path: tuple[Any, ...]
    variable: nnx.Variable
    entry: Entry
    sources: tuple[StoredTensor, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """The words for the dimensions; a parameter without them is kept whole everywhere."""
        return tuple(self.variable.get_metadata().get("dims", ()))


def dotted(path: tuple[Any, ...]) -> str:
    """A parameter's path as one word: ("blocks", 0, "kernel") is "blocks.0.kernel"."""
    return ".".join(str(part) for part in path)


def match_parameters(
    stored: StoredWeights, table: CheckpointMap, abstract: nnx.State
) -> tuple[list[Match], list[Problem]]:
    """The sources of every parameter; and all tensors missing, unexpected or mis-shaped."""
    variables = {dotted(path): (path, value) for path, value in nnx.to_flat_state(abstract)}
    differing = sorted(set(variables) ^ set(table.parameters))
    assert not differing, f"model and checkpoint map differ in {differing}"
    tensors, unexpected = _by_canonical_name(stored, table)
    problems = [_unexpected(stored, name) for name in unexpected]
    matches = []
    for entry in table.entries:
        path, variable = variables[entry.parameter]
        assert not entry.stacked or variable.shape[0] == table.layers, (entry, variable.shape)
        shape, names = entry.source_shape(variable.shape), entry.sources(table.layers)
        problems += [
            problem for name in names for problem in _wrong(stored, name, tensors.get(name), shape)
        ]
        found = tuple(tensors[name] for name in names if name in tensors)
        matches.append(Match(path=path, variable=variable, entry=entry, sources=found))
    return matches, problems


def _by_canonical_name(
    stored: StoredWeights, table: CheckpointMap
) -> tuple[Mapping[str, StoredTensor], list[str]]:
    """The tensors that the map knows, under the map's names; and the names nobody knows."""
    known = {name for entry in table.entries for name in entry.sources(table.layers)}
    tensors: dict[str, StoredTensor] = {}
    unexpected = []
    for name, tensor in stored.tensors.items():
        canonical = table.canonical(name)
        if canonical not in known:
            if not table.ignores(name):
                unexpected.append(name)
        elif name == canonical or canonical not in tensors:
            # A tied tensor may be stored under both of its names: the map's own spelling wins.
            tensors[canonical] = tensor
    return tensors, unexpected


def _wrong(
    stored: StoredWeights, name: str, tensor: StoredTensor | None, shape: tuple[int, ...]
) -> list[Problem]:
    """What is wrong with one tensor that a parameter needs."""
    if tensor is None:
        return [_problem(stored, name, "missing", f"the model needs it, with shape {list(shape)}")]
    if tensor.shape != shape:
        rule = f"the model needs shape {list(shape)}, found {list(tensor.shape)}"
        return [_problem(stored, name, "mis-shaped", rule)]
    if tensor.dtype not in FLOAT_DTYPES:
        rule = f"weights are one of {', '.join(FLOAT_DTYPES)}"
        return [_problem(stored, name, tensor.dtype, rule)]
    return []


def _unexpected(stored: StoredWeights, name: str) -> Problem:
    shape = list(stored.tensors[name].shape)
    rule = f"the model has no place for it (shape {shape})"
    return _problem(stored, name, "unexpected", rule)


def _problem(stored: StoredWeights, name: str, value: str, rule: str) -> Problem:
    return Problem(
        name=f"{stored.folder.name}: {name}",
        value=value,
        rule=rule,
        remedy="Use weights and config.json of the same model",
    )
