"""H.264 video files: written atomically by the ffmpeg of imageio-ffmpeg, and read back.

frames [F Y X 3] -> raw RGB -> ffmpeg (libx264) -> .name.mp4 beside the target -> name.mp4
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import imageio_ffmpeg
import numpy as np
from jaxtyping import Float, UInt8

from maxdiffusion.runtime.atomic import replacing
from maxdiffusion.runtime.ffmetadata import format_tags, parse_tags
from maxdiffusion.runtime.problems import RunFailed

Frames = Float[np.ndarray, "F Y X 3"] | UInt8[np.ndarray, "F Y X 3"]

IDENTITY = "episode_id"  # of the tags that mp4 knows, the one that is meant to tell videos apart
HEADER_BYTES = 1 << 20  # the tags stand before the frames, with a few bytes for each of those
CRF = 18  # of libx264: the usual number for no visible loss
_RAW_STREAM = re.compile(
    r"Video: rawvideo.*?, (?P<columns>\d+)x(?P<rows>\d+)\b.*? (?P<fps>[\d.]+) fps"
)
_ROTATION = re.compile(r"displaymatrix: rotation of (?P<degrees>-?[\d.]+) degrees")
_DIMENSIONS = re.compile(r"^#dimensions 0: (?P<columns>\d+)x(?P<rows>\d+)$", re.MULTILINE)
_SCALING = "bicubic+accurate_rnd+full_chroma_int"  # bicubic averages over what it shrinks


class VideoError(RunFailed):
    """A video could not be written or read; says which, and what ffmpeg said."""


@dataclass(frozen=True, kw_only=True)
class VideoMetadata:
    """What a file says of its making: the prompt as its title, the settings as JSON."""

    prompt: str
    settings: Mapping[str, object]

    def tags(self) -> dict[str, str]:
        """The mp4 tags."""
        settings = json.dumps(self.settings, ensure_ascii=False)
        return {"title": _encodable(self.prompt), "comment": _encodable(settings)}


def _encodable(text: str) -> str:
    """Text with its half surrogate pairs, which UTF-8 lacks, in the form that JSON reads back."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_bytes(frame: np.ndarray) -> np.ndarray:
    """A frame as 8-bit numbers; floats in 0..1 are cut off (not rounded), as diffusers does."""
    if frame.dtype == np.uint8:
        return frame
    return (np.clip(frame, 0, 1) * 255).astype(np.uint8)


def write_video(
    path: Path,
    frames: Frames,
    *,
    fps: float,
    metadata: VideoMetadata | None = None,
    identity: str | None = None,
) -> None:
    """Writes `frames` to `path` as H.264, of exactly their size; all of it or nothing.

    `identity` is a word that `is_video_of` finds again, whatever else is said of the making.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames of shape {frames.shape}: must be [frames, height, width, 3]")
    if not fps > 0:
        raise ValueError(f"fps={fps}: must be above 0")
    with replacing(path) as unfinished, tempfile.TemporaryDirectory() as scratch:
        tags = Path(scratch) / "tags.txt"
        said = (metadata.tags() if metadata else {}) | ({IDENTITY: identity} if identity else {})
        tags.write_text(format_tags(said), "utf-8", newline="")
        command = _encoder_command(frames.shape, fps, tags=tags, target=unfinished)
        _run_encoder(command, frames, path)


def is_video_of(path: Path, identity: str) -> bool:
    """Whether `path` is a video that was written with this identity."""
    try:
        with path.open("rb") as stream:
            return identity.encode() in stream.read(HEADER_BYTES)
    except FileNotFoundError:
        return False


def _encoder_command(shape: tuple[int, ...], fps: float, *, tags: Path, target: Path) -> list[str]:
    rows, columns = shape[1:3]
    # 4:2:0 is what every player shows, but it needs even sizes; 4:4:4 keeps odd ones.
    pixels = "yuv420p" if rows % 2 == 0 and columns % 2 == 0 else "yuv444p"
    bt709 = [
        part
        for name in ("-colorspace", "-color_primaries", "-color_trc")
        for part in (name, "bt709")
    ]
    return [
        *(imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-nostdin", "-loglevel", "error"),
        *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{columns}x{rows}", "-r", str(fps)),
        *("-i", "pipe:0", "-f", "ffmetadata", "-i", str(tags), "-map", "0:v"),
        *("-map_metadata", "1", "-c:v", "libx264", "-crf", str(CRF), "-pix_fmt", pixels),
        *("-vf", "scale=out_color_matrix=bt709:out_range=tv", "-color_range", "tv", *bt709),
        *("-movflags", "+faststart", "-f", "mp4", str(target)),
    ]


def _run_encoder(command: list[str], frames: Frames, path: Path) -> None:
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said)
        assert process.stdin is not None
        try:
            _feed(process.stdin, frames)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.wait() != 0:
            said.seek(0)
            raise VideoError(f"{path}: ffmpeg could not write it: {_last_words(said.read())}")


def _feed(pipe: IO[bytes], frames: Frames) -> None:
    """Sends all frames; an encoder that stops listening says why in its exit code."""
    try:
        with pipe:
            for frame in frames:
                pipe.write(np.ascontiguousarray(to_bytes(np.asarray(frame))).data)
    except BrokenPipeError:
        return


def read_video(path: Path) -> tuple[UInt8[np.ndarray, "F Y X 3"], float]:
    """The frames of a video, and its frames per second."""
    raw, said = _read(path, "-f", "rawvideo", "-pix_fmt", "rgb24", level="info")
    streams = list(_RAW_STREAM.finditer(said))
    if not streams:
        raise VideoError(f"{path}: ffmpeg found no video in it")
    about = streams[-1]  # after the tags, whose text may say anything
    columns, rows, fps = int(about["columns"]), int(about["rows"]), float(about["fps"])
    return np.frombuffer(raw, np.uint8).reshape(-1, rows, columns, 3), fps


def measure_video(path: Path) -> tuple[int, int, int]:
    """Frames, height and width of a video as it is shown; nothing is decoded."""
    listed, said = _read(path, "-map", "0:v:0", "-c", "copy", "-f", "framecrc", level="info")
    table = listed.decode("utf-8", "replace")
    about = _DIMENSIONS.search(table)
    if about is None:
        raise VideoError(f"{path}: ffmpeg found no size in it")
    frames = sum(1 for line in table.splitlines() if line.startswith("0,"))
    rows, columns = int(about["rows"]), int(about["columns"])
    turns = [float(found["degrees"]) for found in _ROTATION.finditer(said)]
    upright = not turns or round(turns[-1] / 90) % 2 == 0
    return (frames, rows, columns) if upright else (frames, columns, rows)


def read_clip(path: Path, *, frames: int, height: int, width: int) -> UInt8[np.ndarray, "F Y X 3"]:
    """The first `frames` frames, scaled to cover the size and cut at the centre."""
    cover = f"scale={width}:{height}:force_original_aspect_ratio=increase:flags={_SCALING}"
    form = ("-f", "rawvideo", "-pix_fmt", "rgb24")
    filters = ("-map", "0:v:0", "-frames:v", str(frames), "-vf", f"{cover},crop={width}:{height}")
    raw, _ = _read(path, *filters, *form, level="error")
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def read_metadata(path: Path) -> dict[str, str]:
    """The tags of a video: `title` (the prompt), `comment` (settings as JSON), and ffmpeg's own."""
    tags, _ = _read(path, "-f", "ffmetadata", level="error")
    return parse_tags(tags.decode("utf-8", "replace"))


def _read(path: Path, *form: str, level: str) -> tuple[bytes, str]:
    """What ffmpeg makes of a file in some form, and what it says meanwhile."""
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    command = [ffmpeg, "-nostdin", "-nostats", "-loglevel", level, "-i", str(path), *form, "pipe:1"]
    result = subprocess.run(command, capture_output=True)
    if result.returncode != 0:
        raise VideoError(f"{path}: ffmpeg could not read it: {_last_words(result.stderr)}")
    return result.stdout, result.stderr.decode("utf-8", "replace")


def _last_words(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()[-500:] or "it gave no reason"
