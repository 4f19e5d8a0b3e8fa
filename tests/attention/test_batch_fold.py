"""The fold of batch into heads is the identity on values, bit by bit."""

from dataclasses import replace

import numpy as np
import pytest

from maxdiffusion.attention import plan_attention
from tests.attention.cases import Case, compiled, inputs_of, mesh_of, placed

CASE = Case(label="fold", mesh=(1, 1, 2, 2, 1), batch=2, length=29, masked=True, heads=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ulysses", "ulysses_ring"])
def test_a_batch_is_its_rows_one_by_one(name):
    mesh = mesh_of(CASE.mesh)
    inputs = inputs_of(CASE)

    def run(batch: int, rows: slice) -> np.ndarray:
        plan = plan_attention(name, replace(CASE.problem, batch=batch), mesh)
        part = replace(
            inputs, q=inputs.q[rows], k=inputs.k[rows], v=inputs.v[rows], mask=inputs.mask[rows]
        )
        arrays = placed(plan, part, padded=True)
        return np.asarray(compiled(plan, arrays)(*arrays))[:, : CASE.length]

    run_distributed = run(2, slice(0, 2))
    for row in range(2):
        np.testing.assert_array_equal(run_distributed[row : row + 1], run(1, slice(row, row + 1)))
