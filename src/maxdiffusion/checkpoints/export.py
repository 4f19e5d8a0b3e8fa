"""Writes parameters back as a component folder in diffusers' layout."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from maxdiffusion.checkpoints.safetensors_io import (
    FLOAT_DTYPES,
    INDEX_SUFFIX,
    STEMS,
    TensorToWrite,
    write_file,
)
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.abstract import values_of
from maxdiffusion.models.checkpoint_map import CheckpointMap, Entry
from maxdiffusion.runtime.files import FilePath, new_folder


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export: stored dtype (None: unchanged), file size limit and file name."""

    dtype: np.dtype | None = None
    max_file_bytes: int = 10 * 1000**3  # diffusers' own limit
    stem: str = STEMS[0]  # transformers' components are called "model"

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOAT_DTYPES.values():
            names = ", ".join(str(dtype) for dtype in FLOAT_DTYPES.values())
            raise ValueError(f"dtype={self.dtype}: weights are stored as one of {names}")
        if self.max_file_bytes < 1:
            raise ValueError(f"max_file_bytes={self.max_file_bytes}: must be at least 1")


def export_component(
    state: nnx.State,
    table: CheckpointMap,
    folder: FilePath,
    *,
    config: Mapping[str, Any],
    options: ExportOptions | None = None,
) -> None:
    """Writes config.json and the weights into a new `folder`, which appears when it is complete.

    With several processes the first one writes, and the others call `help_export`.
    """
    options = options or ExportOptions()
    if folder.exists():
        raise ProblemsFound([_exists(folder)])
    tensors = list(_tensors(state, table, options))
    with new_folder(folder) as unfinished:
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_files(unfinished, list(_groups(tensors, options.max_file_bytes)), options.stem)


def help_export(state: nnx.State, table: CheckpointMap) -> None:
    """Sends this process's shards to the first process, which runs `export_component`."""
    for tensor in _tensors(state, table, ExportOptions()):
        tensor.values()


def _tensors(
    state: nnx.State, table: CheckpointMap, options: ExportOptions
) -> Iterator[TensorToWrite]:
    """Yields every checkpoint tensor, in the order of the table."""
    parameters = values_of(state)
    differing = sorted(set(parameters) ^ set(table.parameters))
    assert not differing, f"model and checkpoint map differ in {differing}"
    for entry in table.entries:
        parameter = parameters[entry.parameter]
        for layer, name in enumerate(table.sources(entry)):
            yield TensorToWrite(
                name=name,
                dtype=options.dtype or np.dtype(parameter.dtype),
                shape=entry.source_shape(parameter.shape),
                values=_Values(entry=entry, parameter=parameter, layer=layer),
            )


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Fetches one tensor from the devices at the time it is written."""

    entry: Entry
    parameter: jax.Array
    layer: int

    def __call__(self) -> np.ndarray:
        part = self.parameter[self.layer] if self.entry.stacked else self.parameter
        return self.entry.transform.invert(fetched(part))


def fetched(part: jax.Array) -> np.ndarray:
    """Returns an array on the host; with several processes all must call it."""
    if not part.is_fully_addressable:
        part = multihost_utils.process_allgather(part, tiled=True)
    return np.asarray(part)


def _groups(tensors: Iterable[TensorToWrite], max_bytes: int) -> Iterator[list[TensorToWrite]]:
    """Yields runs of tensors that fit into a file; a larger tensor has its own."""
    group: list[TensorToWrite] = []
    for tensor in tensors:
        if group and sum(held.size for held in group) + tensor.size > max_bytes:
            yield group
            group = []
        group.append(tensor)
    yield group


def _write_files(folder: Path, groups: list[list[TensorToWrite]], stem: str) -> None:
    """Writes one file, or numbered files and their index."""
    if len(groups) == 1:
        write_file(folder / f"{stem}.safetensors", groups[0])
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / file, group)
        weight_map |= {tensor.name: file for tensor in group}
    total = sum(tensor.size for group in groups for tensor in group)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")


def _exists(folder: FilePath) -> Problem:
    return Problem(
        name="export folder",
        value=str(folder),
        rule="exists already, and an export does not overwrite",
        remedy="Name a new folder, or remove this one",
    )
