"""What a plan says, what it refuses, and that it refuses with every reason at once."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import (
    ATTENTION_NAMES,
    AttentionOptions,
    AttentionProblem,
    BlockSizes,
    UnsupportedAttention,
    plan_attention,
    plan_cross_attention,
    with_gradient,
)
from maxdiffusion.attention.context_parallel import (
    AllGatherKV,
    AllToAllQueries,
    BidirectionalRing,
    LocalKV,
    Partitioning,
    Ring,
    Ulysses,
)
from maxdiffusion.attention.registry import differentiable_names
from maxdiffusion.mesh import CONTEXT_AXES
from tests.attention.cases import mesh_of


def problem(**changes) -> AttentionProblem:
    sizes = {
        "batch": 2,
        "q_len": 64,
        "kv_len": 64,
        "heads": 40,
        "head_dim": 128,
        "dtype": np.dtype("bfloat16"),
    }
    return AttentionProblem(**(sizes | changes))


def test_has_the_public_names():
    assert set(ATTENTION_NAMES) == {
        "dot_product",
        "flash",
        "tokamax_flash",
        "cudnn_flash_te",
        "ring",
        "tokamax_ring",
        "tokamax_ring_custom",
        "ulysses",
        "ulysses_custom",
        "ulysses_custom_fixed_m",
        "ulysses_ring",
        "ulysses_ring_custom",
        "ulysses_ring_custom_bidir",
        "ulysses_ring_custom_fixed_m",
        "ulysses_ring_custom_fp8",
    }


def test_pure_names_take_the_whole_context_and_split_names_its_two_axes():
    mesh = mesh_of((1, 1, 2, 4, 1))

    def scheme(name):
        return plan_attention(name, problem(), mesh).scheme

    whole = {"axes": CONTEXT_AXES, "degree": 8}
    assert scheme("dot_product").partitioning is Partitioning.AUTO
    assert scheme("flash") == AllGatherKV(**whole)
    assert scheme("ring") == Ring(**whole)
    assert scheme("ulysses") == Ulysses(**whole, queries=AllToAllQueries(**whole))
    split = {"axes": ("ulysses",), "degree": 4}
    queries = AllToAllQueries(**split)
    assert scheme("ulysses_ring") == Ulysses(
        **split, inner=Ring(axes=("ring",), degree=2), queries=queries
    )
    line = BidirectionalRing(axes=("ring",), degree=2)
    assert scheme("ulysses_ring_custom_bidir") == Ulysses(**split, inner=line, queries=queries)


FOUR = {"axes": ("ulysses",), "degree": 4}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 1, 1, 1, 1), LocalKV()),
        ((1, 1, 4, 1, 1), Ring(axes=("ring",), degree=4)),
        ((1, 1, 1, 4, 1), Ulysses(**FOUR, queries=AllToAllQueries(**FOUR))),
    ],
)
def test_degrees_of_one_drop_out(shape, expected):
    assert plan_attention("ulysses_ring_custom", problem(), mesh_of(shape)).scheme == expected


def test_plans_are_hashable_and_equal_when_made_again():
    mesh = mesh_of((1, 1, 2, 2, 1))
    first, second = (plan_attention("ulysses_ring", problem(), mesh) for _ in range(2))
    assert hash(first) == hash(second)
    assert first == second


def test_lists_every_reason_at_once():
    mesh = mesh_of((4, 1, 1, 1, 2))
    sizes = problem(batch=3, heads=7, dtype=np.dtype("float32"), head_dim=12)
    with pytest.raises(UnsupportedAttention) as refusal:
        plan_attention("cudnn_flash_te", sizes, mesh)
    reasons = refusal.value.reasons
    assert [reason.split("=")[0] for reason in reasons] == [
        "batch",
        "heads",
        "device",
        "dtype",
        "head_dim",
    ]
    assert (
        "batch=3: the data axis (4) must divide it. Use a data axis of one of [1, 3]" in reasons[0]
    )
    assert (
        "heads=7: the tensor axis (2) must divide them. Use a tensor axis of one of [1, 7]"
        in (reasons[1])
    )
    assert "cuDNN attention runs on NVIDIA GPUs only" in reasons[2]
    assert all(reason in str(refusal.value) for reason in reasons)
    assert isinstance(refusal.value, ValueError)


def test_refuses_an_unknown_name_with_the_nearest():
    with pytest.raises(UnsupportedAttention, match="Did you mean 'ulysses_ring_custom'"):
        plan_attention("ulysses_ring_costum", problem(), mesh_of((1, 1, 1, 1, 1)))


def test_refuses_kernels_where_they_cannot_be_compiled():
    options = AttentionOptions(interpret=False)
    with pytest.raises(UnsupportedAttention, match="our flash kernel is compiled for TPUs only"):
        plan_attention("ulysses_custom", problem(), mesh_of((1, 1, 1, 2, 1)), options)


@pytest.mark.parametrize("name", ["flash", "ring", "ulysses_custom"])
def test_refuses_block_sizes_that_break_a_rule(name):
    sizes = BlockSizes(block_q=100, block_kv=384, block_kv_compute=256)
    with pytest.raises(UnsupportedAttention) as refusal:
        plan_attention(
            name, problem(), mesh_of((1, 1, 1, 2, 1)), AttentionOptions(block_sizes=sizes)
        )
    assert any("block_q=100" in reason and "Use 128" in reason for reason in refusal.value.reasons)


def test_refuses_heads_per_tile_that_do_not_divide_the_heads_of_a_call():
    options = AttentionOptions(block_sizes=BlockSizes(heads_per_tile=3))
    with pytest.raises(UnsupportedAttention, match=r"heads_per_tile=3: must divide heads=20"):
        plan_attention("ulysses_custom", problem(batch=1), mesh_of((1, 1, 1, 2, 1)), options)


def test_refuses_head_widths_that_the_flash_kernel_cannot_hold():
    with pytest.raises(UnsupportedAttention, match="head_dim=20: must be a positive multiple"):
        plan_attention("ulysses_custom", problem(head_dim=20), mesh_of((1, 1, 1, 2, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads=0: sizes are whole numbers from 1"),
        ({"dtype": np.dtype("float16")}, "dtype=float16: attention runs in"),
    ],
)
def test_refuses_problems_that_are_none(change, message):
    with pytest.raises(ValueError, match=message):
        problem(**change)


def test_refuses_a_mesh_with_other_axes():
    from jax.sharding import Mesh

    mesh = Mesh(mesh_of((1, 1, 1, 1, 1)).devices.reshape(1), ("x",))
    with pytest.raises(ValueError, match="attention needs the axes"):
        plan_attention("flash", problem(), mesh)


@pytest.mark.usefixtures("unchecked_types")
def test_refuses_arrays_that_the_plan_is_not_for():
    plan = plan_attention("dot_product", problem(), mesh_of((1, 1, 1, 1, 1)))
    q = jnp.zeros((2, 64, 40, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"k has shape \(2, 60, 40, 128\)"):
        plan(q, q[:, :60], q)
    with pytest.raises(ValueError, match="q has dtype float32: this plan is for bfloat16"):
        plan(q.astype(jnp.float32), q, q)
    with pytest.raises(ValueError, match=r"kv_mask has shape \(2, 3\)"):
        plan(q, q, q, jnp.ones((2, 3), bool))


GIVES_WAY = {
    "flash",
    "tokamax_flash",
    "ulysses",
    "ulysses_custom",
    "ulysses_custom_fixed_m",
    "ulysses_ring",
}


RUN_HERE = sorted(set(ATTENTION_NAMES) - {"cudnn_flash_te", "dot_product"})


@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.parametrize("kv_len", [64, 8192])
@pytest.mark.parametrize("q_len", [64, 8192])
@pytest.mark.parametrize("planned", [plan_attention, plan_cross_attention], ids=["self", "text"])
def test_few_queries_or_keys_give_way_to_dot_product_for_the_listed_names(
    planned, name, q_len, kv_len
):
    sizes, mesh = problem(q_len=q_len, kv_len=kv_len), mesh_of((1, 1, 2, 2, 1))
    plan = planned(name, sizes, mesh, AttentionOptions(flash_min_seq_length=4096))
    first = plan.describe().splitlines()[0]
    why = "64 tokens are fewer than flash_min_seq_length=4096"
    if q_len == kv_len == 8192:
        assert (plan.runs, first) == (name, f"attention {name}")
    elif name in GIVES_WAY:
        assert (plan.runs, plan.backend.title) == ("dot_product", "dense einsum")
        assert first == f"attention {name} runs as dot_product: {why}"
    else:
        assert plan.runs == name
        assert first == f"attention {name}: {why}, to which this name is not held"
    unlimited = planned(name, sizes, mesh, AttentionOptions(flash_min_seq_length=0))
    assert (unlimited.runs, unlimited.note) == (name, "")


@pytest.mark.parametrize("name", sorted(set(ATTENTION_NAMES) - {"cudnn_flash_te"}))
def test_cross_attention_keeps_text_local(name):
    mesh = mesh_of((1, 1, 2, 4, 1))
    plan = plan_cross_attention(name, problem(q_len=100, kv_len=20), mesh)
    assert plan.collectives == ()
    assert plan.padded_q_len == 104
    assert plan.padded_kv_len == 20
    assert (plan.fixed_m, plan.lossy) == (False, False)
    assert "0.00 MiB sent per device" in plan.describe()


@pytest.mark.parametrize("name", RUN_HERE)
def test_only_names_with_a_gradient_are_trained_with(name):
    plan = plan_attention(name, problem(), mesh_of((1, 1, 2, 2, 1)))
    if plan.backend.differentiable:
        assert with_gradient(plan) is plan
        return
    with pytest.raises(UnsupportedAttention) as refusal:
        with_gradient(plan)
    assert refusal.value.reasons == (
        f"attention={name!r}: our flash kernel has no gradient in fp8. Train with one of "
        f"{', '.join(differentiable_names())}.",
    )


def test_describes_what_runs_and_what_it_costs():
    mesh = mesh_of((1, 1, 2, 2, 1))
    sizes = problem(batch=2, heads=5, q_len=62, kv_len=62)
    text = plan_attention("ulysses_ring_custom_fixed_m", sizes, mesh).describe()
    for part in (
        "attention ulysses_ring_custom_fixed_m",
        "all-to-all of heads and tokens over ulysses=2",
        "k, v rotate over ring=2, 1 hops",
        "our flash kernel, fixed-m softmax; 5 (batch, head) pairs x 32 queries x 32 keys a call",
        "blocks: q 128, kv 128/128/128",
        "queries: 64 for 62 (3.1% padding)",
    ):
        assert part in text


@pytest.mark.parametrize("name", ["flash", "ulysses_ring", "ulysses_custom"])
def test_every_pallas_kernel_says_what_it_takes_of_vmem(name):
    options = AttentionOptions(flash_min_seq_length=0)
    plan = plan_attention(name, problem(q_len=256, kv_len=256), mesh_of((1, 1, 2, 2, 1)), options)
    assert re.search(r"VMEM (about )?[01]\.\d MiB", plan.describe())


@pytest.mark.parametrize(("fused", "noted"), [(None, False), (True, False), (False, True)])
def test_says_that_tokamax_has_no_separate_backward_kernel(fused, noted):
    options = AttentionOptions(block_sizes=BlockSizes(use_fused_bwd_kernel=fused))
    text = plan_attention("ring", problem(), mesh_of((1, 1, 4, 1, 1)), options).describe()
    assert ("use_fused_bwd_kernel=false has no effect" in text) == noted


def test_counts_the_bytes_that_an_all_to_all_and_a_ring_send():
    # 16 tokens x 10 heads x 128 x 2 bytes on each of 4 devices.
    local = 16 * 10 * 128 * 2
    sizes = problem(batch=1, heads=10)
    mesh = mesh_of((1, 1, 2, 2, 1))
    ring = plan_attention("ring", sizes, mesh)
    assert sum(each.bytes for each in ring.collectives) == 3 * 2 * local
    both = plan_attention("ulysses_ring", sizes, mesh)
    assert sum(each.bytes for each in both.collectives) == 4 * local // 2 + 2 * local


def test_says_how_many_heads_are_filled_up():
    sizes = problem(batch=1, heads=5)
    plan = plan_attention("ulysses", sizes, mesh_of((1, 1, 1, 4, 1)))
    assert "heads: 8 for 5 (37.5% padding)" in plan.describe()
