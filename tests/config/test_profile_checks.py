"""What can be wrong with a profile that a config asks for."""

from pathlib import Path

import pytest

from maxdiffusion.config.loading import load_config
from maxdiffusion.config.profile_checks import profile_problems

TINY = Path(__file__).parents[2] / "configs" / "wan_tiny.yml"


def problems(*overrides: str, steps_key: str = "num_inference_steps") -> list[str]:
    return [str(one) for one in profile_problems(load_config([str(TINY), *overrides]), steps_key)]


def test_a_profile_that_begins_after_the_last_step_is_refused():
    (said,) = problems(
        "enable_profiler=true", "num_inference_steps=5", "skip_first_n_steps_for_profiler=5"
    )
    assert said.startswith("skip_first_n_steps_for_profiler=5: leaves nothing to profile")
    assert "Use at most 4" in said


@pytest.mark.parametrize(
    "overrides",
    [
        ("enable_profiler=true", "num_inference_steps=6"),
        ("num_inference_steps=5",),  # nobody asks for a profile
    ],
)
def test_other_profiles_are_not(overrides):
    assert problems(*overrides) == []


def test_training_counts_its_own_steps():
    asked = ("enable_profiler=true", "max_train_steps=3")
    assert len(problems(*asked, steps_key="max_train_steps")) == 1
