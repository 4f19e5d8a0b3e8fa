"""How lengths and batches fall on a mesh."""

import numpy as np
import pytest

from maxdiffusion.attention import AttentionProblem, plan_attention
from maxdiffusion.attention.problem import even_length
from tests.attention.cases import mesh_of


@pytest.mark.parametrize(
    ("length", "devices", "padded"),
    [
        (75600, 1, 75600),
        (75600, 8, 8 * 9464),
        (32760, 16, 16 * 2048),
        (32768, 8, 32768),
        (100, 8, 104),
        (5, 8, 8),
    ],
)
def test_shares_are_even_and_whole_tiles_where_that_is_cheap(length, devices, padded):
    assert even_length(length, devices) == padded


@pytest.mark.parametrize(
    ("mesh", "axes", "rows"),
    [
        ((2, 2, 1, 1, 1), ("data", "fsdp"), 1),
        ((2, 4, 1, 1, 1), ("data",), 2),
        ((1, 4, 2, 1, 1), ("data", "fsdp"), 1),
    ],
)
def test_fsdp_shares_in_the_batch_where_it_divides(mesh, axes, rows):
    problem = AttentionProblem(
        batch=4, q_len=8, kv_len=8, heads=2, head_dim=16, dtype=np.dtype("float32")
    )
    split = plan_attention("dot_product", problem, mesh_of(mesh)).problem
    assert split.batch_axes == axes
    assert split.local_batch == rows
