"""Kernel calls of plans, and the cycles that follow from the machine code."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from maxdiffusion.attention import AttentionOptions, AttentionProblem, BlockSizes
from maxdiffusion.attention import plan_attention as plan
from maxdiffusion.attention.backends.base import Tile
from maxdiffusion.costs.step_time import (
    KernelCalls,
    KernelFigures,
    kernel_calls,
)
from maxdiffusion.mesh import MeshShape, build_mesh

# The public online kernel at 8448/1024 with the LP scheduler, as compiled for tpu7x.
PUBLIC = KernelFigures(
    name="flash",
    purpose="self-attention",
    main_loop_bundles=14_104,
    mxu_bound_bundles=12_672,
    ragged_cycles=13_187,
    step_bundles=0,
    q_block_bundles=0,
    spill_stores=0,
    spill_loads=0,
    vmem_bytes=1,
    vmem_limit_bytes=2,
)


def test_cycles_of_a_call():
    tile = Tile(block_q=8448, block_kv=1024, q_tile=8448)
    use = KernelCalls(pairs=5, calls=1, q_len=75_600, kv_len=73 * 1024, tile=tile)
    assert use.q_blocks == 9
    assert use.cycles(PUBLIC) == 5 * 9 * 73 * 14_104
    ragged = dataclasses.replace(use, kv_len=73 * 1024 + 512)
    assert ragged.cycles(PUBLIC) == 5 * 9 * (73 * 14_104 + 13_187 / 2)
    ring = dataclasses.replace(use, calls=2, tile=dataclasses.replace(tile, q_tile=4224))
    assert ring.passes == 2 * 9, "75,600 queries end in the second half of the ninth block"
    assert ring.cycles(PUBLIC) == 2 * 2 * use.cycles(PUBLIC)


def test_a_last_block_as_long_as_the_others_is_one_of_them():
    tile = Tile(block_q=512, block_kv=1024, q_tile=512, kv_step=128)
    use = KernelCalls(pairs=1, calls=1, q_len=512, kv_len=2 * 1024, tile=tile)
    even = dataclasses.replace(use, kv_len=2 * 1024 - 100)
    assert even.cycles(PUBLIC) == use.cycles(PUBLIC)
    shorter = dataclasses.replace(use, kv_len=2 * 1024 - 128)
    assert shorter.cycles(PUBLIC) == 14_104 + 13_187 * 7 / 8


def test_a_last_block_of_queries_costs_the_tiles_that_it_needs():
    tile = Tile(block_q=4096, block_kv=1024, q_tile=1024)
    use = KernelCalls(pairs=1, calls=1, q_len=37_808, kv_len=1024, tile=tile)
    assert use.q_blocks == 10
    assert use.passes == 37


def test_a_shorter_tile_at_the_end_of_a_block_costs_its_own_code():
    tile = Tile(block_q=9472, block_kv=1024, q_tile=512)
    use = KernelCalls(pairs=1, calls=1, q_len=9456, kv_len=1024, tile=tile)
    assert (use.passes, use.short_tiles) == (18.5, 1)
    figures = dataclasses.replace(PUBLIC, short_tile_bundles=9_000)
    assert use.cycles(figures) == pytest.approx(18 * 14_104 + 9_000)
    shorter = dataclasses.replace(use, q_len=2 * 9472 - 256)
    assert (shorter.passes, shorter.short_tiles) == (18.5 + 18, 1)


def test_a_schedule_below_the_bound_is_timed_by_the_mxu():
    below = dataclasses.replace(PUBLIC, main_loop_bundles=12_000)
    assert below.main_loop_cycles == 12_672
    assert below.mxu_share == 1.0
    assert PUBLIC.mxu_share == pytest.approx(0.898, abs=1e-3)


def test_figures_survive_json():
    assert KernelFigures.from_json(PUBLIC.as_json()) == PUBLIC
    assert PUBLIC.as_json()["mxu_share"] == PUBLIC.mxu_share


@pytest.mark.parametrize(
    ("name", "shape", "calls", "pairs", "q_len"),
    [
        ("ulysses_custom", MeshShape(ulysses=4, data=2), 1, 2, 512),
        ("ulysses_ring_custom", MeshShape(ulysses=2, ring=2, data=2), 2, 4, 256),
        ("tokamax_ring_custom", MeshShape(ring=4, data=2), 4, 8, 128),
        ("flash", MeshShape(ring=4, data=2), 1, 8, 128),
        ("tokamax_flash", MeshShape(ring=4, data=2), 1, 8, 128),
    ],
)
def test_calls_follow_the_scheme(name, shape, calls, pairs, q_len):
    problem = AttentionProblem(
        batch=2, q_len=512, kv_len=512, heads=8, head_dim=128, dtype=jnp.dtype("bfloat16")
    )
    options = AttentionOptions(
        block_sizes=BlockSizes(block_q=128, block_kv=128), flash_min_seq_length=0
    )
    use = kernel_calls(plan(name, problem, build_mesh(shape, devices=jax.devices()[:8]), options))
    assert (use.calls, use.pairs, use.q_len) == (calls, pairs, q_len)
    assert use.calls * use.kv_len == 512
    assert (use.tile.block_q, use.tile.block_kv) == (128, 128)


def test_dense_attention_has_no_kernel():
    problem = AttentionProblem(
        batch=1, q_len=64, kv_len=64, heads=2, head_dim=16, dtype=jnp.dtype("float32")
    )
    mesh = build_mesh(MeshShape(), devices=jax.devices()[:1])
    assert plan("dot_product", problem, mesh).backend.tile is None
