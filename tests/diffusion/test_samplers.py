"""UniPC and Euler against diffusers' own schedules and trajectories."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.diffusion import UniPC, step_row
from maxdiffusion.diffusion.flow_match import FlowMatchEuler
from maxdiffusion.errors import ProblemsFound
from tests.diffusion.schedules import assert_same_schedule

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "scheduler.npz")
SCHEDULES = sorted(key.removesuffix("/sigmas") for key in GOLDEN if key.endswith("/sigmas"))
TRAJECTORIES = sorted(name for name in SCHEDULES if f"{name}/samples" in GOLDEN)
# Ten steps, each rounding about eight products of size 4 (half an ulp: 2.4e-7), stay within this.
ATOL = 1e-5


def sampler_called(name):
    kind, shift, steps = name.split("_")
    sampler = {"unipc": UniPC, "euler": FlowMatchEuler}[kind]
    return sampler(steps=int(steps.removeprefix("steps")), shift=float(shift.removeprefix("shift")))


def run(sampler, noise, velocities):
    """The latents after every step, by one compiled step for all of them."""
    advance = jax.jit(sampler.advance)
    state, samples = sampler.start(jnp.asarray(noise)), []
    for step in range(sampler.steps):
        state = advance(state, velocities[step], step_row(sampler.coefficients, step))
        samples.append(state.sample)
    assert advance._cache_size() == 1
    return np.stack(samples)


def test_goldens_cover_both_samplers():
    assert len(SCHEDULES) >= 30
    assert {name.split("_")[0] for name in TRAJECTORIES} == {"unipc", "euler"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_bit_equal(name):
    assert_same_schedule(sampler_called(name), GOLDEN, name)


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_trajectory(name):
    samples = run(sampler_called(name), GOLDEN["sample0"], GOLDEN["model_outputs"])
    np.testing.assert_allclose(samples, GOLDEN[f"{name}/samples"], rtol=0, atol=ATOL)


def test_last_step_returns_the_data_exactly():
    sampler = UniPC(steps=4, shift=3.0)
    state = sampler.start(jnp.asarray(GOLDEN["sample0"]))
    for step in range(4):
        before = state.sample
        velocity = jnp.asarray(GOLDEN["model_outputs"][step])
        state = sampler.advance(state, velocity, step_row(sampler.coefficients, step))
    data = before - sampler.sigmas[3] * velocity
    np.testing.assert_array_equal(state.sample, data)


@pytest.mark.parametrize("sampler", [UniPC(steps=5, shift=3.0), FlowMatchEuler(steps=5, shift=3.0)])
def test_a_straight_flow_is_followed_to_its_end(sampler):
    noise, data = GOLDEN["sample0"], np.ones_like(GOLDEN["sample0"])
    start = sampler.sigmas[0] * noise + (1 - sampler.sigmas[0]) * data
    samples = run(sampler, start, [noise - data] * 5)
    np.testing.assert_allclose(samples[-1], data, rtol=0, atol=ATOL)


@pytest.mark.parametrize("sampler", [UniPC(steps=6, shift=5.0), FlowMatchEuler(steps=6, shift=5.0)])
def test_steps_may_run_inside_a_scan(sampler):
    velocities = GOLDEN["model_outputs"][:6]

    def body(state, step):
        row = step_row(jax.tree.map(jnp.asarray, sampler.coefficients), step)
        state = sampler.advance(state, jnp.asarray(velocities)[step], row)
        return state, state.sample

    start = sampler.start(jnp.asarray(GOLDEN["sample0"]))
    _, samples = jax.lax.scan(body, start, jnp.arange(6))
    expected = run(sampler, GOLDEN["sample0"], velocities)
    np.testing.assert_allclose(samples, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sampler", [UniPC(steps=2, shift=5.0), FlowMatchEuler(steps=2, shift=5.0)])
def test_latents_stay_float32_with_a_bfloat16_model(sampler):
    velocity = jnp.asarray(GOLDEN["model_outputs"][0], jnp.bfloat16)
    state = sampler.advance(
        sampler.start(jnp.asarray(GOLDEN["sample0"])), velocity, step_row(sampler.coefficients, 0)
    )
    assert {array.dtype for array in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_bfloat16_velocities_end_near_diffusers():
    velocities = jnp.asarray(GOLDEN["model_outputs"], jnp.bfloat16)
    samples = run(UniPC(steps=10, shift=3.0), GOLDEN["sample0"], velocities)
    # torch rounds sigma * v to bfloat16 (2^-9 relative) at each of ten steps; ours stays float32.
    np.testing.assert_allclose(
        samples, GOLDEN["unipc_bf16out_shift3_steps10/samples"], rtol=0, atol=3 * 2**-9
    )


def test_boundary_splits_the_steps_as_in_diffusers():
    for name, count in json.loads(str(GOLDEN["boundary_json"])).items():
        shift, steps, boundary = name.split("_")
        sampler = sampler_called(f"unipc_{shift}_{steps}")
        high = sampler.timesteps >= float(boundary.removeprefix("b")) * 1000
        assert high.sum() == count, name


@pytest.mark.parametrize("sampler", [UniPC, FlowMatchEuler])
@pytest.mark.parametrize(
    ("steps", "shift", "word"),
    [
        (0, 3.0, "num_inference_steps"),
        (-1, 3.0, "num_inference_steps"),
        (2.5, 3.0, "num_inference_steps"),
        (True, 3.0, "num_inference_steps"),
        (4, 0.0, "flow_shift"),
        (4, -1.0, "flow_shift"),
        (4, float("nan"), "flow_shift"),
        (4, float("inf"), "flow_shift"),
        (4, "3.0", "flow_shift"),
        (4, None, "flow_shift"),
        (1000, 1e6, "fewer steps"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_impossible_schedules_are_refused(sampler, steps, shift, word):
    with pytest.raises(ProblemsFound, match=word):
        sampler(steps=steps, shift=shift)


def test_samplers_are_values():
    assert UniPC(steps=4, shift=3.0) == UniPC(steps=4, shift=3.0)
    assert hash(UniPC(steps=4, shift=3.0)) == hash(UniPC(steps=4, shift=3.0))
    assert UniPC(steps=4, shift=3.0) != UniPC(steps=5, shift=3.0)
