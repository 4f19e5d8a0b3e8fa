"""Original tensor names map to diffusers' and back; sizes tell released models apart."""

import json

import pytest

from maxdiffusion.models.wan.original import (
    TensorSizes,
    diffusers_module,
    diffusers_name,
    original_module,
    original_name,
)
from tests.models.wan.released import RELEASED, released_tensors

ANIMATE_ONLY = ("face_adapter.", "face_encoder.", "motion_encoder.", "pose_patch_embedding.")
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
}


@pytest.mark.parametrize(("original", "diffusers"), PAIRS.items())
def test_names_both_ways(original, diffusers):
    assert diffusers_name(original) == diffusers
    assert original_name(diffusers) == original


@pytest.mark.parametrize("model", RELEASED)
def test_every_released_name_has_an_original_one(model):
    names = [n for n in released_tensors(model) if not n.startswith(ANIMATE_ONLY)]
    originals = [original_name(name) for name in names]
    assert None not in originals
    assert len(set(originals)) == len(names)
    assert [diffusers_name(name) for name in originals] == names


def test_the_parts_of_animate_have_no_original_name():
    # Its face adapter keeps keys and values in one tensor: no renaming takes them apart.
    unknown = [n for n in released_tensors("wan2.2-animate-14b") if original_name(n) is None]
    assert unknown
    assert all(name.startswith(ANIMATE_ONLY) for name in unknown)


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.self_attn.q",
        "blocks.0.modulation.weight",
        "blocks.00.self_attn.q.weight",
        "blocks.0.before_proj.weight",
        "blocks.0.self_attn.k_img.weight",
        "blocks.0.norm2.weight",
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


def test_sizes_of_tensors_that_are_missing_are_unknown():
    values = TensorSizes.of({"blocks.3.norm2.weight": (8,)}).values
    assert values["num_layers"] == 4
    assert values["width"] is values["patch_size"] is values["out_channels"] is None
