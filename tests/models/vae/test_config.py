"""What a diffusers config.json becomes, and which ones are refused."""

import pytest

from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.vae.config import wan_2_2_vae


def test_an_empty_config_is_the_released_one() -> None:
    config = WanVaeConfig.from_diffusers({"_class_name": "AutoencoderKLWan"})
    assert config == WanVaeConfig()
    assert config.encoder_dims == (96, 192, 384, 384)
    assert config.decoder_dims == (384, 384, 192, 96)
    assert (config.spatial_factor, config.temporal_factor) == (8, 4)


def test_keys_of_diffusers_are_taken_over() -> None:
    config = WanVaeConfig.from_diffusers(
        {
            "base_dim": 16,
            "dim_mult": [1, 2, 2, 2],
            "num_res_blocks": 1,
            "dropout": 0.0,
            "is_residual": False,
            "patch_size": None,
            "attn_scales": [],
        }
    )
    assert config.decoder_dims == (32, 32, 32, 16)
    assert config.num_res_blocks == 1


RELEASED_22 = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 160,
    "decoder_base_dim": 256,
    "dim_mult": [1, 2, 4, 4],
    "in_channels": 12,
    "is_residual": True,
    "latents_mean": list(wan_2_2_vae().latents_mean),
    "latents_std": list(wan_2_2_vae().latents_std),
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "z_dim": 48,
}


def test_the_config_of_wan22_ti2v_is_read() -> None:
    config = WanVaeConfig.from_diffusers(RELEASED_22)
    assert config == wan_2_2_vae()
    assert config.encoder_inputs == (160, 160, 320, 640)
    assert config.encoder_dims == (160, 320, 640, 640)
    assert config.decoder_inputs == (1024, 1024, 1024, 512)
    assert config.decoder_dims == (1024, 1024, 512, 256)
    assert (config.spatial_factor, config.temporal_factor) == (16, 4)
    assert config.video_channels == 3


@pytest.mark.parametrize("patch_size", [None, 1])
def test_no_patch_and_a_patch_of_one_pixel_are_the_same(patch_size: int | None) -> None:
    config = WanVaeConfig.from_diffusers({"patch_size": patch_size})
    assert (config.fold_size, config.spatial_factor, config.video_channels) == (1, 8, 3)


def test_factors_that_the_stages_do_not_give_are_refused_together() -> None:
    keys = {**RELEASED_22, "scale_factor_spatial": 8, "scale_factor_temporal": 2}
    with pytest.raises(ValueError, match="scale_factor_spatial=8: must be 16") as error:
        WanVaeConfig.from_diffusers(keys)
    assert "scale_factor_temporal=2: must be 4" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_everywhere": True}, "attention_everywhere=True: not a key"),
        ({"base_dim": 0}, "base_dim=0: must be a positive integer"),
        ({"base_dim": 3, "dim_mult": [1, 1, 1, 1]}, "even width"),
        ({"z_dim": 8}, "latents_mean=.*needs 8 values"),
        ({"patch_size": 0}, "patch_size=0: must be a positive integer"),
        ({"patch_size": 2}, "in_channels=3: must be a multiple of 4"),
        ({"attn_scales": [0.5]}, "attn_scales.*describe another"),
        ({**RELEASED_22, "dim_mult": [1, 2, 4, 8]}, "dim_mult=.*shortcut of a stage"),
        ({**RELEASED_22, "dim_mult": [1, 3, 4, 4]}, "dim_mult=.*shortcut of a stage"),
        ({"temperal_downsample": [True]}, "temperal_downsample=.*needs 3 values"),
    ],
)
def test_impossible_configs_are_refused(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WanVaeConfig.from_diffusers(keys)


def test_frames_and_latent_frames_belong_together() -> None:
    config = WanVaeConfig()
    for latent_frames in (1, 2, 21):
        assert config.latent_frames(config.video_frames(latent_frames)) == latent_frames
    with pytest.raises(ValueError, match=r"frames=80: .*Use 77 or 81 frames"):
        config.latent_frames(80)
