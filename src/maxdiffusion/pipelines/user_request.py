"""From the arguments that diffusers users know to a request."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.scales import NO_GUIDANCE, GuidanceScales
from maxdiffusion.pipelines.shapes import LatentShape, VideoShape, latent_shape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.schedulers import from_scheduler_config


def request_from_arguments(
    spec: WanSpec,
    *,
    prompt: str | Sequence[str],
    negative_prompt: str | Sequence[str] | None = None,
    height: int = 480,
    width: int = 832,
    num_frames: int = 81,
    num_inference_steps: int = 50,
    guidance_scale: float = 5.0,
    guidance_scale_2: float | None = None,
    num_videos_per_prompt: int = 1,
    seed: int = 0,
    latents: Any = None,
    flow_shift: float | None = None,
    boundary_ratio: float | None = None,
) -> Request:
    """The request, with diffusers' defaults and rules.

    Guidance is on if `guidance_scale` is above 1; `guidance_scale_2` (of the low-noise expert)
    follows it unless given. Video i of a prompt starts from `seed + i`, or all of them start from
    `latents` [B, C, F, H, W]. `flow_shift` and `boundary_ratio` replace those of the checkpoint.
    """
    if guidance_scale_2 is not None and len(spec.experts) == 1:
        raise ProblemsFound([_no_second_expert("guidance_scale_2", guidance_scale_2)])
    if boundary_ratio is not None and len(spec.experts) == 1:
        raise ProblemsFound([_no_second_expert("boundary_ratio", boundary_ratio)])
    if num_videos_per_prompt < 1:
        raise ProblemsFound([_no_videos(num_videos_per_prompt)])
    texts, copies = _texts("prompt", prompt), range(num_videos_per_prompt)
    prompts = [text for text in texts for _ in copies]
    seeds = tuple(seed + copy for _ in texts for copy in copies)
    video = VideoShape(height=height, width=width, num_frames=num_frames)
    shape = latent_shape(video, spec.vae, spec.transformer)
    second = guidance_scale if guidance_scale_2 is None else guidance_scale_2
    scales = GuidanceScales(high_noise=guidance_scale, low_noise=second)
    if guidance_scale <= NO_GUIDANCE:
        scales = GuidanceScales(high_noise=NO_GUIDANCE, low_noise=NO_GUIDANCE)
    return Request(
        prompts=tuple(prompts),
        negative_prompts=tuple(_negatives(negative_prompt, prompts, num_videos_per_prompt)),
        video=video,
        sampler=from_scheduler_config(spec.scheduler, num_inference_steps, flow_shift),
        scales=scales,
        boundary_ratio=spec.boundary_ratio if boundary_ratio is None else boundary_ratio,
        seeds=() if latents is not None else seeds,
        latents=None if latents is None else _channels_last(latents, len(prompts), shape),
    )


def _texts(name: str, text: str | Sequence[str]) -> list[str]:
    texts: list[Any] = list(text) if isinstance(text, list | tuple) else [text]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise ProblemsFound(
            [
                Problem(
                    name=name,
                    value=text,
                    rule="must be a text or a list of texts, at least one",
                    remedy=f'Give {name}="..." or {name}=["...", "..."]',
                )
            ]
        )
    return texts


def _negatives(
    negative: str | Sequence[str] | None, prompts: Sequence[str], per_prompt: int
) -> list[str]:
    """A negative prompt for every video; one text serves all."""
    texts = _texts("negative_prompt", "" if negative is None else negative)
    if len(texts) == 1:
        return texts * len(prompts)
    return [text for text in texts for _ in range(per_prompt)]


def _channels_last(latents: Any, videos: int, shape: LatentShape) -> np.ndarray:
    array = np.asarray(latents, np.float32)
    expected = (videos, shape.channels, shape.frames, shape.rows, shape.columns)
    if array.shape != expected:
        raise ProblemsFound(
            [
                Problem(
                    name="latents.shape",
                    value=array.shape,
                    rule=f"must be [batch, channels, frames, rows, columns] = {expected}",
                    remedy="Check num_frames, height and width, or leave latents out",
                )
            ]
        )
    return np.moveaxis(array, 1, -1)


def _no_videos(count: int) -> Problem:
    rule = "must be a whole number, 1 or more"
    return Problem(name="num_videos_per_prompt", value=count, rule=rule, remedy="Use 1")


def _no_second_expert(name: str, value: float) -> Problem:
    return Problem(
        name=name,
        value=value,
        rule="this checkpoint has one transformer for all noise levels",
        remedy=f"Leave {name} out, or use a WAN 2.2 checkpoint",
    )
