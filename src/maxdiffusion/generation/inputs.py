"""Images and videos of a job, opened and checked before any weight is read.

    rules = IMAGE_TO_VIDEO                        which inputs a pipeline takes, and which it needs
    loader = InputLoader(config, rules)
    loader.check(lines)                           opens everything; raises every problem at once
    inputs = loader.load(line)                    the inputs of one line of a prompts file

A line of a prompts file has precedence over the config. A job may have thousands of lines, so
`check` keeps nothing but downloaded files; `load` reads the inputs of a line when they are needed.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

from maxdiffusion.config import Config
from maxdiffusion.config.job_fields import stated_inputs
from maxdiffusion.config.validate import PATHS, VideoRequestLine
from maxdiffusion.errors import Collector, Problem
from maxdiffusion.pipelines.preprocess.images import ImageFit, Size, aspect_note
from maxdiffusion.pipelines.tasks.base import VisualInputs
from maxdiffusion.runtime.images import (
    fetch_image,
    fetch_video,
    image_size,
    is_address,
    load_image,
    load_video,
)
from maxdiffusion.runtime.video import InputFrames, InputImage

NO_LINE = VideoRequestLine(prompt="")


@dataclass(frozen=True, kw_only=True)
class InputRules:
    """Inputs of a kind of pipeline: the config field of each, and those that must be given."""

    kind: str
    config_fields: Mapping[str, str]
    required: tuple[str, ...] = ()

    def requiring(self, *names: str) -> "InputRules":
        """Returns the rules with more inputs that must be given."""
        return replace(self, required=(*self.required, *names))

    def without(self, *names: str) -> "InputRules":
        """Returns the rules without some inputs."""
        kept = {name: field for name, field in self.config_fields.items() if name not in names}
        return replace(self, config_fields=MappingProxyType(kept))


def _rules(kind: str, required: Sequence[str] = (), **config_fields: str) -> InputRules:
    table = MappingProxyType(config_fields)
    return InputRules(kind=kind, config_fields=table, required=tuple(required))


TEXT_TO_VIDEO = _rules("text-to-video")
IMAGE_TO_VIDEO = _rules(
    "image-to-video", ("image",), image="image_url", last_image="last_image_path"
)
TEXT_OR_IMAGE_TO_VIDEO = _rules("text- and image-to-video", image="image_url")
VIDEO_TO_VIDEO = _rules("video-to-video", ("video",), video="video_path")
VACE = _rules("VACE", video="video_path", mask="mask_path", reference_images="reference_images")
ANIMATE = _rules(
    "Animate",
    ("image", "pose_video", "face_video"),
    image="reference_image_path",
    pose_video="pose_video_path",
    face_video="face_video_path",
    background_video="background_video_path",
    mask_video="mask_video_path",
)
IMAGES = ("image", "last_image")
LINE_INPUTS = (*PATHS, "reference_images")


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Settings of a job's inputs, under the names of the config and of diffusers."""

    image_fit: ImageFit
    strength: float
    conditioning_scale: float | tuple[float, ...]
    mode: str
    segment_frame_length: int
    prev_segment_conditioning_frames: int
    motion_encode_batch_size: int | None
    animate_guidance_scale: float

    @classmethod
    def of(cls, config: Config) -> "InputOptions":
        """Returns the options of a config."""
        return cls(
            image_fit=cast(ImageFit, config.image_fit),
            strength=config.strength,
            conditioning_scale=config.conditioning_scale,
            mode=config.mode,
            segment_frame_length=config.segment_frame_length,
            prev_segment_conditioning_frames=config.prev_segment_conditioning_frames,
            motion_encode_batch_size=config.motion_encode_batch_size,
            animate_guidance_scale=config.animate_guidance_scale,
        )


def load_inputs(
    config: Config, rules: InputRules, line: VideoRequestLine | None = None
) -> VisualInputs:
    """Returns the inputs of a config, or of one line of its prompts file; raises all problems."""
    return InputLoader(config, rules).load(line)


class InputLoader:
    """Loads the inputs of a job's lines. Downloads an address once; files live as long as it."""

    def __init__(self, config: Config, rules: InputRules):
        self._config = config
        self._rules = rules
        self._folder: Path | None = None
        self._copies: dict[str, str] = {}

    def check(self, lines: Sequence[VideoRequestLine]) -> tuple[str, ...]:
        """Opens the inputs of all lines, and returns their notes; raises every problem."""
        problems, notes = Collector(), {}
        for line in lines:
            with problems:
                notes.update(dict.fromkeys(self.load(line).notes))
        problems.raise_if_any()
        return tuple(notes)

    def load(self, line: VideoRequestLine | None = None) -> VisualInputs:
        """Returns the inputs of a line; raises all that is wrong with them."""
        line = line or NO_LINE
        sources = given_sources(self._config, self._rules, line)
        problems = Collector()
        loaded: dict[str, object] = {}
        for name, (field, source) in sources.items():
            with problems:
                loaded[name] = self._load(name, field, source, line)
        problems.raise_if_any()
        inputs = VisualInputs(**loaded)  # type: ignore[arg-type]
        names = {name: field for name, (field, _) in sources.items()}
        check_frames(inputs, names, frames=line.num_frames or self._config.num_frames)
        size = (line.height or self._config.height, line.width or self._config.width)
        fit = cast(ImageFit, self._config.image_fit)
        return replace(inputs, notes=(*aspect_notes(inputs, size, fit), *length_notes(inputs)))

    def _load(self, name: str, field: str, source: object, line: VideoRequestLine) -> object:
        if name == "reference_images":
            return self._images(field, cast(tuple[str, ...], source))
        text = cast(str, source)
        return self._image(field, text) if name in IMAGES else self._video(name, field, text, line)

    def _images(self, field: str, texts: Sequence[str]) -> tuple[InputImage, ...]:
        problems, images = Collector(), []
        for index, text in enumerate(texts):
            with problems:
                images.append(self._image(f"{field}[{index}]", text))
        problems.raise_if_any()
        return tuple(images)

    def _image(self, field: str, text: str) -> InputImage:
        return load_image(self._local(field, text, fetch_image), name=field)

    def _video(self, name: str, field: str, text: str, line: VideoRequestLine) -> InputFrames:
        # The videos of Animate decide about its length; others are cut.
        whole = name not in ("video", "mask")
        most = None if whole else line.num_frames or self._config.num_frames
        local = self._local(field, text, fetch_video)
        return load_video(local, name=field, fps=self._config.fps, most_frames=most)

    def _local(self, field: str, text: str, fetch: Callable[[str, str, Path], Path]) -> str:
        """Returns the path of an input on a disk."""
        if not is_address(text):
            return text
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="maxdiffusion_inputs_"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if text not in self._copies:
            self._copies[text] = str(fetch(field, text, self._folder))
        return self._copies[text]


def given_sources(
    config: Config, rules: InputRules, line: VideoRequestLine
) -> dict[str, tuple[str, object]]:
    """Returns the stated inputs: name -> (field for messages, source).

    Raises for inputs that this kind of pipeline does not take, and for those that it lacks.
    """
    stated = {
        name: (line.field(name), value) for name in LINE_INPUTS if (value := vars(line)[name])
    }
    of_config, rules = stated_inputs(config), _in_mode(config, rules)
    used = set(rules.config_fields.values())
    unused = [(field, source) for field, source in of_config.items() if field not in used]
    unused += [stated[name] for name in stated if name not in rules.config_fields]
    problems = [
        Problem(
            name=field,
            value=value,
            rule=f"{rules.kind} does not take it",
            remedy="Leave it out, or use a model or mode that takes it",
        )
        for field, value in unused
        if value
    ]
    sources = {
        name: stated.get(name, (field, of_config[field]))
        for name, field in rules.config_fields.items()
    }
    problems += missing(sources, rules.required, rules.kind)
    Collector(problems).raise_if_any()
    return {name: source for name, source in sources.items() if source[1]}


def _in_mode(config: Config, rules: InputRules) -> InputRules:
    """Returns the rules in the mode of Animate: replacing a person needs the scene and a mask."""
    if rules.kind != ANIMATE.kind:
        return rules
    scene = ("background_video", "mask_video")
    return rules.requiring(*scene) if config.mode == "replace" else rules.without(*scene)


def missing(
    sources: Mapping[str, tuple[str, object]], required: Sequence[str], kind: str
) -> list[Problem]:
    """Returns the problems of inputs that are not given."""
    problems = [
        Problem(
            name=sources[name][0],
            value="",
            rule=f"{kind} needs it",
            remedy="Give a path or an http(s) address",
        )
        for name in required
        if not sources[name][1]
    ]
    if sources.get("mask", ("", ""))[1] and not sources["video"][1]:
        field, value = sources["mask"]
        rule, remedy = "a mask needs a video", "Give video_path as well"
        problems.append(Problem(name=field, value=value, rule=rule, remedy=remedy))
    return problems


def check_frames(inputs: VisualInputs, names: Mapping[str, str], *, frames: int) -> None:
    """Raises if a video is shorter than the result, or a mask is unlike its video."""
    problems = []
    if inputs.video is not None and len(inputs.video) < frames:
        have = len(inputs.video)
        fitting = (have - 1) // 4 * 4 + 1
        rule = f"num_frames={frames} are needed, at the frame rate of `fps`"
        remedy = f"Use num_frames={fitting}, or a longer video"
        problems.append(
            Problem(name=names["video"], value=f"{have} frames", rule=rule, remedy=remedy)
        )
    for video, mask in (("video", "mask"), ("background_video", "mask_video")):
        problems += _mask_problems(vars(inputs)[video], vars(inputs)[mask], names, mask)
    Collector(problems).raise_if_any()


def _mask_problems(
    video: InputFrames | None, mask: InputFrames | None, names: Mapping[str, str], name: str
) -> list[Problem]:
    if video is None or mask is None:
        return []
    problems = []
    if mask.shape[1:3] != video.shape[1:3]:
        rule = f"must be as large as the frames of the video, {_shown(video.shape[1:3])}"
        value = _shown(mask.shape[1:3])
        problems.append(Problem(name=names[name], value=value, rule=rule))
    if len(mask) != len(video):
        rule = f"must have as many frames as the video, {len(video)}"
        problems.append(Problem(name=names[name], value=f"{len(mask)} frames", rule=rule))
    return problems


def _shown(size: Sequence[int]) -> str:
    height, width = size
    return f"{width}x{height}"


def aspect_notes(inputs: VisualInputs, size: Size, fit: ImageFit) -> tuple[str, ...]:
    """Returns a line for every input of another aspect ratio than the video's."""
    animate = inputs.pose_video is not None
    sizes: dict[str, Size] = {}
    for name in ("image", "last_image"):
        image = vars(inputs)[name]
        if image is not None:
            sizes[name] = image_size(image)
    for name in ("video", "pose_video", "background_video"):
        video = vars(inputs)[name]
        if video is not None:
            sizes[name] = (video.shape[1], video.shape[2])
    # The image of Animate always keeps its aspect ratio.
    fits: dict[str, ImageFit] = {"image": "pad"} if animate else {}
    notes = [aspect_note(name, source, size, fits.get(name, fit)) for name, source in sizes.items()]
    return tuple(note for note in notes if note is not None)


def length_notes(inputs: VisualInputs) -> tuple[str, ...]:
    """Returns a line for every video of Animate that is longer or shorter than the poses."""
    if inputs.pose_video is None:
        return ()
    poses, notes = len(inputs.pose_video), []
    for name in ("face_video", "background_video"):
        video = vars(inputs)[name]
        if video is not None and len(video) != poses:
            fate = "the rest is not used" if len(video) > poses else "it runs back and forth"
            notes.append(f"{name}: {len(video)} frames for {poses} poses; {fate}")
    return tuple(notes)
