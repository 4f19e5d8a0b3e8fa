"""The plan of a run: expert, guidance and scale of every step."""

import pytest

from maxdiffusion.diffusion import UniPC
from maxdiffusion.diffusion.flow_match import FlowMatchEuler
from maxdiffusion.diffusion.guidance import ClassifierFree, GuidanceScales, Unguided, plan_run
from maxdiffusion.errors import ProblemsFound

FOUR_STEPS = FlowMatchEuler(steps=4, shift=5.0, custom_sigmas=(1.0, 0.75, 0.5, 0.25))
FORTY = UniPC(steps=40, shift=12.0)


def plan_of(sampler, high=4.0, low=3.0, ratio=0.875, **options):
    scales = GuidanceScales(high_noise=high, low_noise=low)
    return plan_run(sampler, scales=scales, boundary_ratio=ratio, **options)


def test_the_timestep_decides_on_the_expert():
    plan = plan_of(FORTY)
    assert [step.high_noise for step in plan] == [t >= 875 for t in FORTY.timesteps]
    assert {step.guidance_scale for step in plan if step.high_noise} == {4.0}
    assert {step.guidance_scale for step in plan if not step.high_noise} == {3.0}
    assert plan.guidances == (ClassifierFree(),)


def test_a_step_index_replaces_the_timestep():
    assert [s.high_noise for s in plan_of(FOUR_STEPS, ratio=0.9)] == [True, True, False, False]
    plan = plan_of(FOUR_STEPS, boundary_step_index=3)
    assert [step.high_noise for step in plan] == [True, True, True, False]
    assert not any(step.high_noise for step in plan_of(FOUR_STEPS, boundary_step_index=0))


def test_one_transformer_runs_all_steps():
    assert all(step.high_noise for step in plan_of(FORTY, ratio=None))


def test_guidance_ends_after_the_given_steps():
    plan = plan_of(FORTY, guidance_end_step=10)
    assert [step.guidance.copies for step in plan] == [2] * 10 + [1] * 30
    assert {step.guidance_scale for step in plan.steps[10:]} == {1.0}
    assert plan.guidances == (ClassifierFree(), Unguided())
    assert plan.guidance == ClassifierFree()
    assert plan.guidances_of(high_noise=False) == (Unguided(),)


def test_a_scale_of_one_computes_the_prompt_only():
    plan = plan_of(FOUR_STEPS, high=2.5, low=1.0)
    assert [step.guidance.copies for step in plan] == [2, 2, 1, 1]
    unguided = plan_of(FOUR_STEPS, high=1.0, low=1.0)
    assert unguided.guidances == (Unguided(),)
    assert unguided.guidance == Unguided()


def test_one_line_describes_it():
    text = plan_of(FOUR_STEPS, low=1.0).describe()
    assert text == "steps: 2 high-noise guided, 2 low-noise prompt only"
    assert plan_of(FORTY, ratio=None).describe() == "steps: 40 guided"


@pytest.mark.parametrize(("name", "value"), [("boundary_step_index", 5), ("guidance_end_step", 5)])
def test_steps_that_the_run_lacks_are_refused(name, value):
    with pytest.raises(ProblemsFound, match=f"{name}={value}: must be from . to the 4 steps"):
        plan_of(FOUR_STEPS, **{name: value})
