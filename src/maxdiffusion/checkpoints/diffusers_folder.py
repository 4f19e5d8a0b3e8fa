"""Models in diffusers' folder layout: located, listed and checked before any tensor is read.

    location --locate--> folder --open_model_folder--> configs and weight headers by component

A location is a folder, a hub id (only the files that a run needs are downloaded) or `embedded`.
`component_digests` compares checkpoints between hosts without reading them whole.
"""

import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxdiffusion.checkpoints.safetensors_io import StoredWeights, open_weights
from maxdiffusion.errors import Collector, Problem, ProblemsFound

HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
KINDS = ("*.json", "*.safetensors", "*.model", "*.txt")


def download(repository: str, files: Sequence[str], *, name: str) -> Path:
    """Returns the local copy of these files (patterns) of a hub repository.

    Problems carry the name of the field `name`.
    """
    # Slow to import, and not needed for local folders.
    from huggingface_hub import errors, snapshot_download

    try:
        found = snapshot_download(repository, allow_patterns=[*files])
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        rule = "is neither a folder here nor a hub repository that you may read"
        remedy = "Check the spelling; for a gated model accept its terms and log in (hf auth login)"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        rule = "is not a folder here, not in the hub's cache, and the hub cannot be reached"
        remedy = "Unset HF_HUB_OFFLINE or repair the network, or give the path of a local folder"
    except Exception as error:  # the client does not wrap the errors of its network library
        rule = f"could not be downloaded ({type(error).__name__}: {error})"
        remedy = "Try again, or download it by hand and give the path of the folder"
    else:
        return Path(found)
    raise ProblemsFound([Problem(name=name, value=repository, rule=rule, remedy=remedy)])


def patterns(components: Sequence[str] | None, configs_only: Collection[str] = ()) -> list[str]:
    """Returns the file patterns to download; None: those of all components.

    Of the components in `configs_only` no weights are downloaded.
    """
    if components is None:
        return list(KINDS)
    wanted = [
        f"{part}/{kind}"
        for part in components
        for kind in (("*.json",) if part in configs_only else KINDS)
    ]
    return ["model_index.json", *wanted]


# The small models that come with the package, and their folders in assets.
EMBEDDED: Mapping[str, str] = {"embedded": "wan_tiny", "embedded_image": "wan_tiny_image"}
MODEL_INDEX = "model_index.json"
KEY = "pretrained_model_name_or_path"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FOLDER = "tokenizer"
# Config files of components without weights; all others have config.json.
SETTINGS: Mapping[str, str] = {
    "scheduler": "scheduler_config.json",
    "image_processor": "preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A checked folder: model_index.json, and the config and weights of every component."""

    root: Path
    index: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]] = field(repr=False)  # of each component
    weights: Mapping[str, StoredWeights] = field(repr=False)  # of each component that has any

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the opened components."""
        return tuple(self.configs)

    def path(self, component: str, file: str) -> Path:
        """Returns the path of a file of a component."""
        return self.root / component / file


def open_model_folder(
    location: str | Path,
    *,
    needed: Sequence[str] | None = None,
    configs_only: Collection[str] = (),
) -> ModelFolder:
    """Returns the model at a folder, hub id or `embedded`; reads configs and weight headers.

    `needed` names its components (None: all that it lists); those in `configs_only` need no
    weights. Raises ProblemsFound with everything that is wrong with them.
    """
    root = locate(location, needed, configs_only)
    index = _read_index(root)
    listed = listed_components(index)
    configs: dict[str, Mapping[str, Any]] = {}
    weights: dict[str, StoredWeights] = {}
    problems = Collector()
    for name in listed if needed is None else needed:
        with problems:
            _check_component(root, name, listed)
            with problems:
                configs[name] = _read_config(root / name)
            if name not in (*SETTINGS, TOKENIZER_FOLDER, *configs_only):
                weights[name] = open_weights(root / name)
    problems.raise_if_any()
    return ModelFolder(root=root, index=index, configs=configs, weights=weights)


def read_model_index(location: str | Path) -> Mapping[str, Any]:
    """Returns the model_index.json of a model; of a hub id only this file is downloaded."""
    return _read_index(locate(location, ()))


def _read_index(root: Path) -> Mapping[str, Any]:
    return _read_json(root / MODEL_INDEX, "Name the folder that holds this file")


def locate(
    location: str | Path,
    needed: Sequence[str] | None = None,
    configs_only: Collection[str] = (),
) -> Path:
    """Returns the local folder of a model; downloads a hub id (only the `needed` components)."""
    if folder := EMBEDDED.get(str(location)):
        return Path(str(importlib.resources.files("maxdiffusion") / "assets" / folder))
    path = Path(location).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir it does not raise inside unreadable folders
        if _readable(path):
            return path
        raise ProblemsFound([_not_a_folder(location, "cannot be read")])
    if os.path.exists(path):
        raise ProblemsFound([_not_a_folder(location, "is a file")])
    if is_hub_id(location):
        return download(str(location), patterns(needed, configs_only), name=KEY)
    raise ProblemsFound([_not_a_folder(location, "does not exist")])


def is_hub_id(location: str | Path) -> bool:
    """Returns whether a model would be downloaded from the hub."""
    hub_id = isinstance(location, str) and re.fullmatch(HUB_ID, location) is not None
    return hub_id and not os.path.exists(Path(location).expanduser())


def listed_components(index: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the components that a model_index.json lists and does not set to null."""
    return tuple(
        name
        for name, value in index.items()
        if not name.startswith("_") and isinstance(value, list) and value and value[0] is not None
    )


def _check_component(root: Path, name: str, listed: Sequence[str]) -> None:
    """Raises ProblemsFound unless the model lists the component and its folder can be read."""
    folder = root / name
    if name not in listed:
        raise ProblemsFound([_missing(root, name, "is not in model_index.json")])
    if not os.path.isdir(folder):
        raise ProblemsFound([_missing(root, name, "has no folder")])
    if not _readable(folder):
        raise ProblemsFound([_missing(root, name, "has a folder that cannot be read")])


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Returns the config of a component; a tokenizer, which is slow to parse, reads its own."""
    remedy = f"Download or copy it into {folder}"
    if folder.name != TOKENIZER_FOLDER:
        return _read_json(folder / SETTINGS.get(folder.name, CONFIG), remedy)
    file = folder / TOKENIZER
    if not file.is_file():
        raise ProblemsFound([_bad_file(file, "is missing", remedy)])
    return {}


def _readable(folder: Path) -> bool:
    """Returns whether this user may list a folder and open its files."""
    return os.access(folder, os.R_OK | os.X_OK)


def _read_json(file: Path, remedy: str) -> Mapping[str, Any]:
    """Returns the JSON object in a file."""
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
            return content
        rule = f"must hold a JSON object, not a {type(content).__name__}"
    raise ProblemsFound([_bad_file(file, rule, remedy)])


def _bad_file(file: Path, rule: str, remedy: str) -> Problem:
    return Problem(name="model file", value=str(file), rule=rule, remedy=remedy)


def _not_a_folder(location: str | Path, rule: str) -> Problem:
    return Problem(
        name=KEY,
        value=str(location),
        rule=f"{rule}; it must be a folder in diffusers' layout, a hub id, or "
        f"one of {', '.join(EMBEDDED)}",
        remedy="Give the path of a folder with model_index.json, or an id such as owner/model",
    )


def _missing(root: Path, component: str, rule: str) -> Problem:
    return Problem(
        name=f"component {component}",
        value=str(root / component),
        rule=f"{rule}, and this model needs it",
        remedy="Download the whole model, or name a model that has this component",
    )


SAMPLES, SAMPLE_BYTES = 16, 4096
SMALL_BYTES = 64 << 20  # files up to this size are read whole: configs, tokenizers, small models


def component_digests(folder: ModelFolder) -> dict[str, str]:
    """Returns a short digest of the files of each component.

    Large files enter by their size, header and samples of their content: hashing 28 GB on every
    host before each run would take longer than loading it.
    """
    return {f"checkpoint {name}": _digest(_files_of(folder, name)) for name in folder.components}


def _files_of(folder: ModelFolder, component: str) -> list[Path]:
    """Returns the files of a component; weights may come from another place."""
    own, weights = folder.root / component, folder.weights.get(component)
    files = [file for file in sorted(own.rglob("*")) if file.is_file()]
    if weights is None:
        return files
    replaced = weights.folder != own
    return [*([own / CONFIG, *weights.files] if replaced else files), *weights.patch_files]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= SMALL_BYTES:
                digest.update(stream.read())
                continue
            # The first bytes hold the header, which lists all tensors.
            digest.update(stream.read(1 << 20))
            for piece in range(SAMPLES):
                stream.seek((size - SAMPLE_BYTES) * piece // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
