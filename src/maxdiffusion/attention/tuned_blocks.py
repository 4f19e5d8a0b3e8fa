"""Tile sizes for a site: the user's, completed from a table of what is known to be best."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maxdiffusion.attention.on_device.site import KernelSite
from maxdiffusion.attention.options import LANES
from maxdiffusion.attention.tuned_sites import SEARCHED, SitePlace, TunedSite, row_at
from maxdiffusion.kernels.splash import SplashBlocks

if TYPE_CHECKING:
    from maxdiffusion.kernels.flash import FlashBlocks


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Queries and keys per tile, keys per matrix product, keys per softmax step."""

    block_q: int
    block_kv: int
    block_kv_compute: int
    block_kv_compute_in: int


def _tiles(block_q: int, block_kv: int, compute: int, inner: int) -> Tiles:
    return Tiles(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_kv_compute_in=inner,
    )


# Tiles of WAN 2.2 A14B, 720p, 81 frames (75,600 tokens) as our kernel compiles best to (libtpu
# 0.0.42, without a device): on tpu7x 99 % of the MXU bound in the main loop and 97 % over the whole
# call, in 34 MiB of VMEM; docs/performance.md has what lost. Queries are whole tiles of 512; keys
# are evened out, up to this many.
TUNED = {
    "tpu7x": _tiles(4608, 8192, 8192, 8192),
    "v6e": _tiles(4608, 8192, 8192, 8192),
}
# Products in float8 take half as long, so that the start and the end of a tile weigh twice as much.
TUNED_FP8 = {"tpu7x": _tiles(4608, 19200, 19200, 19200)}
KEYS_AT_ONCE = 256
# Interpreted kernels pay per grid step and per element: one tile of a few hundred is quickest.
INTERPRETED = _tiles(256, 256, 256, 256)
# For chips without a row, and for jax's and tokamax's splash: small enough for 16 MiB of VMEM.
CAUTIOUS = _tiles(1024, 1024, 512, 512)

# What a search over tiles of a splash kernel sets.
SPLASH_FORWARD = ("block_q", "block_kv", "block_kv_compute")

# What jax calls a device, and what libtpu's topologies and the tables here call its chip.
CHIP_NAMES = {
    "tpu7x": "tpu7x",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu v5p": "v5p",
    "tpu v5": "v5p",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
}


def chip_of(device_kind: str) -> str:
    """The short name of a chip; an unknown one is held to the sizes of a tpu7x."""
    return CHIP_NAMES.get(device_kind.lower(), "tpu7x")


def place_of(site: KernelSite, kernel: str) -> SitePlace:
    """Where the results of a search at this site hold."""
    sizes = site.sizes
    return SitePlace(
        chip=CHIP_NAMES.get(site.device_kind.lower(), site.device_kind),
        kernel=kernel,
        batch=sizes.batch,
        heads=max(sizes.heads),
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        head_dim=site.head_dim,
        dtype=site.dtype.name,
        ring=site.ring,
    )


def searched_row(site: KernelSite, kernel: str) -> TunedSite | None:
    """What a search found for a kernel at this site, unless the user gives sizes."""
    given = vars(site.options.block_sizes)
    if any(given[name] is not None for name in SEARCHED):
        return None
    return row_at(site.options.tuned_sites, place_of(site, kernel))


def tuned_tiles(site: KernelSite, *, fp8: bool = False) -> Tiles:
    """The table's tiles for our flash kernel at `site`, evened out."""
    if site.interpret:
        return INTERPRETED
    most = (TUNED_FP8 if fp8 else TUNED).get(CHIP_NAMES.get(site.device_kind.lower(), ""))
    if most is None:
        return CAUTIOUS
    keys = even_block(most.block_kv, site.sizes.kv_len)
    return _tiles(
        most.block_q,
        keys,
        fitting(most.block_kv_compute, keys),
        fitting(most.block_kv_compute_in, keys),
    )


def flash_blocks(site: KernelSite, kernel: str, *, fp8: bool = False) -> "FlashBlocks":
    """Tiles of our flash kernel: given sizes first, the rest tuned and made to fit them.

    With none given, what a search found for this site stands before the table.
    """
    from maxdiffusion.kernels.flash import FlashBlocks

    found = searched_row(site, kernel)
    if found is not None:
        return FlashBlocks(**dict(found.sizes)).fit(site.sizes.q_len, site.sizes.kv_len)
    given = site.options.block_sizes
    tuned = tuned_tiles(site, fp8=fp8)
    block_kv = given.block_kv or tuned.block_kv
    compute = given.block_kv_compute or fitting(tuned.block_kv_compute, block_kv)
    inner = given.block_kv_compute_in or fitting(tuned.block_kv_compute_in, compute)
    blocks = FlashBlocks(
        block_q=given.block_q or tuned.block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_kv_compute_in=inner,
        heads_per_tile=given.heads_per_tile or 1,
        vmem_limit_bytes=given.vmem_limit_bytes,
    )
    return blocks.fit(site.sizes.q_len, site.sizes.kv_len)


def splash_blocks(site: KernelSite, kernel: str = "splash") -> SplashBlocks:
    """Tiles of the splash kernels: given sizes first, clipped to the lengths they cover."""
    given, sizes = site.options.block_sizes, site.sizes
    found = searched_row(site, kernel)
    if found is not None:
        given = given.changed(dict(found.sizes))
    tuned = INTERPRETED if site.interpret else CAUTIOUS
    block_q = covering(given.block_q or tuned.block_q, sizes.q_len)
    block_kv = covering(given.block_kv or tuned.block_kv, sizes.kv_len)
    compute = fitting(given.block_kv_compute or tuned.block_kv_compute, block_kv)
    kv_dkv = covering(given.block_kv_dkv or block_kv, sizes.kv_len)
    return SplashBlocks(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=covering(given.block_q_dkv or block_q, sizes.q_len),
        block_kv_dkv=kv_dkv,
        block_kv_dkv_compute=fitting(given.block_kv_dkv_compute or compute, kv_dkv),
        block_q_dq=covering(given.block_q_dq or block_q, sizes.q_len),
        block_kv_dq=covering(given.block_kv_dq or block_kv, sizes.kv_len),
    )


def even_block(most: int, length: int) -> int:
    """The block of keys up to `most` that cuts `length` into blocks of equal length."""
    blocks = -(-length // most)
    return -(-length // blocks // KEYS_AT_ONCE) * KEYS_AT_ONCE


def covering(size: int, length: int) -> int:
    """`size`, but no larger than the lane tiles that cover `length`."""
    return min(size, -(-length // LANES) * LANES)


def fitting(inner: int, outer: int) -> int:
    """The largest multiple of a lane tile up to `inner` that divides `outer`."""
    candidates = range(min(inner, outer) // LANES * LANES, 0, -LANES)
    return next((size for size in candidates if outer % size == 0), outer)
