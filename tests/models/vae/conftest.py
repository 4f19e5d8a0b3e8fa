"""The autoencoder of the golden checkpoint, and a smaller random one for what needs no judge."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from maxdiffusion.models.vae import WanVae, WanVaeConfig
from maxdiffusion.models.vae.checkpoint import vae_map

GOLDENS = Path(__file__).parents[2] / "goldens"
FOLDER = GOLDENS / "wan22_t2v" / "vae"


def build(config: WanVaeConfig, dtype: Any, value_of: Callable[[str, tuple], np.ndarray]) -> WanVae:
    """An autoencoder with the parameters that `value_of` gives for a path and a shape."""
    vae = nnx.eval_shape(lambda: WanVae(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))
    for path, variable in nnx.to_flat_state(nnx.state(vae)):
        value = value_of(".".join(map(str, path)), variable.shape)
        assert value.shape == variable.shape
        variable.set_value(jnp.asarray(value, dtype))
    return vae


def load(dtype: Any) -> WanVae:
    """The golden autoencoder, parameters and arithmetic in `dtype`."""
    config = WanVaeConfig.from_diffusers(json.loads((FOLDER / "config.json").read_text()))
    tensors = load_file(FOLDER / "diffusion_pytorch_model.safetensors")
    entries = {entry.parameter: entry for entry in vae_map(config).entries}

    def read(path: str, shape: tuple) -> np.ndarray:
        return entries[path].transform.apply(tensors[entries[path].source])

    return build(config, dtype, read)


@pytest.fixture(scope="session")
def goldens() -> dict[str, np.ndarray]:
    """What diffusers computes, channels last, without the `vae/` in front of the names."""
    with np.load(GOLDENS / "vae.npz") as stored:
        return {
            name.removeprefix("vae/"): np.moveaxis(stored[name].astype(np.float32), 1, -1)
            for name in stored.files
        }


@pytest.fixture(scope="session")
def golden_vae() -> WanVae:
    """The golden autoencoder in float32."""
    return load(jnp.float32)


@pytest.fixture(scope="session")
def golden_vae_bf16() -> WanVae:
    """The golden autoencoder in bfloat16."""
    return load(jnp.bfloat16)


def drawn(config: WanVaeConfig) -> WanVae:
    """An autoencoder with random weights in float32."""
    rng = np.random.default_rng(0)

    def draw(path: str, shape: tuple) -> np.ndarray:
        # Outputs of order 1 from inputs of order 1; gains and biases that are neither 0 nor 1.
        scale = np.sqrt(np.prod(shape[:-1])) if len(shape) > 1 else 2.0
        return rng.standard_normal(shape) / scale + path.endswith("gamma")

    return build(config, jnp.float32, draw)


@pytest.fixture(scope="session")
def small_vae() -> WanVae:
    """Three levels of one residual block: 1/4 of the height and width, 4 frames to a latent."""
    return drawn(
        WanVaeConfig(
            base_dim=4, dim_mult=(1, 2, 2), num_res_blocks=1, temperal_downsample=(True, True)
        )
    )


@pytest.fixture(scope="session")
def small_vae22() -> WanVae:
    """As `small_vae` with shortcuts and folded pixels: 1/8 of the height and width."""
    return drawn(
        WanVaeConfig(
            base_dim=4,
            decoder_base_dim=6,
            z_dim=8,
            dim_mult=(1, 2, 2),
            num_res_blocks=1,
            temperal_downsample=(True, True),
            in_channels=12,
            out_channels=12,
            latents_mean=(0.0,) * 8,
            latents_std=(1.0,) * 8,
            is_residual=True,
            patch_size=2,
        )
    )
