"""Whole runs of diffusers' WanPipeline from given latents, step by step."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

from tests.oracle.arrays import Record, as_numpy, normal
from tests.oracle.text import NEGATIVE, PROMPT, SECOND_PROMPT
from tests.oracle.tiny_checkpoints import make_scheduler

LATENT_SHAPE = (16, 3, 6, 4)
SIZE = {"height": 48, "width": 32, "num_frames": 9}
CFG = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "guidance_scale": 4.0}


def load_pipeline(folder: Path, dtype: torch.dtype = torch.float32) -> WanPipeline:
    """Returns diffusers' pipeline in `dtype`; its VAE stays in float32, as WAN is used."""
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", dtype=torch.float32)
    pipeline = WanPipeline.from_pretrained(folder, vae=vae, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def record_run(name: str, pipeline: WanPipeline, seed: int, settings: dict[str, object]) -> Record:
    """Returns one run's latents after every step and its frames, keys under `name/`."""
    batch = len(settings["prompt"]) if isinstance(settings["prompt"], list) else 1
    start = normal(seed, batch, *LATENT_SHAPE)
    after_step: list[np.ndarray] = []
    call = {**settings, "latents": start}

    def keep(pipe: WanPipeline, step: int, timestep: int, values: dict) -> dict:
        after_step.append(as_numpy(values["latents"]))
        return {}

    with _calls_of(pipeline) as calls:
        latents = pipeline(**call, output_type="latent", callback_on_step_end=keep).frames
    frames = pipeline(**call, output_type="np").frames
    return {
        f"{name}/init_latents": as_numpy(start),
        f"{name}/step_latents": np.stack(after_step),
        f"{name}/latents": as_numpy(latents),
        f"{name}/frames": np.asarray(frames),
        f"{name}/timesteps": as_numpy(pipeline.scheduler.timesteps),
        f"{name}/sigmas": as_numpy(pipeline.scheduler.sigmas),
        f"{name}/calls_json": np.asarray(json.dumps(calls)),
        f"{name}/kwargs_json": np.asarray(json.dumps(settings)),
    }


@contextmanager
def _calls_of(pipeline: WanPipeline) -> Iterator[list[tuple[str, float]]]:
    """Yields a list that fills with the expert and the timestep of every forward pass."""
    calls: list[tuple[str, float]] = []

    def note(expert: str):
        return lambda module, args, kwargs: calls.append((expert, float(kwargs["timestep"][0])))

    experts = [name for name in ("transformer", "transformer_2") if getattr(pipeline, name, None)]
    handles = [
        getattr(pipeline, name).register_forward_pre_hook(note(name), with_kwargs=True)
        for name in experts
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def record_wan22_runs(folder: Path) -> Record:
    """Returns runs with two experts: guidance on and off, a batch, bfloat16, other schedules."""
    pipeline = load_pipeline(folder)
    six, four = ({**SIZE, "num_inference_steps": steps} for steps in (6, 4))
    two_scales = {**CFG, "guidance_scale_2": 3.0}
    pair = {"prompt": [PROMPT, SECOND_PROMPT], "negative_prompt": [NEGATIVE, ""]}
    record = record_run("pipe", pipeline, 400, {**six, **two_scales})
    record |= record_run(
        "pipe_nocfg", pipeline, 400, {**four, "prompt": PROMPT, "guidance_scale": 1.0}
    )
    record |= record_run("pipe_b2", pipeline, 401, {**four, **pair, "guidance_scale": 5.0})
    record |= record_run(
        "pipe_bf16", load_pipeline(folder, torch.bfloat16), 400, {**six, **two_scales}
    )
    pipeline.scheduler = make_scheduler(12.0)
    ten = {**SIZE, "num_inference_steps": 10}
    record |= record_run("pipe_shift12_10", pipeline, 400, {**ten, **two_scales})
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    return record | record_run("pipe_euler_shift5", pipeline, 400, {**six, **two_scales})


def record_wan21_run(folder: Path) -> Record:
    """Returns one guided run of a single transformer."""
    settings = {**SIZE, **CFG, "num_inference_steps": 4}
    return record_run("pipe", load_pipeline(folder), 410, settings)
