"""Every sampler against diffusers', on schedules that no file in the repository holds."""

import jax.numpy as jnp
import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from maxdiffusion.diffusion import Sampler, from_scheduler_config, step_row
from maxdiffusion.diffusion.flow_match import FlowMatchLCM
from tests.oracle.arrays import normal
from tests.oracle.samplers import dpm, given_noise, lcm, stochastic_euler
from tests.oracle.schedulers import Scheduler, trajectory
from tests.oracle.tiny_checkpoints import make_scheduler

# Samples are sums of a few float32 products of order 1 per step; 25 steps of rounding at 6e-8 each,
# amplified by the corrector's weights of order 1, stay well below this.
TOLERANCE = 1e-5

# DPMSolverMultistepScheduler makes numpy arrays from tensors in a way that numpy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SCHEDULERS = {
    "unipc": make_scheduler,
    "euler": lambda shift: FlowMatchEulerDiscreteScheduler(shift=shift),
    "dpmpp_2m": dpm,
    "lcm": lcm,
    "euler_stochastic": stochastic_euler,
}
TAKE_SIGMAS = {"unipc": np.asarray, "euler": list, "lcm": list, "euler_stochastic": list}
SHAPE = (2, 3, 2, 5, 4)


def our_trajectory(
    sampler: Sampler, velocities: np.ndarray, start: np.ndarray, noise: np.ndarray
) -> np.ndarray:
    """Returns the sample after every step when the model answers with the given velocities."""
    seeds = np.zeros(len(start), np.uint32)
    state, samples = sampler.start(jnp.asarray(start), seeds), []
    for step, velocity in enumerate(velocities):
        row = step_row(sampler.coefficients, step)
        if isinstance(sampler, FlowMatchLCM):
            given = jnp.asarray(noise[step])
            state = sampler.advance_with_noise(state, jnp.asarray(velocity), row, noise=given)
        else:
            state = sampler.advance(state, jnp.asarray(velocity), row)
        samples.append(np.asarray(state.sample))
    return np.stack(samples)


def check_samples(theirs: Scheduler, ours: Sampler) -> None:
    """Compares the samples after every step, for random velocities and noise."""
    steps = ours.steps
    velocities, start = normal(steps, steps, *SHAPE), normal(steps + 1, *SHAPE)
    noise = normal(steps + 2, steps, *SHAPE)
    with given_noise(noise):
        expected = trajectory(theirs, velocities, start)
    samples = our_trajectory(ours, velocities.numpy(), start.numpy(), noise.numpy())
    np.testing.assert_allclose(samples, expected, rtol=0, atol=TOLERANCE)


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
    check_samples(*pair(kind, shift, steps))


@pytest.mark.parametrize("kind", TAKE_SIGMAS)
@pytest.mark.parametrize("shift", [1.0, 5.0, 12.0])
@pytest.mark.parametrize("sigmas", [(1.0, 0.75, 0.5, 0.25), (0.97, 0.31, 0.02), (0.6,)])
def test_custom_sigmas_are_those_of_diffusers(
    kind: str, shift: float, sigmas: tuple[float, ...]
) -> None:
    theirs = SCHEDULERS[kind](shift)
    theirs.set_timesteps(sigmas=TAKE_SIGMAS[kind](sigmas))
    config = {"_class_name": type(theirs).__name__, **theirs.config}
    ours = from_scheduler_config(config, len(sigmas), sigmas=sigmas)
    np.testing.assert_array_equal(ours.timesteps, theirs.timesteps.numpy())
    np.testing.assert_array_equal(ours.sigmas, theirs.sigmas.numpy())
    check_samples(theirs, ours)
