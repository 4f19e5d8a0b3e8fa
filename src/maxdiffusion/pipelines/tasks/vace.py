"""WAN VACE pipeline: control video, mask and reference images, with diffusers' arguments.

    inactive = encoded video where the mask is black     | 32 channels |
    reactive = encoded video where the mask is white     |             | control of the blocks
    mask     = its pixels, 64 per latent                 | 64 channels |

Each reference image is one more latent frame in front; those frames are denoised and not decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import Conditioning, ControlInput
from maxdiffusion.pipelines.preprocess.images import ImageFit, latent_frames
from maxdiffusion.pipelines.preprocess.vace import check_vace_inputs, vace_inputs
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.tasks.base import (
    Conditions,
    Encoders,
    LatentShape,
    Task,
    VisualInputs,
    shape_of,
)
from maxdiffusion.pipelines.wan import OutputType, VideoPipeline, WanOutput
from maxdiffusion.runtime.images import load_image, load_video


@dataclass(frozen=True, kw_only=True)
class ControlToVideo(Task):
    """Control video, mask and `references` reference images; a scale for each control layer.

    `video_frames` are the latent frames of a control video that is shorter than the result. The
    scales are an input of the programs, so they are not part of the comparison.
    """

    scales: tuple[float, ...] = field(compare=False)
    control_channels: int
    references: int = 0
    video_frames: int | None = None
    fit: ImageFit = "stretch"

    pipeline: ClassVar[str] = "WanVACEPipeline"

    @property
    def title(self) -> str:
        images = f", {self.references} reference images" if self.references else ""
        return f"control to video{images}"

    @property
    def extra_frames(self) -> int:
        return self.references

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        # The parts of the video that are kept and made, then every reference image.
        video = vae.video_frames(self._video_frames(latent))
        return (video, video, *[1] * self.references)

    def _video_frames(self, latent: LatentShape) -> int:
        return self.video_frames or latent.frames - self.references

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        frames = self.references + self._video_frames(latent)
        size = (videos, frames, latent.rows, latent.columns, self.control_channels)
        scales = shape_of((len(self.scales),))
        return Conditioning(control=ControlInput(video=shape_of(size), scales=scales))

    def condition(self, inputs: Sequence[VisualInputs], encoders: Encoders) -> Conditions:
        video: Any = np.stack([self._control(one, encoders) for one in inputs])
        scales: Any = np.asarray(self.scales, np.float32)
        control = ControlInput(video=video, scales=scales)
        return Conditions(conditioning=Conditioning(control=control))

    def _control(self, one: VisualInputs, encoders: Encoders) -> np.ndarray:
        """Returns the control channels of one video."""
        prepared = vace_inputs(
            one.video,
            one.mask,
            one.reference_images,
            height=encoders.height,
            width=encoders.width,
            num_frames=encoders.vae.video_frames(encoders.latent.frames - self.references),
            fit=self.fit,
        )
        video = np.concatenate(
            [encoders.video(prepared.inactive), encoders.video(prepared.reactive)], axis=-1
        )
        references = [encoders.video(image[None]) for image in prepared.references]
        front = [np.concatenate([one, np.zeros_like(one)], axis=-1) for one in references]
        return np.concatenate([np.concatenate([*front, video]), prepared.mask], axis=-1)


@final
class WanVACEPipeline(VideoPipeline):
    """A loaded WAN VACE model on a mesh."""

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        video: Any = None,
        mask: Any = None,
        reference_images: Any = None,
        conditioning_scale: float | Sequence[float] = 1.0,
        image_fit: ImageFit = "stretch",
        output_type: OutputType = "np",
        max_sequence_length: int | None = None,
        **arguments: Any,
    ) -> WanOutput:
        """Generates one video for each prompt (times `num_videos_per_prompt`).

        `video` and `mask` are paths, addresses, lists of images or arrays, white where the video is
        made; `reference_images` is one image or a list. `conditioning_scale` is one number, or one
        for each control layer. The other arguments are those of `request_from_arguments`.
        """
        self.check_output(output_type, max_sequence_length)
        inputs = vace_visual_inputs(video, mask, reference_images)
        check_vace_inputs(
            inputs.video,
            inputs.mask,
            inputs.reference_images,
            num_frames=arguments.get("num_frames", 81),
        )
        spec = self.builder.spec
        task = control_task(
            spec,
            conditioning_scale,
            references=len(inputs.reference_images),
            video_frames=None if inputs.video is None else latent_frames(len(inputs.video)),
            fit=image_fit,
        )
        request = request_from_arguments(
            spec,
            prompt=prompt,
            negative_prompt=negative_prompt,
            task=task,
            inputs=[inputs],
            **arguments,
        )
        return self.generate(request, output_type)


def vace_visual_inputs(video: Any, mask: Any, reference_images: Any) -> VisualInputs:
    """Returns the loaded inputs; a list of a list of images counts as the list."""
    images = reference_images if isinstance(reference_images, list | tuple) else [reference_images]
    if len(images) == 1 and isinstance(images[0], list | tuple):
        images = images[0]
    return VisualInputs(
        video=None if video is None else load_video(video, name="video"),
        mask=None if mask is None else load_video(mask, name="mask"),
        reference_images=tuple(
            load_image(image, name="reference_images") for image in images if image is not None
        ),
    )


def control_task(
    spec: WanSpec,
    scale: float | Sequence[float],
    *,
    references: int,
    video_frames: int | None = None,
    fit: ImageFit = "stretch",
) -> ControlToVideo:
    """Returns the task of a VACE checkpoint; raises if it has no control blocks."""
    layers, channels = spec.transformer.control_layers, spec.transformer.control_channels
    if channels is None:
        rule = "this checkpoint has no control blocks"
        remedy = "Use a WAN VACE checkpoint"
        raise ProblemsFound([Problem(name="WanVACEPipeline", value=0, rule=rule, remedy=remedy)])
    scales = (scale,) * len(layers) if isinstance(scale, int | float) else tuple(scale)
    if len(scales) != len(layers):
        rule = f"must be one number, or one for each of the {len(layers)} control layers"
        problem = Problem(name="conditioning_scale", value=scales, rule=rule)
        raise ProblemsFound([problem])
    return ControlToVideo(
        scales=tuple(float(one) for one in scales),
        control_channels=channels,
        references=references,
        video_frames=video_frames,
        fit=fit,
    )
