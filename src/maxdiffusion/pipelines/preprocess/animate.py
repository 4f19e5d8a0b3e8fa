"""Inputs of Animate: a character, poses and faces, and the scene that it is put into.

A long video is made in segments. Each takes over the last frames of the one before:

    poses      0 ............................ n-1 (reflected to whole segments)
    segment 0  [--------- length ---------]
    segment 1                     [overlap|---------- step ----------]

Model input of a segment, in latent frames: the character, then the condition video.

    condition video    animate: zeros (mid grey); replace: the background
                       its first frames: those taken over, except in segment 0
    mask channels      1 = given: the character, frames taken over, what the mask leaves (black)

diffusers names bilinear interpolation for the character, but its processor uses LANCZOS (its base
class resets the setting); so does this. Videos other than the poses may have another length: they
are reflected, or their rest is not used. A single pose, or fewer poses than the overlap, makes one
segment here; diffusers fails.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from maxdiffusion.errors import Collector, Problem
from maxdiffusion.pipelines.preprocess.images import (
    TEMPORAL_FACTOR,
    ImageFit,
    Pixels,
    VideoPixels,
    first_frame_mask,
    fit_pixels,
    from_8_bits,
    nearest_indices,
    resized_frames,
    to_8_bits,
)
from maxdiffusion.runtime.video import InputFrames, InputImage

FACE_SIZE = 512  # motion_encoder_size of the released model
SPATIAL_FACTOR = 8


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The segments that a video with this number of poses is made in."""

    poses: int
    length: int
    overlap: int

    def __post_init__(self) -> None:
        problems = []
        if self.length < 1 or self.length % TEMPORAL_FACTOR != 1:
            rule = f"must be {TEMPORAL_FACTOR}n + 1"
            problems.append(Problem(name="segment_frame_length", value=self.length, rule=rule))
        if self.overlap not in (1, 5):
            name = "prev_segment_conditioning_frames"
            problems.append(Problem(name=name, value=self.overlap, rule="must be 1 or 5"))
        if self.step < self.overlap:
            rule = f"must be at least {2 * self.overlap}: {self.overlap} frames are taken over"
            problems.append(Problem(name="segment_frame_length", value=self.length, rule=rule))
        Collector(problems).raise_if_any()

    @property
    def step(self) -> int:
        """New frames of a segment after the first."""
        return self.length - self.overlap

    @property
    def count(self) -> int:
        """Number of segments."""
        return max(1, -((self.overlap - self.poses) // self.step))

    @property
    def frames(self) -> int:
        """Frames of all segments; the result is cut to the number of poses."""
        return self.count * self.step + self.overlap

    def span(self, index: int) -> slice:
        """Returns the frames of a segment."""
        return slice(index * self.step, index * self.step + self.length)


def reflected(frames: int, wanted: int) -> np.ndarray:
    """Returns indices of frames that run back and forth: 0 1 2 1 0 1 ..."""
    period = max(1, 2 * (frames - 1))
    indices = np.arange(wanted) % period
    return np.minimum(indices, period - indices) if frames > 1 else indices


@dataclass(frozen=True, kw_only=True)
class SegmentInputs:
    """Pixels of one segment. `mask` is white (1) where the scene is made; None without a scene."""

    pose: VideoPixels
    face: Float32[np.ndarray, "F y x 3"]
    background: VideoPixels | None
    mask: Float32[np.ndarray, "F Y X"] | None

    def condition_video(
        self, taken_over: Float32[np.ndarray, "f Y X 3"] | None, overlap: int
    ) -> VideoPixels:
        """Returns what the VAE encodes; `taken_over` are the last frames of the segment before."""
        video = np.zeros_like(self.pose) if self.background is None else self.background.copy()
        if taken_over is not None:
            video[:overlap] = taken_over[-overlap:]
        return video

    def condition_mask(
        self, given: int, *, factor: int = SPATIAL_FACTOR
    ) -> Float32[np.ndarray, "f y x 4"]:
        """Returns the mask channels of the character and of a segment with `given` first frames."""
        frames, height, width, _ = self.pose.shape
        rows, columns = height // factor, width // factor
        kept = np.zeros((frames, rows, columns), np.float32)
        if self.mask is not None:
            picked = self.mask[:, nearest_indices(height, rows)]
            kept = np.float32(1) - picked[:, :, nearest_indices(width, columns)]
        kept[:given] = 1
        return np.concatenate([first_frame_mask(1, rows, columns), channels_of_frames(kept)])


def channels_of_frames(mask: Float32[np.ndarray, "F y x"]) -> Float32[np.ndarray, "f y x 4"]:
    """Returns the values of video frames as channels of latent frames; the first fills four."""
    whole = np.concatenate([np.repeat(mask[:1], TEMPORAL_FACTOR - 1, axis=0), mask])
    return np.moveaxis(whole.reshape(-1, TEMPORAL_FACTOR, *mask.shape[1:]), 1, -1)


@dataclass(frozen=True, kw_only=True)
class AnimateInputs:
    """All inputs of a video at their final sizes, in 8 bits until a segment needs them."""

    character: Pixels
    pose: UInt8[np.ndarray, "F Y X 3"]
    face: UInt8[np.ndarray, "_ y x 3"]
    background: UInt8[np.ndarray, "_ Y X 3"] | None
    mask: UInt8[np.ndarray, "_ Y X"] | None

    def segment(self, segments: Segments, index: int) -> SegmentInputs:
        """Returns the pixels of a segment."""
        span = segments.span(index)

        def frames_of(video: np.ndarray) -> np.ndarray:
            return video[reflected(len(video), segments.frames)[span]]

        background, mask = self.background, self.mask
        return SegmentInputs(
            pose=from_8_bits(frames_of(self.pose)),
            face=from_8_bits(frames_of(self.face)),
            background=None if background is None else from_8_bits(frames_of(background)),
            mask=None if mask is None else frames_of(mask).astype(np.float32) / np.float32(255),
        )


def animate_inputs(
    image: InputImage,
    *,
    pose_video: InputFrames,
    face_video: InputFrames,
    background_video: InputFrames | None = None,
    mask_video: InputFrames | None = None,
    height: int,
    width: int,
    face_size: int = FACE_SIZE,
    fit: ImageFit = "stretch",
) -> AnimateInputs:
    """Returns the inputs of a video of this size.

    `background_video` and `mask_video` belong to mode "replace". `fit` is for the videos of the
    scene; faces are stretched to a square and the character always keeps its aspect ratio.
    """
    check_scene(background_video, mask_video)

    def fitted(frames: InputFrames) -> UInt8[np.ndarray, "F Y X 3"]:
        return resized_frames(frames, height=height, width=width, fit=fit)

    return AnimateInputs(
        character=character_pixels(image, height=height, width=width),
        pose=fitted(pose_video),
        face=resized_frames(face_video, height=face_size, width=face_size),
        background=None if background_video is None else fitted(background_video),
        mask=None if mask_video is None else grey(fitted(mask_video)),
    )


def check_scene(background_video: InputFrames | None, mask_video: InputFrames | None) -> None:
    """Raises if a scene lacks its mask, or the two are unlike."""
    problems = []
    if (background_video is None) != (mask_video is None):
        lacking = "mask_video" if mask_video is None else "background_video"
        rule = "mode replace needs a background and its mask"
        problems.append(Problem(name=lacking, value=None, rule=rule, remedy=f"Give {lacking}"))
    elif background_video is not None and mask_video is not None:
        expected = list(background_video.shape[:3])
        if list(mask_video.shape[:3]) != expected:
            rule = f"must have the frames, height and width of the background, {expected}"
            value = list(mask_video.shape[:3])
            problems.append(Problem(name="mask_video", value=value, rule=rule))
    Collector(problems).raise_if_any()


def character_pixels(image: InputImage, *, height: int, width: int) -> Pixels:
    """Returns the character in -1..1 at height x width, its aspect ratio kept by black bars."""
    return fit_pixels(to_8_bits(image), height=height, width=width, fit="pad")


def grey(frames: UInt8[np.ndarray, "F Y X 3"]) -> UInt8[np.ndarray, "F Y X"]:
    """Returns the brightness of frames, as Pillow weighs colours."""
    return np.stack([np.asarray(Image.fromarray(frame).convert("L")) for frame in frames])
