"""What a diffusers config.json becomes, and which ones are refused."""

import pytest

from maxdiffusion.models.vae import WanVaeConfig


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


def test_the_autoencoder_of_wan22_ti2v_is_refused_in_one_line() -> None:
    released = {"is_residual": True, "patch_size": 2, "base_dim": 160, "z_dim": 48}
    with pytest.raises(ValueError, match=r"is_residual.*TI2V-5B.*Use a checkpoint with") as error:
        WanVaeConfig.from_diffusers(released)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_everywhere": True}, "attention_everywhere=True: not a key"),
        ({"base_dim": 0}, "base_dim=0: must be a positive integer"),
        ({"base_dim": 3, "dim_mult": [1, 1, 1, 1]}, "even width"),
        ({"z_dim": 8}, "latents_mean=.*needs 8 values"),
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
