"""Partials over some keys become the attention over all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention.backends.base import add, merge, merge_partials, output
from maxdiffusion.kernels.reference import Partials, dense_attention, reference_partials

SCALE = 0.25


def arrays():
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal((2, 12, 3, 16)), jnp.float32) for _ in range(3)]


def halves(valid=None):
    q, k, v = arrays()
    parts = []
    for keys in (slice(0, 5), slice(5, 12)):
        mask = None if valid is None else valid[:, keys]
        parts.append(reference_partials(q, k[:, keys], v[:, keys], scale=SCALE, valid=mask))
    return parts


def test_merged_halves_are_the_whole():
    got = output(merge(*halves(), jnp.exp), jnp.float32)
    np.testing.assert_allclose(got, dense_attention(*arrays(), scale=SCALE), atol=2e-6)


def test_a_half_without_keys_changes_nothing():
    valid = jnp.broadcast_to(jnp.arange(12) < 5, (2, 12))
    first, empty = halves(valid)
    for pair in ((first, empty), (empty, first)):
        merged = merge(*pair, jnp.exp)
        np.testing.assert_array_equal(merged.o, first.o)
        np.testing.assert_array_equal(merged.l, first.l)


def test_rows_without_any_key_are_zero():
    nothing = jnp.zeros((2, 12), bool)
    assert not np.any(output(merge(*halves(nothing), jnp.exp), jnp.float32))


def to_reference(part: Partials, m: float) -> Partials:
    weight = jnp.exp(part.m - m)
    return Partials(o=part.o * weight[..., None], m=jnp.full_like(part.m, m), l=part.l * weight)


def test_partials_with_one_reference_merge_by_addition():
    first, second = (to_reference(part, 4.0) for part in halves())
    jax.tree.map(np.testing.assert_array_equal, merge(first, second, jnp.exp), add(first, second))


@pytest.mark.parametrize("known", [True, False])
def test_knowing_that_the_reference_is_one_picks_addition(known):
    first, second = halves()
    got = merge_partials(first, second, jnp.exp, jnp.asarray(known))
    wanted = add(first, second) if known else merge(first, second, jnp.exp)
    # Compiled, the sum of products is fused: one rounding less.
    np.testing.assert_allclose(got.l, wanted.l, rtol=2**-22)


def test_references_far_apart_stay_finite():
    first, second = halves()
    far = second._replace(m=second.m - 1e38)
    merged = merge(first, far, jnp.exp)
    np.testing.assert_array_equal(merged.o, first.o)
