"""Tile sizes: given ones first, tuned ones for the chip, always ones that the kernel accepts."""

import re
from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.attention import AttentionOptions, FlashBlockSizes
from maxdiffusion.attention.geometry import even_length
from maxdiffusion.attention.modes import MODES
from maxdiffusion.attention.on_device import KernelSite, KernelSizes
from maxdiffusion.attention.on_device.flash import FixedMFlashKernel, FlashKernel
from maxdiffusion.attention.tuned_blocks import even_block, flash_blocks, splash_blocks


def site(
    *, kind: str = "TPU7x", q_len: int = 37824, ring: int = 2, heads: int = 10, **sizes
) -> KernelSite:
    return KernelSite(
        sizes=KernelSizes(batch=1, heads=(heads,), q_len=q_len, kv_len=q_len),
        head_dim=128,
        dtype=np.dtype("bfloat16"),
        scale=128**-0.5,
        ring=ring,
        platform="tpu",
        device_kind=kind,
        options=AttentionOptions(block_sizes=FlashBlockSizes(**sizes)),
    )


@pytest.mark.parametrize(
    ("kernel", "where", "block_q", "block_kv"),
    [
        (FlashKernel, site(), 4608, 7680),
        (FlashKernel, site(ring=1, q_len=75648), 4608, 7680),
        (FlashKernel, site(ring=16, q_len=4728), 4608, 4736),
        (FlashKernel, site(q_len=1000), 1024, 1024),
        (FixedMFlashKernel, site(ring=1, q_len=75648), 4608, 7680),
        (FlashKernel, site(kind="TPU v6 lite", ring=1), 4608, 7680),
        (FlashKernel, site(kind="TPU v9", q_len=8192), 1024, 1024),
    ],
    ids=lambda value: value.device_kind if isinstance(value, KernelSite) else None,
)
def test_picks_the_tuned_tiles_of_a_chip(kernel, where, block_q, block_kv):
    blocks = kernel(where).blocks
    assert (blocks.block_q, blocks.block_kv) == (block_q, block_kv)
    assert kernel(where).limits() == []


def test_given_sizes_come_first_and_the_rest_fits_them():
    blocks = flash_blocks(site(block_q=1536, block_kv=768), "flash online")
    assert (blocks.block_q, blocks.block_kv) == (1536, 768)
    assert blocks.block_kv_compute == blocks.block_kv_compute_in == 768


def test_blocks_of_keys_are_evened_out():
    assert even_block(8192, 37824) == 7680
    assert even_block(8192, 75648) == 7680
    assert even_block(8192, 100) == 256


def test_tuned_blocks_shrink_until_they_fit_the_chip():
    # Five heads a tile keep five blocks of queries in VMEM.
    kernel = FlashKernel(site(heads=10, heads_per_tile=5))
    assert kernel.blocks.block_q < 4608
    assert kernel.limits() == []


def test_given_blocks_that_do_not_fit_are_refused():
    kernel = FlashKernel(site(heads=10, heads_per_tile=5, block_q=9472))
    assert any("MiB of VMEM" in str(problem) for problem in kernel.limits())


def test_splash_tiles_cover_short_lengths_without_excess():
    blocks = splash_blocks(site(q_len=300))
    assert blocks.block_q == blocks.block_kv == 384
    assert blocks.block_kv % blocks.block_kv_compute == 0


CONFIG = Path(__file__).parents[2] / "configs" / "base_wan_27b.yml"
ROW = re.compile(
    r"^#   (tpu7x|v6e) +CP(\d+) +U(\d+) R(\d+) +(\w+) +[\d/]+ +([\d/]+)$", re.MULTILINE
)
KINDS = {"tpu7x": "TPU7x", "v6e": "TPU v6 lite"}


def test_the_config_states_what_the_table_picks():
    rows = ROW.findall(CONFIG.read_text())
    assert len(rows) == 12
    for chip, context, ulysses, ring, name, stated in rows:
        assert int(context) == int(ulysses) * int(ring)
        share = even_length(75600, int(context)) // int(ring)
        where = site(kind=KINDS[chip], q_len=share, ring=int(ring), heads=40 // int(ulysses))
        blocks = MODES[name].kernel(where).blocks
        sizes = (blocks.block_q, blocks.block_kv)
        inner = (blocks.block_kv_compute, blocks.block_kv_compute_in)
        assert "/".join(map(str, sizes + inner)) == stated, (chip, name, ring)
