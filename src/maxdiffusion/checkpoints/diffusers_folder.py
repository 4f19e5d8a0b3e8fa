"""A model in diffusers' folder layout: found, listed and checked before any tensor is read."""

import importlib.resources
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.weights.hub import HUB_ID, download
from maxdiffusion.weights.safetensors_index import StoredWeights, open_weights

EMBEDDED = "embedded"  # the small model that comes with the package
MODEL_INDEX = "model_index.json"
KEY = "pretrained_model_name_or_path"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# The settings of components that have no weights; all others have config.json.
SETTINGS: Mapping[str, str] = {
    "scheduler": "scheduler_config.json",
    "image_processor": "preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A checked folder: model_index.json, and config and weights of every component."""

    root: Path
    index: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]] = field(repr=False)  # of each component
    weights: Mapping[str, StoredWeights] = field(repr=False)  # of each component that has any

    @property
    def components(self) -> tuple[str, ...]:
        """The components that the folder has."""
        return tuple(self.configs)

    def path(self, component: str, file: str) -> Path:
        """A file of a component."""
        return self.root / component / file


def open_model_folder(location: str | Path, *, needed: Sequence[str] | None = None) -> ModelFolder:
    """The model at a folder, hub id or `embedded`; raises everything that is wrong at once."""
    folder, problems = inspect_model_folder(location, needed=needed)
    if folder is None or problems:
        raise ProblemsFound(problems)
    return folder


def inspect_model_folder(
    location: str | Path, *, needed: Sequence[str] | None = None
) -> tuple[ModelFolder | None, tuple[Problem, ...]]:
    """The model with the `needed` components (None: all that it lists), and all that is wrong."""
    root, problems = locate(location, needed)
    if root is None:
        return None, problems
    index, problems = _read_json(root / MODEL_INDEX, "Name the folder that holds this file")
    if index is None:
        return None, problems
    listed = listed_components(index)
    wanted = listed if needed is None else tuple(needed)
    found = [_open_component(root, name, listed) for name in wanted]
    folder = ModelFolder(
        root=root,
        index=index,
        configs={name: part.config for name, part in zip(wanted, found, strict=True)},
        weights={
            name: part.weights
            for name, part in zip(wanted, found, strict=True)
            if part.weights is not None
        },
    )
    return folder, tuple(problem for part in found for problem in part.problems)


def locate(
    location: str | Path, needed: Sequence[str] | None = None
) -> tuple[Path | None, tuple[Problem, ...]]:
    """The local folder of a model; a hub id is downloaded (only the `needed` components)."""
    if str(location) == EMBEDDED:
        return Path(str(importlib.resources.files("maxdiffusion") / "assets" / "wan_tiny")), ()
    path = Path(location).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir it does not raise inside unreadable folders
        readable = _readable(path)
        return (path, ()) if readable else (None, (_not_a_folder(location, "cannot be read"),))
    if os.path.exists(path):
        return None, (_not_a_folder(location, "is a file"),)
    if is_remote(location):
        return download(str(location), needed, name=KEY)
    return None, (_not_a_folder(location, "does not exist"),)


def is_remote(location: str | Path) -> bool:
    """Whether a model would have to be fetched from the hub."""
    hub_id = isinstance(location, str) and re.fullmatch(HUB_ID, location) is not None
    return hub_id and not os.path.exists(Path(location).expanduser())


def listed_components(index: Mapping[str, Any]) -> tuple[str, ...]:
    """The components that a model_index.json lists and does not set to null."""
    return tuple(
        name
        for name, value in index.items()
        if not name.startswith("_") and isinstance(value, list) and value and value[0] is not None
    )


@dataclass(frozen=True, kw_only=True)
class _Component:
    config: Mapping[str, Any]
    weights: StoredWeights | None = None
    problems: tuple[Problem, ...] = ()


def _open_component(root: Path, name: str, listed: Sequence[str]) -> _Component:
    """One component, with everything that is wrong with it."""
    folder = root / name
    if name not in listed:
        return _Component(config={}, problems=(_missing(root, name, "is not in model_index.json"),))
    if not os.path.isdir(folder):
        return _Component(config={}, problems=(_missing(root, name, "has no folder"),))
    if not _readable(folder):
        rule = "has a folder that cannot be read"
        return _Component(config={}, problems=(_missing(root, name, rule),))
    remedy = f"Download or copy it into {folder}"
    if name == "tokenizer":  # left to the tokenizer itself: with 256,384 words it is long to read
        file = folder / TOKENIZER
        absent = () if file.is_file() else (_bad_file(file, "is missing", remedy),)
        return _Component(config={}, problems=absent)
    config, problems = _read_json(folder / SETTINGS.get(name, CONFIG), remedy)
    if name in SETTINGS:
        return _Component(config=config or {}, problems=problems)
    weights, wrong = open_weights(folder)
    return _Component(config=config or {}, weights=weights, problems=(*problems, *wrong))


def _readable(folder: Path) -> bool:
    """Whether this user may list a folder and open what is in it."""
    return os.access(folder, os.R_OK | os.X_OK)


def _read_json(file: Path, remedy: str) -> tuple[Mapping[str, Any] | None, tuple[Problem, ...]]:
    """The JSON object in a file, or why there is none."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        rule = "is missing"
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
    except ValueError as error:
        rule = f"must be JSON ({error})"
    else:
        if isinstance(content, dict):
            return content, ()
        rule = f"must hold a JSON object, not a {type(content).__name__}"
    return None, (_bad_file(file, rule, remedy),)


def _bad_file(file: Path, rule: str, remedy: str) -> Problem:
    return Problem(name="model file", value=str(file), rule=rule, remedy=remedy)


def _not_a_folder(location: str | Path, rule: str) -> Problem:
    return Problem(
        name=KEY,
        value=str(location),
        rule=f"{rule}; it must be a folder in diffusers' layout, a hub id, or {EMBEDDED!r}",
        remedy="Give the path of a folder with model_index.json, or an id such as owner/model",
    )


def _missing(root: Path, component: str, rule: str) -> Problem:
    return Problem(
        name=f"component {component}",
        value=str(root / component),
        rule=f"{rule}, and this model needs it",
        remedy="Download the whole model, or name a model that has this component",
    )
