"""A tiny UMT5 encoder with the weights of the tiny checkpoint."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.umt5.checkpoint import umt5_map

GOLDENS = Path(__file__).parents[2] / "goldens"
FOLDER = GOLDENS / "wan22_t2v" / "text_encoder"


@pytest.fixture(scope="session")
def golden():
    return np.load(GOLDENS / "text.npz")


@pytest.fixture(scope="session")
def config():
    return Umt5Config.from_transformers(json.loads((FOLDER / "config.json").read_text()))


@pytest.fixture(scope="session")
def load_encoder(config):
    """A function that makes the encoder in a dtype, every parameter read through the map."""
    tensors = load_file(FOLDER / "model.safetensors")

    def load(dtype):
        encoder = nnx.eval_shape(
            lambda: Umt5Encoder(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        )
        structure, state = nnx.split(encoder)
        flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
        table = umt5_map(config)
        assert set(flat) == {entry.parameter for entry in table.entries}
        for entry in table.entries:
            sources = [tensors[name] for name in table.sources(entry)]
            arrays = [entry.transform.apply(source) for source in sources]
            value = jnp.asarray(np.stack(arrays) if entry.stacked else arrays[0], dtype)
            assert flat[entry.parameter].shape == value.shape, entry
            flat[entry.parameter].set_value(value)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        return nnx.merge(structure, state)

    return load
