"""Requests: the videos of one call, their sizes in pixels, latents and tokens.

`request_from_arguments` makes a request from the arguments that diffusers users know.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from maxdiffusion.diffusion import Sampler, from_scheduler_config
from maxdiffusion.diffusion.denoise import StepCache
from maxdiffusion.diffusion.guidance import NO_GUIDANCE, GuidanceScales, RunPlan, plan_run
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.tasks.base import LatentShape, Task, TextToVideo, VisualInputs


@dataclass(frozen=True, kw_only=True)
class VideoShape:
    """Height and width in pixels and the number of frames."""

    height: int
    width: int
    num_frames: int


def check_video_shape(
    video: VideoShape, vae: WanVaeConfig, transformer: WanTransformerConfig
) -> None:
    """Raises every size of a video that this model cannot make."""
    problems = []
    _, patch_rows, patch_columns = transformer.patch
    for name, size, patch in (
        ("height", video.height, patch_rows),
        ("width", video.width, patch_columns),
    ):
        multiple = vae.spatial_factor * patch
        if size < multiple or size % multiple:
            nearest = max(multiple, round(size / multiple) * multiple)
            rule, remedy = f"must be a positive multiple of {multiple}", f"Use {name}={nearest}"
            problems.append(Problem(name=name, value=size, rule=rule, remedy=remedy))
    frames, factor = video.num_frames, vae.temporal_factor
    if frames < 1 or (frames - 1) % factor:
        nearest = max(0, round((frames - 1) / factor)) * factor + 1
        rule, remedy = f"must be {factor}n + 1", f"Use num_frames={nearest}"
        problems.append(Problem(name="num_frames", value=frames, rule=rule, remedy=remedy))
    Collector(problems).raise_if_any()


def latent_shape(
    video: VideoShape,
    vae: WanVaeConfig,
    transformer: WanTransformerConfig,
    task: Task | None = None,
) -> LatentShape:
    """Returns the latents and tokens of a video; raises if the model cannot make its size.

    They include the frames that `task` adds in front.
    """
    check_video_shape(video, vae, transformer)
    frames = (video.num_frames - 1) // vae.temporal_factor + 1
    frames += 0 if task is None else task.extra_frames
    rows = video.height // vae.spatial_factor
    columns = video.width // vae.spatial_factor
    patch_frames, patch_rows, patch_columns = transformer.patch
    return LatentShape(
        frames=frames,
        rows=rows,
        columns=columns,
        channels=transformer.out_channels,
        tokens=(frames // patch_frames) * (rows // patch_rows) * (columns // patch_columns),
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A batch of videos, one per prompt: their prompts, size, sampler and guidance.

    The videos start from the noise of their `seeds`, from `noise` in its place, or from `latents`;
    samplers that draw noise at every step draw it from the seeds. `inputs` are the visual
    conditions of the `task`, one value per video. The high-noise expert runs while the timestep is
    at least `boundary_ratio` x 1000, or for `boundary_step_index` steps; guidance ends before the
    step `guidance_end_step`.
    """

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    video: VideoShape
    sampler: Sampler
    scales: GuidanceScales
    boundary_ratio: float | None
    boundary_step_index: int | None = None
    guidance_end_step: int | None = None
    seeds: tuple[int, ...] = ()
    latents: Float[np.ndarray, "B F Y X C"] | None = None
    noise: Float[np.ndarray, "B F Y X C"] | None = None
    step_cache: StepCache | None = None
    task: Task = field(default_factory=TextToVideo)
    inputs: tuple[VisualInputs, ...] = ()

    def __post_init__(self) -> None:
        Collector([*self._count_problems(), *self._seed_problems()]).raise_if_any()

    @cached_property
    def plan(self) -> RunPlan:
        """Expert, guidance and scale of every step; raises step numbers that the run lacks."""
        plan = plan_run(
            self.sampler,
            scales=self.scales,
            boundary_ratio=self.boundary_ratio,
            boundary_step_index=self.boundary_step_index,
            guidance_end_step=self.guidance_end_step,
        )
        return plan if self.step_cache is None else self.step_cache.planned_for(plan, self.sampler)

    def _count_problems(self) -> list[Problem]:
        videos = len(self.prompts)
        counts = {"negative_prompts": len(self.negative_prompts), "seeds": len(self.seeds)}
        if not isinstance(self.task, TextToVideo):
            counts["inputs"] = len(self.inputs)
        if self.latents is not None:
            counts["latents"] = len(self.latents)
        return [
            Problem(
                name=name,
                value=count,
                rule=f"there must be one for each of the {videos} videos",
            )
            for name, count in counts.items()
            if count != videos or not videos
        ]

    def _seed_problems(self) -> list[Problem]:
        return [
            Problem(
                name="seed",
                value=seed,
                rule="must be an integer from 0 to 4294967295",
            )
            for seed in self.seeds
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32
        ]


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
    boundary_step_index: int | None = None,
    guidance_end_step: int | None = None,
    sigmas: Sequence[float] | None = None,
    step_cache: StepCache | None = None,
    noise: Any = None,
    task: Task | None = None,
    inputs: Sequence[VisualInputs] = (),
) -> Request:
    """Returns the request, with diffusers' defaults and rules.

    Guidance is on if `guidance_scale` is above 1; `guidance_scale_2` (of the low-noise expert)
    follows it unless given. Video i of a prompt starts from `seed + i`, or all of them start from
    `latents` [B, C, F, H, W]. `flow_shift` and `boundary_ratio` replace those of the checkpoint.
    `sigmas` are noise levels before the shift, one per step, and replace `num_inference_steps`. The
    first `boundary_step_index` steps run on the high-noise expert, in place of `boundary_ratio`;
    from `guidance_end_step` on only the prompt is computed. `step_cache` skips parts of steps.
    `inputs` are the visual conditions of `task`: one for all videos, or one for each prompt.
    """
    steps = num_inference_steps if sigmas is None else len(sigmas)
    if len(spec.experts) == 1:
        check_one_expert(
            guidance_scale_2=guidance_scale_2,
            boundary_ratio=boundary_ratio,
            boundary_step_index=boundary_step_index,
        )
    if num_videos_per_prompt < 1:
        raise ProblemsFound([_no_videos(num_videos_per_prompt)])
    texts, copies = _texts("prompt", prompt), range(num_videos_per_prompt)
    prompts = [text for text in texts for _ in copies]
    seeds = tuple(seed + copy for _ in texts for copy in copies)
    video = VideoShape(height=height, width=width, num_frames=num_frames)
    task = task or TextToVideo()
    shape = latent_shape(video, spec.vae, spec.transformer, task)
    second = guidance_scale if guidance_scale_2 is None else guidance_scale_2
    scales = GuidanceScales(high_noise=guidance_scale, low_noise=second)
    if guidance_scale <= NO_GUIDANCE:
        scales = GuidanceScales(high_noise=NO_GUIDANCE, low_noise=NO_GUIDANCE)
    return Request(
        prompts=tuple(prompts),
        negative_prompts=tuple(_negatives(negative_prompt, prompts, num_videos_per_prompt)),
        video=video,
        sampler=task.sampler(
            from_scheduler_config(spec.scheduler, steps, flow_shift, sigmas=sigmas)
        ),
        scales=scales,
        boundary_ratio=spec.boundary_ratio if boundary_ratio is None else boundary_ratio,
        boundary_step_index=boundary_step_index,
        guidance_end_step=guidance_end_step,
        step_cache=step_cache,
        seeds=seeds,
        latents=channels_last("latents", latents, len(prompts), shape),
        noise=channels_last("noise", noise, len(prompts), shape),
        task=task,
        inputs=_for_videos(inputs, len(texts), num_videos_per_prompt),
    )


def _for_videos(
    inputs: Sequence[VisualInputs], prompts: int, per_prompt: int
) -> tuple[VisualInputs, ...]:
    """Returns the visual conditions of every video; a single one serves all."""
    each = [*inputs] * prompts if len(inputs) == 1 else [*inputs]
    return tuple(one for one in each for _ in range(per_prompt))


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
    """Returns a negative prompt for every video; one text serves all."""
    texts = _texts("negative_prompt", "" if negative is None else negative)
    if len(texts) == 1:
        return texts * len(prompts)
    return [text for text in texts for _ in range(per_prompt)]


def channels_last(name: str, latents: Any, videos: int, shape: LatentShape) -> np.ndarray | None:
    """Returns given latents [B, C, F, H, W] in our order; raises if their shape is another."""
    if latents is None:
        return None
    array = np.asarray(latents, np.float32)
    expected = (videos, shape.channels, shape.frames, shape.rows, shape.columns)
    if array.shape != expected:
        raise ProblemsFound(
            [
                Problem(
                    name=f"{name}.shape",
                    value=array.shape,
                    rule=f"must be [batch, channels, frames, rows, columns] = {expected}",
                    remedy=f"Check num_frames, height and width, or leave {name} out",
                )
            ]
        )
    return np.moveaxis(array, 1, -1)


def _no_videos(count: int) -> Problem:
    rule = "must be a positive integer"
    return Problem(name="num_videos_per_prompt", value=count, rule=rule)


def check_one_expert(**of_two_experts: float | None) -> None:
    """Raises every given argument that is about a second expert."""
    rule = "this checkpoint has one transformer for all noise levels"
    Collector(
        [
            Problem(
                name=name,
                value=value,
                rule=rule,
                remedy=f"Leave {name} out, or use a WAN 2.2 checkpoint",
            )
            for name, value in of_two_experts.items()
            if value is not None
        ]
    ).raise_if_any()
