"""WAN video-to-video pipeline: starts from a noised video, with diffusers' arguments.

The video is encoded, noise is mixed in at the level of step k, and the steps from k on run:
k = steps - int(steps * strength). Every text-to-video checkpoint can do it. diffusers uses the
high-noise expert alone for a checkpoint with two; here each step has its own expert, as in
text-to-video.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import numpy as np

from maxdiffusion.diffusion import Sampler
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import Conditioning
from maxdiffusion.pipelines.preprocess.images import (
    ImageFit,
    VideoPixels,
    video_pixels,
    whole_latent_frames,
)
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.tasks.base import (
    Conditions,
    Encoders,
    LatentShape,
    Task,
    VisualInputs,
)
from maxdiffusion.pipelines.wan import OutputType, VideoPipeline, WanOutput, check_text_only
from maxdiffusion.runtime.images import load_video
from maxdiffusion.runtime.video import InputFrames

DEFAULT_STRENGTH = 0.8


@dataclass(frozen=True, kw_only=True)
class VideoToVideo(Task):
    """Noise is mixed into a given video; `strength` is the share of the steps that run.

    Programs do not depend on the strength, so it is not part of the comparison.
    """

    strength: float = field(default=DEFAULT_STRENGTH, compare=False)
    fit: ImageFit = "stretch"

    pipeline: ClassVar[str] = "WanVideoToVideoPipeline"

    @property
    def title(self) -> str:
        return f"video to video, strength {self.strength:g}"

    def sampler(self, sampler: Sampler) -> Sampler:
        return replace(sampler, first_step=start_step(sampler.steps, self.strength))

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        return (vae.video_frames(latent.frames),)

    def condition(self, inputs: Sequence[VisualInputs], encoders: Encoders) -> Conditions:
        if all(one.video is None for one in inputs):
            return Conditions(conditioning=Conditioning())
        frames = encoders.vae.video_frames(encoders.latent.frames)
        videos = [one.video for one in inputs if one.video is not None]
        assert len(videos) == len(inputs)
        size = {"height": encoders.height, "width": encoders.width}
        encoded = [
            encoders.video(video_to_video_pixels(video[:frames], **size, fit=self.fit))
            for video in videos
        ]
        return Conditions(conditioning=Conditioning(), source=np.stack(encoded))


def video_to_video_pixels(
    frames: InputFrames, *, height: int, width: int, fit: ImageFit = "stretch"
) -> VideoPixels:
    """Returns what the VAE encodes for video to video."""
    return video_pixels(whole_latent_frames(frames), height=height, width=width, fit=fit)


def start_step(steps: int, strength: float) -> int:
    """Returns the step that video to video begins with: the last int(steps * strength) run.

    diffusers returns an empty batch where no step runs; here that is refused.
    """
    running = min(int(steps * strength), steps)
    if running < 1:
        rule = f"leaves none of num_inference_steps={steps}: int({steps} x {strength:g}) = 0"
        remedy = f"Use at least {np.ceil(1e4 / steps) / 1e4:g}" if steps else ""
        raise ProblemsFound([Problem(name="strength", value=strength, rule=rule, remedy=remedy)])
    return steps - running


@final
class WanVideoToVideoPipeline(VideoPipeline):
    """A loaded WAN text-to-video model that changes a given video, on a mesh."""

    def __call__(
        self,
        video: Any,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        strength: float = DEFAULT_STRENGTH,
        image_fit: ImageFit = "stretch",
        latents: Any = None,
        output_type: OutputType = "np",
        max_sequence_length: int | None = None,
        **arguments: Any,
    ) -> WanOutput:
        """Generates one video for each prompt (times `num_videos_per_prompt`).

        `video` is a path, an address, a list of images or an array [F, H, W, 3]; its first 4n + 1
        frames are used. `latents` are latents with their noise, in place of a video. The other
        arguments are those of `request_from_arguments`, but for num_frames.
        """
        self.check_output(output_type, max_sequence_length)
        check_text_only(self.builder.spec)
        task = VideoToVideo(strength=strength, fit=image_fit)
        inputs, frames = self._inputs(video, latents)
        request = request_from_arguments(
            self.builder.spec,
            prompt=prompt,
            negative_prompt=negative_prompt,
            num_frames=frames,
            latents=latents,
            task=task,
            inputs=[inputs],
            **arguments,
        )
        return self.generate(request, output_type)

    def _inputs(self, video: Any, latents: Any) -> tuple[VisualInputs, int]:
        """Returns the video, and how many frames the result has."""
        if (video is None) == (latents is None):
            rule = "one of video and latents must be given"
            given = "both" if video is not None else None
            raise ProblemsFound([Problem(name="video", value=given, rule=rule)])
        if video is None:
            frames = np.asarray(latents).shape[2]
            return VisualInputs(), self.builder.spec.vae.video_frames(frames)
        loaded = load_video(video, name="video")
        return VisualInputs(video=loaded), len(whole_latent_frames(loaded))
