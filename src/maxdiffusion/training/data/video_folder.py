"""Clips from a folder of videos and images with captions, sorted into buckets of one size each.

Captions are in `name.txt` for `name.mp4`, or in captions.jsonl, one object per line:

    {"file": "name.mp4", "caption": "..."}

An image is a clip of one frame, so buckets of one frame take images, and those of more take videos.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.runtime.files import FilePath, append_json_lines, read_json_lines
from maxdiffusion.runtime.video import VideoError, measure_video, read_clip
from maxdiffusion.training.data.batches import Sample

CAPTIONS = "captions.jsonl"
IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp"})
CLIPS = IMAGES | {".mp4"}
Captioned = tuple[Path, str]  # a video file and its caption


class UnusableClip(ValueError):
    """A clip that cannot be used; the message names the file and the reason."""


@dataclass(frozen=True, kw_only=True, order=True)
class ClipSize:
    """Frames, height and width of a clip."""

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if min(self.frames, self.height, self.width) < 1:
            raise ValueError(f"{self}: frames, height and width must be at least 1")

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"

    def covers(self, other: "ClipSize") -> bool:
        """Returns whether the other size can be cut out of this one."""
        mine, theirs = ((size.frames, size.height, size.width) for size in (self, other))
        return all(have >= need for have, need in zip(mine, theirs, strict=True))


@dataclass(frozen=True, kw_only=True)
class VideoClips:
    """Clips of one size: videos are scaled to cover it, and cropped at the centre and the end."""

    videos: tuple[Captioned, ...]
    size: ClipSize

    def __len__(self) -> int:
        return len(self.videos)

    def caption(self, index: int) -> str:
        """Returns the caption of a clip."""
        return self.videos[index][1]

    def __getitem__(self, index: int) -> Sample:
        """Returns the frames of a clip, as bytes. Raises UnusableClip."""
        file, size = self.videos[index][0], self.size
        found = size_of(file)
        if not found.covers(size):
            raise UnusableClip(f"{file}: is {found}, and {size} (frames, height, width) is needed")
        if is_image(file):
            return {"video": cover(open_image(file), size.height, size.width)[None]}
        try:
            video = read_clip(file, frames=size.frames, height=size.height, width=size.width)
        except VideoError as error:
            raise UnusableClip(str(error)) from error
        if len(video) < size.frames:
            raise UnusableClip(f"{file}: only {len(video)} of {size.frames} frames can be read")
        return {"video": video}

    def describe(self) -> dict[str, object]:
        """Returns everything that the clips depend on, as JSON values."""
        return {
            "source": "videos",
            "files": [[file.name, file.stat().st_size, text] for file, text in self.videos],
            "size": str(self.size),
        }


def is_image(file: Path) -> bool:
    """Returns whether a file is an image, by its name."""
    return file.suffix.lower() in IMAGES


def open_image(file: Path) -> Image.Image:
    """Returns an image in RGB, turned upright. Raises UnusableClip."""
    try:
        with Image.open(file) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UnusableClip(f"{file}: could not be read as an image ({error})") from error


def cover(image: Image.Image, height: int, width: int) -> UInt8[np.ndarray, "Y X 3"]:
    """Returns an image scaled to cover a size and cropped at the centre, as `read_clip` does."""
    return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC))


def size_of(file: Path) -> ClipSize:
    """Returns the size of a video or an image. Raises UnusableClip."""
    if is_image(file):
        width, height = open_image(file).size
        return ClipSize(frames=1, height=height, width=width)
    try:
        frames, height, width = measure_video(file)
    except VideoError as error:
        raise UnusableClip(str(error)) from error
    if not frames:
        raise UnusableClip(f"{file}: has no frames")
    return ClipSize(frames=frames, height=height, width=width)


def videos_in(folder: Path) -> tuple[Captioned, ...]:
    """Returns videos and captions, sorted by name. Raises ProblemsFound with all problems."""
    if not folder.is_dir():
        raise ProblemsFound([_wrong(folder, "is not a folder")])
    table = folder / CAPTIONS
    pairs = list(_listed(table) if table.is_file() else _same_names(folder))
    problems = [
        _wrong(file, "has no caption (a .txt of the same name)" if file.is_file() else "is missing")
        for file, text in sorted(pairs)
        if not text or not file.is_file()
    ]
    if not pairs:
        problems.append(_wrong(folder, f"holds no .mp4, no image and no {CAPTIONS}"))
    if problems:
        raise ProblemsFound(problems)
    return tuple(sorted(pairs))


def _listed(table: Path) -> Iterator[Captioned]:
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield table.parent / row["file"], str(row["caption"])
        except (ValueError, KeyError, TypeError) as error:
            rule = f'line {number} must be {{"file": ..., "caption": ...}} ({error})'
            raise ProblemsFound([_wrong(table, rule)]) from error


def _same_names(folder: Path) -> Iterator[Captioned]:
    clips = [file for file in folder.iterdir() if file.suffix.lower() in CLIPS]
    texts = {file.stem: file.read_text(encoding="utf-8").strip() for file in folder.glob("*.txt")}
    yield from ((file, texts.get(file.stem, "")) for file in clips)
    for stem in {*texts} - {file.stem for file in clips}:
        yield folder / f"{stem}.mp4", texts[stem]


def _wrong(path: Path, rule: str) -> Problem:
    remedy = f"Put name.txt next to name.mp4, or list files and captions in {CAPTIONS}"
    return Problem(name="training data", value=str(path), rule=rule, remedy=remedy)


Advance = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """Videos by bucket, and the reasons why others fit none."""

    buckets: Mapping[ClipSize, tuple[Captioned, ...]]
    left_out: Mapping[Path, str]


def kept_share(clip: ClipSize, bucket: ClipSize) -> float:
    """Returns the share of a clip that a bucket keeps: length x picture area x detail.

    A clip is scaled to cover the bucket (loses detail by the scale), cropped at the sides (loses
    picture area) and at the end (loses length).
    """
    scale = max(bucket.height / clip.height, bucket.width / clip.width)
    picture = bucket.height * bucket.width / (clip.height * clip.width * scale**2)
    return bucket.frames / clip.frames * picture * scale


def bucket_of(clip: ClipSize, buckets: Sequence[ClipSize]) -> ClipSize | None:
    """Returns the bucket that keeps most of a clip (the first of equals), or None."""
    fitting = [bucket for bucket in buckets if clip.covers(bucket)]
    return max(fitting, key=lambda bucket: kept_share(clip, bucket), default=None)


def sort_videos(
    videos: Sequence[Captioned],
    buckets: Sequence[ClipSize],
    *,
    notes: FilePath,
    advance: Advance = lambda: None,
) -> Sorted:
    """Returns every video in its bucket, in order; caches measured sizes in `notes`."""
    sorted_in: dict[ClipSize, list[Captioned]] = {bucket: [] for bucket in buckets}
    left_out: dict[Path, str] = {}
    measured = Measured(notes)
    for file, caption in videos:
        try:
            size = measured.size(file)
        except UnusableClip as error:
            left_out[file] = str(error)
        else:
            bucket = bucket_of(size, buckets)
            if bucket is None:
                names = ", ".join(map(str, buckets))
                left_out[file] = f"{file}: is {size}, and smaller than every bucket ({names})"
            else:
                sorted_in[bucket].append((file, caption))
        advance()
    return Sorted(
        buckets={bucket: tuple(held) for bucket, held in sorted_in.items() if held},
        left_out=left_out,
    )


class Measured:
    """Sizes of videos, each measured once and cached in a file of JSON lines."""

    def __init__(self, notes: FilePath):
        self._notes = notes
        self._known = {_key(line): line["size"] for line in read_json_lines(notes)}

    def size(self, file: Path) -> ClipSize:
        """Returns the size of a video. Raises UnusableClip."""
        about = {"file": str(file), "bytes": file.stat().st_size}
        held = self._known.get(_key(about))
        if held is not None:
            return ClipSize(**held)
        size = size_of(file)
        append_json_lines(self._notes, [{**about, "size": vars(size)}])
        return size


def _key(line: Mapping[str, Any]) -> tuple[str, int]:
    return line["file"], line["bytes"]
