"""Clips of different sizes and lengths, each in the bucket that loses least of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion.runtime.json_lines import append_lines, whole_lines
from maxdiffusion.training.video_folder import Captioned, ClipSize, UnusableClip, size_of

Advance = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """Videos by the size that they are cut to, and why some are left out, by their file."""

    buckets: Mapping[ClipSize, tuple[Captioned, ...]]
    left_out: Mapping[Path, str]


def kept(clip: ClipSize, bucket: ClipSize) -> float:
    """What is left of a clip in a bucket, up to 1: of its length, its picture and its detail.

    A clip is scaled to cover the bucket (which costs detail, by the scale), cut at the sides to
    fit (which costs a share of the picture), and cut at the end (a share of its length).
    """
    scale = max(bucket.height / clip.height, bucket.width / clip.width)
    picture = bucket.height * bucket.width / (clip.height * clip.width * scale**2)
    return bucket.frames / clip.frames * picture * scale


def bucket_of(clip: ClipSize, buckets: Sequence[ClipSize]) -> ClipSize | None:
    """The bucket that keeps most of a clip (of equals the first); None: it fits into none."""
    fitting = [bucket for bucket in buckets if clip.covers(bucket)]
    return max(fitting, key=lambda bucket: kept(clip, bucket), default=None)


def sort_videos(
    videos: Sequence[Captioned],
    buckets: Sequence[ClipSize],
    *,
    notes: Path,
    advance: Advance = lambda: None,
) -> Sorted:
    """Every video in its bucket, in the order given; `notes` keeps sizes for the next time."""
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
    """Sizes of videos, each measured once: a file of JSON lines remembers them."""

    def __init__(self, notes: Path):
        self._notes = notes
        self._known = {_key(line): line["size"] for line in whole_lines(notes)}

    def size(self, file: Path) -> ClipSize:
        """The size of a video; raises UnusableClip."""
        about = {"file": str(file), "bytes": file.stat().st_size}
        held = self._known.get(_key(about))
        if held is not None:
            return ClipSize(**held)
        size = size_of(file)
        append_lines(self._notes, [{**about, "size": vars(size)}])
        return size


def _key(line: Mapping[str, Any]) -> tuple[str, int]:
    return line["file"], line["bytes"]
