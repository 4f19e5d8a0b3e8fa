"""Videos as models take them: every frame at height x width, whole latent frames; video to video.

load_video -> video_pixels          [F Y X 3] in -1..1, each frame as `fit_pixels` makes it
           -> whole_latent_frames   without the frames after the last of form 4n + 1
           -> start_step            the first step of video to video, from its strength
"""

from typing import TypeAlias

import numpy as np
from jaxtyping import Float32, UInt8

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.pipelines.preprocess.images import (
    TEMPORAL_FACTOR,
    ImageFit,
    fit_image,
    fit_pixels,
    to_8_bits,
)
from maxdiffusion.runtime.images import frame_images
from maxdiffusion.runtime.video import InputFrames

VideoPixels: TypeAlias = Float32[np.ndarray, "F Y X 3"]


def video_pixels(
    frames: InputFrames, *, height: int, width: int, fit: ImageFit = "stretch"
) -> VideoPixels:
    """Returns the frames at height x width in -1..1."""
    pixels = np.empty((len(frames), height, width, 3), np.float32)
    for row, image in zip(pixels, frame_images(frames), strict=True):
        row[:] = fit_pixels(image, height=height, width=width, fit=fit)
    return pixels


def resized_frames(
    frames: InputFrames, *, height: int, width: int, fit: ImageFit = "stretch"
) -> UInt8[np.ndarray, "F Y X 3"]:
    """Returns the frames at height x width in 8 bits, a quarter of the memory of `video_pixels`.

    `from_8_bits` of the result equals `video_pixels`; float frames are rounded first.
    """
    resized = np.empty((len(frames), height, width, 3), np.uint8)
    for row, image in zip(resized, frame_images(frames), strict=True):
        row[:] = np.asarray(fit_image(to_8_bits(image), (height, width), fit))
    return resized


def from_8_bits(frames: UInt8[np.ndarray, "F Y X 3"]) -> VideoPixels:
    """Returns bytes in -1..1."""
    return frames.astype(np.float32) / np.float32(255) * np.float32(2) - np.float32(1)


def whole_latent_frames(frames: np.ndarray) -> np.ndarray:
    """Returns the first 4n + 1 frames, as many as possible: the VAE leaves the others out."""
    return frames[: (len(frames) - 1) // TEMPORAL_FACTOR * TEMPORAL_FACTOR + 1]


def latent_frames(frames: int) -> int:
    """Returns the number of latent frames that the VAE makes of a video."""
    return (frames - 1) // TEMPORAL_FACTOR + 1


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
