"""Images and videos as models take them: resized, for CLIP, as first and last frame.

    load_image -> fit_pixels      [Y X 3] in -1..1, height x width: what the VAE encodes
               -> clip_pixels     [Y X 3] normalised, of the original image: what CLIP encodes
    load_video -> video_pixels    [F Y X 3] in -1..1, each frame as `fit_pixels` makes it

Pillow images are resized with LANCZOS in 8 bits. Float arrays are resized as diffusers resizes
tensors: the nearest pixel, no rounding to 8 bits; at the right size their values are exact.

`image_fit` decides about an image of another aspect ratio:

    stretch    to height x width, as diffusers does
    crop       scaled to cover height x width, cut at the centre
    pad        scaled to fit into height x width, black bars
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.runtime.images import frame_images, image_size
from maxdiffusion.runtime.video import InputFrames, InputImage

ImageFit: TypeAlias = Literal["stretch", "crop", "pad"]
FITS: tuple[ImageFit, ...] = ("stretch", "crop", "pad")
Pixels: TypeAlias = Float32[np.ndarray, "Y X 3"]
VideoPixels: TypeAlias = Float32[np.ndarray, "F Y X 3"]
Size: TypeAlias = tuple[int, int]  # height, width
TEMPORAL_FACTOR = 4  # frames of a latent frame after the first; the WAN VAEs have no other
# Relative difference of aspect ratios that is not mentioned: 832x480 is 2.5 % off 16:9.
SAME_ASPECT = 0.03


def fit_pixels(image: InputImage, *, height: int, width: int, fit: ImageFit = "stretch") -> Pixels:
    """Returns the image at height x width in -1..1."""
    return to_pixels(fit_image(image, (height, width), fit))


def fit_image(image: InputImage, size: Size, fit: ImageFit = "stretch") -> InputImage:
    """Returns the image at a size."""
    if fit == "stretch":
        return resize(image, size)
    inner = np.asarray(resize(image, scaled_size(image_size(image), size, fit)))
    canvas = np.zeros((*size, 3), inner.dtype)  # black
    (to_rows, rows), (to_columns, columns) = map(_overlap, size, inner.shape[:2])
    canvas[to_rows, to_columns] = inner[rows, columns]
    return Image.fromarray(canvas) if isinstance(image, Image.Image) else canvas


def scaled_size(source: Size, target: Size, fit: ImageFit) -> Size:
    """Returns the size that keeps the aspect ratio and covers the target, or fits into it."""
    rows, columns = source
    height, width = target
    # Integers: rows / columns against height / width.
    wide = columns * height > width * rows
    by_height = wide if fit == "crop" else not wide
    if by_height:
        return height, max(1, columns * height // rows)
    return max(1, rows * width // columns), width


def resize(image: InputImage, size: Size) -> InputImage:
    """Returns the image at another size: LANCZOS in 8 bits, nearest pixels for floats."""
    height, width = size
    if isinstance(image, Image.Image):
        return image.resize((width, height), resample=Image.Resampling.LANCZOS)
    rows = nearest_indices(image.shape[0], height)
    return image[rows][:, nearest_indices(image.shape[1], width)]


def nearest_indices(size: int, wanted: int, *, centre: float = 0.0) -> np.ndarray:
    """Returns the source index of every output index, in torch's float32 arithmetic.

    Mode "nearest" of `torch.nn.functional.interpolate`; with `centre=0.5` "nearest-exact".
    """
    if size == wanted:
        return np.arange(size)
    scale = np.float32(size) / np.float32(wanted)
    positions = (np.arange(wanted, dtype=np.float32) + np.float32(centre)) * scale
    return np.minimum(np.floor(positions).astype(np.int64), size - 1)


def to_pixels(image: InputImage) -> Pixels:
    """Returns the colours in -1..1."""
    return to_unit(image) * np.float32(2) - np.float32(1)


def to_unit(image: InputImage) -> Pixels:
    """Returns the colours in 0..1."""
    if isinstance(image, Image.Image):
        return np.asarray(image).astype(np.float32) / np.float32(255)
    return image


def to_8_bits(image: InputImage) -> Image.Image:
    """Returns a Pillow image; floats are rounded."""
    if isinstance(image, Image.Image):
        return image
    return Image.fromarray(np.rint(image * np.float32(255)).astype(np.uint8))


def _overlap(size: int, inner: int) -> tuple[slice, slice]:
    """Returns where `inner` pixels lie on a line of `size` if their middles meet."""
    start = size // 2 - inner // 2
    low, high = max(start, 0), min(start + inner, size)
    return slice(low, high), slice(low - start, high - start)


def aspect_note(name: str, source: Size, target: Size, fit: ImageFit) -> str | None:
    """Returns a line for the start-up plan if an input has another aspect ratio; else None."""
    rows, columns = source
    height, width = target
    if abs(columns * height / (rows * width) - 1) <= SAME_ASPECT:
        return None
    treatment = {
        "stretch": "stretched; image_fit=crop or pad keeps its aspect ratio",
        "crop": "cropped at the centre",
        "pad": "padded with black bars",
    }[fit]
    return f"{name}: {columns}x{rows} for a video of {width}x{height} is {treatment}"


# The conditioning video of image-to-video


def image_condition_video(
    image: Pixels, last_image: Pixels | None, frames: int
) -> Float32[np.ndarray, "F Y X 3"]:
    """Returns the video that the VAE encodes: the image, zeros (mid grey), the last image."""
    if last_image is not None and frames == 1:
        raise ProblemsFound([_no_last_frame()])
    video = np.zeros((frames, *image.shape), np.float32)
    video[0] = image
    if last_image is not None:
        video[-1] = last_image
    return video


def _no_last_frame() -> Problem:
    rule = "a first and a last image need at least two frames"
    return Problem(name="num_frames", value=1, rule=rule, remedy="Use num_frames=5 or more")


def first_frame_mask(
    frames: int, rows: int, columns: int, *, last: bool = False
) -> Float32[np.ndarray, "F Y X 4"]:
    """Returns the mask channels of given frames, for latents of this size: 1 = given.

    Channel c of latent frame t > 0 belongs to video frame 4(t - 1) + c + 1. The first video frame
    fills all channels of latent frame 0; the last is the last channel of the last latent frame.
    """
    if last and frames == 1:
        raise ProblemsFound([_no_last_frame()])
    mask = np.zeros((frames, rows, columns, TEMPORAL_FACTOR), np.float32)
    mask[0] = 1
    if last:
        mask[-1, ..., -1] = 1
    return mask


# CLIP


@dataclass(frozen=True, kw_only=True)
class ClipPreprocessor:
    """Pixels of the CLIP image encoder, as preprocessor_config.json of a folder states them.

    The defaults are those of the WAN folders, and of CLIP.
    """

    shortest_edge: int | None = 224
    resized: Size | None = None
    crop: Size | None = (224, 224)
    resample: int = 3
    rescale_factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] | None = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ClipPreprocessor":
        """Returns the preprocessor of a config file's content; unstated values are CLIP's."""
        usual = cls()
        size = _size_entry("size", config.get("size", {"shortest_edge": usual.shortest_edge}))
        crop = _size_entry("crop_size", config.get("crop_size", 224), square=True)
        resizes, crops = config.get("do_resize", True), config.get("do_center_crop", True)
        normalises = config.get("do_normalize", True)
        factor = config.get("rescale_factor", usual.rescale_factor)
        return cls(
            shortest_edge=size if resizes and isinstance(size, int) else None,
            resized=size if resizes and isinstance(size, tuple) else None,
            crop=cast(Size, crop) if crops else None,
            resample=config.get("resample", usual.resample),
            rescale_factor=factor if config.get("do_rescale", True) else None,
            mean=tuple(config.get("image_mean", usual.mean)) if normalises else None,
            std=tuple(config.get("image_std", usual.std)) if normalises else None,
        )

    def size_of(self, source: Size) -> Size:
        """Returns the height and width that an image is resized to; the long side is truncated."""
        if self.resized is not None:
            return self.resized
        if self.shortest_edge is None:
            return source
        short, long = sorted(source)
        length = int(self.shortest_edge * long / short)
        rows, columns = source
        return (length, self.shortest_edge) if rows > columns else (self.shortest_edge, length)


def _size_entry(name: str, entry: Any, *, square: bool = False) -> int | Size:
    """Returns the shortest edge, or height and width, of an entry of preprocessor_config.json."""
    match entry:
        case {"height": int(height), "width": int(width)}:
            return height, width
        case {"shortest_edge": int(edge), **others} if not others and not square:
            return edge
        case int(edge):
            return (edge, edge) if square else edge
    rule = 'must be a number, {"height": ..., "width": ...}'
    rule += "" if square else ' or {"shortest_edge": ...}'
    remedy = "Use the image_processor folder of a WAN checkpoint"
    name = f"preprocessor_config.json {name}"
    raise ProblemsFound([Problem(name=name, value=entry, rule=rule, remedy=remedy)])


def clip_pixels(
    image: InputImage, preprocessor: ClipPreprocessor | None = None
) -> Float32[np.ndarray, "Y X 3"]:
    """Returns what CLIP encodes of an original image, before it is resized to the video's size."""
    preprocessor = preprocessor or ClipPreprocessor()
    whole = to_8_bits(image)
    height, width = preprocessor.size_of((whole.height, whole.width))
    resample = Image.Resampling(preprocessor.resample)
    colours: UInt8[np.ndarray, "Y X 3"] = np.asarray(whole.resize((width, height), resample))
    if preprocessor.crop is not None:
        colours = _centre_crop(colours, preprocessor.crop)
    pixels = colours.astype(np.float32)
    if preprocessor.rescale_factor is not None:
        # In float64, as transformers does.
        pixels = (colours.astype(np.float64) * preprocessor.rescale_factor).astype(np.float32)
    if preprocessor.mean is not None and preprocessor.std is not None:
        mean, std = (np.array(row, np.float32) for row in (preprocessor.mean, preprocessor.std))
        pixels = np.divide(pixels - mean, std)
    return pixels


def _centre_crop(colours: UInt8[np.ndarray, "Y X 3"], size: Size) -> UInt8[np.ndarray, "y x 3"]:
    """Returns the middle of an image; one that is too small gets black bars."""
    missing = [max(0, want - have) for have, want in zip(colours.shape[:2], size, strict=True)]
    bars = [((pixels + 1) // 2, pixels // 2) for pixels in missing]
    whole = np.pad(colours, (*bars, (0, 0)))
    top, left = ((have - want) // 2 for have, want in zip(whole.shape[:2], size, strict=True))
    return whole[top : top + size[0], left : left + size[1]]


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
