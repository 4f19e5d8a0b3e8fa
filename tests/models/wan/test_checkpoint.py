"""The transformer's table: every parameter, every name, and back again."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.config import (
    FaceConfig,
    WanTransformerConfig,
    wan_2_1_i2v_14b,
    wan_2_1_t2v_1_3b,
    wan_2_1_vace_1_3b,
    wan_2_2_animate_14b,
    wan_2_2_i2v_a14b,
    wan_2_2_ti2v_5b,
    wan_14b,
    wan_vace_14b,
)

SMALL = WanTransformerConfig(layers=3, heads=2, head_dim=8, ffn_dim=20, text_dim=12, freq_dim=6)


def released_shapes(config: WanTransformerConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released WAN transformer of these sizes."""
    width = config.model_dim
    shapes = {"patch_embedding": (width, config.in_channels, *config.patch)}
    embedder = "condition_embedder"
    shapes |= {
        f"{embedder}.time_embedder.linear_1": (width, config.freq_dim),
        f"{embedder}.time_embedder.linear_2": (width, width),
        f"{embedder}.time_proj": (6 * width, width),
        f"{embedder}.text_embedder.linear_1": (width, config.text_dim),
        f"{embedder}.text_embedder.linear_2": (width, width),
        "proj_out": (math.prod(config.patch) * config.out_channels, width),
    }
    extra: dict[str, tuple[int, ...]] = {"scale_shift_table": (1, 2, width)}
    blocks = [f"blocks.{layer}" for layer in range(config.layers)]
    control = [f"vace_blocks.{index}" for index in range(len(config.control_layers))]
    for block in (*blocks, *control):
        for attention in ("attn1", "attn2"):
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                shapes[f"{block}.{attention}.{part}"] = (width, width)
            for part in ("norm_q", "norm_k"):
                extra[f"{block}.{attention}.{part}.weight"] = (width,)
        shapes[f"{block}.ffn.net.0.proj"] = (config.ffn_dim, width)
        shapes[f"{block}.ffn.net.2"] = (width, config.ffn_dim)
        extra[f"{block}.norm2.weight"] = extra[f"{block}.norm2.bias"] = (width,)
        extra[f"{block}.scale_shift_table"] = (1, 6, width)
        if config.image_dim:
            for part in ("add_k_proj", "add_v_proj"):
                shapes[f"{block}.attn2.{part}"] = (width, width)
            extra[f"{block}.attn2.norm_added_k.weight"] = (width,)
    for block in control:
        shapes[f"{block}.proj_out"] = (width, width)
    if control:
        shapes["vace_blocks.0.proj_in"] = (width, width)
        shapes["vace_patch_embedding"] = (width, config.control_channels or 0, *config.patch)
    if config.image_dim:
        image = f"{embedder}.image_embedder"
        shapes[f"{image}.ff.net.0.proj"] = (config.image_dim, config.image_dim)
        shapes[f"{image}.ff.net.2"] = (width, config.image_dim)
        for part, size in (("norm1", config.image_dim), ("norm2", width)):
            extra[f"{image}.{part}.weight"] = extra[f"{image}.{part}.bias"] = (size,)
    if config.face:
        more_shapes, more = animate_shapes(config, config.face)
        shapes |= more_shapes
        extra |= more
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    return weights | biases | extra


def animate_shapes(
    config: WanTransformerConfig, face: FaceConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes that only Animate has: modules with a bias, and single parameters."""
    width, hidden, motion = config.model_dim, face.hidden_dim, "motion_encoder"
    shapes: dict[str, tuple[int, ...]] = {
        "pose_patch_embedding": (width, face.pose_channels, *config.patch),
        "face_encoder.conv1_local": (hidden * face.heads, face.feature_dim, 3),
        "face_encoder.conv2": (hidden, hidden, 3),
        "face_encoder.conv3": (hidden, hidden, 3),
        "face_encoder.out_proj": (width, hidden),
    }
    extra: dict[str, tuple[int, ...]] = {
        "face_encoder.padding_tokens": (1, 1, 1, width),
        f"{motion}.motion_synthesis_weight": (face.feature_dim, face.motion_dim),
        f"{motion}.conv_in.weight": (face.widths[0], 3, 1, 1),
        f"{motion}.conv_in.act_fn.bias": (face.widths[0],),
        f"{motion}.conv_out.weight": (face.style_dim, face.widths[-1], 4, 4),
    }
    for index, (narrow, wide) in enumerate(itertools.pairwise(face.widths)):
        block = f"{motion}.res_blocks.{index}"
        for part, size in (("conv1", narrow), ("conv2", wide)):
            extra[f"{block}.{part}.weight"] = (size, narrow, 3, 3)
            extra[f"{block}.{part}.act_fn.bias"] = (size,)
        extra[f"{block}.conv_skip.weight"] = (wide, narrow, 1, 1)
    for index, size in enumerate([face.style_dim] * 4 + [face.motion_dim]):
        shapes[f"{motion}.motion_network.{index}"] = (size, face.style_dim)
    for index in range(config.layers // face.every):
        for part in ("to_q", "to_k", "to_v", "to_out"):
            shapes[f"face_adapter.{index}.{part}"] = (width, width)
        for part in ("norm_q", "norm_k"):
            extra[f"face_adapter.{index}.{part}.weight"] = (config.head_dim,)
    return shapes, extra


def parameter_shapes(config: WanTransformerConfig) -> dict[str, tuple[int, ...]]:
    model = nnx.eval_shape(
        lambda: WanTransformer(
            config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
    )
    state = nnx.state(model, nnx.Param)
    return {".".join(map(str, path)): param.shape for path, param in nnx.to_flat_state(state)}


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [
        (wan_2_1_t2v_1_3b(), 825, 1_418_996_800),
        (wan_14b(), 1095, 14_288_491_584),
        (wan_2_2_i2v_a14b(), 1095, 14_288_901_184),
        (wan_2_1_i2v_14b(), 1303, 16_394_878_784),
        (wan_2_2_ti2v_5b(), 825, 4_999_787_712),
        (wan_2_1_vace_1_3b(), 1264, 2_153_972_032),
        (wan_vace_14b(), 1331, 17_337_592_896),
        (wan_2_2_animate_14b(), 1443, 17_274_816_884),
    ],
    ids=["2.1-1.3b", "14b", "2.2-i2v", "2.1-i2v", "5b", "vace-1.3b", "vace-14b", "animate"],
)
def test_released_models_are_covered_exactly(config, tensors, parameters):
    table = transformer_map(config)
    names = [name for entry in table.entries for name in table.sources(entry)]
    assert len(names) == len(set(names)) == tensors
    assert set(names) == set(released_shapes(config))
    shapes = parameter_shapes(config)
    assert {entry.parameter for entry in table.entries} == set(shapes)
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_every_tensor_fits_its_parameter_and_comes_back():
    released, shapes = released_shapes(SMALL), parameter_shapes(SMALL)
    rng = np.random.default_rng(0)
    table = transformer_map(SMALL)
    for entry in table.entries:
        for name in table.sources(entry):
            tensor = rng.standard_normal(released[name])
            parameter = entry.transform.apply(tensor)
            stacked = (SMALL.layers,) if entry.stacked else ()
            assert (*stacked, *parameter.shape) == shapes[entry.parameter]
            np.testing.assert_array_equal(entry.transform.invert(parameter), tensor)


def test_only_rotated_features_are_regrouped():
    head = np.arange(8.0)
    halves = np.array([0, 2, 4, 6, 1, 3, 5, 7.0])
    by_parameter = {entry.parameter: entry for entry in transformer_map(SMALL).entries}
    for name in ("to_q.bias", "to_k.bias", "norm_q.scale", "norm_k.scale"):
        rotated = by_parameter[f"blocks.attn1.{name}"].transform.apply(np.tile(head, 2))
        np.testing.assert_array_equal(rotated, np.tile(halves, 2))
        kept = by_parameter[f"blocks.attn2.{name}"].transform.apply(np.tile(head, 2))
        np.testing.assert_array_equal(kept, np.tile(head, 2))
    values = by_parameter["blocks.attn1.to_v.bias"].transform.apply(np.tile(head, 2))
    np.testing.assert_array_equal(values, np.tile(head, 2))
