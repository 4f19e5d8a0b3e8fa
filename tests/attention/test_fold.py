"""Batch folded into heads, masks with it, and heads in groups."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention.problem import fold_batch, fold_mask, head_groups, unfold_batch


def test_folding_is_undone():
    x = jnp.arange(2.0 * 5 * 3 * 4).reshape(2, 5, 3, 4)
    folded = fold_batch(x)
    assert folded.shape == (1, 5, 6, 4)
    np.testing.assert_array_equal(folded[0, :, 4], x[1, :, 1])
    np.testing.assert_array_equal(unfold_batch(folded, 2), x)


def test_a_folded_head_keeps_the_mask_of_its_batch_row():
    mask = jnp.asarray([[True, False], [False, True]])
    np.testing.assert_array_equal(fold_mask(mask, 3), np.repeat(mask, 3, axis=0))


@pytest.mark.parametrize(
    ("heads", "degree", "chunks", "groups"),
    [
        (40, 8, 1, [(0, 40)]),
        (40, 8, 2, [(0, 16), (16, 40)]),
        (40, 8, 99, [(0, 8), (8, 16), (16, 24), (24, 32), (32, 40)]),
        (12, 4, 2, [(0, 4), (4, 12)]),
        (6, 1, 4, [(0, 1), (1, 2), (2, 3), (3, 6)]),
    ],
)
def test_the_last_head_group_takes_the_remainder(heads, degree, chunks, groups):
    assert head_groups(heads, degree, chunks) == groups
