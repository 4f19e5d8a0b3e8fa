"""Checks of a config by itself."""

from pathlib import Path

import pytest

from maxdiffusion.config import load_config
from maxdiffusion.config.validate import check_profile, check_steps
from maxdiffusion.errors import ProblemsFound

TINY = Path(__file__).parents[2] / "configs" / "wan_tiny.yml"


def check(*overrides: str, field: str = "num_inference_steps") -> None:
    config = load_config([str(TINY), *overrides])
    steps = {
        "num_inference_steps": config.num_inference_steps,
        "max_train_steps": config.max_train_steps,
    }
    check_profile(config, field, steps[field])


def test_a_profile_that_begins_after_the_last_step_is_refused():
    overrides = ("num_inference_steps=5", "skip_first_n_steps_for_profiler=5")
    rule = r"^skip_first_n_steps_for_profiler=5: leaves nothing to profile.*Use at most 4"
    with pytest.raises(ProblemsFound, match=rule):
        check("enable_profiler=true", *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ("enable_profiler=true", "num_inference_steps=6"),
        ("num_inference_steps=5",),  # no profile is asked for
    ],
)
def test_other_profiles_are_not(overrides):
    check(*overrides)


def test_training_counts_its_own_steps():
    with pytest.raises(ProblemsFound, match="max_train_steps=3"):
        check("enable_profiler=true", "max_train_steps=3", field="max_train_steps")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sigmas=[1.0, 0.5]"], "num_inference_steps=20: sigmas has 2. Use num_inference_steps=2."),
        (
            ["denoising_step_list=[1000, 500]", "num_inference_steps=2", "sigmas=[1.0, 0.5]"],
            "denoising_step_list gives the steps as well",
        ),
        (
            ["denoising_step_list=[500, 1000]", "num_inference_steps=2"],
            "must fall from each step to the next",
        ),
        (["model_name=wan2.1", "boundary_step_index=2"], "wan2.1 has one transformer only"),
    ],
)
def test_lists_of_steps_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ProblemsFound) as caught:
        check_steps(load_config([str(TINY), *overrides]))
    assert message in str(caught.value)
