"""Transformers from other files than those of the model's folder.

The sizes that their tensors reveal are checked against the folder's config, and every tensor
against the model, in one report and before anything is read. Imported only for such files.
"""

from dataclasses import replace
from pathlib import Path

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.checkpoints.load import match_parameters
from maxdiffusion.checkpoints.original_files import (
    NameDialects,
    find_transformers,
    open_transformer,
)
from maxdiffusion.checkpoints.safetensors_io import StoredWeights
from maxdiffusion.errors import Collector, Problem
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.original import TensorSizes, diffusers_name, original_name
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.spec import TransformerFiles, WanSpec, wan_models

WAN_NAMES = NameDialects(to_diffusers=diffusers_name, to_original=original_name)


def with_transformers(folder: ModelFolder, spec: WanSpec, files: TransformerFiles) -> ModelFolder:
    """Returns the folder with the transformers of `files`; raises all differences at once."""
    paths = find_transformers(files.first, files.second, spec.experts, base=folder.root)
    problems = Collector()
    opened: dict[str, StoredWeights] = {}
    for name, path in paths.items():
        with problems:
            opened[name] = open_checked(path, folder, name, spec)
    problems.raise_if_any()
    return replace(folder, weights={**folder.weights, **opened})


def open_checked(path: Path, folder: ModelFolder, name: str, spec: WanSpec) -> StoredWeights:
    """Returns the tensors of a transformer; raises every difference from the component `name`."""
    stored = open_transformer(path, WAN_NAMES)
    problems = Collector(size_problems(stored, folder, name))
    with problems:
        abstract = wan_models(spec, Precision()).transformer.parameters
        match_parameters(stored, transformer_map(spec.transformer), abstract)
    problems.raise_if_any()
    return stored


def size_problems(stored: StoredWeights, folder: ModelFolder, name: str) -> list[Problem]:
    """Returns a problem for each size that differs from the config of the component `name`."""
    sizes = TensorSizes.of({tensor: stored.tensors[tensor].shape for tensor in stored.tensors})
    config = folder.path(name, "config.json")
    remedy = "Set pretrained_model_name_or_path to a folder of that model, or take other files"
    return [
        Problem(
            name=f"{stored.folder.name}: {key}",
            value=here,
            rule=f"is {there} in {config}; the tensors are those of {sizes.kind}",
            remedy=remedy,
        )
        for key, (here, there) in sizes.differences(folder.configs[name]).items()
    ]
