"""Our models with the weights of a folder that diffusers or transformers saved."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from maxdiffusion.checkpoints.load import ComponentSource, load_parameters
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.models.checkpoint_map import CheckpointMap
from maxdiffusion.models.clip import ClipVisionConfig, ClipVisionEncoder
from maxdiffusion.models.clip.checkpoint import clip_map
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.umt5.checkpoint import umt5_map
from maxdiffusion.models.vae import WanVae, WanVaeConfig
from maxdiffusion.models.vae.checkpoint import vae_map
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.models.wan.checkpoint import transformer_map


def load_umt5(folder: Path) -> Umt5Encoder:
    """Returns the encoder in float32."""
    config = Umt5Config.from_transformers(_config(folder))
    return _load(folder, Umt5Encoder, config, umt5_map(config))


def load_clip(folder: Path) -> ClipVisionEncoder:
    """Returns the vision tower in float32."""
    config = ClipVisionConfig.from_transformers(_config(folder))
    return _load(folder, ClipVisionEncoder, config, clip_map(config))


def load_transformer(folder: Path) -> WanTransformer:
    """Returns the transformer in float32."""
    config = WanTransformerConfig.from_diffusers(_config(folder))
    return _load(folder, WanTransformer, config, transformer_map(config))


def load_vae(folder: Path) -> WanVae:
    """Returns the VAE in float32."""
    config = WanVaeConfig.from_diffusers(_config(folder))
    return _load(folder, WanVae, config, vae_map(config))


def channels_last(tensor: torch.Tensor) -> np.ndarray:
    """Returns diffusers' [B, C, F, H, W] in our order."""
    return np.moveaxis(tensor.numpy(), 1, -1)


def channels_first(values: Any) -> np.ndarray:
    """Returns our [B, F, Y, X, C] in diffusers' order."""
    return np.moveaxis(np.asarray(values), -1, 1)


def _config(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _load(folder: Path, model: Callable[..., Any], config: object, table: CheckpointMap) -> Any:
    """Returns the model, every parameter read from the folder by the strict loader."""
    build = lambda: model(  # noqa: E731
        config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    structure, abstract = nnx.split(nnx.eval_shape(build))
    source = ComponentSource(stored=open_weights(folder), table=table, abstract=abstract)
    state, _ = load_parameters(source)
    return nnx.merge(structure, state)
