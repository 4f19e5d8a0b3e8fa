"""Schedules and sample trajectories of diffusers' UniPC and flow-matching Euler."""

import json

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests.oracle.arrays import Record, as_numpy, normal
from tests.oracle.tiny_checkpoints import make_scheduler

SAMPLE_SHAPE = (1, 4, 2, 4, 3)
SHIFTS = (1.0, 3.0, 5.0, 12.0)
STEPS_WITH_SAMPLES = (1, 2, 3, 4, 10)
STEPS = (*STEPS_WITH_SAMPLES, 20, 40, 50)
Scheduler = UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler


def trajectory(scheduler: Scheduler, velocities: torch.Tensor, start: torch.Tensor) -> np.ndarray:
    """Returns the sample after every step when the model answers with the given velocities."""
    scheduler.set_begin_index(0)
    samples, sample = [], start.clone()
    for velocity, timestep in zip(velocities, scheduler.timesteps, strict=False):
        sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0]
        samples.append(as_numpy(sample))
    return np.stack(samples)


def record_schedule(key: str, scheduler: Scheduler, steps: int) -> Record:
    """Returns timesteps and sigmas, and samples where the number of steps is small."""
    velocities, start = normal(100, 10, *SAMPLE_SHAPE), normal(101, *SAMPLE_SHAPE)
    scheduler.set_timesteps(steps)
    record = {
        f"{key}/timesteps": as_numpy(scheduler.timesteps),
        f"{key}/sigmas": as_numpy(scheduler.sigmas),
    }
    if steps in STEPS_WITH_SAMPLES:
        record[f"{key}/samples"] = trajectory(scheduler, velocities, start)
    return record


def record_schedulers() -> Record:
    """Returns every schedule of both samplers, and one UniPC run with bfloat16 velocities."""
    record = {
        "model_outputs": as_numpy(normal(100, 10, *SAMPLE_SHAPE)),
        "sample0": as_numpy(normal(101, *SAMPLE_SHAPE)),
    }
    for shift in SHIFTS:
        for steps in STEPS:
            name = f"shift{shift:g}_steps{steps}"
            record |= record_schedule(f"unipc_{name}", make_scheduler(shift), steps)
            euler = FlowMatchEulerDiscreteScheduler(shift=shift)
            record |= record_schedule(f"euler_{name}", euler, steps)
    half = make_scheduler(3.0)
    half.set_timesteps(10)
    velocities = normal(100, 10, *SAMPLE_SHAPE).bfloat16()
    record["unipc_bf16out_shift3_steps10/samples"] = trajectory(
        half, velocities, normal(101, *SAMPLE_SHAPE)
    )
    record["boundary_json"] = np.asarray(json.dumps(_steps_of_the_high_noise_expert(record)))
    return record


def _steps_of_the_high_noise_expert(record: Record) -> dict[str, int]:
    return {
        f"shift{shift:g}_steps{steps}_b{ratio:g}": int(
            np.sum(record[f"unipc_shift{shift:g}_steps{steps}/timesteps"] >= ratio * 1000)
        )
        for shift in SHIFTS
        for steps in STEPS
        for ratio in (0.875, 0.9)
    }
