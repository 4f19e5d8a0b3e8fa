"""Images and videos that a person gives as inputs, from files, addresses, arrays and objects.

    load_image   path, http(s) address, bytes, Pillow image, array         -> RGB image
    load_video   path, http(s) address, folder, list of images, 4-D array  -> frames [F Y X 3]

Everything that Pillow opens is treated as diffusers' `load_image` does: turned by its EXIF tag,
then converted to RGB, which drops alpha, resolves palettes, and clips 16-bit grey at 255. Its own
function is not called, because importing it takes 2.4 s (it loads torch); Pillow takes 0.04 s.

uint8 arrays count as images. Float arrays hold 0..1 and stay floats, without rounding to 8 bits;
`pipelines.preprocess` resizes them as diffusers resizes tensors.

Each bad input is one `Problem` with the name of its field, before any pixel is used.
"""

import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.runtime.files import FilePath, as_path, local_copy, open_binary
from maxdiffusion.runtime.video import InputFrames, InputImage

ImageSource: TypeAlias = Any
"""Path, address, bytes, Pillow image or array; `load_image` says what it refuses."""

MOST_IMAGE_PIXELS = 80_000_000  # Pillow itself warns above 89 million
MOST_IMAGE_BYTES = 100_000_000
MOST_VIDEO_PIXELS = 2_000_000_000  # of all frames that are kept: 6 GB as RGB bytes
MOST_VIDEO_BYTES = 1_000_000_000
IMAGE_TYPES = ("image/",)
VIDEO_TYPES = ("video/", "image/gif", "image/webp", "application/mp4", "application/mxf")
FRAME_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm"})
CHANNELS = (1, 3, 4)
SIXTEEN_BIT = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")

logger = logging.getLogger(__name__)


@runtime_checkable
class SupportsArray(Protocol):
    """Arrays of numpy, jax and others."""

    def __array__(self) -> np.ndarray: ...


# Images


def load_image(source: ImageSource, *, name: str = "image") -> InputImage:
    """Returns an RGB image: of Pillow, or float32 [Y X 3] in 0..1 if the source is a float array.

    Raises `ProblemsFound` that names the input `name`.
    """
    if isinstance(source, str | os.PathLike):
        return _opened(name, str(source), _read(name, source))
    if isinstance(source, bytes):
        return _opened(name, f"{len(source)} bytes", source)
    if isinstance(source, Image.Image):
        value = f"{source.mode} image of {source.width}x{source.height}"
        return _as_rgb(name, value, source)
    if isinstance(source, SupportsArray):
        return _image_of_array(name, np.asarray(source))
    rule = "must be a path, an http(s) address, a Pillow image, an array or the bytes of a file"
    raise _problem(name, type(source).__name__, rule)


def image_size(image: InputImage) -> tuple[int, int]:
    """Returns the height and width of a loaded image."""
    return (image.height, image.width) if isinstance(image, Image.Image) else image.shape[:2]


def _read(name: str, source: str | os.PathLike[str]) -> bytes:
    """Returns the content of a file or an address."""
    text = os.fspath(source)
    if is_address(text):
        from maxdiffusion.runtime.download import Limits, download

        return download(name, text, Limits(types=IMAGE_TYPES, bytes=MOST_IMAGE_BYTES))
    path = _existing(name, text)
    if path.is_dir():
        raise _problem(name, text, "is a folder, not an image")
    try:
        with open_binary(path) as stream:
            content = stream.read(MOST_IMAGE_BYTES + 1)
    except OSError as error:
        raise _problem(name, text, f"cannot be read: {error.strerror}") from error
    if len(content) > MOST_IMAGE_BYTES:
        raise _problem(name, text, f"has more than {MOST_IMAGE_BYTES / 1e6:.0f} MB")
    return content


def fetch_image(name: str, address: str, folder: Path) -> Path:
    """Downloads an image to a file in the folder, and returns its path."""
    from maxdiffusion.runtime.download import Limits, download_file

    limits = Limits(types=IMAGE_TYPES, bytes=MOST_IMAGE_BYTES)
    return download_file(name, address, limits, folder)


def is_address(text: str) -> bool:
    """Returns whether a text is an address to download from."""
    return text.lower().startswith(("http://", "https://"))


def _existing(name: str, text: str) -> FilePath:
    if not text:
        raise _problem(name, text, "must be the path or address of a file")
    path = as_path(text)
    if not path.exists():
        raise _problem(name, text, "no such file or folder", "Check the path")
    return path


def _opened(name: str, value: str, content: bytes) -> Image.Image:
    if not content:
        raise _problem(name, value, "is empty")
    try:
        with _no_warnings():
            image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        rule = "is not an image, or of a format that Pillow does not read"
        raise _problem(name, value, rule, "Use PNG, JPEG or WebP") from None
    except Image.DecompressionBombError:
        raise _too_many_pixels(name, value) from None
    except Exception as error:  # each decoder has its own exceptions
        raise _damaged(name, value, error) from error
    return _as_rgb(name, value, image)


def _as_rgb(name: str, value: str, image: Image.Image) -> Image.Image:
    """Returns the upright image in RGB, as diffusers' `load_image` makes it."""
    _check_size(name, value, image.height, image.width)
    if image.mode in SIXTEEN_BIT:
        text = "%s: values of %s images above 255 become white, as in diffusers; scale them first"
        logger.warning(text, name, image.mode)
    try:
        with _no_warnings():
            upright = ImageOps.exif_transpose(image)
            # Pillow cannot convert premultiplied grey; diffusers fails there.
            return (upright.convert("LA") if upright.mode == "La" else upright).convert("RGB")
    except Exception as error:  # each decoder has its own exceptions
        raise _damaged(name, value, error) from error


def _no_warnings() -> warnings.catch_warnings:
    """Returns a block without Pillow's warnings, about sizes (checked here) and odd metadata."""
    return warnings.catch_warnings(action="ignore")


def _check_size(name: str, value: str, height: int, width: int) -> None:
    if not height or not width:
        raise _problem(name, value, "has no pixels")
    if height * width > MOST_IMAGE_PIXELS:
        raise _too_many_pixels(name, value)


def _image_of_array(name: str, array: np.ndarray) -> InputImage:
    value = _described(array)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in CHANNELS:
        raise _problem(name, value, "must be [height, width, channels] with 1, 3 or 4 channels")
    _check_size(name, value, *array.shape[:2])
    colours = _checked_values(name, value, array)
    if colours.dtype == np.uint8:
        return Image.fromarray(np.ascontiguousarray(colours))
    return colours


def _checked_values(name: str, value: str, array: np.ndarray) -> np.ndarray:
    """Returns [..., 3] as uint8, or as float32 in 0..1; alpha is dropped and grey repeated."""
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * np.uint8(255)
    is_float = np.issubdtype(array.dtype, np.floating)
    if array.dtype != np.uint8 and not is_float:
        rule = "must be uint8 (0..255) or float (0..1)"
        raise _problem(name, value, rule, "Convert it with .astype('uint8'), or divide by 255")
    if is_float and not (array.min() >= 0 and array.max() <= 1):  # false for NaN too
        rule = f"floats must be in 0..1; they are in {array.min():g}..{array.max():g}"
        raise _problem(name, value, rule, "Use (x + 1) / 2 for values in -1..1, uint8 for 0..255")
    colours = np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array[..., :3]
    return colours.astype(np.float32) if is_float else colours


# Videos


def load_video(
    source: Any, *, name: str = "video", fps: float | None = None, most_frames: int | None = None
) -> InputFrames:
    """Returns the frames of a video, uint8, or float32 in 0..1 if the source is a float array.

    A file or address is resampled to `fps`: frame i is the one nearest in time to i / fps. Folders,
    lists and arrays have no rate, so each of their frames counts as one frame at `fps`. Of a file,
    an address or a folder the first `most_frames` are read. Raises `ProblemsFound` that names the
    input `name`.
    """
    if isinstance(source, str | os.PathLike):
        return _video_of_path(name, os.fspath(source), fps=fps, most=most_frames)
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        return _stacked(name, source)
    if isinstance(source, SupportsArray) and not isinstance(source, Image.Image):
        return _video_of_array(name, np.asarray(source))
    rule = "must be a path, an http(s) address, a list of images or an array [F, H, W, 3]"
    raise _problem(name, type(source).__name__, rule)


def frame_images(frames: InputFrames) -> list[InputImage]:
    """Returns the frames as images."""
    if frames.dtype == np.uint8:
        return [Image.fromarray(frame) for frame in np.ascontiguousarray(frames)]
    return list(frames)


def _video_of_path(name: str, text: str, *, fps: float | None, most: int | None) -> InputFrames:
    if is_address(text):
        with tempfile.TemporaryDirectory() as folder:
            copy = fetch_video(name, text, Path(folder))
            return _decoded(name, text, copy, fps=fps, most=most)
    path = _existing(name, text)
    if not path.is_dir():
        return _decoded(name, text, local_copy(path), fps=fps, most=most)
    files = frame_files(path)[:most]
    if not files:
        suffixes = ", ".join(sorted(FRAME_SUFFIXES))
        raise _problem(name, text, "the folder has no frames", f"Frames end in {suffixes}")
    return _stacked(name, files)


def fetch_video(name: str, address: str, folder: Path) -> Path:
    """Downloads a video to a file in the folder, and returns its path."""
    from maxdiffusion.runtime.download import Limits, download_file

    limits = Limits(types=VIDEO_TYPES, bytes=MOST_VIDEO_BYTES)
    return download_file(name, address, limits, folder)


def frame_files(folder: FilePath) -> list[FilePath]:
    """Returns the images of a folder by name, numbers as numbers: frame2 comes before frame10."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in FRAME_SUFFIXES]

    def parts(file: FilePath) -> list[tuple[int, str]]:
        found = re.findall(r"\d+|\D+", file.name)
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in found]

    return sorted(files, key=parts)


def _decoded(
    name: str, text: str, path: Path, *, fps: float | None, most: int | None
) -> UInt8[np.ndarray, "F Y X 3"]:
    from maxdiffusion.runtime.video import VideoError, read_frames

    try:
        return read_frames(path, fps=fps, most=most, most_pixels=MOST_VIDEO_PIXELS)
    except VideoError as error:
        rule = str(error).removeprefix(f"{path}: ")
        raise _problem(name, text, rule, "Use an mp4, webm or gif file that plays") from error


def _stacked(name: str, frames: Sequence[ImageSource]) -> InputFrames:
    """Returns frames that are given one by one; all problems of them are raised together."""
    if not frames:
        raise _problem(name, [], "has no frames")
    problems, images = Collector(), []
    for index, frame in enumerate(frames):
        with problems:
            images.append(load_image(frame, name=f"{name}[{index}]"))
    problems.raise_if_any()
    _check_alike(name, images)
    _check_volume(name, f"{len(images)} frames", (len(images), *image_size(images[0])))
    return np.stack([np.asarray(image) for image in images])


def _check_alike(name: str, images: Iterable[InputImage]) -> None:
    """Raises if frames differ in size, or if only some of them are float arrays."""
    sizes = {image_size(image) for image in images}
    if len(sizes) > 1:
        shown = ", ".join(f"{width}x{height}" for height, width in sorted(sizes))
        raise _problem(name, shown, "all frames must have one size")
    if len({isinstance(image, Image.Image) for image in images}) > 1:
        raise _problem(name, "images and float arrays", "all frames must be of one kind")


def _video_of_array(name: str, array: np.ndarray) -> InputFrames:
    value = _described(array)
    if array.ndim != 4 or array.shape[-1] not in CHANNELS:
        raise _problem(name, value, "must be [frames, height, width, channels]")
    if not len(array):
        raise _problem(name, value, "has no frames")
    _check_size(name, value, *array.shape[1:3])
    _check_volume(name, value, array.shape[:3])
    return _checked_values(name, value, array)


def _check_volume(name: str, value: str, shape: Sequence[int]) -> None:
    frames, height, width = shape
    if frames * height * width > MOST_VIDEO_PIXELS:
        limit = f"{MOST_VIDEO_PIXELS / 1e6:.0f} million pixels"
        rule = f"{frames} frames of {width}x{height} are more than {limit}"
        raise _problem(name, value, rule, "Use fewer or smaller frames")


# Problems


def _described(array: np.ndarray) -> str:
    return f"{array.dtype} array {list(array.shape)}"


def _too_many_pixels(name: str, value: str) -> ProblemsFound:
    rule = f"has more than {MOST_IMAGE_PIXELS / 1e6:.0f} million pixels"
    return _problem(name, value, rule, "Make it smaller")


def _damaged(name: str, value: str, error: Exception) -> ProblemsFound:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
    return _problem(name, value, f"is damaged or cut short ({reason})", "Save it again")


def _problem(name: str, value: object, rule: str, remedy: str = "") -> ProblemsFound:
    if isinstance(value, str) and is_address(value):
        from maxdiffusion.runtime.download import shown

        value = shown(value)
    return ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)])
