"""Images and videos of requests: decoded from their content, checked, and kept by digest.

    file of a form, data: URL --> PNG, JPEG or WebP by content     --> inputs/DIGEST.png
                              --> MP4, WebM or GIF by content      --> inputs/DIGEST.mp4 (or so)

The declared name and type of a file are not used, and no address is ever opened: a video must be of
a container that cannot name other files. What a decoder says about a broken file stays in the
server. Images are kept as PNG, videos as they came.
"""

import base64
import binascii
import hashlib
import io
import os
import re
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from maxdiffusion.runtime.files import FilePath, local_copy, replacing
from maxdiffusion.runtime.video import VideoError, measure_video, read_frames
from maxdiffusion.serving.errors import ApiError, bad_request

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 40_000_000
SHORTEST_SIDE = 16
MOST_SIDE = 8192
MOST_VIDEO_FRAMES = 2001
DATA_URL = re.compile(r"data:[\w/+.-]*;base64,", re.ASCII)
KEPT = re.compile(r"[0-9a-f]{64}\.(?:png|mp4|webm|gif)")
ORPHAN_SECONDS = 600  # longer than a request takes from its upload to its row


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A field of a request that carries files; `line` is their name in generation."""

    line: str
    medium: str
    meaning: str
    most: int = 1

    @property
    def formats(self) -> str:
        """Names of the formats that are read."""
        return "PNG, JPEG or WebP" if self.medium == "image" else "MP4, WebM or GIF"


UPLOADS = {
    "input_reference": Upload(
        line="image", medium="image", meaning="The first image of the video."
    ),
    "input_last_image": Upload(
        line="last_image", medium="image", meaning="The last image of the video."
    ),
    "input_video": Upload(
        line="video", medium="video", meaning="A video to change, or the control video of VACE."
    ),
    "input_mask": Upload(
        line="mask",
        medium="video",
        meaning="Mask of input_video, of its size and length: white is made, black is kept.",
    ),
    "reference_images": Upload(
        line="reference_images",
        medium="image",
        meaning="Images of what the video shall show.",
        most=4,
    ),
}
"""All files that a request may carry; the model decides which of them are offered."""


def given_files(
    fields: Mapping[str, Any], offered: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of the offered files of a request, and its other fields.

    A field of several files has a list. Raises ApiError for other kinds of values.
    """
    files: dict[str, Any] = {}
    others = dict(fields)
    for name in offered:
        url = others.pop(f"{name}[image_url]", None)  # as the openai package writes a reference
        value = others.pop(name, None)
        value = url if value in (None, "", []) else value
        if value in (None, "", []):
            continue
        if UPLOADS[name].most == 1:
            files[name] = content_of(name, value)
        else:
            given = value if isinstance(value, list) else [value]
            if len(given) > UPLOADS[name].most:
                raise refused(name, f"has {len(given)} files; at most {UPLOADS[name].most} do")
            files[name] = [content_of(name, one) for one in given]
    return files, others


def content_of(name: str, value: object) -> bytes:
    """Returns the bytes of a file or a data: URL; raises ApiError for anything else."""
    if isinstance(value, Mapping):
        value = value.get("image_url")
    if isinstance(value, bytes):
        return value
    found = DATA_URL.match(value) if isinstance(value, str) else None
    if not isinstance(value, str) or found is None:
        raise refused(name, "must be a file, or a data: URL with base64; addresses are not opened")
    try:
        return base64.b64decode(value[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise refused(name, "is not valid base64") from None


def clean_image(content: bytes, name: str = "input_reference") -> bytes:
    """Returns the image as PNG, upright and in RGB; raises ApiError for anything else."""
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            Image.open(io.BytesIO(content), formats=FORMATS) as image,
        ):
            check_size(name, *image.size)
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except ApiError:
        raise
    except Exception:  # decoders raise many kinds, with addresses in their messages
        raise refused(name, f"is not a readable {', '.join(FORMATS)} image") from None
    buffer = io.BytesIO()
    upright.save(buffer, format="PNG")
    return buffer.getvalue()


def check_size(name: str, width: int, height: int) -> None:
    """Raises ApiError before an image of a bad size is decoded."""
    if width * height > MOST_PIXELS:
        raise refused(name, f"has {width}x{height} pixels; at most {MOST_PIXELS} are read")
    if min(width, height) < SHORTEST_SIDE:
        raise refused(name, f"has {width}x{height} pixels; both sides need {SHORTEST_SIDE}")


def video_suffix(content: bytes) -> str | None:
    """Returns the suffix of a video by its first bytes; None for containers that are not read.

    Playlists and the like are not read: FFmpeg would open the files and addresses that they name.
    """
    if content[4:8] == b"ftyp":
        return ".mp4"
    if content[:4] == b"\x1a\x45\xdf\xa3":
        return ".webm"
    return ".gif" if content[:4] == b"GIF8" else None


def check_video(path: Path, name: str, *, most_pixels: int) -> None:
    """Raises ApiError unless the whole video can be read within the limits.

    Size and length are compared with the limits before more than one frame is decoded.
    """
    try:
        frames, height, width = measure_video(path)
        if not frames:
            raise refused(name, "contains no frames")
        if min(width, height) < SHORTEST_SIDE or max(width, height) > MOST_SIDE:
            sides = f"from {SHORTEST_SIDE} to {MOST_SIDE}"
            raise refused(name, f"has {width}x{height} pixels; both sides must be {sides}")
        if frames > MOST_VIDEO_FRAMES:
            raise refused(name, f"has {frames} frames; at most {MOST_VIDEO_FRAMES} are read")
        if frames * height * width > most_pixels:
            shown = f"{frames} frames of {width}x{height} pixels"
            raise refused(name, f"has {shown}; at most {most_pixels} pixels are read in all")
        read_frames(path, most_pixels=most_pixels)
    except ApiError:
        raise
    except VideoError:
        raise refused(name, "is damaged, cut short or too large") from None
    except Exception:  # decoders raise many kinds
        raise refused(name, f"is not a readable {UPLOADS[name].formats} video") from None


def refused(name: str, rule: str) -> ApiError:
    """Returns the error of a file that is not taken."""
    return bad_request(f"{name}: {rule}.", param=name, code=f"invalid_{UPLOADS[name].medium}")


class InputFiles:
    """The folder of images and videos that jobs need; a name is a digest and a suffix."""

    def __init__(self, folder: FilePath, *, most_video_pixels: int = 500_000_000):
        self._folder, self._most_pixels = folder, most_video_pixels

    def keep_all(self, files: Mapping[str, Any]) -> dict[str, Any]:
        """Stores the files of a request; returns their names by field. Raises ApiError."""
        return {
            name: [self.keep(name, one) for one in value]
            if isinstance(value, list)
            else self.keep(name, value)
            for name, value in files.items()
        }

    def keep(self, name: str, content: bytes) -> str:
        """Stores one file of a request and returns its name; raises ApiError."""
        if UPLOADS[name].medium == "image":
            return self._write(clean_image(content, name), ".png")
        suffix = video_suffix(content)
        if suffix is None:
            raise refused(name, f"is not an {UPLOADS[name].formats} video")
        kept = f"{hashlib.sha256(content).hexdigest()}{suffix}"
        if self.path(kept).exists():  # checked before
            return self._write(content, suffix)
        with replacing(self.path(kept)) as unfinished:
            unfinished.write_bytes(content)
            check_video(local_copy(unfinished), name, most_pixels=self._most_pixels)
        return kept

    def _write(self, content: bytes, suffix: str) -> str:
        name = f"{hashlib.sha256(content).hexdigest()}{suffix}"
        # A file that exists is written again: its age protects it from the next sweep.
        with replacing(self.path(name)) as unfinished:
            unfinished.write_bytes(content)
        return name

    def path(self, name: str) -> FilePath:
        """Returns the path of a file; raises ValueError for what is no name of this folder."""
        if not KEPT.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an input")
        return self._folder / name

    def remove(self, name: str) -> None:
        """Removes a file."""
        self.path(name).unlink(missing_ok=True)

    def sweep(self, needed: set[str], *, older_than: float = 0.0) -> int:
        """Removes the files that no job needs and that are old enough; returns how many."""
        if not self._folder.exists():
            return 0
        removed, before = 0, time.time() - older_than
        for path in self._folder.iterdir():
            if path.name not in needed and changed_at(path) <= before:
                path.unlink(missing_ok=True)
                removed += 1
        return removed


def changed_at(path: FilePath) -> float:
    """Returns when a file was written, in seconds since 1970."""
    status = path.stat()
    return status.st_mtime if isinstance(status, os.stat_result) else float(status.mtime)


def inputs_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the files among the fields of a job: names, or lists of names."""
    return {name: value for name, value in fields.items() if name in UPLOADS}


def names_of(jobs: Iterable[Mapping[str, Any]]) -> set[str]:
    """Returns the names of all files that the fields of jobs refer to."""
    found: set[str] = set()
    for fields in jobs:
        for value in inputs_of(fields).values():
            found.update(value if isinstance(value, list) else [value])
    return found
