"""Weights that become 8-bit while they are read: right values, half the bytes, in caches too."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.checkpoints.device_buffers import DeviceBuffer
from maxdiffusion.checkpoints.load import (
    ComponentSource,
    LoadOptions,
    load_parameters,
    source_shapes,
)
from maxdiffusion.checkpoints.lora import Adapter, LoraTargets, fuse, read_lora
from maxdiffusion.checkpoints.lora_update import AdaptedTransformer
from maxdiffusion.checkpoints.orbax_cache import load_through_cache
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.models.abstract import AbstractModel, values_of
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.eight_bit import FLOAT8, INT8, Activations, WeightFormat
from maxdiffusion.models.wan.original import original_module
from maxdiffusion.pipelines.spec import open_wan_folder
from tests.oracle.lora_files import write_lora

FOLDER = Path(__file__).parents[1] / "goldens" / "wan22_t2v"
CONFIG = open_wan_folder(FOLDER)[1].transformer
EIGHT_BIT = WeightFormat(dtype=INT8)


def source(
    weight_format: WeightFormat | None = EIGHT_BIT, dtype: object = jnp.bfloat16
) -> ComponentSource:
    model = AbstractModel.of(
        lambda rngs: WanTransformer(
            CONFIG, dtype=dtype, param_dtype=dtype, weight_format=weight_format, rngs=rngs
        )
    )
    stored = open_weights(FOLDER / "transformer")
    return ComponentSource(stored=stored, table=transformer_map(CONFIG), abstract=model.parameters)


def quantized(wide: nnx.State, weight_format: WeightFormat) -> dict[str, np.ndarray]:
    """Returns loaded parameters with the kernels of blocks quantized."""
    made: dict[str, jax.Array] = {}
    for name, value in values_of(wide).items():
        if name.startswith("blocks.") and name.endswith(".kernel"):
            made[name], made[f"{name}_scale"] = jax.jit(weight_format.quantized)(value)
        else:
            made[name] = value
    return {name: np.asarray(value) for name, value in made.items()}


def assert_same_bits(state: nnx.State, expected: dict[str, np.ndarray]) -> None:
    found = {name: np.asarray(value) for name, value in values_of(state).items()}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name].view(np.uint8), value.view(np.uint8), name)


@pytest.fixture(scope="module")
def wide() -> nnx.State:
    return load_parameters(source(None))[0]


@pytest.mark.parametrize("dtype", [INT8, FLOAT8], ids=str)
def test_values_are_those_of_the_loaded_weights(wide, dtype):
    weight_format = WeightFormat(dtype=dtype)
    state, report = load_parameters(source(weight_format))
    assert_same_bits(state, quantized(wide, weight_format))
    assert report.bytes_read == report.bytes_needed


@pytest.mark.parametrize(
    "shape",
    [MeshShape(fsdp=8), MeshShape(fsdp=2, tensor=4), MeshShape(ring=2, ulysses=2, data=2)],
    ids=lambda shape: "x".join(map(str, shape.sizes)),
)
def test_every_mesh_holds_the_same(wide, shape):
    state, _ = load_parameters(source(), mesh=build_mesh(shape))
    assert_same_bits(state, quantized(wide, EIGHT_BIT))
    values = values_of(state)
    kernel, scale = values["blocks.ffn.up.kernel"], values["blocks.ffn.up.kernel_scale"]
    # Scales are split as the output features are.
    assert kernel.sharding.shard_shape(kernel.shape)[-1] == CONFIG.ffn_dim // shape.tensor
    assert scale.sharding.shard_shape(scale.shape)[-1] == CONFIG.ffn_dim // shape.tensor


def test_no_more_than_one_kernel_is_wide_at_a_time():
    leaves = jax.tree.leaves(source().abstract)
    kernels = {leaf.shape for leaf in leaves if leaf.dtype == jnp.int8}
    counts = []

    def watch(done: int, total: int) -> None:
        assert done <= total
        wide = [one for one in jax.live_arrays() if one.dtype == jnp.float32]
        counts.append(sum(one.shape in kernels for one in wide) - before)

    before = 0
    watch(0, 0)
    before = counts.pop()
    load_parameters(
        source(dtype=jnp.float32), options=LoadOptions(buffer=DeviceBuffer), progress=watch
    )
    assert max(counts) == 1
    assert len(counts) > 10  # at least one for each kernel


def test_kernels_have_half_the_bytes_of_bfloat16(wide):
    eight_bit = values_of(load_parameters(source())[0])
    scales = sum(one.nbytes for name, one in eight_bit.items() if name.endswith("_scale"))
    kernels = sum(one.nbytes for one in eight_bit.values() if one.dtype == jnp.int8)
    whole = sum(one.nbytes for one in values_of(wide).values())
    assert sum(one.nbytes for one in eight_bit.values()) == whole - kernels + scales
    assert scales < 0.1 * kernels  # 4 bytes for each output, of at least 48 inputs


def load_cached(cache, weight_format):
    result = load_through_cache({"transformer": source(weight_format)}, cache)
    (message,) = result.messages
    return result.states["transformer"], result.report.bytes_read, message


@pytest.mark.slow
def test_the_orbax_cache_holds_8_bits(wide, tmp_path):
    load_cached(tmp_path, EIGHT_BIT)
    # Activations are no part of what is stored.
    per_token = WeightFormat(dtype=INT8, activations=Activations.PER_TOKEN)
    state, read, message = load_cached(tmp_path, per_token)
    assert read == 0
    assert "taken from" in message
    assert_same_bits(state, quantized(wide, EIGHT_BIT))
    state, read, message = load_cached(tmp_path, WeightFormat(dtype=FLOAT8))
    assert read > 0
    assert "was converted again, because parameters" in message
    assert_same_bits(state, quantized(wide, WeightFormat(dtype=FLOAT8)))
    assert "converted again" in load_cached(tmp_path, None)[2]


@pytest.fixture
def adapter(tmp_path):
    of_files = source(None)
    shapes = {name: tensor.shape for name, tensor in of_files.stored.tensors.items()}
    write_lora(tmp_path / "lora.safetensors", shapes, "diffusers")
    targets = LoraTargets.of(source_shapes(of_files.table, of_files.abstract), original_module)
    return Adapter(lora=read_lora(tmp_path / "lora.safetensors", targets), strength=0.7)


def fused(of_files: ComponentSource, adapter: Adapter) -> ComponentSource:
    stored = fuse(of_files.stored, [adapter])
    return ComponentSource(stored=stored, table=of_files.table, abstract=of_files.abstract)


def test_adapters_are_fused_before_weights_are_quantized(wide, adapter):
    changed, _ = load_parameters(fused(source(None), adapter))
    expected = quantized(changed, EIGHT_BIT)
    assert_same_bits(load_parameters(fused(source(), adapter))[0], expected)
    # The same when an adapter is added to weights that are there already, and taken away again.
    held = source()
    transformer = AdaptedTransformer(source=held, abstract=held.abstract, mesh=None)
    plain = dict(nnx.to_flat_state(load_parameters(held)[0]))
    with_adapter = transformer.update(plain, (), (adapter,))
    assert_same_bits(with_adapter, expected)
    without = transformer.update(dict(nnx.to_flat_state(with_adapter)), (adapter,), ())
    assert_same_bits(without, quantized(wide, EIGHT_BIT))
