"""The task of every line of a job: what its model needs, what the line gives, and the shapes.

    checkpoint            takes                          task
    text-to-video         nothing                        TextToVideo
    image-to-video        image, last_image              ImageToVideo
    TI2V-5B               nothing or image               TextToVideo, FirstFrame
    text-to-video         video                          VideoToVideo
    VACE                  video, mask, references        ControlToVideo
    Animate               image, pose and face video     Animate

Inputs are opened and checked here, before weights are read. A plain text-to-video job loads
nothing of what images and videos need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from maxdiffusion.config import Config
from maxdiffusion.config.input_fields import stated_inputs
from maxdiffusion.config.validate import VideoRequestLine
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.settings import program_shape
from maxdiffusion.pipelines.programs import ProgramShape
from maxdiffusion.pipelines.request import VideoShape, check_video_shape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.tasks.base import Task, TextToVideo, VisualInputs

if TYPE_CHECKING:
    from maxdiffusion.generation.inputs import InputLoader, InputRules
    from maxdiffusion.pipelines.preprocess.images import ImageFit

TEXT = TextToVideo()


@dataclass(frozen=True, kw_only=True)
class LineTasks:
    """Tasks and inputs of the lines of a job."""

    config: Config
    spec: WanSpec

    @property
    def takes_inputs(self) -> bool:
        """True if the model is conditioned on images or videos, in some of its tasks at least."""
        spec = self.spec
        return (
            spec.image_channels
            or spec.time_per_token
            or bool(spec.transformer.control_layers)
            or bool(self.config.video_path)
        )

    def check(self, lines: Sequence[VideoRequestLine]) -> tuple[str, ...]:
        """Opens the inputs of all lines and returns notes for the plan; raises every problem."""
        problems = Collector()
        notes: tuple[str, ...] = ()
        with problems:
            check_model_type(self.config, self.spec)
        if self.spec.animates:
            with problems:
                check_animate(self.config, lines)
        for video in {self.video(line): None for line in lines}:
            with problems:
                check_video_shape(video, self.spec.vae, self.spec.transformer)
        if self.takes_inputs or states_inputs(self.config, lines):
            with problems:
                notes = self._loader.check(lines)
            with problems:
                for line in lines:
                    self.task(line)
        problems.raise_if_any()
        return notes

    def task(self, line: VideoRequestLine) -> Task:
        """Returns the task of a line; raises if the model cannot do it."""
        config, fit = self.config, cast("ImageFit", self.config.image_fit)
        if self.spec.animates:
            from maxdiffusion.pipelines.tasks.animate import animate_task

            return animate_task(
                self.spec,
                length=config.segment_frame_length,
                overlap=config.prev_segment_conditioning_frames,
                motion_batch=config.motion_encode_batch_size,
                fit=fit,
            )
        if self.spec.transformer.control_layers:
            from maxdiffusion.pipelines.tasks.vace import control_task

            references = line.reference_images or config.reference_images
            return control_task(
                self.spec, config.conditioning_scale, references=len(references), fit=fit
            )
        if line.video or config.video_path:
            from maxdiffusion.pipelines.tasks.video_to_video import VideoToVideo

            return VideoToVideo(strength=config.strength, fit=fit)
        if not (line.image or config.image_url):
            return TEXT
        from maxdiffusion.pipelines.tasks.image_to_video import image_task

        last = bool(line.last_image or config.last_image_path)
        return image_task(self.spec, last=last, fit=fit)

    def shape(self, line: VideoRequestLine, videos: int) -> ProgramShape:
        """Returns the sizes that the programs of a line are compiled for."""
        task = self.task(line) if self.takes_inputs else TEXT
        return program_shape(self.config, self.spec, videos, video=self.video(line), task=task)

    def video(self, line: VideoRequestLine) -> VideoShape:
        """Returns the size of a line's video, of one segment if it is made in several.

        A line has precedence over the config.
        """
        frames = line.num_frames or self.config.num_frames
        return VideoShape(
            height=line.height or self.config.height,
            width=line.width or self.config.width,
            num_frames=self.config.segment_frame_length if self.spec.animates else frames,
        )

    def inputs(self, line: VideoRequestLine) -> VisualInputs | None:
        """Returns the images and videos of a line; None if its task has none."""
        if not self.takes_inputs:
            return None
        return self._loader.load(line)

    @cached_property
    def _loader(self) -> "InputLoader":
        from maxdiffusion.generation.inputs import InputLoader

        return InputLoader(self.config, self._rules())

    def _rules(self) -> "InputRules":
        from maxdiffusion.generation import inputs

        if self.spec.animates:
            return inputs.ANIMATE
        if self.spec.transformer.control_layers:
            return inputs.VACE
        if self.config.video_path and not self.spec.image_channels:
            return inputs.VIDEO_TO_VIDEO
        if self.spec.time_per_token:
            return inputs.TEXT_OR_IMAGE_TO_VIDEO
        if not self.spec.image_channels:
            return inputs.TEXT_TO_VIDEO
        if self.spec.image_encoder is None:
            return inputs.IMAGE_TO_VIDEO
        if self.spec.transformer.image_positions is None:
            return inputs.IMAGE_TO_VIDEO.without("last_image")
        return inputs.IMAGE_TO_VIDEO.requiring("last_image")


def check_animate(config: Config, lines: Sequence[VideoRequestLine]) -> None:
    """Raises for settings that have no effect on Animate; a file may have them for other models."""
    length = ("a video has as many frames as its poses", "Leave it out, or cut the pose video")
    scale = ("Animate has one guidance scale", "Use animate_guidance_scale")
    rules = {"num_frames": length, "guidance_scale_high": scale, "guidance_scale_low": scale}
    found = [(name, config.values[name], name) for name in rules if config.overridden(name)]
    found += [
        (line.field("num_frames"), line.num_frames, "num_frames")
        for line in lines
        if line.num_frames is not None
    ]
    Collector(
        [
            Problem(name=shown, value=value, rule=rules[name][0], remedy=rules[name][1])
            for shown, value, name in found
        ]
    ).raise_if_any()


def states_inputs(config: Config, lines: Sequence[VideoRequestLine]) -> bool:
    """Returns whether the config or a line names an image or a video."""
    bare = VideoRequestLine(prompt="")
    kept = ("prompt", "seed", "height", "width", "num_frames", "source")
    return any(stated_inputs(config).values()) or any(
        replace(line, **{name: vars(bare)[name] for name in kept}) != bare for line in lines
    )


def check_model_type(config: Config, spec: WanSpec) -> None:
    """Raises if `model_type` is not that of the model."""
    possible = ("I2V",) if spec.image_channels else ("T2V", "I2V")
    possible = possible if spec.image_channels or spec.time_per_token else ("T2V",)
    if config.model_type not in possible:
        problem = Problem(
            name="model_type",
            value=config.model_type,
            rule=f"{config.pretrained_model_name_or_path!r} is a model of type "
            f"{' and '.join(possible)}",
            remedy=f"Use model_type={possible[0]}, or another model",
        )
        raise ProblemsFound([problem])
