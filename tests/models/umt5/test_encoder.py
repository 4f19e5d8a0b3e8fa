"""The UMT5 encoder against transformers' on the tiny checkpoint."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh, parameter_sharding
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.umt5.encoder import position_bias, relative_buckets
from tests.attention.collectives import counted

ATOL = 1e-5  # float32, sums of up to 512 terms of size 4, two layers
run = nnx.jit(lambda encoder, ids, mask: encoder(ids, mask))


@pytest.fixture(scope="module")
def encoder(load_encoder):
    return load_encoder(jnp.float32)


def test_buckets_are_those_of_transformers(golden):
    ours = relative_buckets(golden["bucket_rel"], buckets=32, max_distance=128)
    np.testing.assert_array_equal(ours, golden["bucket"])


def test_position_bias_of_the_second_layer(encoder, golden):
    table = encoder.blocks.attention.position_table[...][1]
    ours = position_bias(table, 16, encoder.config)
    np.testing.assert_array_equal(ours, golden["position_bias_16"][0])


@nnx.jit
def first_block(encoder, ids, mask):
    """What the first layer's attention adds up to, and what its block returns."""
    structure, layers = nnx.split(encoder.blocks)
    block = nnx.merge(structure, jax.tree.map(lambda stacked: stacked[0], layers))
    hidden = encoder.embedding[...][ids]
    return hidden + block.attention(block.attention_norm(hidden), mask), block(hidden, mask)


def test_first_block(encoder, golden):
    ids, mask = golden["input_ids"][:4], golden["attention_mask"][:4].astype(bool)
    attended, block = first_block(encoder, ids, mask)
    zeroed = mask[..., None].astype(np.float32)
    np.testing.assert_allclose(attended * zeroed, golden["block0_attn"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(block * zeroed, golden["block0"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("length", [28, 64, 128, 512])
def test_embeddings_at_any_padded_length(encoder, golden, length):
    assert golden["lens"][:4].max() <= 28
    ids, mask = golden["input_ids"][:4, :length], golden["attention_mask"][:4, :length]
    embeddings = np.asarray(run(encoder, ids, mask))
    expected = golden["prompt_embeds"]
    np.testing.assert_allclose(embeddings, expected[:, :length], rtol=0, atol=ATOL)
    assert not embeddings[mask == 0].any()
    assert not expected[:, length:].any()


def test_a_text_of_full_length(encoder, golden):
    assert golden["lens"][4] == 512
    embeddings = run(encoder, golden["input_ids"][4:], golden["attention_mask"][4:])
    np.testing.assert_allclose(embeddings, golden["prompt_embeds_truncated"], rtol=0, atol=ATOL)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(load_encoder, golden):
    half = load_encoder(jnp.bfloat16)
    embeddings = run(half, golden["input_ids"][:4, :64], golden["attention_mask"][:4, :64])
    assert embeddings.dtype == jnp.bfloat16
    exact = golden["prompt_embeds"][:, :64]
    ours = np.abs(np.asarray(embeddings, np.float32) - exact)
    theirs = np.abs(golden["prompt_embeds_bf16"][:, :64] - exact)
    # Values up to 4 have a spacing of 2^-6 in bfloat16; two roundings may fall on either side.
    assert ours.max() <= theirs.max() + 2**-6
    assert ours.mean() <= 1.25 * theirs.mean()


def test_a_text_without_tokens_is_zero(encoder):
    nothing = np.zeros((1, 8), np.int32)
    assert not np.asarray(run(encoder, nothing, nothing)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(ulysses=8),
        MeshShape(data=2, ring=2, ulysses=2),
        MeshShape(fsdp=2, tensor=2),
    ],
    ids=lambda shape: "x".join(map(str, shape.sizes)),
)
def test_all_devices_share_weights_and_products_and_no_sum_is_cut(encoder, golden, shape):
    mesh = build_mesh(shape, devices=jax.devices()[: shape.devices])
    structure, state = nnx.split(encoder)
    split = jax.tree.map(
        lambda leaf: leaf.replace(
            jax.device_put(
                leaf[...], parameter_sharding(mesh, leaf.get_metadata("dims"), leaf.shape)
            )
        ),
        state,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    for path, leaf in nnx.to_flat_state(split):
        if path[-1] in ("kernel", "embedding"):
            array = leaf.get_value()
            assert array.addressable_shards[0].data.size * shape.devices == array.size, path
    ids, mask = golden["input_ids"][1:2, :64], golden["attention_mask"][1:2, :64]
    layout = ActivationLayout(mesh=mesh)

    def encode(state, ids, mask):
        return nnx.merge(structure, state)(ids, mask, layout=layout)

    program = jax.jit(encode).lower(split, ids, mask).compile()
    text = program.as_text()
    # The word rows, which one device has and the others add zeros to, are the only sum.
    assert counted(text).get("all-reduce") == 1
    assert len(re.findall(r"= f32\[1,64,\d+\]\S* all-gather", text)) >= 4
    assert not re.search(rf"= f32\[{encoder.config.vocab},\d+\]\S* all-gather", text)
    embeddings = program(split, ids, mask)
    np.testing.assert_allclose(embeddings, run(encoder, ids, mask), rtol=0, atol=ATOL / 2)
    np.testing.assert_allclose(embeddings, golden["prompt_embeds"][1:2, :64], rtol=0, atol=ATOL)


@pytest.mark.slow
def test_fresh_parameters_have_the_asked_dtype_and_differ_between_layers():
    small = Umt5Config(
        vocab=11, width=16, head_dim=4, mlp_width=24, layers=3, heads=2, buckets=8, max_distance=16
    )
    with jax.default_prng_impl("rbg"):  # compiles in a tenth of the time
        fresh = Umt5Encoder(small, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    kernels = fresh.blocks.mlp.gate.kernel[...]
    assert kernels.shape == (3, 16, 24)
    assert kernels.dtype == jnp.float32
    assert not np.array_equal(kernels[0], kernels[1])
    embeddings = run(fresh, np.ones((1, 4), np.int32), np.ones((1, 4), np.int32))
    assert embeddings.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(embeddings, np.float32)).all()
