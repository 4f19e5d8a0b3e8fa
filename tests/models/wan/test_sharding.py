"""The transformer on eight devices computes what it computes on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.mesh import MeshShape, build_mesh
from tests.models.wan.tiny_transformer import Expert, forward, golden_inputs, placed

# The same float32 sums in another order, through two blocks: as far apart as two exact
# implementations are (see test_transformer.FLOAT32).
NOISE = 3e-5
SHAPES = {
    "data_ring_ulysses": MeshShape(data=2, ring=2, ulysses=2),
    "ring_ulysses_tensor": MeshShape(ring=2, ulysses=2, tensor=2),
    "data_fsdp_tensor": MeshShape(data=2, fsdp=2, tensor=2),
    "fsdp_ring": MeshShape(fsdp=2, ring=4),
}


@pytest.fixture(scope="module")
def inputs(high_noise: Expert) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Golden times and text with a video of 27 tokens, which no even number of devices divides."""
    _, timestep, text = golden_inputs(high_noise)
    latents = np.random.default_rng(5).standard_normal((2, 3, 6, 6, 16)).astype(np.float32)
    return jnp.asarray(latents), timestep, text


@pytest.fixture(scope="module")
def alone(high_noise: Expert, inputs: tuple[jax.Array, jax.Array, jax.Array]) -> np.ndarray:
    return forward(high_noise.model(), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_eight_devices_equal_one(high_noise, inputs, alone, shape):
    run_distributed = forward(high_noise.model(), inputs, mesh=build_mesh(shape))
    np.testing.assert_allclose(run_distributed, alone, rtol=0, atol=NOISE)


def test_eight_devices_equal_diffusers(high_noise):
    mesh = build_mesh(SHAPES["data_ring_ulysses"])
    ours = forward(high_noise.model(), golden_inputs(high_noise), mesh=mesh)
    golden = high_noise.golden["out"].transpose(0, 2, 3, 4, 1)
    np.testing.assert_allclose(ours, golden, rtol=0, atol=NOISE)


def test_parameters_are_split_over_fsdp_and_tensor(high_noise):
    mesh = build_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    model = placed(high_noise.model(), mesh)
    kernel = model.blocks.attn1.to_q.kernel[...]
    layers, inside, outside = kernel.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (layers, inside // 2, outside // 2)
    narrowing = model.blocks.ffn.down.kernel[...]
    layers, inside, outside = narrowing.shape
    assert narrowing.sharding.shard_shape(narrowing.shape) == (layers, inside // 2, outside // 2)
    assert model.blocks.scale_shift_table[...].sharding.is_fully_replicated


@pytest.mark.slow
def test_spread_weights_are_gathered_where_they_are_used(high_noise, inputs, alone):
    """Weights over all devices of a sequence compute the same."""
    mesh = build_mesh(MeshShape(data=2, ring=2, ulysses=2))
    model = high_noise.model(spread_weights=True)
    kernel = placed(model, mesh).blocks.ffn.up.kernel[...]
    layers, inside, outside = kernel.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (layers, inside // 4, outside)
    run_distributed = forward(model, inputs, mesh=mesh)
    np.testing.assert_allclose(run_distributed, alone, rtol=0, atol=NOISE)
