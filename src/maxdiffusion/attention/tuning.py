"""Block sizes for a local problem: the user's, then those of a search, then a table by chip."""

from dataclasses import replace

from maxdiffusion.attention.options import AttentionOptions, TunedBlocks, find_row
from maxdiffusion.attention.problem import LocalProblem
from maxdiffusion.kernels.tpu import SEARCHED, BlockSizes, covering, even_block, fitting


def _tiles(block_q: int, block_kv: int, compute: int, inner: int) -> BlockSizes:
    return BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_kv_compute_in=inner,
    )


# Best tiles of our kernel for WAN 2.2 A14B, 720p, 81 frames (75,600 tokens), as compiled by libtpu
# 0.0.42 without a device: on tpu7x 99 % of the MXU bound in the main loop and 97 % over the whole
# call, in 34 MiB of VMEM. Queries are whole tiles of 512; keys are evened out, up to this many.
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

SPLASH_FORWARD = ("block_q", "block_kv", "block_kv_compute")
"""Sizes that a search over tiles of a splash kernel sets."""


def searched_row(
    problem: LocalProblem, options: AttentionOptions, kernel: str
) -> TunedBlocks | None:
    """Returns the row of a search for this kernel and problem, unless the user gives sizes."""
    given = options.block_sizes.given()
    if any(name in given for name in SEARCHED):
        return None
    return find_row(options.tuned_blocks, kernel, problem)


def tuned_tiles(
    problem: LocalProblem, options: AttentionOptions, *, fp8: bool = False
) -> BlockSizes:
    """Returns the table's blocks of our flash kernel, with blocks of keys evened out."""
    if options.interprets(problem.platform):
        return INTERPRETED
    most = (TUNED_FP8 if fp8 else TUNED).get(problem.chip)
    if most is None:
        return CAUTIOUS
    keys = even_block(most.block_kv, problem.kv_len, KEYS_AT_ONCE)
    return _tiles(
        most.block_q,
        keys,
        fitting(most.block_kv_compute, keys),
        fitting(most.block_kv_compute_in, keys),
    )


def flash_blocks(
    problem: LocalProblem, options: AttentionOptions, kernel: str, *, fp8: bool = False
) -> BlockSizes:
    """Returns blocks of our flash kernel: given sizes first, the rest tuned to fit them.

    If none is given, the result of a search goes before the table.
    """
    found = searched_row(problem, options, kernel)
    if found is not None:
        return found.blocks.fit(problem.q_len, problem.kv_len)
    given, tuned = options.block_sizes, tuned_tiles(problem, options, fp8=fp8)
    block_kv = given.block_kv or tuned.block_kv
    compute = given.block_kv_compute or fitting(tuned.block_kv_compute, block_kv)
    inner = given.block_kv_compute_in or fitting(tuned.block_kv_compute_in, compute)
    blocks = BlockSizes(
        block_q=given.block_q or tuned.block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_kv_compute_in=inner,
        heads_per_tile=given.heads_per_tile or 1,
        vmem_limit_bytes=given.vmem_limit_bytes,
    )
    return blocks.fit(problem.q_len, problem.kv_len)


def splash_blocks(
    problem: LocalProblem, options: AttentionOptions, kernel: str = "splash"
) -> BlockSizes:
    """Returns blocks of the splash kernels: given sizes first, clipped to the lengths."""
    given, q_len, kv_len = options.block_sizes, problem.q_len, problem.kv_len
    found = searched_row(problem, options, kernel)
    if found is not None:
        given = given.updated(found.blocks.given())
    tuned = INTERPRETED if options.interprets(problem.platform) else CAUTIOUS
    block_q = covering(given.block_q or tuned.block_q, q_len)
    block_kv = covering(given.block_kv or tuned.block_kv, kv_len)
    compute = fitting(given.block_kv_compute or tuned.block_kv_compute, block_kv)
    kv_dkv = covering(given.block_kv_dkv or block_kv, kv_len)
    return replace(
        given,
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute,
        block_q_dkv=covering(given.block_q_dkv or block_q, q_len),
        block_kv_dkv=kv_dkv,
        block_kv_dkv_compute=fitting(given.block_kv_dkv_compute or compute, kv_dkv),
        block_q_dq=covering(given.block_q_dq or block_q, q_len),
        block_kv_dq=covering(given.block_kv_dq or block_kv, kv_len),
    )
