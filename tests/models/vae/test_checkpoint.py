"""Every parameter of the autoencoder has one diffusers tensor, of the right shape."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.vae import WanVae, WanVaeConfig
from maxdiffusion.models.vae.checkpoint import vae_map
from maxdiffusion.models.vae.config import wan_2_2_vae

# Names and shapes of every tensor of the released checkpoints.
NAMES = Path(__file__).parents[2] / "goldens" / "names"

CONFIGS = {
    "released": WanVaeConfig(),
    "small": WanVaeConfig(base_dim=16, dim_mult=(1, 2, 2, 2), num_res_blocks=1),
    "wider decoder": WanVaeConfig(base_dim=8, decoder_base_dim=12),
    "released 2.2": wan_2_2_vae(),
}


def shapes(config: WanVaeConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its dotted path."""
    vae = nnx.eval_shape(lambda: WanVae(config, rngs=nnx.Rngs(0)))
    return {".".join(map(str, path)): v.shape for path, v in nnx.to_flat_state(nnx.state(vae))}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_map_names_every_parameter_once(config: WanVaeConfig) -> None:
    parameters = [entry.parameter for entry in vae_map(config).entries]
    assert sorted(parameters) == sorted(shapes(config))


@pytest.mark.parametrize(
    ("config", "tensors", "size"),
    [(WanVaeConfig(), 194, 126_892_531), (wan_2_2_vae(), 196, 704_688_668)],
    ids=["2.1", "2.2"],
)
def test_the_released_models_have_their_tensors_and_size(
    config: WanVaeConfig, tensors: int, size: int
) -> None:
    assert len({entry.source for entry in vae_map(config).entries}) == tensors
    assert sum(int(np.prod(shape)) for shape in shapes(config).values()) == size


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_names_and_shapes_are_those_of_the_release(version: str) -> None:
    config = WanVaeConfig() if version == "2.1" else wan_2_2_vae()
    released = json.loads((NAMES / f"vae{version}.json").read_text())
    ours = shapes(config)
    found = {
        entry.source: list(entry.source_shape(ours[entry.parameter]))
        for entry in vae_map(config).entries
    }
    assert found == released


# Names and shapes of the released checkpoint, one of every kind.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("encoder.conv_in.weight", (96, 3, 3, 3, 3)),
        ("encoder.down_blocks.2.resample.1.weight", (96, 96, 3, 3)),
        ("encoder.down_blocks.3.conv_shortcut.weight", (192, 96, 1, 1, 1)),
        ("encoder.down_blocks.8.time_conv.weight", (384, 384, 3, 1, 1)),
        ("encoder.down_blocks.10.norm2.gamma", (384, 1, 1, 1)),
        ("encoder.mid_block.attentions.0.norm.gamma", (384, 1, 1)),
        ("encoder.mid_block.attentions.0.to_qkv.weight", (1152, 384, 1, 1)),
        ("encoder.mid_block.resnets.1.conv2.bias", (384,)),
        ("quant_conv.weight", (32, 32, 1, 1, 1)),
        ("post_quant_conv.bias", (16,)),
        ("decoder.up_blocks.0.upsamplers.0.time_conv.weight", (768, 384, 3, 1, 1)),
        ("decoder.up_blocks.1.resnets.0.conv1.weight", (384, 192, 3, 3, 3)),
        ("decoder.up_blocks.2.upsamplers.0.resample.1.weight", (96, 192, 3, 3)),
        ("decoder.norm_out.gamma", (96, 1, 1, 1)),
        ("decoder.conv_out.weight", (3, 96, 3, 3, 3)),
    ],
)
def test_tensors_become_parameters_and_back(source: str, shape: tuple[int, ...]) -> None:
    entry = next(entry for entry in vae_map(WanVaeConfig()).entries if entry.source == source)
    tensor = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    parameter = entry.transform.apply(tensor)
    assert parameter.shape == shapes(WanVaeConfig())[entry.parameter]
    np.testing.assert_array_equal(entry.transform.invert(parameter), tensor)
