"""Fewer key heads than query heads: every key head serves its group, under every scheme."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import AttentionProblem, UnsupportedAttention, plan_attention
from tests.attention.cases import (
    Case,
    allowed_error,
    compiled,
    inputs_of,
    mesh_of,
    placed,
    relative_error,
)

CASE = Case(label="grouped", mesh=(1, 1, 2, 2, 1), length=37, heads=6, masked=True, padded=False)
KEY_HEADS = 2
GROUPED = replace(CASE.problem, kv_heads=KEY_HEADS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dot_product", "ring", "ulysses_ring_custom_fixed_m"])
def test_equals_dense_attention_over_repeated_keys(name):
    plan = plan_attention(name, GROUPED, mesh_of(CASE.mesh))
    full = inputs_of(CASE)
    few = replace(full, k=full.k[:, :, :KEY_HEADS], v=full.v[:, :, :KEY_HEADS])
    arrays = placed(plan, few, padded=False)
    got = np.asarray(compiled(plan, arrays)(*arrays))
    repeated = replace(few, k=np.repeat(few.k, 3, axis=2), v=np.repeat(few.v, 3, axis=2))
    bound = allowed_error(CASE, repeated, fixed_m=plan.fixed_m)
    assert relative_error(got, repeated.expected(GROUPED.scale)) <= bound
    if plan.fixed_m:
        with jax.set_mesh(plan.mesh):
            assert int(jax.jit(plan.fixed_m_eligible_heads)(*arrays)) == CASE.heads


def test_the_plan_says_so():
    text = plan_attention("ulysses_custom", GROUPED, mesh_of(CASE.mesh)).describe()
    assert "key heads: 2, each repeated for 3 query heads before any collective" in text


def test_refuses_key_heads_that_do_not_divide_the_heads():
    problem: AttentionProblem = replace(CASE.problem, kv_heads=4)
    with pytest.raises(UnsupportedAttention) as refusal:
        plan_attention("ulysses_custom", problem, mesh_of(CASE.mesh))
    assert refusal.value.reasons == ("kv_heads=4: must divide heads=6. Use one of [1, 2, 3, 6].",)


def test_refuses_arrays_with_other_key_heads():
    plan = plan_attention("dot_product", GROUPED, mesh_of((1, 1, 1, 1, 1)))
    q = jnp.zeros((1, 37, 6, 32))
    with pytest.raises(
        ValueError, match=r"k has shape \(1, 37, 6, 32\): this plan is for \(1, 37, 2"
    ):
        plan(q, q, q)
