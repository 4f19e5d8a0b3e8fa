"""Sizes: where they come from and what is refused."""

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.wan.config import (
    WanTransformerConfig,
    wan_2_1_t2v_1_3b,
    wan_2_2_animate_14b,
    wan_2_2_i2v_a14b,
    wan_14b,
)


def test_released_sizes():
    small = wan_2_1_t2v_1_3b()
    assert (small.layers, small.model_dim, small.ffn_dim) == (30, 1536, 8960)
    large = wan_14b()
    assert (large.layers, large.model_dim, large.ffn_dim) == (40, 5120, 13824)
    assert wan_2_2_i2v_a14b().in_channels == 36


def test_missing_keys_have_the_defaults_of_diffusers_and_private_ones_are_ignored():
    config = WanTransformerConfig.from_diffusers({"_class_name": "WanTransformer3DModel"})
    assert config == wan_14b()


def test_sizes_come_from_diffusers_keys():
    config = WanTransformerConfig.from_diffusers(
        {
            "num_layers": 3,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "patch_size": [1, 2, 2],
        }
    )
    assert (config.layers, config.model_dim, config.patch) == (3, 64, (1, 2, 2))


@pytest.mark.parametrize(
    ("frames_rows_columns", "tokens"),
    [((21, 60, 104), 32_760), ((21, 90, 160), 75_600), ((3, 6, 4), 18)],
)
def test_tokens_of_a_latent_video(frames_rows_columns, tokens):
    assert wan_14b().tokens(frames_rows_columns) == tokens


def test_every_key_without_a_meaning_is_reported_at_once():
    with pytest.raises(ProblemsFound) as caught:
        WanTransformerConfig.from_diffusers(
            {"cross_attn_norm": False, "qk_norm": "layer_norm", "window_size": 7}
        )
    assert {problem.name for problem in caught.value.problems} == {
        "cross_attn_norm",
        "qk_norm",
        "window_size",
    }


def test_image_and_control_parts():
    parse = WanTransformerConfig.from_diffusers
    config = parse({"image_dim": 64, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 10})
    assert (config.image_dim, config.image_positions) == (64, 10)
    with pytest.raises(ProblemsFound, match="added_kv_proj_dim=None: must be 5120"):
        parse({"image_dim": 64})
    control = {"vace_layers": [0, 5], "vace_in_channels": 96}
    assert parse(control).control_layers == (0, 5)
    for layers in ([5, 0], [1, 5], [0, 40], [0, 0]):
        with pytest.raises(ProblemsFound, match="must rise from layer 0"):
            parse({**control, "vace_layers": layers})
    with pytest.raises(ProblemsFound, match="belong together"):
        parse({"vace_layers": [0, 5]})


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"layers": 0}, "layers"),
        ({"heads": 2.0}, "heads"),
        ({"ffn_dim": True}, "ffn_dim"),
        ({"patch": (1, 0, 2)}, r"patch\[1\]"),
        ({"head_dim": 33}, "head_dim"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_a_wrong_size_names_itself(sizes, name):
    with pytest.raises(ProblemsFound, match=name):
        WanTransformerConfig(**sizes)


def test_positions_end_at_the_longest_sequence():
    with pytest.raises(ValueError, match="rope_max_seq_len=1024"):
        wan_14b().grid((1, 2, 2050))


ANIMATE = {
    "_class_name": "WanAnimateTransformer3DModel",
    "added_kv_proj_dim": 5120,
    "motion_encoder_channel_sizes": None,
}


def test_animate_has_the_released_sizes_by_default():
    assert WanTransformerConfig.from_diffusers(ANIMATE) == wan_2_2_animate_14b()


def test_channels_of_the_motion_encoder_are_those_of_its_sizes():
    widths = {"4": 9, "8": 7, "16": 5, "32": 3, "512": 1}
    given = {**ANIMATE, "motion_encoder_size": 32, "motion_encoder_channel_sizes": widths}
    face = WanTransformerConfig.from_diffusers(given).face
    assert face is not None
    assert face.widths == (3, 5, 7, 9)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"inject_face_latents_blocks": 3}, "inject_face_latents_blocks"),
        ({"latent_channels": 48}, "in_channels"),
        ({"motion_encoder_size": 96}, "motion_encoder_size"),
        ({"motion_encoder_size": 16, "motion_encoder_channel_sizes": {"16": 3, "8": 4}}, "sizes"),
        ({"motion_dim": 0}, "motion_dim"),
        ({"image_dim": None, "added_kv_proj_dim": None}, "image_dim"),
    ],
    ids=str,
)
def test_impossible_animate_sizes_are_refused(changes, name):
    with pytest.raises(ProblemsFound) as caught:
        WanTransformerConfig.from_diffusers({**ANIMATE, **changes})
    assert any(name in problem.name for problem in caught.value.problems)
