"""The weights of one component: a single safetensors file, or shards with or without an index."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from maxdiffusion.runtime.problems import Problem
from maxdiffusion.weights.safetensors_file import StoredTensor, read_header

# diffusers' and transformers' own names come before variants (`….fp16.safetensors`).
STEMS = ("diffusion_pytorch_model", "model")
INDEX_SUFFIX = ".safetensors.index.json"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """All tensors of a component by name, and the files that hold them."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor] = field(repr=False)


def open_weights(folder: Path) -> tuple[StoredWeights, tuple[Problem, ...]]:
    """The tensors in a component's folder (only headers are read), and all that is wrong there."""
    named, files, problems = _files(folder)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found, bad = read_header(file)
        problems += bad
        for tensor in found:
            if tensor.name in tensors:
                problems.append(_twice(tensor, tensors[tensor.name].file))
            tensors[tensor.name] = tensor
    if not problems:
        problems += _misplaced(named, tensors)
    return StoredWeights(folder=folder, files=tuple(files), tensors=tensors), tuple(problems)


def _files(folder: Path) -> tuple[Mapping[str, str], list[Path], list[Problem]]:
    """The index (tensor -> file name; empty without one), the files that are there, problems."""
    indices = [folder / f"{stem}{INDEX_SUFFIX}" for stem in STEMS]
    singles = [folder / f"{stem}.safetensors" for stem in STEMS]
    for candidate in (*indices, *singles, *sorted(folder.glob(f"*{INDEX_SUFFIX}"))):
        if candidate.is_file() and candidate.name.endswith(INDEX_SUFFIX):
            return _indexed(candidate)
        if candidate.is_file():
            return {}, [candidate], []
    files = sorted(folder.glob("*.safetensors"))
    return {}, files, _missing_shards(folder, files) if files else [_no_weights(folder)]


def _indexed(index: Path) -> tuple[Mapping[str, str], list[Path], list[Problem]]:
    """What an index names."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [], [_bad_index(index, error)]
    files = [index.parent / name for name in names]
    absent = [file for file in files if not file.is_file()]
    problems = [_absent(file, f"{index.name} names it") for file in absent]
    return weight_map, [file for file in files if file not in absent], problems


def _missing_shards(folder: Path, files: list[Path]) -> list[Problem]:
    """One problem for every shard that the names of its neighbours promise."""
    names = {file.name for file in files}
    series = {
        (match["stem"], int(match["count"])) for name in names if (match := SHARD.fullmatch(name))
    }
    wanted = [
        f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        for stem, count in sorted(series)
        for number in range(1, count + 1)
    ]
    return [
        _absent(folder / name, "its neighbours are numbered")
        for name in wanted
        if name not in names
    ]


def _misplaced(named: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> list[Problem]:
    """One problem for every tensor that is not in the file where the index says it is."""
    return [
        Problem(
            name=f"tensor {name}",
            value=file,
            rule="the index says that the tensor is in this file, and it is not",
            remedy="Download or copy the index and this file again",
        )
        for name, file in named.items()
        if name not in tensors or tensors[name].file.name != Path(file).name
    ]


def _absent(file: Path, reason: str) -> Problem:
    return Problem(
        name="weights file",
        value=str(file),
        rule=f"is missing, and {reason}",
        remedy="Download or copy this file into the folder",
    )


def _twice(tensor: StoredTensor, other: Path) -> Problem:
    return Problem(
        name=f"tensor {tensor.name}",
        value=str(tensor.file),
        rule=f"is also in {other.name}, and a folder without an index may hold each tensor once",
        remedy="Keep one set of files",
    )


def _bad_index(index: Path, error: Exception) -> Problem:
    return Problem(
        name="weights index",
        value=str(index),
        rule=f"must be JSON with a weight_map from tensors to files ({error!r})",
        remedy="Download or copy this file again",
    )


def _no_weights(folder: Path) -> Problem:
    others = sorted(
        file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)
    )
    found = f"; found only {', '.join(others)}" if others else ""
    return Problem(
        name="weights",
        value=str(folder),
        rule=f"has no .safetensors file{found}",
        remedy="Download the safetensors weights of this component into the folder",
    )
