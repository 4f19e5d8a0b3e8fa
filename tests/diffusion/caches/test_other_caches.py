"""Decisions and arithmetic of the CFG cache and of SenCache."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion import UniPC
from maxdiffusion.diffusion.caches.cfg_cache import (
    BandWeights,
    CfgCache,
    CfgState,
    estimated,
    low_band,
)
from maxdiffusion.diffusion.caches.sen_cache import SenCache, SenState
from maxdiffusion.diffusion.guidance import Action, GuidanceScales, plan_run
from maxdiffusion.errors import ProblemsFound

BOTH = GuidanceScales(high_noise=4.0, low_noise=3.0)
SHAPE = (1, 2, 12, 10, 3)


def plan_of(steps=40, ratio=None, scales=BOTH):
    return plan_run(UniPC(steps=steps, shift=12.0), scales=scales, boundary_ratio=ratio)


def test_one_expert_estimates_four_of_five_steps_in_the_middle():
    plan = CfgCache(height=720).planned(plan_of())
    assert plan.actions == "C" * 13 + "CccccCccccCccccCccccCcc" + "C" * 4
    assert [step.guidance.copies for step in plan] == [
        1 if step.action is Action.ESTIMATE else 2 for step in plan
    ]
    assert {step.guidance_scale for step in plan} == {4.0}
    assert CfgCache(height=480).planned(plan_of()).actions[36:] == "ccCC"


def test_two_experts_estimate_low_noise_steps_after_the_first():
    plan = CfgCache(height=720).planned(plan_of(ratio=0.875))
    assert plan.high_noise_steps == 26
    assert plan.actions == "C" * 27 + "cCccccCcc" + "CCCC"
    weights = CfgCache(height=720).rows(plan)
    assert set(weights.low) == {np.float32(1)}
    assert set(weights.high) == {np.float32(1.2)}


def test_one_expert_boosts_low_frequencies_first():
    weights = CfgCache(height=720).rows(plan_of())
    assert weights.low[[0, 19, 20, 39]].tolist() == np.float32([1.2, 1.2, 1, 1]).tolist()
    assert weights.high[[0, 19, 20, 39]].tolist() == np.float32([1, 1, 1.2, 1.2]).tolist()


def test_without_guidance_there_is_nothing_to_estimate():
    with pytest.raises(ProblemsFound, match="needs guidance at every step"):
        CfgCache(height=720).planned(plan_of(scales=GuidanceScales(high_noise=1.0, low_noise=1.0)))


def test_an_estimate_keeps_the_difference_in_both_bands():
    draw = np.random.default_rng(0).standard_normal
    prompted, before, negative = (draw(SHAPE).astype(np.float32) for _ in range(3))
    state = CfgState(prompted=jnp.asarray(before), unprompted=jnp.asarray(negative))
    same = BandWeights(low=jnp.float32(1), high=jnp.float32(1))
    # rfft and irfft over 12 x 10 values: a few roundings of numbers of order 10.
    np.testing.assert_allclose(
        estimated(jnp.asarray(prompted), state, same), prompted + negative - before, atol=1e-5
    )
    weights = BandWeights(low=jnp.float32(1), high=jnp.float32(1.2))
    spectrum = np.fft.rfft2(negative, axes=(2, 3)) - np.fft.rfft2(before, axes=(2, 3))
    mask = np.where(low_band(12, 6), 1.0, 1.2)[None, None, :, :, None]
    whole = np.fft.rfft2(prompted, axes=(2, 3)) + spectrum * mask
    expected = np.fft.irfft2(whole, s=(12, 10), axes=(2, 3))
    np.testing.assert_allclose(
        estimated(jnp.asarray(prompted), state, weights), expected, atol=1e-5
    )


def test_the_low_band_is_the_corner_of_the_spectrum():
    mask = low_band(12, 6)
    assert mask.sum() == 5  # rows 0, 1, 2 and 10, 11 of the first column
    assert mask[[0, 1, 2, 10, 11], 0].all()


class CountedForward:
    """Stands in for the transformer: its velocity is the number of the call."""

    def __init__(self, sample, timestep, forced):
        self.sample, self.step = (
            jnp.asarray(sample),
            SimpleNamespace(timestep=jnp.float32(timestep), cache_row=np.bool_(forced)),
        )

    def velocity(self):
        return self.sample + 1

    def guided(self, velocity):
        return velocity


def sen_run(samples, timesteps, forced, cache):
    zero = jnp.float32(0)
    state = SenState(
        velocity=jnp.zeros(SHAPE),
        sample=jnp.zeros(SHAPE),
        timestep=zero,
        moved=zero,
        repeats=zero,
        computed=zero,
    )
    counts = []
    for sample, timestep, force in zip(samples, timesteps, forced, strict=True):
        forward = CountedForward(np.full(SHAPE, sample, np.float32), timestep, force)
        velocity, state = cache.predict(forward, state, Action.COMPUTE)
        np.testing.assert_array_equal(velocity, state.velocity)
        counts.append(int(state.computed))
    return np.diff([0, *counts]).astype(bool).tolist()


@pytest.mark.usefixtures("unchecked_types")
def test_sen_cache_repeats_while_the_summed_distance_is_small():
    # Distances to the step computed last: 0.02, 0.04, 0.06 sum to 0.12 > 0.1 at the third.
    computed = sen_run([0, 0.02, 0.04, 0.06, 0.08], [500] * 5, [True] + [False] * 4, SenCache())
    assert computed == [True, False, False, True, False]
    # Time counts too: 60 + 120 of 1000 is above 0.1 at the second.
    assert sen_run([0] * 3, [500, 440, 380], [True, False, False], SenCache()) == [
        *(True, False, True)
    ]


@pytest.mark.usefixtures("unchecked_types")
def test_sen_cache_repeats_at_most_three_times_and_not_where_forced():
    assert sen_run([0] * 6, [500] * 6, [True] + [False] * 5, SenCache()) == [
        *(True, False, False, False, True, False)
    ]
    assert sen_run([0] * 3, [500] * 3, [True, True, False], SenCache()) == [True, True, False]


def test_sen_cache_computes_both_ends_and_the_boundary():
    forced = SenCache().rows(plan_of(ratio=0.875))
    assert np.flatnonzero(~forced).tolist() == [*range(12, 26), *range(27, 36)]
