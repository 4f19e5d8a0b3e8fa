"""Split queries over text keys that every device has: no collective, any mesh."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxdiffusion.attention import plan_cross_attention
from maxdiffusion.kernels.reference import dense_attention
from tests.attention.cases import (
    Case,
    allowed_error,
    compiled,
    inputs_of,
    mesh_of,
    placed,
    relative_error,
)
from tests.attention.collectives import counted

TEXT = 21
CASE = Case(label="cross", mesh=(2, 1, 2, 2, 1), batch=2, length=61, masked=True)


@pytest.mark.parametrize("name", ["dot_product", "flash", "ring", "ulysses_custom_fixed_m"])
def test_equals_dense_attention_and_moves_nothing(name):
    problem = replace(CASE.problem, kv_len=TEXT)
    plan = plan_cross_attention(name, problem, mesh_of(CASE.mesh))
    whole = inputs_of(CASE)
    inputs = replace(whole, k=whole.k[:, :TEXT], v=whole.v[:, :TEXT], mask=whole.mask[:, :TEXT])
    arrays = placed(plan, inputs, padded=True)
    program = compiled(plan, arrays)
    got = np.asarray(program(*arrays))[:, : CASE.length]
    wanted = inputs.expected(problem.scale)
    assert relative_error(got, wanted) <= allowed_error(CASE, inputs, fixed_m=False)
    assert counted(program.as_text()) == {}


def test_batches_that_fsdp_does_not_divide_are_copied_along_it():
    case = Case(label="fsdp", mesh=(2, 2, 1, 2, 1), batch=2, length=30)
    plan = plan_cross_attention("flash", case.problem, mesh_of(case.mesh))
    assert plan.problem.batch_axes == ("data",)
    inputs = inputs_of(case)
    arrays = placed(plan, inputs, padded=True)
    got = np.asarray(compiled(plan, arrays)(*arrays))
    wanted = dense_attention(
        *(jax.numpy.asarray(x) for x in (inputs.q, inputs.k, inputs.v)), scale=case.problem.scale
    )
    assert relative_error(got, wanted) <= allowed_error(case, inputs, fixed_m=False)
