"""Every attention name on eight virtual devices, against dense attention in float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import ATTENTION_NAMES, AttentionOptions, plan_attention
from maxdiffusion.attention.registry import ATTENTION_OPS
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
from tests.marking import slow_except

ON_CPU = [name for name in ATTENTION_NAMES if name != "cudnn_flash_te"]
# Cheap names that cover every context-parallel scheme, for the quick tests.
ONE_PER_SCHEME = (
    *("dot_product", "flash", "ring", "ulysses"),
    *("ulysses_ring_custom", "ulysses_ring_custom_bidir"),
)
CHUNKS = 2

CASES = [
    Case(label="one device", mesh=(1, 1, 1, 1, 1), length=37, masked=True, padded=False),
    Case(label="ring 2, data 2, batch 2", mesh=(2, 1, 2, 1, 1), batch=2, length=50, masked=True),
    Case(
        label="2x2, tensor 2, ragged, batch 2",
        mesh=(1, 1, 2, 2, 2),
        batch=2,
        length=61,
        masked=True,
        padded=False,
    ),
    Case(
        label="context 4, fsdp 2, heads of 128, bfloat16",
        mesh=(1, 2, 2, 2, 1),
        batch=2,
        length=66,
        heads=6,
        head_dim=128,
        dtype="bfloat16",
    ),
    Case(
        label="ulysses 8, 40 heads, head chunks",
        mesh=(1, 1, 1, 8, 1),
        heads=40,
        length=53,
        options=AttentionOptions(ulysses_attention_chunks=CHUNKS),
    ),
    Case(
        label="4x2, heads that do not divide, batch 2, masks",
        mesh=(1, 1, 4, 2, 1),
        batch=2,
        heads=5,
        length=60,
        masked=True,
    ),
]


@pytest.mark.parametrize("case", slow_except([CASES[2]], CASES), ids=lambda case: case.label)
@pytest.mark.parametrize("name", slow_except(ONE_PER_SCHEME, ON_CPU))
def test_equals_dense_attention_with_the_expected_collectives(name, case):
    plan = plan_attention(name, case.problem, mesh_of(case.mesh), case.options)
    inputs = inputs_of(case)
    arrays = placed(plan, inputs, padded=case.padded)
    program = compiled(plan, arrays)
    first, again = (np.asarray(program(*arrays)) for _ in range(2))
    assert first.dtype == jnp.dtype(case.dtype)
    assert np.array_equal(first, again)
    bound = allowed_error(case, inputs, fixed_m=plan.fixed_m)
    if plan.lossy:
        bound += fp8_error(inputs)
    expected = inputs.expected(case.problem.scale)
    assert relative_error(first[:, : case.length], expected) <= bound
    if case.padded:
        assert counted(program.as_text()) == stated(plan.collectives)


LONGEST_RING = Case(label="ring 8", mesh=(1, 1, 8, 1, 1), length=57, masked=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "ulysses_ring_custom_bidir"])
def test_equals_dense_attention_on_a_ring_of_eight(name):
    test_equals_dense_attention_with_the_expected_collectives(name, LONGEST_RING)


OVERLAPPED = Case(
    label="2x2, local queries in whole tiles", mesh=(1, 1, 2, 2, 1), length=1100, heads=2
)
WITH_OVERLAP = [
    name
    for name in ON_CPU
    if ATTENTION_OPS[name].scheme == ATTENTION_OPS["ulysses_ring_custom"].scheme
]


@pytest.mark.parametrize("name", slow_except(WITH_OVERLAP[:1], WITH_OVERLAP))
def test_equals_dense_attention_with_overlapped_queries(name):
    plan = plan_attention(name, OVERLAPPED.problem, mesh_of(OVERLAPPED.mesh))
    assert plan.local.heads == (1, 1), "two kernel calls: local and remote queries"
    test_equals_dense_attention_with_the_expected_collectives(name, OVERLAPPED)


NATURAL = Case(
    label="natural exponent",
    mesh=(1, 1, 2, 2, 1),
    length=44,
    options=AttentionOptions(use_base2_exp=False),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ulysses_ring", "ulysses_ring_custom_fixed_m"])
def test_equals_dense_attention_with_the_natural_exponent(name):
    test_equals_dense_attention_with_the_expected_collectives(name, NATURAL)


EXPLICIT = Case(label="explicit axes", mesh=(2, 1, 2, 2, 1), batch=2, length=30, padded=False)


@pytest.mark.parametrize("name", ["dot_product", "flash", "ulysses_ring"])
def test_takes_meshes_with_explicit_axes(name):
    plan = plan_attention(name, EXPLICIT.problem, mesh_of(EXPLICIT.mesh, explicit=True))
    inputs = inputs_of(EXPLICIT)
    arrays = placed(plan, inputs, padded=False)
    got = np.asarray(compiled(plan, arrays)(*arrays))
    bound = allowed_error(EXPLICIT, inputs, fixed_m=False)
    assert relative_error(got, inputs.expected(EXPLICIT.problem.scale)) <= bound
