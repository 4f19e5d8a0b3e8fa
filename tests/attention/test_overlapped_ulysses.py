"""Two devices that trade heads while they compute: the same attention, in another order."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import AttentionOptions, AttentionProblem, plan_attention
from maxdiffusion.attention.context_parallel import AllToAllQueries, OverlappedQueries
from tests.attention.cases import (
    Case,
    allowed_error,
    compiled,
    fp8_error,
    inputs_of,
    mesh_of,
    placed,
    relative_error,
)
from tests.attention.collectives import counted, stated
from tests.attention.test_projected_heads import NOISE, WIDTH, attended, columns
from tests.attention.test_projected_heads import placed as placed_columns
from tests.attention.test_streams import operations_of
from tests.marking import slow_except

pytestmark = pytest.mark.slow

NAMES = ("ulysses_ring_custom", "ulysses_ring_custom_fixed_m", "ulysses_ring_custom_fp8")
CASES = [
    Case(label="2x2, ragged", mesh=(1, 1, 2, 2, 1), length=61, padded=False),
    Case(
        label="2x2, data 2, batch 4, masks", mesh=(2, 1, 2, 2, 1), batch=4, length=40, masked=True
    ),
    Case(label="4x2, heads that two do not divide", mesh=(1, 1, 4, 2, 1), heads=5, length=50),
    Case(
        label="2x2, tensor 2, head groups, bfloat16",
        mesh=(1, 1, 2, 2, 2),
        heads=12,
        dtype=np.dtype("bfloat16"),
        options=AttentionOptions(ulysses_attention_chunks=2),
    ),
]


def paired(plan):
    """The plan with queries that travel by themselves, however few tokens it has."""
    pair = replace(plan.scheme, queries=OverlappedQueries(axes=plan.scheme.axes))
    backend = replace(plan.backend, problem=pair.local_problem(plan.problem.shard))
    return replace(plan, scheme=pair, backend=backend)


@pytest.mark.parametrize("case", slow_except(CASES[:1], CASES), ids=lambda case: case.label)
@pytest.mark.parametrize("name", slow_except(NAMES[:1], NAMES))
def test_equals_dense_attention(name, case):
    plan = paired(plan_attention(name, case.problem, mesh_of(case.mesh), case.options))
    inputs = inputs_of(case)
    arrays = placed(plan, inputs, padded=case.padded)
    program = compiled(plan, arrays)
    first, again = (np.asarray(program(*arrays)) for _ in range(2))
    assert np.array_equal(first, again)
    bound = allowed_error(case, inputs, fixed_m=plan.fixed_m)
    bound += fp8_error(inputs) if plan.lossy else 0
    expected = inputs.expected(case.problem.scale)
    assert relative_error(first[:, : case.length], expected) <= bound


def test_only_keys_and_values_are_traded_all_at_once():
    case = Case(label="2x2", mesh=(1, 1, 2, 2, 1))
    plan = paired(plan_attention(NAMES[0], case.problem, mesh_of(case.mesh)))
    program = compiled(plan, placed(plan, inputs_of(case), padded=True))
    # A hop of k and of v, the way of the queries and that of their output back.
    assert counted(program.as_text()) == {"all-to-all": 2, "collective-permute": 4}
    assert counted(program.as_text()) == stated(plan.collectives)


def test_own_queries_begin_before_others_come_and_end_after_they_left():
    case = Case(label="2x2", mesh=(1, 1, 2, 2, 1))
    plan = paired(plan_attention(NAMES[0], case.problem, mesh_of(case.mesh)))
    order = [
        "over" if params.get("axis_name") == ("ulysses",) else name
        for name, params in operations_of(plan, case)
        if name in ("ppermute", "pallas_call")
    ]
    hop = ["ppermute", "ppermute"]
    calls = ["pallas_call"] * 3
    assert order == ["over", *hop, *calls, "pallas_call", "over"]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "batch", "chunks"), [(3, 1, 1), (5, 1, 2), (3, 2, 2)])
def test_heads_placed_in_one_pass_attend_alike(heads, batch, chunks):
    mesh = mesh_of((1, 1, 2, 2, 1))
    sizes = {"heads": heads, "head_dim": WIDTH, "dtype": np.dtype("float32")}
    problem = AttentionProblem(batch=batch, q_len=64, kv_len=64, **sizes)
    options = AttentionOptions(ulysses_attention_chunks=chunks)
    plan = paired(plan_attention(NAMES[0], problem, mesh, options))
    parts = [
        placed_columns(columns(seed, batch=batch, heads=heads, **kind), plan.problem.q_spec)
        for seed, kind in ((1, {}), (2, {}), (3, {"normed": False, "turned": False}))
    ]
    plain, fused = attended(plan, *parts), attended(replace(plan, fused=True), *parts)
    np.testing.assert_allclose(fused, plain, rtol=0, atol=NOISE * np.abs(plain).max())


@pytest.mark.parametrize(("ring", "kind"), [(2, OverlappedQueries), (4, AllToAllQueries)])
def test_devices_pair_where_it_takes_no_more_tiles(ring, kind):
    """75,600 tokens: 37 tiles for a quarter of them and 74 for two, but 19 and 37 for eighths."""
    sizes = {"heads": 40, "head_dim": 128, "dtype": jnp.dtype("bfloat16")}
    problem = AttentionProblem(batch=1, q_len=75_600, kv_len=75_600, **sizes)
    plan = plan_attention(NAMES[0], problem, mesh_of((1, 1, ring, 2, 1)))
    assert type(plan.scheme.queries) is kind
    assert ("remote queries overlapped" in plan.describe()) == (kind is OverlappedQueries)
