"""The WAN video autoencoders (2.1 and 2.2), with chunked, tiled and spatially sharded runs."""

from maxdiffusion.models.vae.autoencoder import ALL_FRAMES, LatentDistribution, WanVae
from maxdiffusion.models.vae.config import WanVaeConfig
from maxdiffusion.models.vae.sharding import SpatialSharding
from maxdiffusion.models.vae.tiling import Tiling

__all__ = [
    "ALL_FRAMES",
    "LatentDistribution",
    "SpatialSharding",
    "Tiling",
    "WanVae",
    "WanVaeConfig",
]
