"""Trajectories of diffusers' further flow samplers: DPM++ 2M, LCM stepping, custom noise levels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    UniPCMultistepScheduler,
)
from diffusers.schedulers import scheduling_flow_match_euler_discrete, scheduling_flow_match_lcm

from tests.oracle.arrays import Record, as_numpy, normal
from tests.oracle.schedulers import SAMPLE_SHAPE, trajectory

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SHIFTS = (3.0, 5.0)
STEPS = (1, 2, 3, 10, 20)
CUSTOM = {"distilled": (1.0, 0.75, 0.5, 0.25), "below_one": (0.95, 0.8, 0.55, 0.3, 0.1)}


def dpm(shift: float) -> DPMSolverMultistepScheduler:
    """Returns DPM++ 2M for a flow model."""
    return DPMSolverMultistepScheduler(**FLOW, flow_shift=shift)


def lcm(shift: float) -> FlowMatchLCMScheduler:
    """Returns LCM stepping for a flow model."""
    return FlowMatchLCMScheduler(shift=shift)


def stochastic_euler(shift: float) -> FlowMatchEulerDiscreteScheduler:
    """Returns Euler with fresh noise at each step."""
    return FlowMatchEulerDiscreteScheduler(shift=shift, stochastic_sampling=True)


@contextmanager
def given_noise(noise: torch.Tensor) -> Iterator[None]:
    """Makes the stochastic schedulers draw `noise[0]`, `noise[1]`, ... instead of random values."""
    modules = (scheduling_flow_match_lcm, scheduling_flow_match_euler_discrete)
    drawn, kept = iter(noise), [module.randn_tensor for module in modules]
    for module in modules:
        module.randn_tensor = lambda *arguments, **options: next(drawn)
    try:
        yield
    finally:
        for module, function in zip(modules, kept, strict=True):
            module.randn_tensor = function


def record(key: str, scheduler: Any, steps: int | None = None, **options: Any) -> Record:
    """Returns timesteps, sigmas and the samples after every step of one schedule."""
    scheduler.set_timesteps(steps, **options)
    velocities, start = normal(110, 20, *SAMPLE_SHAPE), normal(111, *SAMPLE_SHAPE)
    return {
        f"{key}/timesteps": as_numpy(scheduler.timesteps),
        f"{key}/sigmas": as_numpy(scheduler.sigmas),
        f"{key}/samples": trajectory(scheduler, velocities, start),
    }


def record_samplers() -> Record:
    """Returns every trajectory."""
    noise = normal(112, 20, *SAMPLE_SHAPE)
    found = {
        "model_outputs": as_numpy(normal(110, 20, *SAMPLE_SHAPE)),
        "sample0": as_numpy(normal(111, *SAMPLE_SHAPE)),
        "noise": as_numpy(noise),
    }
    for shift in SHIFTS:
        for steps in STEPS:
            name = f"shift{shift:g}_steps{steps}"
            found |= record(f"dpmpp_2m_{name}", dpm(shift), steps)
            for kind, make in {"lcm": lcm, "euler_stochastic": stochastic_euler}.items():
                with given_noise(noise):
                    found |= record(f"{kind}_{name}", make(shift), steps)
        for name, sigmas in CUSTOM.items():
            key, euler = f"shift{shift:g}_{name}", FlowMatchEulerDiscreteScheduler(shift=shift)
            unipc = UniPCMultistepScheduler(**FLOW, flow_shift=shift)
            found |= record(f"unipc_{key}", unipc, sigmas=np.array(sigmas))
            found |= record(f"euler_{key}", euler, sigmas=list(sigmas))
            with given_noise(noise):
                found |= record(f"lcm_{key}", lcm(shift), sigmas=list(sigmas))
    return found
