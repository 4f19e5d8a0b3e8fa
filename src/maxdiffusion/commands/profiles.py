"""The profile that a config asks for."""

import os

from maxdiffusion.config.config import Config
from maxdiffusion.runtime.profiling import ProfilePlan

FOLDER = "profile"


def profile_plan(config: Config) -> ProfilePlan | None:
    """The steps to profile and where to write them; None if nobody asks for a profile."""
    if not config.enable_profiler:
        return None
    return ProfilePlan(
        folder=os.path.join(os.path.expanduser(config.output_dir), FOLDER),
        skip=config.skip_first_n_steps_for_profiler,
        steps=config.profiler_steps,
    )


def profile_notes(config: Config) -> tuple[str, ...]:
    """What a start-up plan says of the profile; nothing if there is none."""
    plan = profile_plan(config)
    return () if plan is None else (plan.describe(),)
