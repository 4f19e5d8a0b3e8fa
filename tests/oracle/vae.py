"""What diffusers' WAN 2.1 VAE computes: whole, tiled and in bfloat16."""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from tests.oracle.arrays import Record, as_numpy, normal, small_video

PIXELS_PER_LATENT = 8
TILE, STRIDE = 4 * PIXELS_PER_LATENT, 3 * PIXELS_PER_LATENT


def load_vae(folder: Path, dtype: torch.dtype = torch.float32) -> AutoencoderKLWan:
    """Returns the VAE of a checkpoint folder."""
    return AutoencoderKLWan.from_pretrained(folder / "vae", dtype=dtype).eval()


def moments(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Returns mean and log variance side by side in the channels, before any clamp."""
    return vae._encode(video)


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Returns the video in [-1, 1] of latents that were not normalised."""
    return vae.decode(latents, return_dict=False)[0]


def use_small_tiles(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Returns the same VAE with tiles of four latents that step by three."""
    vae.enable_tiling(TILE, TILE, STRIDE, STRIDE)
    return vae


def record_vae(folder: Path) -> Record:
    """Returns videos, latents and what becomes of them, keys under `vae/`."""
    vae, scale = load_vae(folder), PIXELS_PER_LATENT
    channels = vae.config.z_dim
    video = small_video(200, 1, 3, 17, 2 * scale, 3 * scale)
    latents = 1.5 * normal(201, 1, channels, 5, 2, 3)
    tiled_video = small_video(203, 1, 3, 5, 6 * scale, 7 * scale)
    tiled_latents = 1.5 * normal(202, 1, channels, 2, 6, 7)
    values = {
        "moments_17f": moments(vae, video),
        "moments_1f": moments(vae, video[:, :, :1]),
        "mode_9f": vae.encode(video[:, :, :9]).latent_dist.mode(),
        "latents": latents,
        "decoded_5lat": decode(vae, latents),
        "decoded_1lat": decode(vae, latents[:, :, :1]),
        "decoded_5lat_bf16": decode(load_vae(folder, torch.bfloat16), latents.bfloat16()),
        "tiled_latents": tiled_latents,
    }
    tiling = use_small_tiles(vae)
    values["tiled_decoded"] = decode(tiling, tiled_latents)
    values["tiled_moments"] = moments(tiling, tiled_video)
    record = {f"vae/{name}": as_numpy(value) for name, value in values.items()}
    record["vae/video"] = as_numpy(video).astype(np.float16)
    record["vae/tiled_video"] = as_numpy(tiled_video).astype(np.float16)
    return record
