"""The videos of a job: what each shows, its seed, its file, and which are made together."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion import __version__
from maxdiffusion.config.config import Config
from maxdiffusion.config.job import Job
from maxdiffusion.runtime.coordination import from_first
from maxdiffusion.runtime.places import is_remote, place
from maxdiffusion.runtime.video import VideoMetadata, is_video_of


@dataclass(frozen=True, kw_only=True)
class Video:
    """One video to make."""

    prompt: str
    seed: int
    path: Path


def list_videos(config: Config, job: Job) -> tuple[Video, ...]:
    """The videos in order: every prompt with seeds seed, seed + 1, ..."""
    folder = place(config.output_dir) if is_remote(config.output_dir) else Path(config.output_dir)
    prompts_and_seeds = [
        (prompt, config.seed + copy)
        for prompt in job.prompts
        for copy in range(job.videos_per_prompt)
    ]
    return tuple(
        Video(
            prompt=prompt,
            seed=seed,
            path=folder / config.output_name.format(seed=config.seed, i=index),
        )
        for index, (prompt, seed) in enumerate(prompts_and_seeds)
    )


def finished(config: Config, videos: tuple[Video, ...]) -> list[bool]:
    """Which videos an earlier run of the same job has made; the first process looks, for all.

    Jobs of a prompts file go on where they were cut short. Any other job is made again.
    """
    if not config.prompts_file:
        return [False] * len(videos)
    return from_first(
        "finished videos",
        lambda: [is_video_of(video.path, identity(config, video)) for video in videos],
    )


def identity(config: Config, video: Video) -> str:
    """A hash of everything that a video's frames depend on but the weights themselves."""
    made_with = _settings(config, video) | {"fps": config.fps}
    text = json.dumps(made_with, sort_keys=True, default=str)
    return f"maxdiffusion-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def batches(videos: tuple[Video, ...], size: int) -> Iterator[tuple[Video, ...]]:
    """The videos in groups of `size`; the last group may be smaller."""
    for first in range(0, len(videos), size):
        yield videos[first : first + size]


def metadata(config: Config, video: Video) -> VideoMetadata | None:
    """What the file says of its making; None if the config wants nothing said."""
    if not config.embed_metadata:
        return None
    made_by = {"software": f"maxdiffusion {__version__}"}
    return VideoMetadata(prompt=video.prompt, settings=made_by | _settings(config, video))


def _settings(config: Config, video: Video) -> dict[str, Any]:
    """What a video is made with."""
    names = (
        *("negative_prompt", "height", "width", "num_frames", "fps", "num_inference_steps"),
        *("scheduler", "flow_shift", "pretrained_model_name_or_path", "model_name"),
        *("weights_dtype", "activations_dtype", "attention"),
    )
    scales = (
        ("guidance_scale_high", "guidance_scale_low", "boundary_ratio")
        if config.model_name == "wan2.2"
        else ("guidance_scale",)
    )
    settings = {name: config.values[name] for name in (*names, *scales)}
    return {"prompt": video.prompt, "seed": video.seed, **settings}
