"""Writes and reads H.264 video files with PyAV, the Python binding of FFmpeg.

    write_video     frames [F Y X 3] -> YUV (BT.709) -> libx264 -> mp4, whole or not at all
    read_video      all frames, upright, at a constant rate
    read_frames     frames at another rate, up to a number; refuses damaged and enormous files
    read_clip       the first frames, scaled to cover a size and cropped at the centre
    measure_video   frames and size without decoding them all
    read_metadata   tags such as the prompt

Filters are the same strings as on FFmpeg's command line.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import av
import numpy as np
from av.codec.codec import UnknownCodecError
from av.container import InputContainer
from av.filter import Graph
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream
from jaxtyping import Float, Float32, UInt8
from PIL import Image

from maxdiffusion.errors import RunFailed
from maxdiffusion.runtime.files import FilePath, replacing

Frames = Float[np.ndarray, "F Y X 3"] | UInt8[np.ndarray, "F Y X 3"]
Filter = tuple[str, str]  # name and arguments
# Of any size: a function that resizes takes one and returns another.
InputImage: TypeAlias = Image.Image | Float32[np.ndarray, "_ _ 3"]
InputFrames: TypeAlias = UInt8[np.ndarray, "_ _ _ 3"] | Float32[np.ndarray, "_ _ _ 3"]

T = TypeVar("T")

CODEC = "libx264"
CRF = 18  # of libx264: commonly used for no visible loss
# Without it x264 165 gives small frames (48 x 64) other bits from run to run: the vector code of
# its macroblock tree is at fault.
REPRODUCIBLE = "cpu-independent=1"
IDENTITY = "episode_id"  # a tag of mp4 that is meant to identify a video
HEADER_BYTES = 1 << 20  # faststart puts tags before the frames, with a few bytes for each frame
LARGEST_RATE_DENOMINATOR = 1_001_000  # FFmpeg's own limit when it reads a frame rate
_TO_BT709: Filter = ("scale", "out_color_matrix=bt709:out_range=tv")
_KEEP_SIZE: Filter = ("scale", "flags=bicubic")
_SCALING = "bicubic+accurate_rnd+full_chroma_int"  # bicubic averages over what it shrinks


class VideoError(RunFailed):
    """A video could not be written or read. The message has its path and FFmpeg's reason."""


@dataclass(frozen=True, kw_only=True)
class VideoMetadata:
    """The origin of a video: its prompt, kept as the title, and its settings, kept as JSON."""

    prompt: str
    settings: Mapping[str, object]

    def tags(self) -> dict[str, str]:
        """Returns the mp4 tags."""
        settings = json.dumps(self.settings, ensure_ascii=False)
        return {"title": _encodable(self.prompt), "comment": _encodable(settings)}


def _encodable(text: str) -> str:
    """Escapes lone surrogates, which UTF-8 lacks, as JSON does; drops NUL, which ends C strings."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "")


# Writing


def to_bytes(frame: np.ndarray) -> np.ndarray:
    """Returns a frame as uint8. Floats in 0..1 are truncated, not rounded, as in diffusers."""
    if frame.dtype == np.uint8:
        return frame
    return (np.clip(frame, 0, 1) * 255).astype(np.uint8)


def write_video(
    path: FilePath,
    frames: Frames,
    *,
    fps: float,
    metadata: VideoMetadata | None = None,
    identity: str | None = None,
) -> None:
    """Writes `frames` to `path` as H.264 in their exact size, atomically.

    `is_video_of` finds `identity` again, whatever the other metadata is.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames of shape {frames.shape}: must be [frames, height, width, 3]")
    if not fps > 0:
        raise ValueError(f"fps={fps}: must be above 0")
    tags = (metadata.tags() if metadata else {}) | ({IDENTITY: identity} if identity else {})
    with replacing(path) as unfinished, _errors(path, "write"):
        _encode(unfinished, frames, fps=fps, tags=tags)


def is_video_of(path: FilePath, identity: str) -> bool:
    """Returns whether `path` is a video that was written with this identity."""
    try:
        with path.open("rb") as stream:
            return identity.encode() in stream.read(HEADER_BYTES)
    except FileNotFoundError:
        return False


def _encode(path: Path, frames: Frames, *, fps: float, tags: Mapping[str, str]) -> None:
    rate = Fraction(fps).limit_denominator(LARGEST_RATE_DENOMINATOR)
    height, width = frames.shape[1:3]
    options = {"movflags": "+faststart"}
    with av.open(str(path), "w", format="mp4", container_options=options) as container:
        container.metadata.update(tags)
        stream = _video_stream(container, rate, height=height, width=width)
        blank = av.VideoFrame(width, height, "rgb24")
        graph = _graph(blank, 1 / rate, [_TO_BT709, ("format", str(stream.pix_fmt))])
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(_contiguous(pixels), format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            graph.vpush(frame)
            container.mux(stream.encode(graph.vpull()))
        container.mux(stream.encode(None))


def _contiguous(frame: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(to_bytes(np.asarray(frame)))


def _video_stream(
    container: av.container.OutputContainer, rate: Fraction, *, height: int, width: int
) -> VideoStream:
    options = {"crf": str(CRF), "x264-params": REPRODUCIBLE}
    stream = container.add_stream(CODEC, rate=rate, options=options)
    assert isinstance(stream, VideoStream)
    stream.height, stream.width = height, width
    stream.thread_type = "FRAME"  # PyAV's default splits every frame into slices, which costs bits
    # Every player shows 4:2:0, which needs even sizes; 4:4:4 keeps odd ones.
    stream.pix_fmt = "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"
    stream.color_range = ColorRange.MPEG
    stream.colorspace = Colorspace.ITU709
    stream.color_primaries = ColorPrimaries.BT709
    stream.color_trc = ColorTrc.BT709
    return stream


# Reading


def read_video(path: Path) -> tuple[UInt8[np.ndarray, "F Y X 3"], float]:
    """Returns the frames of a video and its frames per second."""
    with _opened(path) as (container, stream):
        frames = list(_decode(stream, _decoded(container, stream), [_KEEP_SIZE]))
        if not frames:
            raise VideoError(f"{path}: contains no frames")
        return np.stack(frames), float(_frame_rate(stream))


def read_frames(
    path: Path, *, fps: float | None = None, most: int | None = None, most_pixels: int
) -> UInt8[np.ndarray, "F Y X 3"]:
    """Returns the frames of a video at `fps`, or at its own rate; at most `most` of them.

    Frame i is the frame of the file that is nearest in time to i / fps (`resampled`). Raises
    `VideoError` if the file is damaged or cut short, or if more than `most_pixels` are asked for.
    """
    with _opened(path) as (container, stream):
        step = Fraction(1) if fps is None else _frame_rate(stream) / Fraction(fps)
        source = _decode(stream, _undamaged(path, container, stream), [_KEEP_SIZE])
        frames: list[np.ndarray] = []
        for frame in resampled(source, step, most):
            frames.append(frame)
            if len(frames) * frame.shape[0] * frame.shape[1] > most_pixels:
                size = f"{frame.shape[1]}x{frame.shape[0]}"
                limit = f"more than {most_pixels / 1e6:.0f} million pixels"
                raise VideoError(f"{path}: {len(frames)} frames of {size} are {limit}")
    if not frames:
        raise VideoError(f"{path}: contains no frames")
    return np.stack(frames)


def resampled(frames: Iterable[T], step: Fraction, most: int | None = None) -> Iterator[T]:
    """Yields frames at another rate; `step` is the old rate over the new one.

    Frame i of the result is frame floor(i * step + 1/2) of the source, the nearest in time; the
    result ends where the source does, or after `most` frames.
    """
    given = 0
    for index, frame in enumerate(frames):
        while given != most and math.floor(given * step + Fraction(1, 2)) == index:
            yield frame
            given += 1
        if given == most:
            return


def read_clip(path: Path, *, frames: int, height: int, width: int) -> UInt8[np.ndarray, "F Y X 3"]:
    """Returns up to `frames` first frames, scaled to cover the size and cropped at the centre."""
    cover = f"{width}:{height}:force_original_aspect_ratio=increase:flags={_SCALING}"
    filters = [("scale", cover), ("crop", f"{width}:{height}")]
    with _opened(path) as (container, stream):
        decoded = _decode(stream, _decoded(container, stream), filters)
        found = [frame for _, frame in zip(range(frames), decoded, strict=False)]
    return np.stack(found) if found else np.zeros((0, height, width, 3), np.uint8)


def measure_video(path: Path) -> tuple[int, int, int]:
    """Returns the frames, height and width of a video as it is shown. Decodes one frame."""
    with _opened(path) as (container, stream):
        packets = sum(1 for packet in container.demux(stream) if packet.size)
        height, width = stream.height, stream.width
    with _opened(path) as (container, stream):
        first = next(_decoded(container, stream), None)
        turned = first is not None and round(first.rotation / 90) % 2 != 0
    return (packets, width, height) if turned else (packets, height, width)


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the tags of a video: `title` (the prompt), `comment` (the settings), and others."""
    with _errors(path, "read"), av.open(str(path)) as container:
        return dict(container.metadata)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    with _errors(path, "read"), av.open(str(path)) as container:
        if not container.streams.video:
            raise VideoError(f"{path}: contains no video")
        yield container, container.streams.video[0]


@contextmanager
def _errors(path: FilePath, action: str) -> Iterator[None]:
    try:
        yield
    except UnknownCodecError as error:
        raise VideoError(f"{path}: this build of PyAV has no encoder {error}") from error
    except av.FFmpegError as error:
        raise VideoError(f"{path}: FFmpeg could not {action} it: {error.strerror}") from error


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[av.VideoFrame]:
    """Yields all frames that can be decoded. A damaged packet costs its own frames only."""
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.InvalidDataError:
            continue


def _undamaged(
    path: Path, container: InputContainer, stream: VideoStream
) -> Iterator[av.VideoFrame]:
    """Yields all frames; raises where one is damaged, or if the file ends before its last one."""
    found = 0
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise VideoError(f"{path}: is damaged or cut short after {found} frames")
        found += bool(packet.size)
        yield from packet.decode()
    if found < stream.frames:  # as the header states it; 0 if it does not
        raise VideoError(f"{path}: is cut short: {found} of {stream.frames} frames are there")


def _decode(
    stream: VideoStream, decoded: Iterable[av.VideoFrame], filters: Sequence[Filter]
) -> Iterator[UInt8[np.ndarray, "Y X 3"]]:
    """Yields RGB frames: at a constant rate, turned upright, and filtered."""
    graph = None
    for frame in decoded:
        if graph is None:
            constant_rate: Filter = ("fps", str(_frame_rate(stream)))
            chain = [constant_rate, *_upright(frame), *filters, ("format", "rgb24")]
            assert stream.time_base is not None
            graph = _graph(frame, stream.time_base, chain)
        graph.vpush(frame)
        yield from _pulled(graph)
    if graph is not None:
        graph.vpush(None)
        yield from _pulled(graph)


def _frame_rate(stream: VideoStream) -> Fraction:
    rate = stream.guessed_rate
    if not rate:
        raise VideoError(f"{stream.container.name}: FFmpeg found no frame rate")
    return rate


def _upright(frame: av.VideoFrame) -> list[Filter]:
    """Returns the filters that undo the rotation and mirroring of a phone's camera."""
    side_data = cast(SideDataContainer, frame.side_data)  # PyAV's stub has another type here
    matrices = [one for one in side_data if one.type is SideDataType.DISPLAYMATRIX]
    if not matrices:
        return []
    matrix = np.frombuffer(bytes(matrices[0]), np.int32)
    clockwise = -frame.rotation % 360
    if clockwise == 90:
        return [("transpose", "cclock_flip" if matrix[3] > 0 else "clock")]
    if clockwise == 270:
        return [("transpose", "clock_flip" if matrix[3] < 0 else "cclock")]
    if clockwise not in (0, 180):
        return [("rotate", f"{clockwise}*PI/180")]
    return [(name, "") for name, cell in (("hflip", 0), ("vflip", 4)) if matrix[cell] < 0]


def _pulled(graph: Graph) -> Iterator[UInt8[np.ndarray, "Y X 3"]]:
    while True:
        try:
            yield graph.vpull().to_ndarray()
        except (av.BlockingIOError, av.EOFError):
            return


def _graph(frame: av.VideoFrame, time_base: Fraction, filters: Sequence[Filter]) -> Graph:
    """Returns a chain of filters for frames like the given one."""
    graph = Graph()
    source = graph.add(
        "buffer",
        video_size=f"{frame.width}x{frame.height}",
        pix_fmt=frame.format.name,
        time_base=str(time_base),
        colorspace=str(int(frame.colorspace)),
        range=str(int(frame.color_range)),
    )
    nodes = [graph.add(name, arguments or None) for name, arguments in filters]
    graph.link_nodes(source, *nodes, graph.add("buffersink")).configure()
    return graph
