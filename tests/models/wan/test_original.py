"""Original tensor names map to diffusers' and back; sizes tell released models apart."""

import json
import re

import pytest

from maxdiffusion.models.wan.original import (
    Piece,
    TensorSizes,
    diffusers_module,
    diffusers_name,
    fixed_values,
    original_module,
    original_name,
    pieces_of,
)
from tests.models.wan.released import RELEASED, released_tensors

CONVOLUTIONS = "motion_encoder.enc.net_app.convs"
PAIRS = {
    "blocks.0.self_attn.q.weight": "blocks.0.attn1.to_q.weight",
    "blocks.39.self_attn.o.bias": "blocks.39.attn1.to_out.0.bias",
    "blocks.7.self_attn.norm_q.weight": "blocks.7.attn1.norm_q.weight",
    "blocks.7.cross_attn.k_img.weight": "blocks.7.attn2.add_k_proj.weight",
    "blocks.7.cross_attn.norm_k_img.weight": "blocks.7.attn2.norm_added_k.weight",
    "blocks.7.ffn.0.weight": "blocks.7.ffn.net.0.proj.weight",
    "blocks.7.ffn.2.bias": "blocks.7.ffn.net.2.bias",
    "blocks.7.norm3.weight": "blocks.7.norm2.weight",
    "blocks.7.modulation": "blocks.7.scale_shift_table",
    "head.modulation": "scale_shift_table",
    "head.head.weight": "proj_out.weight",
    "time_embedding.2.weight": "condition_embedder.time_embedder.linear_2.weight",
    "time_projection.1.bias": "condition_embedder.time_proj.bias",
    "img_emb.proj.4.weight": "condition_embedder.image_embedder.norm2.weight",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "vace_patch_embedding.weight": "vace_patch_embedding.weight",
    "vace_blocks.0.before_proj.weight": "vace_blocks.0.proj_in.weight",
    "vace_blocks.14.after_proj.bias": "vace_blocks.14.proj_out.bias",
    "vace_blocks.3.self_attn.v.weight": "vace_blocks.3.attn1.to_v.weight",
    "pose_patch_embedding.bias": "pose_patch_embedding.bias",
    "face_adapter.fuser_blocks.7.linear1_q.weight": "face_adapter.7.to_q.weight",
    "face_adapter.fuser_blocks.7.linear2.bias": "face_adapter.7.to_out.bias",
    "face_adapter.fuser_blocks.7.k_norm.weight": "face_adapter.7.norm_k.weight",
    "face_encoder.conv1_local.conv.weight": "face_encoder.conv1_local.weight",
    "face_encoder.padding_tokens": "face_encoder.padding_tokens",
    f"{CONVOLUTIONS}.0.1.bias": "motion_encoder.conv_in.act_fn.bias",
    f"{CONVOLUTIONS}.1.conv2.1.weight": "motion_encoder.res_blocks.0.conv2.weight",
    f"{CONVOLUTIONS}.7.skip.1.weight": "motion_encoder.res_blocks.6.conv_skip.weight",
    f"{CONVOLUTIONS}.8.weight": "motion_encoder.conv_out.weight",
    "motion_encoder.enc.fc.4.bias": "motion_encoder.motion_network.4.bias",
    "motion_encoder.dec.direction.weight": "motion_encoder.motion_synthesis_weight",
}


FUSED = re.compile(r"face_adapter\.\d+\.to_[kv]\..+")


@pytest.mark.parametrize(("original", "diffusers"), PAIRS.items())
def test_names_both_ways(original, diffusers):
    assert diffusers_name(original) == diffusers
    assert original_name(diffusers) == original


@pytest.mark.parametrize("model", RELEASED)
def test_every_released_name_has_an_original_one(model):
    names = [name for name in released_tensors(model) if not FUSED.fullmatch(name)]
    originals = [original_name(name) for name in names]
    assert None not in originals
    assert len(set(originals)) == len(names)
    assert [diffusers_name(name) for name in originals] == names


@pytest.mark.parametrize("model", RELEASED)
def test_one_piece_of_the_same_shape_but_for_animate(model):
    for name, shape in released_tensors(model).items():
        if not FUSED.fullmatch(name):
            assert pieces_of(original_name(name), shape) == (Piece(name=name, shape=shape),)


def test_keys_and_values_of_a_face_adapter_are_halves_of_one_tensor():
    for leaf, shape, half in ((".weight", (12, 6), (6, 6)), (".bias", (12,), (6,))):
        names = [f"face_adapter.3.{part}{leaf}" for part in ("to_k", "to_v")]
        fused = f"face_adapter.fuser_blocks.3.linear1_kv{leaf}"
        assert [original_name(name) for name in names] == [fused, fused]
        assert pieces_of(fused, shape) == tuple(Piece(name=name, shape=half) for name in names)
        assert pieces_of(fused, (11, *shape[1:])) == ()
        assert pieces_of(fused, ()) == ()
    # An adapter file has no tensor for one of them alone.
    assert original_module("face_adapter.3.to_k") is None
    assert diffusers_module("face_adapter.fuser_blocks.3.linear1_kv") is None


def test_biases_of_the_motion_encoder_lose_three_dimensions():
    name, ours = f"{CONVOLUTIONS}.2.conv1.1.bias", "motion_encoder.res_blocks.1.conv1.act_fn.bias"
    for shape, kept in (((1, 8, 1, 1), (8,)), ((8,), (8,)), ((8, 1, 1, 1), (8, 1, 1, 1))):
        assert pieces_of(name, shape) == (Piece(name=ours, shape=kept),)


def test_the_last_convolution_has_the_number_after_the_blocks():
    for number in (4, 8):
        name = f"{CONVOLUTIONS}.{number}.weight"
        assert diffusers_name(name) == "motion_encoder.conv_out.weight"


def test_blurs_are_fixed():
    blur = fixed_values(f"{CONVOLUTIONS}.3.skip.0.kernel")
    assert blur.shape == (4, 4)
    assert blur.sum() == 1
    for name in (f"{CONVOLUTIONS}.0.0.kernel", f"{CONVOLUTIONS}.3.skip.1.weight", "head.kernel"):
        assert fixed_values(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.self_attn.q",
        "blocks.0.modulation.weight",
        "blocks.00.self_attn.q.weight",
        "blocks.0.before_proj.weight",
        "blocks.0.self_attn.k_img.weight",
        "blocks.0.norm2.weight",
        "face_adapter.0.to_q.weight",
        "face_adapter.fuser_blocks.0.linear1_kv.weight",
        f"{CONVOLUTIONS}.0.weight",
        f"{CONVOLUTIONS}.0.conv1.0.weight",
        f"{CONVOLUTIONS}.1.conv2.0.kernel",
        "motion_encoder.enc.fc.5.weight",
        "motion_encoder.dec.direction",
        "head.weight",
        "",
    ],
)
def test_other_names_have_none(name):
    assert diffusers_name(name) is None


def test_modules_have_no_leaf():
    assert diffusers_module("blocks.3.self_attn.q") == "blocks.3.attn1.to_q"
    assert original_module("blocks.3.attn1.to_q") == "blocks.3.self_attn.q"
    assert diffusers_module("blocks.3.modulation") == "blocks.3.scale_shift_table"


SIZES = {
    "wan2.1-t2v-1.3b": (1536, 30, 8960, 16, 16, None, 0),
    "wan2.1-t2v-14b": (5120, 40, 13824, 16, 16, None, 0),
    "wan2.1-i2v-14b": (5120, 40, 13824, 36, 16, 1280, 0),
    "wan2.2-i2v-a14b": (5120, 40, 13824, 36, 16, None, 0),
    "wan2.2-ti2v-5b": (3072, 30, 14336, 48, 48, None, 0),
    "wan2.1-vace-1.3b": (1536, 30, 8960, 16, 16, None, 15),
    "wan2.1-vace-14b": (5120, 40, 13824, 16, 16, None, 8),
}
KEYS = ("width", "num_layers", "ffn_dim", "in_channels", "out_channels", "image_dim")


@pytest.mark.parametrize(("model", "expected"), SIZES.items())
def test_sizes_of_released_models(model, expected):
    values = TensorSizes.of(released_tensors(model)).values
    assert tuple(values[key] for key in (*KEYS, "control_blocks")) == expected
    assert (values["patch_size"], values["text_dim"], values["freq_dim"]) == ((1, 2, 2), 4096, 256)


@pytest.mark.parametrize(
    ("model", "kind"),
    {
        "wan2.1-t2v-14b": "text-to-video",
        "wan2.1-i2v-14b": "2.1 image-to-video",
        "wan2.2-i2v-a14b": "2.2 image-to-video",
        "wan2.2-ti2v-5b": "TI2V",
        "wan2.1-vace-14b": "VACE",
        "wan2.2-animate-14b": "Animate",
    }.items(),
)
def test_the_kind_follows_from_the_tensors(model, kind):
    assert kind in TensorSizes.of(released_tensors(model)).kind


def config_of_14b(**changes):
    config = {
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "num_layers": 40,
        "ffn_dim": 13824,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "patch_size": [1, 2, 2],
        "image_dim": None,
        "eps": 1e-6,
    }
    return json.loads(json.dumps(config | changes))


def test_differences_from_a_config():
    sizes = TensorSizes.of(released_tensors("wan2.1-t2v-14b"))
    assert sizes.differences(config_of_14b()) == {}
    assert sizes.differences({"in_channels": 16}) == {}  # absent keys say nothing
    image = TensorSizes.of(released_tensors("wan2.1-i2v-14b")).differences(config_of_14b())
    assert image == {
        "in_channels": (36, 16),
        "image_dim": (1280, None),
        "added_kv_proj_dim": (5120, None),
    }
    smaller = config_of_14b(num_attention_heads=12, num_layers=30, vace_layers=[0, 2])
    assert sizes.differences(smaller) == {
        "num_layers": (40, 30),
        "width": (5120, 1536),
        "control_blocks": (0, 2),
    }


def test_faces_are_compared_with_a_config():
    sizes = TensorSizes.of(released_tensors("wan2.2-animate-14b"))
    shared = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
    face = {
        "latent_channels": 16,
        "motion_encoder_size": 512,
        "motion_style_dim": 512,
        "motion_dim": 20,
        "motion_encoder_dim": 512,
        "face_encoder_hidden_dim": 1024,
        "inject_face_latents_blocks": 5,
    }
    assert sizes.differences(config_of_14b(**shared, **face)) == {}
    assert sizes.differences(config_of_14b(**shared)) == {"face_adapters": (8, 0)}
    other = {"motion_encoder_size": 256, "motion_dim": 10, "inject_face_latents_blocks": 4}
    assert sizes.differences(config_of_14b(**shared, **{**face, **other})) == {
        "motion_encoder_size": (512, 256),
        "motion_dim": (20, 10),
        "face_adapters": (8, 10),
    }
    image = TensorSizes.of(released_tensors("wan2.1-i2v-14b"))
    found = image.differences(config_of_14b(**shared, **face))
    assert found["face_adapters"] == (0, 8)
    assert found["latent_channels"] == (None, 16)


def test_sizes_of_tensors_that_are_missing_are_unknown():
    values = TensorSizes.of({"blocks.3.norm2.weight": (8,)}).values
    assert values["num_layers"] == 4
    assert values["width"] is values["patch_size"] is values["out_channels"] is None
