"""DPM++ 2M, LCM stepping and custom noise levels against diffusers' trajectories."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion import UniPC, step_row
from maxdiffusion.diffusion.flow_match import FlowMatchEuler, FlowMatchLCM, step_noise
from maxdiffusion.diffusion.multistep import DpmPlusPlus2M
from maxdiffusion.errors import ProblemsFound
from tests.diffusion.schedules import assert_same_schedule

pytestmark = pytest.mark.slow

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "samplers.npz")
NAMES = sorted(key.removesuffix("/sigmas") for key in GOLDEN if key.endswith("/sigmas"))
CUSTOM = {"distilled": (1.0, 0.75, 0.5, 0.25), "below_one": (0.95, 0.8, 0.55, 0.3, 0.1)}
SAMPLERS = {
    "unipc": UniPC,
    "euler": FlowMatchEuler,
    "dpmpp_2m": DpmPlusPlus2M,
    "lcm": FlowMatchLCM,
    "euler_stochastic": FlowMatchLCM,
}
# Twenty steps, each rounding about eight products of size 4 (half an ulp: 2.4e-7).
ATOL = 1e-5
SHAPE = (2, 3, 4, 5)


def sampler_called(name):
    kind, rest = name.split("_shift")
    shift, schedule = rest.split("_", 1)
    if schedule in CUSTOM:
        sigmas = CUSTOM[schedule]
        return SAMPLERS[kind](steps=len(sigmas), shift=float(shift), custom_sigmas=sigmas)
    return SAMPLERS[kind](steps=int(schedule.removeprefix("steps")), shift=float(shift))


def run(sampler):
    """The latents after every step, with the noise of the recordings."""
    noise = GOLDEN["noise"]

    def one_step(state, step):
        velocity, row = (
            jnp.asarray(GOLDEN["model_outputs"][step]),
            step_row(sampler.coefficients, step),
        )
        if isinstance(sampler, FlowMatchLCM):
            return sampler.advance_with_noise(state, velocity, row, noise=jnp.asarray(noise[step]))
        return sampler.advance(state, velocity, row)

    state = sampler.start(jnp.asarray(GOLDEN["sample0"]), np.zeros(1, np.uint32))
    samples = []
    for step in range(sampler.steps):
        state = one_step(state, step)
        samples.append(state.sample)
    return np.stack(samples)


@pytest.mark.parametrize("name", NAMES)
def test_schedule_is_bit_equal_and_samples_follow(name):
    sampler = sampler_called(name)
    assert_same_schedule(sampler, GOLDEN, name)
    np.testing.assert_allclose(run(sampler), GOLDEN[f"{name}/samples"], rtol=0, atol=ATOL)


def test_the_four_distilled_steps():
    sampler = FlowMatchEuler(steps=4, shift=5.0, custom_sigmas=CUSTOM["distilled"])
    np.testing.assert_allclose(sampler.sigmas, [1, 0.9375, 5 / 6, 0.625, 0], rtol=0, atol=1e-7)
    np.testing.assert_allclose(sampler.timesteps, [1000, 937.5, 2500 / 3, 625], rtol=1e-7)


def test_dpm_takes_custom_levels_too():
    noise, data = GOLDEN["sample0"], np.ones_like(GOLDEN["sample0"])
    sampler = DpmPlusPlus2M(steps=4, shift=5.0, custom_sigmas=CUSTOM["distilled"])
    state = sampler.start(jnp.asarray(noise))
    for step in range(4):
        velocity = jnp.asarray(noise - data)
        state = sampler.advance(state, velocity, step_row(sampler.coefficients, step))
    np.testing.assert_allclose(state.sample, data, rtol=0, atol=ATOL)
    assert sampler.timesteps.tolist() == [999, 937, 833, 625]


def lcm_after_a_step(seeds, steps=1, sharding=None):
    sampler = FlowMatchLCM(steps=4, shift=5.0)
    latents = jnp.ones((len(seeds), *SHAPE))
    state = sampler.start(latents, np.array(seeds, np.uint32))
    if sharding is not None:
        state = jax.device_put(state, sharding)
    for step in range(steps):
        row = step_row(sampler.coefficients, step)
        state = jax.jit(sampler.advance)(state, jnp.zeros_like(latents), row)
    return np.asarray(state.sample)


def test_noise_depends_on_the_seed_and_the_step_alone():
    together = lcm_after_a_step([7, 8, 9])
    for index, seed in enumerate((7, 8, 9)):
        np.testing.assert_array_equal(together[index], lcm_after_a_step([seed])[0])
    draws = [
        np.asarray(step_noise(jnp.uint32([seed]), np.uint32(step), SHAPE))
        for seed in (7, 8)
        for step in (0, 1)
    ]
    assert len({draw.tobytes() for draw in draws}) == 4
    many = np.asarray(step_noise(jnp.uint32([3]), np.uint32(2), (200, 500)))
    assert abs(many.mean()) < 5 / 1e5**0.5
    assert abs(many.std() - 1) < 5 / 2e5**0.5


def test_noise_is_the_same_on_every_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = jax.sharding.NamedSharding(mesh, jax.P("data"))
    expected = lcm_after_a_step([1, 2], steps=3)
    np.testing.assert_array_equal(lcm_after_a_step([1, 2], steps=3, sharding=sharded), expected)


def test_a_stochastic_sampler_needs_seeds():
    with pytest.raises(ProblemsFound, match="needs one seed for each of the 2 videos"):
        FlowMatchLCM(steps=4, shift=5.0).start(jnp.ones((2, *SHAPE)))


@pytest.mark.parametrize("sampler", [UniPC, FlowMatchEuler, DpmPlusPlus2M, FlowMatchLCM])
@pytest.mark.parametrize(
    ("sigmas", "rule"),
    [
        ((1.0, 0.5), "one number for each of the 3 steps"),
        ((1.0, 0.5, 0.5), "must fall"),
        ((1.2, 0.5, 0.1), "at most 1"),
        ((1.0, 0.5, 0.0), "above 0"),
        ((1.0, 0.5, float("nan")), "above 0"),
        ((), "one number for each"),
    ],
)
def test_bad_custom_levels_are_refused(sampler, sigmas, rule):
    with pytest.raises(ProblemsFound, match=rule):
        sampler(steps=3, shift=5.0, custom_sigmas=sigmas)
