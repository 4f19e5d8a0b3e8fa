"""Checks of the profile that a run is asked for."""

from collections.abc import Iterator

from maxdiffusion.config.config import Config
from maxdiffusion.runtime.problems import Problem

SKIP = "skip_first_n_steps_for_profiler"


def profile_problems(config: Config, steps_key: str) -> Iterator[Problem]:
    """A problem if a profile is asked for that begins after the last step."""
    skip, steps = config.values[SKIP], config.values[steps_key]
    if config.enable_profiler and skip >= steps:
        rule = f"leaves nothing to profile of {steps_key}={steps}"
        remedy = f"Use at most {max(0, steps - 1)}, or enable_profiler=false"
        yield Problem(name=SKIP, value=skip, rule=rule, remedy=remedy)
