"""Inputs of VACE: control video, mask and reference images.

    video [F Y X 3], mask [F Y X 3] -> inactive = video where the mask is black, else grey (0)
                                       reactive = video where the mask is white, else grey (0)
    mask, soft                      -> 64 channels for each latent pixel: its 8 x 8 mask pixels
    reference images                -> each on a white canvas, one latent frame in front

The model's control input is [inactive latents | reactive latents | mask channels], 96 channels; a
reference is [its latents | zeros | zeros]. References are put in front one after the other, so the
last one given comes first.

Differs from diffusers in one thing. There the control video keeps its own aspect ratio and may be
smaller than the result; its tokens are then fewer and belong to other places of the picture. Here
every frame is fitted to height x width by `image_fit`. Frames of that size, or larger ones of that
aspect ratio, give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from maxdiffusion.errors import Collector, Problem
from maxdiffusion.pipelines.preprocess.images import (
    ImageFit,
    Pixels,
    Size,
    VideoPixels,
    latent_frames,
    nearest_indices,
    resize,
    to_pixels,
    video_pixels,
    whole_latent_frames,
)
from maxdiffusion.runtime.images import image_size
from maxdiffusion.runtime.video import InputFrames, InputImage

SPATIAL_FACTOR = 8  # pixels of a latent pixel, along each side
WHITE = 1.0
MIDDLE = 0.5  # mask values above it count as white


@dataclass(frozen=True, kw_only=True)
class VaceInputs:
    """Pixels and mask channels of one video, as numpy arrays.

    The VAE encodes `inactive` and `reactive` as videos and every row of `references` as a video of
    one frame. `mask` has the latent frames of the references in front, which are zero.
    """

    inactive: VideoPixels
    reactive: VideoPixels
    references: Float32[np.ndarray, "B Y X 3"]
    mask: Float32[np.ndarray, "f y x C"]

    @property
    def reference_frames(self) -> int:
        """Latent frames in front of the video, to be cut off before decoding."""
        return len(self.references)


def vace_inputs(
    video: InputFrames | None = None,
    mask: InputFrames | None = None,
    reference_images: Sequence[InputImage] = (),
    *,
    height: int,
    width: int,
    num_frames: int,
    fit: ImageFit = "stretch",
) -> VaceInputs:
    """Returns the inputs of a video of this size.

    Without a video the control is mid grey, without a mask all is made. A shorter video has fewer
    latent frames of control, as in diffusers; a longer one is refused.
    """
    check_vace_inputs(video, mask, reference_images, num_frames=num_frames)
    if video is None:
        pixels: VideoPixels = np.zeros((num_frames, height, width, 3), np.float32)
    else:
        pixels = video_pixels(video, height=height, width=width, fit=fit)
    soft = np.ones_like(pixels) if mask is None else soft_mask(mask, pixels.shape[1:3], fit)
    inactive, reactive = split_by_mask(pixels, soft)
    channels = mask_channels(soft)
    front = np.zeros((len(reference_images), *channels.shape[1:]), np.float32)
    return VaceInputs(
        inactive=whole_latent_frames(inactive),
        reactive=whole_latent_frames(reactive),
        references=reference_canvases(reference_images, height=height, width=width),
        mask=np.concatenate([front, channels]),
    )


def check_vace_inputs(
    video: InputFrames | None,
    mask: InputFrames | None,
    reference_images: Sequence[InputImage],
    *,
    num_frames: int,
) -> None:
    """Raises everything that is wrong with the inputs of VACE."""
    problems = []
    if video is not None and len(video) > num_frames:
        rule = f"must have at most num_frames={num_frames} frames"
        problems.append(Problem(name="video", value=f"{len(video)} frames", rule=rule))
    if mask is not None and video is None:
        rule, remedy = "a mask needs a video", "Give video as well"
        problems.append(Problem(name="mask", value=mask.shape, rule=rule, remedy=remedy))
    if mask is not None and video is not None and mask.shape[:3] != video.shape[:3]:
        rule = f"must have the frames, height and width of the video, {list(video.shape[:3])}"
        problems.append(Problem(name="mask", value=list(mask.shape[:3]), rule=rule))
    for index, image in enumerate(reference_images):
        if min(image_size(image)) < SPATIAL_FACTOR:
            rule = f"must have at least {SPATIAL_FACTOR} rows and columns"
            name, value = f"reference_images[{index}]", image_size(image)
            problems.append(Problem(name=name, value=value, rule=rule))
    Collector(problems).raise_if_any()


def soft_mask(mask: InputFrames, size: Size, fit: ImageFit = "stretch") -> VideoPixels:
    """Returns the mask in 0..1 at a size; resizing makes values between."""
    pixels = video_pixels(mask, height=size[0], width=size[1], fit=fit)
    return np.clip((pixels + np.float32(1)) / np.float32(2), 0, 1)


def split_by_mask(video: VideoPixels, mask: VideoPixels) -> tuple[VideoPixels, VideoPixels]:
    """Returns the parts of a video that are kept and that are made; the rest of each is grey."""
    made = (mask > MIDDLE).astype(np.float32)
    return video * (np.float32(1) - made), video * made


def mask_channels(
    mask: VideoPixels, *, factor: int = SPATIAL_FACTOR
) -> Float32[np.ndarray, "f y x C"]:
    """Returns the soft mask for each latent pixel: channel factor * dy + dx of its pixels.

    The frame of a latent frame is the middle one of its share: floor((i + 1/2) * F / f).
    """
    frames, height, width, _ = mask.shape
    chosen = mask[nearest_indices(frames, latent_frames(frames), centre=0.5), :, :, 0]
    cells = chosen.reshape(-1, height // factor, factor, width // factor, factor)
    channels = cells.transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(channels).reshape(*channels.shape[:3], factor * factor)


def reference_canvases(
    images: Sequence[InputImage], *, height: int, width: int
) -> Float32[np.ndarray, "B Y X 3"]:
    """Returns reference images on white canvases, in the order of the model: the last one first."""
    canvases = [reference_canvas(image, height=height, width=width) for image in reversed(images)]
    return np.stack(canvases) if canvases else np.zeros((0, height, width, 3), np.float32)


def reference_canvas(image: InputImage, *, height: int, width: int) -> Pixels:
    """Returns an image that keeps its aspect ratio in the middle of a white canvas, in -1..1."""
    rows, columns = (side - side % SPATIAL_FACTOR for side in image_size(image))
    pixels = to_pixels(resize(image, (rows, columns)))
    scale = min(height / rows, width / columns)
    inner = (max(1, int(rows * scale)), max(1, int(columns * scale)))
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    canvas = np.full((height, width, 3), WHITE, np.float32)
    canvas[top : top + inner[0], left : left + inner[1]] = bilinear(pixels, inner)
    return canvas


def bilinear(pixels: Pixels, size: Size) -> Float32[np.ndarray, "y x 3"]:
    """Returns pixels at another size, interpolated between the nearest two along each side.

    Nothing is averaged when an image shrinks: torch's bilinear mode without antialias.
    """
    along_rows = _interpolated(pixels, size[0])
    return _interpolated(along_rows.swapaxes(0, 1), size[1]).swapaxes(0, 1)


def _interpolated(pixels: np.ndarray, wanted: int) -> np.ndarray:
    """Returns `wanted` rows between the given ones; the centres of pixels are at 1/2."""
    # torch rounds the ratio and the whole position (a fused multiply-add) to float32.
    scale = np.float64(np.float32(len(pixels)) / np.float32(wanted))
    exact = (np.arange(wanted) + 0.5) * scale - 0.5
    positions = np.maximum(exact, 0).astype(np.float32)
    below = np.floor(positions).astype(np.int64)
    above = np.minimum(below + 1, len(pixels) - 1)
    share = (positions - below.astype(np.float32))[:, None, None]
    return pixels[below] * (np.float32(1) - share) + pixels[above] * share
