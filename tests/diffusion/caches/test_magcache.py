"""MagCache's decisions, for published ratios and settings."""

import numpy as np
import pytest

from maxdiffusion.diffusion import UniPC
from maxdiffusion.diffusion.caches.magcache import (
    MagCache,
    MagRatios,
    interleaved_means,
    published_ratios,
)
from maxdiffusion.diffusion.flow_match import FlowMatchEuler
from maxdiffusion.diffusion.guidance import GuidanceScales, plan_run
from maxdiffusion.errors import ProblemsFound

BOTH = GuidanceScales(high_noise=4.0, low_noise=3.0)


def plan_of(name, shift, ratio, **settings):
    cache = MagCache(ratios=MagRatios.published(name), **settings)
    sampler = UniPC(steps=40, shift=shift)
    return cache.planned(plan_run(sampler, scales=BOTH, boundary_ratio=ratio))


@pytest.mark.parametrize(
    ("name", "shift", "ratio", "settings", "actions"),
    [
        # The defaults of the public files: 18 and 17 of 40 steps are skipped.
        (
            *("wan2.2-t2v-a14b", 12.0, 0.875, {"threshold": 0.04}),
            "CCCCC..C..C..C..C..C..C..CCC..C.C.CCCCCC",
        ),
        (
            *("wan2.2-i2v-a14b", 5.0, 0.9, {"threshold": 0.06}),
            "CCC..C..C..C..CCCCCC..C..C..C.C.C.CCCCCC",
        ),
        # The settings of MagCache's authors for text to video.
        (
            *("wan2.2-t2v-a14b", 12.0, 0.875, {"threshold": 0.06, "retention": 0.4}),
            "CCCCCCCCCC..C..C..C..C..C.CCCCC.C.C.CCCC",
        ),
    ],
)
def test_decisions_are_those_of_the_public_rule(name, shift, ratio, settings, actions):
    plan = plan_of(name, shift, ratio, **settings)
    assert plan.actions == actions
    computed = actions.count("C")
    assert plan.describe().endswith(
        f"{2 * computed} of 80 forwards through the blocks, {40 / computed:.2f} times fewer"
    )


def test_the_first_step_of_each_expert_is_computed():
    ratios = MagRatios.interleaved([1.0] * 40)
    cache = MagCache(ratios=ratios, threshold=1.0, max_skips=100, retention=0.0)
    assert cache.computed_steps(20, 12, 2) == tuple(step in (0, 12) for step in range(20))
    assert cache.computed_steps(20, 20, 2) == tuple(step == 0 for step in range(20))


def test_the_worse_of_both_prompts_decides():
    good, bad = [1.0] * 20, [0.5] * 20
    numbers = [ratio for pair in zip(good, bad, strict=True) for ratio in pair]
    cache = MagCache(ratios=MagRatios.interleaved(numbers), threshold=0.1, retention=0.0)
    assert all(cache.computed_steps(20, 20, 2))
    assert not all(cache.computed_steps(20, 20, 1))


def test_other_numbers_of_steps_take_the_nearest_ratios():
    ratios = MagRatios.published("wan2.2-t2v-a14b")
    np.testing.assert_array_equal(ratios.for_steps(40), np.asarray(ratios.values))
    half = ratios.for_steps(20)
    np.testing.assert_array_equal(half[[0, 19]], np.asarray(ratios.values)[[0, 39]])


def test_every_published_list_is_complete():
    for name, entry in published_ratios().items():
        ratios = MagRatios.published(name)
        assert len(ratios.values) * 2 == len(entry["ratios"])
        assert ratios.values[0] == (1.0, 1.0)


def test_runs_that_do_not_suit_it_are_refused():
    cache = MagCache(ratios=MagRatios.published("wan2.2-t2v-a14b"))
    few = FlowMatchEuler(steps=4, shift=5.0)
    plan = plan_run(few, scales=BOTH, boundary_ratio=0.875, guidance_end_step=2)
    with pytest.raises(ProblemsFound) as caught:
        cache.planned(plan)
    assert {problem.name for problem in caught.value.problems} == {
        "use_magcache",
        "num_inference_steps",
    }
    with pytest.raises(ProblemsFound, match="mag_ratios_base='7 numbers'"):
        MagRatios.interleaved([1.0] * 7)


def test_measured_ratios_are_averaged_over_videos():
    ratios = np.array([[1, 1, 1, 1], [0.9, 0.7, 0.5, 0.3]])  # two prompts, two negative prompts
    assert interleaved_means(ratios, 2) == [1, 1, 0.8, 0.4]
    assert interleaved_means(ratios[:, :2], 2) == [1, 1, 0.8, 0.8]
