"""A folder of videos with captions: `name.mp4` beside `name.txt`, or lines of captions.jsonl.

captions.jsonl:  {"file": "name.mp4", "caption": "..."}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.runtime.video import VideoError, measure_video, read_clip
from maxdiffusion.training.data import Sample

CAPTIONS = "captions.jsonl"
Captioned = tuple[Path, str]  # a video file and what is said of it


class UnusableClip(ValueError):
    """A clip that cannot be trained on; says which, and why."""


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
        """Whether the other size can be cut out of this one."""
        mine, theirs = ((size.frames, size.height, size.width) for size in (self, other))
        return all(have >= need for have, need in zip(mine, theirs, strict=True))


@dataclass(frozen=True, kw_only=True)
class VideoClips:
    """Clips of one size out of videos: scaled to cover it, cut at the centre, from the start."""

    videos: tuple[Captioned, ...]
    size: ClipSize

    def __len__(self) -> int:
        return len(self.videos)

    def caption(self, index: int) -> str:
        """What is said of a clip."""
        return self.videos[index][1]

    def __getitem__(self, index: int) -> Sample:
        """The frames of a clip, as bytes; raises UnusableClip."""
        file, size = self.videos[index][0], self.size
        found = size_of(file)
        if not found.covers(size):
            raise UnusableClip(f"{file}: is {found}, and {size} (frames, height, width) is needed")
        try:
            video = read_clip(file, frames=size.frames, height=size.height, width=size.width)
        except VideoError as error:
            raise UnusableClip(str(error)) from error
        if len(video) < size.frames:
            raise UnusableClip(f"{file}: only {len(video)} of {size.frames} frames can be read")
        return {"video": video}

    def describe(self) -> dict[str, object]:
        """What the clips depend on, as plain values."""
        return {
            "source": "videos",
            "files": [[file.name, file.stat().st_size, text] for file, text in self.videos],
            "size": str(self.size),
        }


def size_of(file: Path) -> ClipSize:
    """The size of a video; raises UnusableClip."""
    try:
        frames, height, width = measure_video(file)
    except VideoError as error:
        raise UnusableClip(str(error)) from error
    if not frames:
        raise UnusableClip(f"{file}: has no frames")
    return ClipSize(frames=frames, height=height, width=width)


def videos_in(folder: Path) -> tuple[Captioned, ...]:
    """Videos and captions in the order of their names; everything wrong is raised at once."""
    if not folder.is_dir():
        raise ProblemsFound([_wrong(folder, "is not a folder")])
    table = folder / CAPTIONS
    pairs = list(_listed(table) if table.is_file() else _beside(folder))
    problems = [
        _wrong(file, "has no caption (a .txt beside it)" if file.is_file() else "is missing")
        for file, text in sorted(pairs)
        if not text or not file.is_file()
    ]
    if not pairs:
        problems.append(_wrong(folder, f"holds no .mp4 and no {CAPTIONS}"))
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


def _beside(folder: Path) -> Iterator[Captioned]:
    videos = {file.stem: file for file in folder.glob("*.mp4")}
    texts = {file.stem: file.read_text(encoding="utf-8").strip() for file in folder.glob("*.txt")}
    for stem in {*videos, *texts}:
        yield videos.get(stem, folder / f"{stem}.mp4"), texts.get(stem, "")


def _wrong(path: Path, rule: str) -> Problem:
    remedy = f"Put name.mp4 and name.txt side by side, or list files and captions in {CAPTIONS}"
    return Problem(name="training data", value=str(path), rule=rule, remedy=remedy)
