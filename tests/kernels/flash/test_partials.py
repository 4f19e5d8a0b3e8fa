"""Unnormalised outputs merge to the whole, whatever their references are."""

import jax
import jax.numpy as jnp
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.kernels.flash import (
    FixedM,
    FlashOptions,
    Online,
    fixed_m_bounds,
    flash_attention,
    flash_attention_partials,
    flash_attention_with_log_sum,
    smooth_keys,
)
from maxdiffusion.kernels.reference import Partials
from tests.kernels.flash.cases import UNIT, Case, error, expected, tolerance

HALF = 150


def merged(parts: list[Partials], options: FlashOptions) -> jax.Array:
    """Returns the normalised sum of partials."""
    m = jnp.max(jnp.stack([p.m for p in parts]), axis=0)
    weights = [options.exponent.power(p.m - m) for p in parts]
    o = sum(w[..., None] * p.o for w, p in zip(weights, parts, strict=True))
    l = sum(w * p.l for w, p in zip(weights, parts, strict=True))  # noqa: E741
    return o / l[..., None]


@pytest.mark.slow
@pytest.mark.parametrize("softmax", [Online(), FixedM()], ids=["online", "fixed-m"])
def test_two_halves_and_an_empty_part_merge_to_the_whole(softmax: Online | FixedM) -> None:
    case = Case(batch=2, head_dim=64, options=FlashOptions(interpret=True, softmax=softmax))
    q, k, v = case.arrays()
    bounds = None
    if isinstance(softmax, FixedM):
        k = smooth_keys(k)
        bounds = fixed_m_bounds(q, k, v)
        assert bool(jnp.all(bounds.fixed))
    partials = jax.jit(flash_attention_partials, static_argnames=("blocks", "options"))

    def part(keys: slice, length: int) -> Partials:
        lengths = jnp.full(2, length, jnp.int32)
        settings = {"blocks": case.blocks, "options": case.options, "bounds": bounds}
        return partials(q, k[:, keys], v[:, keys], kv_len=lengths, **settings)

    parts = [part(slice(HALF), HALF), part(slice(HALF, None), HALF), part(slice(HALF), 0)]
    for p in parts:
        assert p.o.dtype == p.m.dtype == p.l.dtype == jnp.float32
        assert p.o.shape == q.shape
        assert p.m.shape == p.l.shape == q.shape[:3]
    assert not jnp.any(parts[2].l)
    assert bool(jnp.all(jnp.isfinite(parts[2].m)))
    whole = merged(parts, case.options)
    assert error(whole, expected(case, q, k, v)) <= tolerance(case, q, k, v)
    if bounds is not None:
        assert jnp.array_equal(parts[0].m, parts[1].m)


JUMP = 60.0
"""More than the headroom between blocks, in nats of the largest score."""


@pytest.mark.slow
@pytest.mark.parametrize("softmax", [Online(), FixedM()], ids=["online", "fixed-m"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rising", "falling"])
def test_a_call_goes_on_where_the_one_before_it_stopped(softmax, order) -> None:
    """Three calls: keys, none (a shard of padding), and the rest, far above or below the first."""
    case = Case(batch=2, options=FlashOptions(interpret=True, softmax=softmax))
    q, k, v = case.arrays()
    bounds = None
    if isinstance(softmax, FixedM):
        k = smooth_keys(k)
        bounds = fixed_m_bounds(q, k, v)
    else:
        direction = q[0, 0, 0] / jnp.linalg.norm(q[0, 0, 0])
        k = k.at[:, HALF:].add(direction * JUMP)
    settings = {"blocks": case.blocks, "options": case.options, "bounds": bounds}
    partials = jax.jit(flash_attention_partials, static_argnames=("blocks", "options"))
    finish = jax.jit(flash_attention, static_argnames=("blocks", "options"))
    with_log_sum = jax.jit(flash_attention_with_log_sum, static_argnames=("blocks", "options"))
    first, last = ((slice(HALF), slice(HALF, None))[index] for index in order)
    sums = partials(q, k[:, first], v[:, first], **settings)
    none = jnp.zeros(2, jnp.int32)
    sums = partials(q, k[:, last], v[:, last], kv_len=none, before=sums, **settings)
    whole = finish(q, k[:, last], v[:, last], before=sums, **settings)
    assert error(whole, expected(case, q, k, v)) <= tolerance(case, q, k, v)
    again, log_sum = with_log_sum(q, k[:, last], v[:, last], before=sums, **settings)
    assert jnp.array_equal(again, whole)
    ends = partials(q, k[:, last], v[:, last], before=sums, **settings)
    assert error(ends.o / ends.l[..., None], expected(case, q, k, v)) <= tolerance(case, q, k, v)
    wanted = ends.m / case.options.exponent.per_nat + jnp.log(ends.l)
    # One rounding of the shift and one of the sum, of the size of the scores.
    assert error(log_sum, wanted) <= 2 * UNIT["float32"] * float(jnp.max(jnp.abs(ends.m)) + 1)


def test_fixed_m_goes_on_with_the_bounds_it_began_with() -> None:
    case = Case(options=FlashOptions(interpret=True, softmax=FixedM()))
    q, k, v = case.arrays()
    sums = Partials(o=jnp.zeros(q.shape), m=jnp.zeros(q.shape[:3]), l=jnp.zeros(q.shape[:3]))
    with pytest.raises(ProblemsFound, match="must be given for fixed-m partials"):
        flash_attention(q, k, v, blocks=case.blocks, options=case.options, before=sums)


def test_fixed_m_partials_ask_for_shared_bounds() -> None:
    case = Case(options=FlashOptions(interpret=True, softmax=FixedM()))
    with pytest.raises(ProblemsFound, match="must be given for fixed-m partials"):
        flash_attention_partials(*case.arrays(), blocks=case.blocks, options=case.options)


def test_bounds_do_not_go_with_online_softmax() -> None:
    case = Case()
    q, k, v = case.arrays()
    bounds = fixed_m_bounds(q, k, v)
    with pytest.raises(ProblemsFound, match="belong to fixed-m softmax"):
        flash_attention(q, k, v, blocks=case.blocks, options=case.options, bounds=bounds)
