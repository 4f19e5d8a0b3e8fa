"""Schedules of samplers against recorded ones."""

from collections.abc import Mapping

import numpy as np

from maxdiffusion.diffusion import Sampler


def assert_same_schedule(sampler: Sampler, recorded: Mapping[str, np.ndarray], name: str) -> None:
    """Compares noise levels and timesteps with those recorded under `name`, bit for bit."""
    for ours, field in ((sampler.sigmas, "sigmas"), (sampler.timesteps, "timesteps")):
        theirs = recorded[f"{name}/{field}"]
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
