"""A folder of videos with captions: `name.mp4` beside `name.txt`, or lines of captions.jsonl.

captions.jsonl:  {"file": "name.mp4", "caption": "..."}
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.runtime.video import VideoError, read_video
from maxdiffusion.training.data import Sample

CAPTIONS = "captions.jsonl"


class UnusableClip(ValueError):
    """A clip that cannot be trained on; says which, and why."""


@dataclass(frozen=True, kw_only=True)
class VideoFolder:
    """Clips of one size out of a folder: scaled to cover it, cut at the centre, from the start."""

    folder: Path
    frames: int
    height: int
    width: int

    @cached_property
    def entries(self) -> tuple[tuple[Path, str], ...]:
        """Files and captions in the order of their names; everything wrong is raised at once."""
        if not self.folder.is_dir():
            raise ProblemsFound([_wrong(self.folder, "is not a folder")])
        table = self.folder / CAPTIONS
        pairs = list(_listed(table) if table.is_file() else _beside(self.folder))
        problems = [
            _wrong(file, "has no caption (a .txt beside it)" if file.is_file() else "is missing")
            for file, text in pairs
            if not text or not file.is_file()
        ]
        if not pairs:
            problems.append(_wrong(self.folder, f"holds no .mp4 and no {CAPTIONS}"))
        if problems:
            raise ProblemsFound(problems)
        return tuple(sorted(pairs))

    def __len__(self) -> int:
        return len(self.entries)

    def caption(self, index: int) -> str:
        """What is said of a clip."""
        return self.entries[index][1]

    def __getitem__(self, index: int) -> Sample:
        """The frames of a clip, as bytes; raises UnusableClip."""
        file, _ = self.entries[index]
        try:
            video, _ = read_video(file)
        except VideoError as error:
            raise UnusableClip(str(error)) from error
        count, rows, columns = video.shape[:3]
        if count < self.frames:
            raise UnusableClip(f"{file}: has {count} frames, and {self.frames} are needed")
        if rows < self.height or columns < self.width:
            size = f"{columns}x{rows}"
            raise UnusableClip(f"{file}: is {size}, and {self.width}x{self.height} is needed")
        return {"video": _fitted(video[: self.frames], self.height, self.width)}

    def describe(self) -> dict[str, object]:
        """What the clips depend on, as plain values."""
        return {
            "source": str(self.folder),
            "files": [[file.name, file.stat().st_size, text] for file, text in self.entries],
            "size": [self.frames, self.height, self.width],
        }


def _listed(table: Path) -> Iterator[tuple[Path, str]]:
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield table.parent / row["file"], str(row["caption"])
        except (ValueError, KeyError, TypeError) as error:
            rule = f'line {number} must be {{"file": ..., "caption": ...}} ({error})'
            raise ProblemsFound([_wrong(table, rule)]) from error


def _beside(folder: Path) -> Iterator[tuple[Path, str]]:
    videos = {file.stem: file for file in folder.glob("*.mp4")}
    texts = {file.stem: file.read_text(encoding="utf-8").strip() for file in folder.glob("*.txt")}
    for stem in {*videos, *texts}:
        yield videos.get(stem, folder / f"{stem}.mp4"), texts.get(stem, "")


def _fitted(video: np.ndarray, height: int, width: int) -> np.ndarray:
    """Frames scaled to cover the size, by areas of whole pixels, and cut at the centre."""
    rows, columns = video.shape[1:3]
    factor = max(1, min(rows // height, columns // width))
    top, left = (rows - factor * height) // 2, (columns - factor * width) // 2
    cut = video[:, top : top + factor * height, left : left + factor * width]
    blocks = cut.reshape(len(video), height, factor, width, factor, 3)
    return np.rint(blocks.mean(axis=(2, 4))).astype(np.uint8)


def _wrong(path: Path, rule: str) -> Problem:
    remedy = f"Put name.mp4 and name.txt side by side, or list files and captions in {CAPTIONS}"
    return Problem(name="training data", value=str(path), rule=rule, remedy=remedy)
