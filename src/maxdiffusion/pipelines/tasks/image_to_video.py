"""WAN image-to-video pipeline, with the names and arguments of diffusers.

| checkpoint            | task          | last_image      |
|-----------------------|---------------|-----------------|
| WAN 2.2 I2V A14B      | ImageToVideo  | optional        |
| WAN 2.1 I2V 14B       | ImageToVideo  | refused         |
| WAN 2.1 FLF2V 14B     | ImageToVideo  | required        |
| WAN 2.2 TI2V 5B       | FirstFrame    | refused         |

diffusers fails inside the model for the refused cases, or ignores the last image (5B).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import numpy as np

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.wan import Conditioning
from maxdiffusion.models.wan.config import MASK_CHANNELS
from maxdiffusion.pipelines.preprocess.images import (
    ClipPreprocessor,
    ImageFit,
    clip_pixels,
    first_frame_mask,
    fit_pixels,
    image_condition_video,
)
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
from maxdiffusion.runtime.images import ImageSource, load_image


@dataclass(frozen=True, kw_only=True)
class ImageToVideo(Task):
    """The first image, and the last one if `last`, as channels of the transformer's input.

    Channels are the mask of given frames, then the encoded video of given frames and mid grey.
    With `clip`, the blocks also attend to `clip_tokens` of each image.
    """

    last: bool = False
    fit: ImageFit = "stretch"
    clip: ClipPreprocessor | None = None

    pipeline: ClassVar[str] = "WanImageToVideoPipeline"

    @property
    def title(self) -> str:
        return "first and last image to video" if self.last else "image to video"

    @property
    def images(self) -> int:
        return 0 if self.clip is None else 1 + self.last

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        return (vae.video_frames(latent.frames),)

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        *video, channels = latent.dims
        size = (videos, *video, MASK_CHANNELS + channels)
        return Conditioning(channels=shape_of(size))

    def condition(self, inputs: Sequence[VisualInputs], encoders: Encoders) -> Conditions:
        channels: Any = np.stack([self._channels(one, encoders) for one in inputs])
        clip = self.clip
        tokens = None if clip is None else [tokens_of(one, clip, encoders) for one in inputs]
        return Conditions(
            conditioning=Conditioning(channels=channels),
            image_tokens=None if tokens is None else np.stack(tokens),
        )

    def _channels(self, one: VisualInputs, encoders: Encoders) -> np.ndarray:
        assert one.image is not None
        fitted = partial(fit_pixels, height=encoders.height, width=encoders.width, fit=self.fit)
        first = fitted(one.image)
        last = None if one.last_image is None else fitted(one.last_image)
        latent = encoders.latent
        video = image_condition_video(first, last, encoders.vae.video_frames(latent.frames))
        mask = first_frame_mask(latent.frames, latent.rows, latent.columns, last=self.last)
        return np.concatenate([mask, encoders.video(video)], axis=-1)


@dataclass(frozen=True, kw_only=True)
class FirstFrame(Task):
    """The first latent frame is the encoded image; it has no noise and time 0."""

    fit: ImageFit = "stretch"

    pipeline: ClassVar[str] = "WanImageToVideoPipeline"

    @property
    def title(self) -> str:
        return "image to video, first frame known"

    def encoded_frames(self, latent: LatentShape, vae: WanVaeConfig) -> tuple[int, ...]:
        del latent, vae
        return (1,)

    def shapes(self, latent: LatentShape, videos: int) -> Conditioning:
        return Conditioning(known=shape_of((videos, *latent.with_frames(1).dims)))

    def condition(self, inputs: Sequence[VisualInputs], encoders: Encoders) -> Conditions:
        images = [one.image for one in inputs if one.image is not None]
        assert len(images) == len(inputs)
        fitted = partial(fit_pixels, height=encoders.height, width=encoders.width, fit=self.fit)
        known: Any = np.stack([encoders.video(fitted(one)[None]) for one in images])
        return Conditions(conditioning=Conditioning(known=known))


def tokens_of(one: VisualInputs, clip: ClipPreprocessor, encoders: Encoders) -> np.ndarray:
    """Returns the CLIP tokens of a video's images, one image after the other."""
    images = [image for image in (one.image, one.last_image) if image is not None]
    tokens = encoders.image(np.stack([clip_pixels(image, clip) for image in images]))
    return tokens.reshape(-1, tokens.shape[-1])


@final
class WanImageToVideoPipeline(VideoPipeline):
    """A loaded WAN model that continues an image, on a mesh."""

    def __call__(
        self,
        image: ImageSource | Sequence[ImageSource],
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        last_image: ImageSource | Sequence[ImageSource] | None = None,
        image_fit: ImageFit = "stretch",
        output_type: OutputType = "np",
        max_sequence_length: int | None = None,
        **arguments: Any,
    ) -> WanOutput:
        """Generates one video for each prompt (times `num_videos_per_prompt`).

        `image` is a path, an address, a Pillow image or an array [H, W, 3] (bytes, or floats from
        0 to 1): one for all prompts, or a list with one for each. `image_fit` decides about an
        image of another aspect ratio. The other arguments are those of `request_from_arguments`.
        """
        self.check_output(output_type, max_sequence_length)
        inputs = image_inputs(image, last_image)
        task = image_task(self.builder.spec, last=last_image is not None, fit=image_fit)
        request = request_from_arguments(
            self.builder.spec,
            prompt=prompt,
            negative_prompt=negative_prompt,
            task=task,
            inputs=inputs,
            **arguments,
        )
        return self.generate(request, output_type)


def image_inputs(image: Any, last_image: Any = None) -> list[VisualInputs]:
    """Returns the loaded images, one value per given image."""
    first = list(image) if isinstance(image, list | tuple) else [image]
    last = list(last_image) if isinstance(last_image, list | tuple) else [last_image]
    if len(last) == 1:
        last = last * len(first)
    if len(first) != len(last):
        rule = f"there must be one for each of the {len(first)} first images"
        raise ProblemsFound([Problem(name="last_image", value=len(last), rule=rule)])
    return [
        VisualInputs(
            image=load_image(one, name="image"),
            last_image=None if end is None else load_image(end, name="last_image"),
        )
        for one, end in zip(first, last, strict=True)
    ]


def image_task(spec: WanSpec, *, last: bool, fit: ImageFit = "stretch") -> Task:
    """Returns the task of an image, and of a last one, for a checkpoint; raises if it has none."""
    if spec.animates:
        rule, remedy = "this checkpoint needs poses and faces as well", "Use WanAnimatePipeline"
        raise ProblemsFound([Problem(name="image", value="given", rule=rule, remedy=remedy)])
    if spec.time_per_token:
        if last:
            raise ProblemsFound([_no_last_image("knows the first frame alone")])
        return FirstFrame(fit=fit)
    if not spec.image_channels:
        rule = "this checkpoint takes no image: its input has the channels of the noise alone"
        remedy = "Leave the image out, or use a WAN image-to-video checkpoint"
        raise ProblemsFound([Problem(name="image", value="given", rule=rule, remedy=remedy)])
    if spec.image_encoder is None:
        return ImageToVideo(last=last, fit=fit)
    _check_positions(spec, last=last)
    return ImageToVideo(
        last=last,
        fit=fit,
        clip=ClipPreprocessor.from_config(spec.image_processor or {}),
        clip_tokens=spec.image_encoder.tokens,
    )


def _check_positions(spec: WanSpec, *, last: bool) -> None:
    """Raises unless the images are as many as the model has positions for."""
    positions = spec.transformer.image_positions
    if positions is None and last:
        raise ProblemsFound([_no_last_image("attends to the tokens of one image")])
    if positions is not None and not last:
        rule = f"this checkpoint has {positions} positions for the tokens of two images"
        remedy = "Give last_image too, or use a WAN 2.1 I2V checkpoint"
        raise ProblemsFound([Problem(name="last_image", value=None, rule=rule, remedy=remedy)])


def _no_last_image(reason: str) -> Problem:
    return Problem(
        name="last_image",
        value="given",
        rule=f"this checkpoint {reason}",
        remedy="Leave it out, or use WAN 2.2 I2V A14B or WAN 2.1 FLF2V",
    )
