"""A trained model as a diffusers folder: new parts are written, the others copied."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxdiffusion.runtime.coordination import barrier
from maxdiffusion.weights.atomic import new_folder
from maxdiffusion.weights.checkpoint_map import CheckpointMap
from maxdiffusion.weights.export import ExportOptions, export_component, help_export

TEXT_ENCODER = "text_encoder"


@dataclass(frozen=True, kw_only=True)
class NewPart:
    """A component with its new weights: the map of their names, and its config.json."""

    state: nnx.State
    table: CheckpointMap
    config: Mapping[str, Any] = field(repr=False)


def export_model(
    template: Path, folder: Path, parts: Mapping[str, NewPart], *, dtype: np.dtype | None = None
) -> None:
    """Writes `folder` anew: `parts` by their names, and everything else as `template` has it.

    The first process writes, and all must call it.
    """
    if jax.process_index() != 0:
        for part in parts.values():
            help_export(part.state, part.table)
        barrier("export")
        return
    with new_folder(folder) as unfinished:
        for source in sorted(template.iterdir()):
            if source.name in parts:
                continue
            if source.is_dir():
                shutil.copytree(source, unfinished / source.name)
            else:
                shutil.copy2(source, unfinished / source.name)
        for name, part in parts.items():
            stem = "model" if name == TEXT_ENCODER else "diffusion_pytorch_model"
            config = dict(part.config)
            if name == TEXT_ENCODER and dtype is not None:
                config["dtype"] = str(dtype)  # transformers loads in the dtype that stands here
            export_component(
                part.state,
                part.table,
                unfinished / name,
                config=config,
                options=ExportOptions(dtype=dtype, stem=stem),
            )
    barrier("export")


def config_of(template: Path, component: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a component with some values changed; lists for tuples."""
    held = json.loads((template / component / "config.json").read_text())
    plain = {
        key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()
    }
    return held | plain
