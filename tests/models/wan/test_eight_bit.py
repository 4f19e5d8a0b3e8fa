"""Kernels in 8 bits: how far they are from the real ones, and that products use what is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.models.abstract import values_of
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.models.wan.eight_bit import FLOAT8, INT8, Activations, WeightFormat
from maxdiffusion.models.wan.layers import Linear, Numerics
from tests.models.wan.tiny_transformer import forward, golden_inputs

EPS = 2.0**-23  # of float32
INT8_PER_TOKEN = WeightFormat(dtype=INT8, activations=Activations.PER_TOKEN)
FORMATS = pytest.mark.parametrize("dtype", [INT8, FLOAT8], ids=str)


def kernel_of(seed: int = 0) -> np.ndarray:
    """Three layers of [40, 24]; output features differ by factors of thousands, one is zero."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(draw.uniform(-5, 5, (3, 1, 24)))
    kernel = (draw.standard_normal((3, 40, 24)) * sizes).astype(np.float32)
    kernel[1, :, 5] = 0
    kernel[2, :, 7] = 1e-40  # not a normal number
    return kernel


def dequantized(values, scale) -> np.ndarray:
    return np.asarray(values, np.float32) * np.asarray(scale)[..., None, :]


def test_int8_is_half_a_step_of_the_largest_weight_away():
    kernel = kernel_of()
    values, scale = WeightFormat(dtype=INT8).quantized(jnp.asarray(kernel))
    most = np.abs(kernel).max(axis=-2)
    assert values.dtype == jnp.int8
    normal = most > 1e-30
    np.testing.assert_allclose(np.asarray(scale)[normal], most[normal] / 127, rtol=EPS)
    assert np.abs(np.asarray(values, np.int32)).max() == 127
    # The quotient is rounded before it goes to the nearest of 127 steps.
    half_step = (0.5 + 127 * EPS) * np.asarray(scale)[:, None, :]
    assert (np.abs(dequantized(values, scale) - kernel) <= half_step).all()
    assert (dequantized(values, scale)[1, :, 5] == 0).all()


def test_float8_keeps_four_significant_bits():
    kernel = kernel_of()
    values, scale = WeightFormat(dtype=FLOAT8).quantized(jnp.asarray(kernel))
    assert values.dtype == jnp.float8_e4m3fn
    assert np.abs(np.asarray(values, np.float32)).max() == 448
    # Half a unit of the fourth bit, 2**-4 of a value; below 2**-6 steps are 2**-9.
    bound = np.maximum(np.abs(kernel) * 2.0**-4, np.asarray(scale)[:, None, :] * 2.0**-10)
    assert (np.abs(dequantized(values, scale) - kernel) <= bound * (1 + 4 * EPS)).all()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="dtype=uint8: 8-bit weights are one of int8"):
        WeightFormat(dtype=jnp.dtype(jnp.uint8))


def linear(weight_format: WeightFormat | None, **options: object) -> Linear:
    numerics = Numerics(
        dtype=jnp.dtype(jnp.float32),
        param_dtype=jnp.dtype(jnp.float32),
        weight_format=weight_format,
    )
    return Linear((96, 32), ("model", "heads"), numerics, rngs=nnx.Rngs(0), **options)


@FORMATS
def test_a_product_is_that_of_the_stored_weights(dtype):
    layer, exact = linear(WeightFormat(dtype=dtype), rank=4), linear(None, rank=4)
    exact.kernel.set_value(
        jnp.asarray(dequantized(layer.kernel[...][None], layer.kernel_scale[...][None])[0])
    )
    draw = np.random.default_rng(1)
    for part in ("lora_down", "lora_up"):
        factor = jnp.asarray(draw.standard_normal(vars(layer)[part].shape), jnp.float32)
        vars(layer)[part].set_value(factor)
        vars(exact)[part].set_value(factor)
    x = jnp.asarray(draw.standard_normal((2, 7, 96)), jnp.float32)
    # 96 products of float32; one more rounding of each sum by its scale.
    np.testing.assert_allclose(layer(x), exact(x), rtol=0, atol=96 * EPS * 8)


@FORMATS
def test_activations_per_token_are_as_close_as_their_format(dtype):
    native = linear(WeightFormat(dtype=dtype))
    rounded = linear(WeightFormat(dtype=dtype, activations=Activations.PER_TOKEN))
    x = np.random.default_rng(2).standard_normal((2, 7, 96)).astype(np.float32)
    x[0] *= 1000  # tokens have scales of their own
    x[1, 3], x[1, 4] = 0, 1e-40
    error = np.abs(np.asarray(rounded(jnp.asarray(x))) - np.asarray(native(jnp.asarray(x))))
    most = np.abs(x).max(axis=-1, keepdims=True)
    step = most / 254 if dtype == INT8 else np.maximum(np.abs(x) * 2.0**-4, most * 2.0**-18)
    kernel = np.abs(dequantized(native.kernel[...], native.kernel_scale[...]))
    bound = np.broadcast_to(step, x.shape) @ kernel
    assert (error <= bound * (1 + 1e-4)).all()
    assert error[0].max() > 0
    assert (error[1, 3] == 0).all()


def test_int8_products_are_the_same_on_every_mesh():
    """Sums of integers are exact, and so is the largest value of a token that devices share."""
    layer = linear(INT8_PER_TOKEN)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 8, 96)), jnp.float32)
    mesh = build_mesh(MeshShape(data=2, tensor=4))
    graph, state = nnx.split(layer)
    placed = {
        "kernel": ("tensor", None),
        "kernel_scale": (None,),
        "bias": (None,),
    }
    sharded = nnx.from_flat_state(
        [
            (path, one.replace(jax.device_put(one[...], NamedSharding(mesh, P(*placed[path[-1]])))))
            for path, one in nnx.to_flat_state(state)
        ]
    )
    spread = jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor")))
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    np.testing.assert_array_equal(run(sharded, spread), run(state, x))


def tiny(high_noise, weight_format: WeightFormat | None) -> WanTransformer:
    """Returns the tiny transformer; kernels of its blocks are quantized from the checkpoint's."""
    whole = values_of(nnx.state(high_noise.model()))
    config, dtype = high_noise.config, jnp.float32
    model = WanTransformer(
        config, dtype=dtype, param_dtype=dtype, weight_format=weight_format, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(model)
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        if name in whole and variable.dtype == whole[name].dtype:
            variable.set_value(whole[name])
        elif name in whole:
            values, scale = weight_format.quantized(whole[name])
            variable.set_value(values)
            scales = {".".join(map(str, path)): one for path, one in nnx.to_flat_state(state)}
            scales[f"{name}_scale"].set_value(scale)
    return nnx.merge(graph, state)


@pytest.mark.slow
@FORMATS
def test_the_transformer_is_that_of_its_stored_weights(high_noise, dtype):
    """Weights in 8 bits change nothing but the weights: equal to float32 with dequantized ones."""
    model, exact = tiny(high_noise, WeightFormat(dtype=dtype)), high_noise.model()
    stored = values_of(nnx.state(model))
    for path, variable in nnx.to_flat_state(nnx.state(exact)):
        name = ".".join(map(str, path))
        if f"{name}_scale" in stored:
            wide = dequantized(stored[name], stored[f"{name}_scale"])
            variable.set_value(jnp.asarray(wide))
    inputs = golden_inputs(high_noise)
    # Scales multiply sums instead of weights: the float32 tolerance of two exact implementations.
    np.testing.assert_allclose(forward(model, inputs), forward(exact, inputs), rtol=0, atol=3e-5)


def test_embeddings_norms_and_the_head_stay_as_they_are(high_noise):
    values = values_of(nnx.state(tiny(high_noise, WeightFormat(dtype=INT8))))
    eight_bit = {name for name, value in values.items() if value.dtype == jnp.int8}
    kernels = {name for name in values if name.startswith("blocks.") and name.endswith(".kernel")}
    assert eight_bit == kernels
    assert {f"{name}_scale" for name in kernels} <= set(values)
    assert len(kernels) == 10
