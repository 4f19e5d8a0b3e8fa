"""Profiles name the parts of a block: the names that docs/profiling.md explains are all there."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from maxdiffusion.attention import AttentionProblem, BlockAttention, plan_attention
from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE

CONFIG = WanTransformerConfig.from_diffusers(
    {
        "num_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "ffn_dim": 32,
        "text_dim": 16,
        "freq_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
    }
)
BLOCK = {
    "self_attention": {"norm", "qkv", "rope", COLLECTIVE_SCOPE, "kernel", "merge", "out", "gate"},
    "cross_attention": {"norm", "qkv", "kernel", "out"},
    "ffn": {"norm", "mlp", "gate"},
}


@pytest.fixture(scope="module")
def operations() -> list[str]:
    """The paths of scopes in the program of one forward on a ring of two."""
    mesh = build_mesh(MeshShape(ring=2), devices=jax.devices()[:2])
    sizes = {"batch": 1, "q_len": 4, "heads": 2, "head_dim": 12, "dtype": jnp.dtype(jnp.float32)}
    attention = BlockAttention(
        self_attention=plan_attention("ring", AttentionProblem(kv_len=4, **sizes), mesh),
        cross_attention=plan_attention("dot_product", AttentionProblem(kv_len=3, **sizes), mesh),
    )
    layout = ActivationLayout(mesh=mesh)

    kinds = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    graph, weights = nnx.split(
        nnx.eval_shape(lambda: WanTransformer(CONFIG, **kinds, rngs=nnx.Rngs(0)))
    )

    def forward(weights, latents, timestep, text):
        model = nnx.merge(graph, weights)
        read = model.text_keys_values(text, layout=layout)
        return model(latents, timestep, read, attention=attention, layout=layout)

    with jax.set_mesh(mesh):
        arrays = (jnp.zeros((1, 1, 4, 4, 4)), jnp.zeros(1), jnp.zeros((1, 3, 16)))
        program = jax.jit(forward).lower(weights, *arrays)
    return re.findall(r'op_name="([^"]+)"', program.compile().as_text())


@pytest.mark.parametrize("part", BLOCK)
def test_every_part_of_a_block_has_its_name(operations, part):
    inside = [path.split("/") for path in operations if part in path.split("/")]
    found = {word for path in inside for word in path[path.index(part) :]}
    assert found >= BLOCK[part]


def test_what_is_around_the_blocks_has_names_too(operations):
    found = {word for path in operations for word in path.split("/")}
    assert found >= {"embed", "blocks", "head", "text_keys_values"}
