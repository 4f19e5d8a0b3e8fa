"""Modulated layer norm: one pass of the kernel against plain array code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels.layer_norm import (
    layer_norm_modulate,
    reference_layer_norm_modulate,
    takes,
)
from maxdiffusion.mesh import ActivationLayout
from tests.attention.cases import mesh_of

EPS, FEATURES = 1e-6, 512
# Both sides compute in float32 and sum 512 numbers in another order: nine roundoffs of 2**-24 for
# each moment (a tree), and six more for the root, the products and the sums. In bfloat16 that may
# move a result to its neighbour, 2**-8 of it.
NOISE = {"float32": 16 * 2.0**-24, "bfloat16": 2.0**-8}


def inputs(dtype, *, batch=2, rows=70):
    keys = jax.random.split(jax.random.key(3), 3)
    x = 0.5 + 3 * jax.random.normal(keys[0], (batch, rows, FEATURES))
    scale, shift = (0.3 * jax.random.normal(key, (batch, FEATURES)) for key in keys[1:])
    return x.astype(dtype), scale, shift


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_is_the_reference(dtype):
    """70 rows are two blocks of 32 and one that ends past the array."""
    x, scale, shift = inputs(dtype)
    got = layer_norm_modulate(x, scale, shift, EPS, True)
    wanted = reference_layer_norm_modulate(x, scale, shift, eps=EPS)
    assert got.dtype == x.dtype
    got, wanted = (np.asarray(one, np.float32) for one in (got, wanted))
    # The terms that cancel are as large as the largest of a row.
    size = np.abs(wanted).max(axis=-1, keepdims=True)
    assert np.all(np.abs(got - wanted) <= NOISE[dtype] * size)


def test_the_reference_is_that_of_float64():
    x, scale, shift = inputs("float32")
    wide = np.asarray(x, np.float64)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + EPS)
    wanted = normal * (1 + np.asarray(scale)[:, None]) + np.asarray(shift)[:, None]
    got = reference_layer_norm_modulate(x, scale, shift, eps=EPS)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=NOISE["float32"] * np.abs(wanted).max())


def test_gradients_are_those_of_the_reference():
    arrays = inputs("float32", rows=40)
    weights = jax.random.normal(jax.random.key(4), arrays[0].shape)

    def loss(function, *arrays):
        return jnp.sum(function(*arrays) * weights)

    def kernel(*arrays):
        return layer_norm_modulate(*arrays, EPS, True)

    def plain(*arrays):
        return reference_layer_norm_modulate(*arrays, eps=EPS)

    got, wanted = (
        jax.grad(loss, argnums=(1, 2, 3))(function, *arrays) for function in (kernel, plain)
    )
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_shards_are_normalised_where_they_are():
    mesh = mesh_of((2, 1, 2, 1, 1))
    layout = ActivationLayout(mesh=mesh)
    assert not layout.runs_kernels
    x, scale, shift = inputs("float32", rows=64)
    rows, vector = ("batch", "sequence", "model"), ("batch", "model")

    def kernel(x, scale, shift):
        return layer_norm_modulate(x, scale, shift, EPS, True)

    @jax.jit
    def run(*arrays):
        return layout.on_shards(kernel, *zip(arrays, (rows, vector, vector), strict=True))

    got = run(x, scale, shift)
    assert got.sharding.is_equivalent_to(layout.sharding(rows, x.shape), 3)
    np.testing.assert_array_equal(got, kernel(x, scale, shift))


def test_widths_of_the_released_models_are_taken():
    assert all(takes(features) for features in (1536, 3072, 5120))
    assert not takes(96)
