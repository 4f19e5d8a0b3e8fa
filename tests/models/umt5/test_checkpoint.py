"""The table of UMT5 parameters against the names and shapes of the released encoder."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.umt5.checkpoint import umt5_map


def released_tensors(config):
    """The tensors of a transformers UMT5EncoderModel, by name."""
    width, inner = config.width, config.heads * config.head_dim
    shapes = {"shared.weight": (config.vocab, width), "encoder.final_layer_norm.weight": (width,)}
    for layer in range(config.layers):
        first, second = (f"encoder.block.{layer}.layer.{part}" for part in (0, 1))
        for name in "qkv":
            shapes[f"{first}.SelfAttention.{name}.weight"] = (inner, width)
        shapes |= {
            f"{first}.SelfAttention.o.weight": (width, inner),
            f"{first}.SelfAttention.relative_attention_bias.weight": (config.buckets, config.heads),
            f"{first}.layer_norm.weight": (width,),
            f"{second}.DenseReluDense.wi_0.weight": (config.mlp_width, width),
            f"{second}.DenseReluDense.wi_1.weight": (config.mlp_width, width),
            f"{second}.DenseReluDense.wo.weight": (width, config.mlp_width),
            f"{second}.layer_norm.weight": (width,),
        }
    return shapes


def parameter_shapes(config):
    encoder = nnx.eval_shape(lambda: Umt5Encoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(encoder, nnx.Param))
    return {".".join(map(str, path)): leaf.shape for path, leaf in flat}


def test_every_tensor_of_umt5_xxl_has_a_place():
    config = Umt5Config()
    table, expected = umt5_map(config), released_tensors(config)
    named = [name for entry in table.entries for name in table.sources(entry)]
    assert sorted(named) == sorted(expected)
    assert sum(np.prod(shape) for shape in expected.values()) == 5_680_910_336


def test_every_parameter_has_a_tensor_of_its_shape():
    config = Umt5Config(
        vocab=13, width=12, head_dim=4, mlp_width=20, layers=2, heads=2, buckets=8, max_distance=16
    )
    table, tensors, shapes = umt5_map(config), released_tensors(config), parameter_shapes(config)
    assert {entry.parameter for entry in table.entries} == set(shapes)
    for entry in table.entries:
        for name in table.sources(entry):
            source = np.arange(np.prod(tensors[name])).reshape(tensors[name])
            parameter = entry.transform.apply(source)
            stacked = (config.layers, *parameter.shape) if entry.stacked else parameter.shape
            assert stacked == shapes[entry.parameter], entry
            np.testing.assert_array_equal(entry.transform.invert(parameter), source)


@pytest.mark.parametrize("name", ["shared.weight", "encoder.embed_tokens.weight"])
def test_both_names_of_the_tied_embedding_mean_the_same(name):
    assert umt5_map(Umt5Config()).canonical(name) == "shared.weight"
