"""The CLIP vision tower on one device and on a mesh; tests/parity compares it with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh
from maxdiffusion.models.abstract import AbstractModel, values_of
from maxdiffusion.models.clip import ClipVisionConfig, ClipVisionEncoder
from tests.attention.collectives import counted

pytestmark = pytest.mark.slow

SMALL = ClipVisionConfig(width=32, mlp_width=64, layers=4, heads=8, image_size=28, patch=14)


def build(rngs: nnx.Rngs, dtype=jnp.float32) -> ClipVisionEncoder:
    return ClipVisionEncoder(SMALL, dtype=dtype, rngs=rngs)


@pytest.fixture(scope="module")
def encoder():
    """The small tower with gains, biases and positions that are neither 0 nor 1."""
    rng = np.random.default_rng(0)
    with jax.default_prng_impl("rbg"):
        made = build(nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(made)):
        if path[-1] in ("bias", "scale", "positions"):
            noise = rng.standard_normal(variable.shape, dtype=np.float32)
            variable.set_value(variable.get_value() + 0.2 * noise)
    return made


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(1).standard_normal((2, 28, 28, 3), dtype=np.float32)


def test_images_do_not_see_each_other(encoder, pixels):
    tokens = jax.jit(encoder.__call__)(pixels)
    assert tokens.shape == (2, 5, 32)
    alone = jax.jit(encoder.__call__)(pixels[1:])
    # Rows of order 2 after three layers of sums of 14 * 14 * 3 terms and less, in another order.
    np.testing.assert_allclose(alone, tokens[1:], rtol=0, atol=1e-5)


def test_a_token_is_a_patch(encoder, pixels):
    changed = pixels.copy()
    changed[:, :14, 14:] += 1.0  # first row, second column
    embed = jax.jit(encoder.embedding.__call__)
    moved = np.abs(embed(changed) - embed(pixels)).max(axis=(0, 2))
    np.testing.assert_array_equal(moved > 0, [False, False, True, False, False])


@pytest.mark.parametrize(
    "shape", [MeshShape(ulysses=8), MeshShape(data=2, ring=2, tensor=2), MeshShape(fsdp=3)]
)
def test_a_mesh_gives_the_tokens_of_one_device(encoder, pixels, shape):
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    graph, state = nnx.split(encoder)
    abstract = AbstractModel.of(build)
    placed = {
        path: jax.device_put(value, abstract.shardings(mesh)[path])
        for path, value in values_of(state).items()
    }
    kernel = placed["blocks.up.kernel"]
    sharded = 1 if shape.fsdp == 3 else 8  # neither 32 nor 64 columns are divided by three
    assert kernel.addressable_shards[0].data.shape == (3, 32, 64 // sharded)

    def run(values, pixels):
        model = nnx.merge(graph, abstract.state(values))
        return model(pixels, layout=ActivationLayout(mesh=mesh))

    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(placed, pixels).compile()
    collectives = counted(program.as_text())  # columns are gathered, no sum is cut
    assert set(collectives) == (set() if sharded == 1 else {"all-gather"})
    found, whole = program(placed, pixels), jax.jit(encoder.__call__)(pixels)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5)


def test_bfloat16_stays_near_to_float32(encoder, pixels):
    _, state = nnx.split(encoder)
    half = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0), jnp.bfloat16))), state)
    tokens, exact = jax.jit(half.__call__)(pixels), jax.jit(encoder.__call__)(pixels)
    assert tokens.dtype == jnp.bfloat16
    # Values up to 8 have a spacing of 2^-5 in bfloat16; six sums are rounded.
    np.testing.assert_allclose(tokens.astype(jnp.float32), exact, rtol=0, atol=6 * 2**-5)


@pytest.mark.parametrize("shape", [(1, 3, 28, 28), (1, 28, 14, 3), (2, 14, 14, 3)])
def test_other_images_are_refused(encoder, shape):
    with pytest.raises(ValueError, match=r"pixels\.shape=.*must be \[images, 28, 28, 3\]"):
        encoder(jnp.zeros(shape))
