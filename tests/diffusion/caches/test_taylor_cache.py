"""The Taylor cache: which steps it skips, and the line that it continues."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion import UniPC
from maxdiffusion.diffusion.caches.taylor_cache import TaylorCache, TaylorState
from maxdiffusion.diffusion.guidance import Action, GuidanceScales, plan_run
from maxdiffusion.errors import ProblemsFound

SHAPE = (1, 2, 3, 4, 2)


def plan_of(steps=40, ratio=None, low_noise=3.0, shift=12.0):
    scales = GuidanceScales(high_noise=3.0, low_noise=low_noise)
    return plan_run(UniPC(steps=steps, shift=shift), scales=scales, boundary_ratio=ratio)


def test_both_ends_are_computed_and_every_second_step_between_them():
    assert TaylorCache().planned(plan_of()).actions == "C" * 12 + ".C" * 12 + "CCCC"
    actions = TaylorCache(interval=3).planned(plan_of()).actions
    assert actions == "C" * 12 + "..C" * 8 + "CCCC"


def test_every_expert_begins_with_computed_steps():
    plan = TaylorCache().planned(plan_of(ratio=0.875))
    assert plan.high_noise_steps == 26
    assert plan.actions == "CCCCCCCC" + ".C" * 9 + "CCCCC" + ".C.C." + "CCCC"
    few = TaylorCache().planned(plan_of(steps=20, ratio=0.875, shift=3.0))
    assert few.high_noise_steps == 7
    assert few.actions == "CCC.C.C" + "CCCC.C.C.C.CC"


def test_runs_that_do_not_suit_it_are_refused():
    with pytest.raises(ProblemsFound, match="at least 20 steps"):
        TaylorCache().planned(plan_of(steps=19))
    with pytest.raises(ProblemsFound, match="the same guidance at every step"):
        TaylorCache().planned(plan_of(ratio=0.875, low_noise=1.0))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("interval", [2, 3])
def test_a_velocity_that_moves_in_a_straight_line_is_continued_exactly(interval):
    """Whole numbers: sums and products of the line have no rounding."""
    cache = TaylorCache(interval=interval)
    plan = cache.planned(plan_of(ratio=0.875))
    rows, draw = cache.rows(plan), np.random.default_rng(0).integers
    start, slope = (draw(-50, 50, SHAPE).astype(np.float32) for _ in range(2))
    state = TaylorState(last=jnp.zeros(SHAPE), before=jnp.zeros(SHAPE))
    for step, row in zip(plan, rows, strict=True):
        expert = 0 if step.high_noise else 1000
        expected = start + expert + slope * step.index * 6
        forward = SimpleNamespace(
            step=SimpleNamespace(cache_row=row),
            velocity=lambda value=expected: jnp.asarray(value),
            guided=lambda velocity: velocity,
        )
        velocity, state = cache.predict(forward, state, step.action)
        np.testing.assert_allclose(velocity, expected, rtol=1e-6, err_msg=str(step.index))
    assert {step.action for step in plan} == {Action.COMPUTE, Action.SKIP}


@pytest.mark.usefixtures("unchecked_types")
def test_lines_are_continued_in_float32():
    last, before = jnp.full(SHAPE, 1.0, jnp.bfloat16), jnp.full(SHAPE, 0.5, jnp.bfloat16)
    forward = SimpleNamespace(step=SimpleNamespace(cache_row=np.float32(0.5)))
    state = TaylorState(last=last, before=before)
    velocity, kept = TaylorCache().predict(forward, state, Action.SKIP)
    assert velocity.dtype == jnp.bfloat16
    assert float(velocity[0, 0, 0, 0, 0]) == 1.25
    assert kept == state
