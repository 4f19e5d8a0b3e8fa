"""Tile sizes for a site: the user's, completed from a table of what is known to be best."""

from dataclasses import dataclass

from maxdiffusion.attention.on_device.site import KernelSite
from maxdiffusion.attention.options import LANES
from maxdiffusion.kernels.splash import SplashBlocks


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Queries and keys per tile, and keys per matrix product."""

    block_q: int
    block_kv: int
    block_kv_compute: int


# Interpreted kernels pay per grid step and per element: one tile of a few hundred is quickest.
INTERPRETED = Tiles(block_q=256, block_kv=256, block_kv_compute=256)
# jax's and tokamax's splash: 64 MiB of VMEM hold 1024 x 1024 float32 scores with double buffers.
SPLASH = Tiles(block_q=1024, block_kv=1024, block_kv_compute=512)


def covering(size: int, length: int, multiple: int = LANES) -> int:
    """`size`, but no larger than the multiple of `multiple` that covers `length`."""
    return min(size, -(-length // multiple) * multiple)


def splash_blocks(site: KernelSite) -> SplashBlocks:
    """Tiles of the splash kernels: given sizes first, clipped to the lengths they cover."""
    given = site.options.block_sizes
    tuned = INTERPRETED if site.interpret else SPLASH
    block_q = covering(given.block_q or tuned.block_q, site.q_len)
    block_kv = covering(given.block_kv or tuned.block_kv, site.kv_len)
    compute = fitting(given.block_kv_compute or tuned.block_kv_compute, block_kv)
    kv_dkv = covering(given.block_kv_dkv or block_kv, site.kv_len)
    return SplashBlocks(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=covering(given.block_q_dkv or block_q, site.q_len),
        block_kv_dkv=kv_dkv,
        block_kv_dkv_compute=fitting(given.block_kv_dkv_compute or compute, kv_dkv),
        block_q_dq=covering(given.block_q_dq or block_q, site.q_len),
        block_kv_dq=covering(given.block_kv_dq or block_kv, site.kv_len),
    )


def fitting(inner: int, outer: int) -> int:
    """The largest multiple of a lane tile up to `inner` that divides `outer`."""
    candidates = range(min(inner, outer) // LANES * LANES, 0, -LANES)
    return next(size for size in candidates if outer % size == 0)
