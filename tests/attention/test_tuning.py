"""Tile sizes: given ones first, tuned ones for the chip, always ones that the kernel accepts."""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from maxdiffusion.attention import AttentionOptions, BlockSizes
from maxdiffusion.attention.backends import Softmax
from maxdiffusion.attention.backends.flash import FlashBackend
from maxdiffusion.attention.options import splash_blocks
from maxdiffusion.attention.problem import LocalProblem, even_length
from maxdiffusion.attention.registry import ATTENTION_OPS
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.kernels.tpu import even_block


def local(
    *, kind: str = "TPU7x", q_len: int = 37824, ring: int = 2, heads: int = 10
) -> LocalProblem:
    return LocalProblem(
        batch=1,
        heads=(heads,),
        q_len=q_len,
        kv_len=q_len,
        head_dim=128,
        dtype=jnp.dtype("bfloat16"),
        num_kv_shards=ring,
        platform="tpu",
        device_kind=kind,
    )


def flash(problem: LocalProblem, **sizes) -> FlashBackend:
    options = AttentionOptions(block_sizes=BlockSizes(**sizes))
    return FlashBackend(problem=problem, options=options)


@pytest.mark.parametrize(
    ("backend", "block_q", "block_kv"),
    [
        (flash(local()), 9728, 7680),
        (flash(local(ring=1, q_len=75648)), 9728, 7680),
        (flash(local(ring=4, q_len=18912)), 9728, 6400),
        (flash(local(ring=8, q_len=9456)), 9472, 4864),
        (flash(local(ring=16, q_len=4728)), 4736, 4736),
        (flash(local(kind="TPU v6 lite", ring=4, q_len=18912)), 9728, 18944),
        (flash(local(q_len=1000)), 1024, 1024),
        (replace(flash(local(ring=1, q_len=75648)), softmax=Softmax.FIXED_M), 9728, 7680),
        (flash(local(kind="TPU v6 lite", ring=1)), 9728, 18944),
        (replace(flash(local(kind="TPU v6 lite")), softmax=Softmax.FIXED_M), 9728, 7680),
        (flash(local(kind="TPU v9", q_len=8192)), 1024, 1024),
    ],
)
def test_picks_the_tuned_tiles_of_a_chip(backend, block_q, block_kv):
    assert (backend.blocks.block_q, backend.blocks.block_kv) == (block_q, block_kv)
    backend.check()


def test_given_sizes_come_first_and_the_rest_fits_them():
    blocks = flash(local(), block_q=1536, block_kv=768).blocks
    assert (blocks.block_q, blocks.block_kv) == (1536, 768)
    assert blocks.block_kv_compute == blocks.block_kv_compute_in == 768


def test_blocks_of_keys_are_evened_out():
    assert even_block(8192, 37824, 256) == 7680
    assert even_block(8192, 75648, 256) == 7680
    assert even_block(8192, 100, 256) == 256


def test_tuned_blocks_shrink_until_they_fit_the_chip():
    # Five heads a tile keep five blocks of queries in VMEM.
    backend = flash(local(), heads_per_tile=5)
    assert backend.blocks.block_q < 4608
    backend.check()


def test_given_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ProblemsFound, match="MiB of VMEM"):
        flash(local(), heads_per_tile=5, block_q=9472).check()


def test_splash_tiles_cover_short_lengths_without_excess():
    blocks = splash_blocks(local(q_len=300), AttentionOptions())
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
        where = local(kind=KINDS[chip], q_len=share, ring=int(ring), heads=40 // int(ulysses))
        blocks = ATTENTION_OPS[name].self_backend(where, AttentionOptions()).blocks
        sizes = (blocks.block_q, blocks.block_kv)
        inner = (blocks.block_kv_compute, blocks.block_kv_compute_in)
        assert "/".join(map(str, sizes + inner)) == stated, (chip, name, ring)
