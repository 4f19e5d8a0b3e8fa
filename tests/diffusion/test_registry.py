"""Reading a diffusers scheduler_config.json."""

from dataclasses import dataclass

import numpy as np
import pytest

from maxdiffusion.diffusion import (
    Sampler,
    UniPC,
    from_scheduler_config,
    sampler_named,
    step_row,
)
from maxdiffusion.diffusion.flow_match import EulerState, FlowMatchEuler, FlowMatchLCM
from maxdiffusion.diffusion.multistep import DpmPlusPlus2M
from maxdiffusion.diffusion.registry import SAMPLERS, SamplerEntry
from maxdiffusion.errors import ProblemsFound

WAN = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.35.0",
    "beta_schedule": "linear",
    "disable_corrector": [],
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "solver_order": 2,
    "solver_p": None,
    "solver_type": "bh2",
    "thresholding": False,
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}


def test_unipc_with_the_shift_of_the_file_or_a_given_one():
    assert from_scheduler_config(WAN, 40) == UniPC(steps=40, shift=3.0)
    assert from_scheduler_config(WAN, 40, 12.0) == UniPC(steps=40, shift=12.0)
    assert from_scheduler_config(WAN, 40, shift=5.0) == UniPC(steps=40, shift=5.0)


def test_missing_settings_mean_diffusers_defaults():
    needed = {"_class_name", "prediction_type", "use_flow_sigmas"}
    short = {key: value for key, value in WAN.items() if key in needed}
    assert from_scheduler_config(short, 4) == UniPC(steps=4, shift=1.0)
    with pytest.raises(ProblemsFound, match=r"prediction_type='epsilon'.*missing setting"):
        from_scheduler_config({"_class_name": WAN["_class_name"], "use_flow_sigmas": True}, 4)


def test_euler_names_its_shift_otherwise():
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
    assert from_scheduler_config(config, 10) == FlowMatchEuler(steps=10, shift=5.0)
    assert from_scheduler_config(config, 10, 8.0) == FlowMatchEuler(steps=10, shift=8.0)


@pytest.mark.parametrize("name", ["DDIMScheduler", None, 3])
def test_other_schedulers_are_refused_with_the_supported_ones(name):
    with pytest.raises(ProblemsFound) as caught:
        from_scheduler_config({**WAN, "_class_name": name}, 4)
    (problem,) = caught.value.problems
    assert problem.value == name
    assert "UniPCMultistepScheduler" in problem.rule
    assert "FlowMatchEulerDiscreteScheduler" in problem.rule


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("solver_order", 3),
        ("solver_type", "bh1"),
        ("thresholding", True),
        ("use_karras_sigmas", True),
        ("use_beta_sigmas", True),
        ("use_exponential_sigmas", True),
        ("use_dynamic_shifting", True),
        ("predict_x0", False),
        ("lower_order_final", False),
        ("disable_corrector", [0]),
        ("prediction_type", "v_prediction"),
        ("use_flow_sigmas", False),
        ("final_sigmas_type", "sigma_min"),
        ("shift_terminal", 0.1),
    ],
)
def test_unsupported_settings_are_refused_by_name(setting, value):
    with pytest.raises(ProblemsFound) as caught:
        from_scheduler_config({**WAN, setting: value}, 4)
    (problem,) = caught.value.problems
    assert problem.name == f"scheduler_config.json {setting}"
    assert problem.value == value


def test_all_unsupported_settings_are_listed_at_once():
    config = {**WAN, "solver_order": 3, "thresholding": True, "predict_x0": False}
    with pytest.raises(ProblemsFound) as caught:
        from_scheduler_config(config, 4)
    assert len(caught.value.problems) == 3


EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
LCM = {"_class_name": "FlowMatchLCMScheduler", "shift": 5.0}
DPM = {
    "_class_name": "DPMSolverMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 5.0,
}


@pytest.mark.parametrize(
    ("config", "sampler"),
    [
        (EULER, FlowMatchEuler),
        (EULER | {"stochastic_sampling": True}, FlowMatchLCM),
        (LCM, FlowMatchLCM),
        (DPM, DpmPlusPlus2M),
        (DPM | {"euler_at_final": True, "lower_order_final": False}, DpmPlusPlus2M),
    ],
)
def test_a_class_name_and_its_settings_select_the_sampler(config, sampler):
    assert from_scheduler_config(config, 4) == sampler(steps=4, shift=5.0)


@pytest.mark.parametrize(
    ("config", "setting", "value"),
    [
        (DPM, "solver_type", "heun"),
        (DPM, "solver_order", 3),
        (DPM, "algorithm_type", "sde-dpmsolver++"),
        (DPM, "use_karras_sigmas", True),
        (DPM, "use_lu_lambdas", True),
        (DPM, "use_flow_sigmas", False),
        (DPM, "final_sigmas_type", "sigma_min"),
        (LCM, "scale_factors", [0.5, 1.0]),
        (LCM, "use_beta_sigmas", True),
        (EULER, "stochastic_sampling", "yes"),
        (EULER, "invert_sigmas", True),
    ],
)
def test_unsupported_settings_of_other_samplers_are_refused(config, setting, value):
    with pytest.raises(ProblemsFound) as caught:
        from_scheduler_config({**config, setting: value}, 4)
    (problem,) = caught.value.problems
    assert problem.name == f"scheduler_config.json {setting}"


def test_custom_sigmas_reach_every_sampler():
    levels = (1.0, 0.6, 0.2)
    for config in (WAN, EULER, LCM, DPM):
        sampler = from_scheduler_config(config, 3, sigmas=[1.0, 0.6, 0.2])
        assert sampler.custom_sigmas == levels
    named = sampler_named("euler", WAN, steps=3, shift=5.0, sigmas=levels)
    assert named == FlowMatchEuler(steps=3, shift=5.0, custom_sigmas=levels)


@pytest.mark.parametrize("value", [None, "1000", 0])
@pytest.mark.usefixtures("unchecked_types")
def test_bad_train_timesteps_are_refused(value):
    with pytest.raises(ProblemsFound, match="num_train_timesteps"):
        from_scheduler_config({**WAN, "num_train_timesteps": value}, 4)


@pytest.mark.parametrize(
    ("name", "scheduler", "expected"),
    [
        ("unipc", WAN, UniPC(steps=4, shift=5.0)),
        ("unipc", {}, UniPC(steps=4, shift=5.0)),
        (
            "unipc",
            WAN | {"num_train_timesteps": 500},
            UniPC(steps=4, shift=5.0, train_timesteps=500),
        ),
        ("euler", WAN, FlowMatchEuler(steps=4, shift=5.0)),
    ],
)
def test_a_config_names_a_sampler(name, scheduler, expected):
    assert sampler_named(name, scheduler, steps=4, shift=5.0) == expected


def test_a_named_sampler_is_held_to_the_settings_of_its_checkpoint():
    with pytest.raises(ProblemsFound, match="solver_order=3"):
        sampler_named("unipc", WAN | {"solver_order": 3}, steps=4, shift=5.0)


@dataclass(frozen=True, kw_only=True)
class Halving(Sampler):
    """A toy sampler: every step halves the noise level, and jumps there along the velocity."""

    @property
    def sigmas(self):
        return np.append(0.5 ** np.arange(self.steps), 0).astype(np.float32)

    @property
    def timesteps(self):
        return self.sigmas[:-1] * self.train_timesteps

    @property
    def coefficients(self):
        return (np.diff(self.sigmas),)

    def start(self, latents, seeds=None):
        return EulerState(sample=latents)

    def advance(self, state, velocity, coefficients):
        (change,) = coefficients
        return EulerState(sample=state.sample + change * velocity)


def test_a_sampler_is_one_class_and_one_row():
    row = SamplerEntry(
        name="halving", diffusers_class="Halving", load=lambda: Halving, shift_name="shift"
    )
    samplers = (*SAMPLERS, row)
    sampler = sampler_named("halving", WAN, steps=3, shift=2.0, samplers=samplers)
    assert sampler == Halving(steps=3, shift=2.0)
    config = {"_class_name": "Halving", "shift": 2.0}
    assert from_scheduler_config(config, 3, samplers=samplers) == sampler
    noise, data = np.ones(4, np.float32), np.full(4, 3.0, np.float32)
    state = sampler.start(noise)
    for step in range(3):
        state = sampler.advance(state, noise - data, step_row(sampler.coefficients, step))
    np.testing.assert_allclose(state.sample, data)
    with pytest.raises(ProblemsFound, match="must be a positive integer"):
        Halving(steps=0, shift=1.0)
