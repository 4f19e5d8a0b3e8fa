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
from typing import Any, final

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.pipelines.preprocess.images import ClipPreprocessor, ImageFit
from maxdiffusion.pipelines.request import request_from_arguments
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.tasks import FirstFrame, ImageToVideo, Task, VisualInputs
from maxdiffusion.pipelines.wan import OutputType, VideoPipeline, WanOutput
from maxdiffusion.runtime.images import ImageSource, load_image


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
