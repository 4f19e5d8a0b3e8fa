"""The tiny WAN transformers as our models, and what diffusers computes with them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file

from maxdiffusion.attention import (
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.mesh import ActivationLayout, parameter_sharding, single_device_mesh
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.models.wan.checkpoint import transformer_map

GOLDENS = Path(__file__).parents[2] / "goldens"
FILES = {"wan22_t2v": "transformer.npz", "wan21_t2v": "transformer_wan21.npz"}


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One transformer of a tiny checkpoint, with its goldens by their short names."""

    folder: Path
    golden: Mapping[str, np.ndarray]

    @property
    def config(self) -> WanTransformerConfig:
        return WanTransformerConfig.from_diffusers(
            json.loads((self.folder / "config.json").read_text())
        )

    @property
    def latents(self) -> jax.Array:
        """The golden input, channels last."""
        return jnp.asarray(self.golden["hidden_states"].transpose(0, 2, 3, 4, 1))

    def model(self, dtype: str = "float32", **changes: object) -> WanTransformer:
        """The transformer with the checkpoint's weights, kept and computed in `dtype`."""
        return with_weights(replace(self.config, **changes), self.folder, jnp.dtype(dtype))


def with_weights(config: WanTransformerConfig, folder: Path, dtype: jnp.dtype) -> WanTransformer:
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    model = nnx.eval_shape(
        lambda: WanTransformer(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(model)
    params = {".".join(map(str, path)): param for path, param in nnx.to_flat_state(state)}
    table = transformer_map(config)
    for entry in table.entries:
        parts = [entry.transform.apply(tensors[name]) for name in table.sources(entry)]
        value = np.stack(parts) if entry.stacked else parts[0]
        param = params[entry.parameter]
        assert value.shape == param.shape, entry
        param.set_value(jnp.asarray(value, param.dtype))
    return nnx.merge(graph, state)


def block_attention(
    model: WanTransformer,
    batch: int,
    tokens: int,
    *,
    mesh: Mesh | None = None,
    name: str = "dot_product",
) -> BlockAttention:
    """Plans for `tokens` video tokens and 512 text tokens."""
    mesh = mesh or single_device_mesh()
    sizes = {
        "batch": batch,
        "q_len": tokens,
        "heads": model.config.heads,
        "head_dim": model.config.head_dim,
        "dtype": model.dtype,
    }
    return BlockAttention(
        self_attention=plan_attention(name, AttentionProblem(kv_len=tokens, **sizes), mesh),
        cross_attention=plan_cross_attention(name, AttentionProblem(kv_len=512, **sizes), mesh),
    )


def placed(model: WanTransformer, mesh: Mesh) -> WanTransformer:
    """`model` with every parameter where the mesh wants it."""
    graph, state = nnx.split(model)

    def place(param: nnx.Param) -> nnx.Param:
        where = parameter_sharding(mesh, param.get_metadata()["dims"], param.shape)
        return param.replace(jax.device_put(param.get_value(), where))

    moved = jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, moved)


def forward(
    model: WanTransformer,
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    *,
    mesh: Mesh | None = None,
    name: str = "dot_product",
) -> np.ndarray:
    """The velocity for (latents, timestep, text) as float32, jitted, on `mesh` or one device."""
    latents, timestep, text = inputs
    mesh = mesh or single_device_mesh()
    tokens = model.config.tokens(latents.shape[1:4])
    attention = block_attention(model, len(latents), tokens, mesh=mesh, name=name)
    layout = ActivationLayout(mesh=mesh)

    @nnx.jit
    def run(model, latents, timestep, text):
        cached = model.text_keys_values(text.astype(model.dtype), layout=layout)
        return model(
            latents.astype(model.dtype), timestep, cached, attention=attention, layout=layout
        )

    with jax.set_mesh(mesh):
        velocity = run(placed(model, mesh), latents, timestep, text)
    assert velocity.dtype == model.dtype
    return np.asarray(velocity.astype(jnp.float32))


def golden_inputs(expert: Expert) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        expert.latents,
        jnp.asarray(expert.golden["timestep"]),
        jnp.asarray(expert.golden["encoder_hidden_states"]),
    )


def read_expert(checkpoint: str, part: str) -> Expert:
    with np.load(GOLDENS / FILES[checkpoint]) as values:
        golden = {
            name.removeprefix(f"{part}/"): values[name]
            for name in values.files
            if name.startswith(f"{part}/")
        }
    return Expert(folder=GOLDENS / checkpoint / part, golden=golden)
