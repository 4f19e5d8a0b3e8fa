"""Device layouts of weights: programs get them, weights are copied to them, others are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.layout import Layout

from maxdiffusion.mesh import MeshShape, build_mesh, mesh, parameter_layout, parameter_sharding
from maxdiffusion.models import abstract
from maxdiffusion.models.abstract import AbstractModel, lay_out

TILES = ((16, 128), (2, 1))
MESH = build_mesh(MeshShape(tensor=2), devices=jax.devices()[:2])


@pytest.mark.parametrize(
    ("dims", "shape", "dtype", "tiled"),
    [
        (("model", "width"), (40, 5120, 13824), jnp.bfloat16, True),
        (("model", "width"), (40, 5120, 13824), jnp.float32, False),
        (("model", "width"), (40, 5120, 64), jnp.bfloat16, False),
        (("model", "width"), (5120, 5120), jnp.bfloat16, False),
        (("model", "mlp"), (40, 5120, 13824), jnp.bfloat16, False),
    ],
    ids=["stacked", "float32", "narrow", "one", "sharded"],
)
def test_stacked_matrices_have_the_tiles_of_their_chip(monkeypatch, dims, shape, dtype, tiled):
    sharding = parameter_sharding(MESH, dims, shape)
    assert parameter_layout(sharding, shape, dtype) is None  # a CPU reads the default
    monkeypatch.setattr(mesh, "WEIGHT_TILES", {"cpu": TILES})
    wanted = Layout(major_to_minor=(0, 1, 2), tiling=TILES) if tiled else None
    assert parameter_layout(sharding, shape, dtype) == wanted


class Stack(nnx.Module):
    """Three stacked matrices and a table of the same shape."""

    def __init__(self, rngs: nnx.Rngs):
        values = rngs.normal((3, 4, 8))
        self.layer = nnx.Dict(kernel=nnx.Param(values, dims=("model", "width")))
        self.table = nnx.Param(values, dims=("model", "width"))

    def __call__(self, rows: jax.Array) -> jax.Array:
        return rows @ self.layer.kernel[0] + self.table[0, :1]


def test_weights_are_copied_to_the_layouts_that_programs_are_compiled_for(monkeypatch):
    """CPUs have no tiles, but an order of dimensions, which jax checks in the same way."""
    swapped = Layout(major_to_minor=(0, 2, 1))
    monkeypatch.setattr(abstract, "parameter_layout", lambda *_: swapped)
    model = AbstractModel.of(Stack)
    _, state = nnx.split(Stack(nnx.Rngs(0)))
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, model.on(MESH)))
    before = np.asarray(state["layer"]["kernel"].get_value())
    with jax.set_mesh(MESH):
        program = jax.jit(lambda weights: nnx.merge(model.graph, weights)(jnp.ones((2, 4))))
        compiled = program.lower(model.on(MESH)).compile()
    with pytest.raises(ValueError, match="compiled for input layouts that disagree"):
        compiled(state)
    lay_out(state, model.on(MESH))
    kernel, table = state["layer"]["kernel"].get_value(), state["table"].get_value()
    assert kernel.format.layout.major_to_minor == (0, 2, 1)
    assert table.format.layout.major_to_minor == (0, 1, 2)
    np.testing.assert_array_equal(kernel, before)
    wanted = np.broadcast_to(before[0].sum(0) + before[0, 0], (2, 8))
    # Sums of five float32 numbers.
    np.testing.assert_allclose(compiled(state), wanted, rtol=0, atol=5 * 2.0**-22)
