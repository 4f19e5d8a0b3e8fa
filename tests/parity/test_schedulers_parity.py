"""Both samplers against diffusers', on schedules that no file in the repository holds."""

import jax.numpy as jnp
import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from maxdiffusion.diffusion import Sampler, from_scheduler_config, step_row
from tests.oracle.arrays import normal
from tests.oracle.schedulers import Scheduler, trajectory
from tests.oracle.tiny_checkpoints import make_scheduler

# Samples are sums of a few float32 products of order 1 per step; 25 steps of rounding at 6e-8 each,
# amplified by the corrector's weights of order 1, stay well below this.
TOLERANCE = 1e-5

SCHEDULERS = {
    "unipc": make_scheduler,
    "euler": lambda shift: FlowMatchEulerDiscreteScheduler(shift=shift),
}
SHAPE = (2, 3, 2, 5, 4)


def our_trajectory(sampler: Sampler, velocities: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Returns the sample after every step when the model answers with the given velocities."""
    state, samples = sampler.start(jnp.asarray(start)), []
    for step, velocity in enumerate(velocities):
        row = step_row(sampler.coefficients, step)
        state = sampler.advance(state, jnp.asarray(velocity), row)
        samples.append(np.asarray(state.sample))
    return np.stack(samples)


def pair(kind: str, shift: float, steps: int) -> tuple[Scheduler, Sampler]:
    """Returns diffusers' scheduler and our sampler, made from its config."""
    theirs = SCHEDULERS[kind](shift)
    theirs.set_timesteps(steps)
    config = {"_class_name": type(theirs).__name__, **theirs.config}
    return theirs, from_scheduler_config(config, steps)


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("shift", [1.0, 2.7, 8.0, 16.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 25, 41])
def test_timesteps_and_sigmas_are_those_of_diffusers(kind: str, shift: float, steps: int) -> None:
    theirs, ours = pair(kind, shift, steps)
    np.testing.assert_array_equal(ours.timesteps, theirs.timesteps.numpy())
    np.testing.assert_array_equal(ours.sigmas, theirs.sigmas.numpy())


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize(("shift", "steps"), [(2.7, 1), (8.0, 2), (16.0, 7), (1.0, 25), (5.0, 25)])
def test_samples_follow_diffusers(kind: str, shift: float, steps: int) -> None:
    theirs, ours = pair(kind, shift, steps)
    velocities, start = normal(steps, steps, *SHAPE), normal(steps + 1, *SHAPE)
    expected = trajectory(theirs, velocities, start)
    samples = our_trajectory(ours, velocities.numpy(), start.numpy())
    np.testing.assert_allclose(samples, expected, rtol=0, atol=TOLERANCE)
