"""Keys about the VAE: chunks of frames, tiles, and its own split over devices."""

from maxdiffusion.config.kinds import Boolean, Integer
from maxdiffusion.config.schema import unused, used

PIXELS = Integer(minimum=16, step=8)

KEYS = (
    used(
        "vae_decode_chunk",
        Integer(minimum=1, special=(-1,)),
        1,
        "Latent frames decoded at once; -1 = all. The video is the same for any value.",
    ),
    unused(
        "vae_encode_chunk",
        Integer(minimum=4, step=4, special=(-1,)),
        4,
        "Frames encoded at once; -1 = all. Text-to-video encodes none.",
    ),
    used(
        "vae_spatial",
        Integer(minimum=1, special=(-1,)),
        -1,
        "Devices that share a frame, by rows and columns; -1 = all of them.",
    ),
    used("vae_tiling", Boolean(), False, "Decode in overlapping tiles that are blended."),
    used("vae_tile_height", PIXELS, 256, "Rows of a tile, in pixels."),
    used("vae_tile_width", PIXELS, 256, "Columns of a tile, in pixels."),
    used("vae_tile_stride_height", PIXELS, 192, "Rows from one tile to the next."),
    used("vae_tile_stride_width", PIXELS, 192, "Columns from one tile to the next."),
    unused("replicate_vae", Boolean(), False, "Every device holds the whole VAE: always so."),
)
