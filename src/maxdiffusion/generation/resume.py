"""Videos of a job on disk: which exist, which an earlier run has left, and how they are written.

A job of a prompts file continues where an earlier run of it stopped:

    wan_output_5_0.mp4                     a finished video; its identity is in the file
    wan_output_5_0.latents.safetensors     denoised, not decoded: latents [F Y X C], the identity

Denoising takes minutes, decoding seconds. Latents are stored as soon as they are denoised and
deleted once the video exists, so a killed run loses only the batch that it was denoising. Videos
are written in the background while the next ones are made:

    latents on the host ----moving----> file, until the video exists
    frames on the devices --moving----> bytes on the host --writing--> mp4
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maxdiffusion import __version__
from maxdiffusion.config.validate import VideoRequestLine
from maxdiffusion.distributed.coordination import broadcast_from_first, is_multiprocess
from maxdiffusion.generation.job import ResolvedJob, latents_facts
from maxdiffusion.runtime.files import (
    CacheKey,
    FilePath,
    as_path,
    is_object_store,
    local_copy,
    replacing,
    writing,
)
from maxdiffusion.runtime.video import VideoMetadata, is_video_of, write_video

LATENTS = "latents"
IDENTITY = "identity"
HostLatents = Float[np.ndarray, "B F Y X C"]
MADE_WITH = (
    *("negative_prompt", "height", "width", "num_frames", "fps", "num_inference_steps"),
    *("scheduler", "flow_shift", "denoising_step_list", "sigmas", "guidance_end_step"),
    *("use_magcache", "magcache_thresh", "magcache_K", "retention_ratio", "mag_ratios_base"),
    *("mag_ratios_base_720p", "mag_ratios_base_480p", "use_cfg_cache", "use_sen_cache"),
    *("use_taylor_cache", "taylor_cache_interval"),
    *("pretrained_model_name_or_path", "model_name"),
    *("weights_dtype", "activations_dtype", "attention"),
)
"""Config fields that the frames of a video depend on; the guidance of the model comes on top."""
GUIDANCE = {
    "wan2.2": (
        *("guidance_scale_high", "guidance_scale_low"),
        *("boundary_ratio", "boundary_step_index"),
    ),
    "wan2.1": ("guidance_scale",),
}
ANIMATE = (
    *("mode", "segment_frame_length", "prev_segment_conditioning_frames"),
    "animate_guidance_scale",
)
"""Config fields that the frames of Animate depend on besides."""


@dataclass(frozen=True, kw_only=True)
class Video:
    """One video to make, number `index` of the job.

    `changes` are settings that differ between videos: those of its line, and its initial latents.
    """

    prompt: str
    seed: int
    path: FilePath
    line: VideoRequestLine | None = None
    index: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Settings that all videos of a job are made with, and whether the job can be resumed."""

    made_with: Mapping[str, Any]
    embed_metadata: bool
    resumable: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Provenance":
        """Returns the provenance of videos, from all config fields with `auto` replaced."""
        names = (*MADE_WITH, *GUIDANCE[fields["model_name"]])
        return cls(
            made_with={name: fields[name] for name in names},
            embed_metadata=fields["embed_metadata"],
            resumable=bool(fields["prompts_file"]),
        )

    @property
    def fps(self) -> int:
        """Frames per second of the videos."""
        return self.made_with["fps"]

    def settings(self, video: Video) -> dict[str, Any]:
        """Returns everything that a video is made with."""
        return {"prompt": video.prompt, "seed": video.seed, **self.made_with, **video.changes}

    def identity(self, video: Video) -> str:
        """Returns a digest of everything that a video's frames depend on except the weights."""
        return f"maxdiffusion-{CacheKey(self.settings(video)).digest[:32]}"

    def metadata(self, video: Video) -> VideoMetadata | None:
        """Returns the tags of the video file; None if the config wants none."""
        if not self.embed_metadata:
            return None
        made_by = {"software": f"maxdiffusion {__version__}"}
        return VideoMetadata(prompt=video.prompt, settings=made_by | self.settings(video))


def list_videos(job: ResolvedJob) -> tuple[Video, ...]:
    """Returns the videos in order: every prompt with seeds seed, seed + 1, ..."""
    config, workload = job.config, job.workload
    folder = (
        as_path(config.output_dir)
        if is_object_store(config.output_dir)
        else Path(config.output_dir)
    )
    lines_and_seeds = [
        (line, (config.seed if line.seed is None else line.seed) + copy)
        for line in workload.lines
        for copy in range(workload.videos_per_prompt)
    ]
    changes = {line: changes_of(job, line) for line in workload.lines}
    digests = [{"latents": digest} for digest in latents_facts(job).values()]
    return tuple(
        Video(
            prompt=line.prompt,
            seed=seed,
            path=folder / config.output_name.format(seed=config.seed, i=index),
            line=line,
            index=index,
            changes={**changes[line], **(digests[index] if digests else {})},
        )
        for index, (line, seed) in enumerate(lines_and_seeds)
    )


def changes_of(job: ResolvedJob, line: VideoRequestLine) -> dict[str, Any]:
    """Returns the sizes that a line states, a digest of its inputs, and how they are used."""
    stated = {"height": line.height, "width": line.width, "num_frames": line.num_frames}
    changes: dict[str, Any] = {name: size for name, size in stated.items() if size is not None}
    inputs = job.tasks.inputs(line)
    if inputs is not None:
        changes |= {"inputs": inputs.digest, "image_fit": job.config.image_fit}
        control = bool(job.builder.spec.transformer.control_layers)
        if control:
            changes["conditioning_scale"] = job.config.conditioning_scale
        elif inputs.video is not None:
            changes["strength"] = job.config.strength
    if inputs is not None and inputs.pose_video is not None:
        changes |= {name: job.config.values[name] for name in ANIMATE}
        changes |= {"num_frames": len(inputs.pose_video)}
    return changes


def finished(provenance: Provenance, videos: tuple[Video, ...]) -> list[bool]:
    """Returns which videos an earlier run of the job has made; the first process looks for all.

    A job without a prompts file starts from the beginning.
    """
    if not provenance.resumable:
        return [False] * len(videos)
    return broadcast_from_first(
        "finished videos",
        lambda: [is_video_of(video.path, provenance.identity(video)) for video in videos],
    )


def batches(videos: tuple[Video, ...], size: int) -> Iterator[tuple[Video, ...]]:
    """Yields the videos in groups of `size`; the last group may be smaller."""
    for first in range(0, len(videos), size):
        yield videos[first : first + size]


def latents_path(video: Video) -> FilePath:
    """Returns the file of a video's latents."""
    return video.path.with_name(f"{video.path.stem}.{LATENTS}.safetensors")


def store_latents(provenance: Provenance, videos: Sequence[Video], latents: HostLatents) -> None:
    """Writes the latents of each video, atomically; one process calls it."""
    for video, one in zip(videos, latents, strict=False):
        path = latents_path(video)
        with writing("latents", path.parent), replacing(path) as unfinished:
            tensors = {LATENTS: np.ascontiguousarray(one, np.float32)}
            save_file(tensors, unfinished, {IDENTITY: provenance.identity(video)})


def delete_latents(video: Video) -> None:
    """Removes the latents of a video, if there are any."""
    latents_path(video).unlink(missing_ok=True)


def delete_unneeded_latents(written: Sequence[Video]) -> None:
    """Removes latents of videos that exist: a run was killed after it wrote the video."""
    folders = {video.path.parent for video in written}
    found = {file.name for folder in folders for file in folder.iterdir()}
    for video in written:
        if latents_path(video).name in found:
            delete_latents(video)


class LatentCache:
    """Latents of an earlier run of the job whose videos do not exist; equal on all processes.

    The first process looks and reads; the others need not see its folder.
    """

    def __init__(self, provenance: Provenance, videos: Sequence[Video]):
        self._provenance = provenance
        shapes: list[list[int]] = [[] for _ in videos]
        if provenance.resumable:
            shapes = broadcast_from_first(
                "stored latents", lambda: [self._shape(video) for video in videos]
            )
        self._shapes = {
            video.path: tuple(shape) for video, shape in zip(videos, shapes, strict=True) if shape
        }

    def __contains__(self, video: Video) -> bool:
        return video.path in self._shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def read(self, videos: Sequence[Video]) -> HostLatents:
        """Returns the latents of videos that are all in the cache, on every process."""
        latents = np.zeros((len(videos), *self._shapes[videos[0].path]), np.float32)
        if jax.process_index() == 0:
            latents = np.stack([self._read(video) for video in videos])
        if is_multiprocess():
            # As integers: the broadcast is a sum with zeros, which would lose the sign of -0.
            bits = multihost_utils.broadcast_one_to_all(latents.view(np.uint32))
            latents = np.asarray(bits).view(np.float32)
        return latents

    def _shape(self, video: Video) -> list[int]:
        """Returns the shape of a video's stored latents; empty if there are none of this job."""
        try:
            return list(self._read(video).shape)
        except (OSError, KeyError, SafetensorError):
            return []

    def _read(self, video: Video) -> np.ndarray:
        file: Any
        with safe_open(local_copy(latents_path(video)), framework="np") as file:
            if (file.metadata() or {}).get(IDENTITY) != self._provenance.identity(video):
                raise KeyError(IDENTITY)
            return file.get_tensor(LATENTS)


logger = logging.getLogger(__name__)

AHEAD = 1
"""Videos that may wait for their files while another one is made."""


Write = Callable[[Provenance, Video, np.ndarray], None]
"""Writes the frames of a video to its file."""


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A video in the queue: its frames on the host, and its file, once they are done."""

    fetched: Future[np.ndarray]
    written: Future[None]


class VideoWriter:
    """Fetches and writes one video after the other, in its own threads, on the first process.

    An error there is raised by the next call, at the latest at the end of the block. After an error
    of the run itself, the videos that were added before are still written.
    """

    def __init__(self, provenance: Provenance, write: "Write | None" = None):
        self._provenance = provenance
        self._write = write or write_file
        self._moving = ThreadPoolExecutor(1, thread_name_prefix="moving latents and frames")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="writing videos")
        self._waiting: deque[_Pending] = deque()
        self._stored: Future[None] | None = None

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
            else:
                wait([video.written for video in self._waiting])
        finally:
            self._moving.shutdown(wait=False, cancel_futures=True)
            self._writing.shutdown(wait=False, cancel_futures=True)

    def store(self, videos: Sequence[Video], latents: HostLatents) -> None:
        """Starts to store latents until their videos exist, in a job that can be resumed."""
        if jax.process_index() == 0 and self._provenance.resumable:
            self._stored = self._moving.submit(store_latents, self._provenance, videos, latents)

    def wait_for_latents(self) -> None:
        """Returns when latents are stored, so that a killed run cannot lose them."""
        if self._stored is not None:
            self._stored.result()

    def add(self, video: Video, frames: jax.Array | np.ndarray) -> None:
        """Queues a video; waits while more than `AHEAD` others have no file yet."""
        if jax.process_index() != 0:
            return
        self.check()
        while len(self._waiting) >= AHEAD:
            self._waiting[0].written.result()
            self._waiting.popleft()
        fetched = self._moving.submit(np.asarray, frames)
        written = self._writing.submit(
            lambda: self._write(self._provenance, video, fetched.result())
        )
        self._waiting.append(_Pending(fetched=fetched, written=written))

    def check(self) -> None:
        """Raises the error of a video that could not be written; does not wait."""
        while self._waiting and self._waiting[0].written.done():
            self._waiting[0].written.result()
            self._waiting.popleft()

    def fetch(self) -> None:
        """Returns when all frames are on the host."""
        for video in self._waiting:
            video.fetched.result()

    def finish(self) -> None:
        """Returns when all files exist."""
        while self._waiting:
            self._waiting[0].written.result()
            self._waiting.popleft()


def write_file(provenance: Provenance, video: Video, frames: np.ndarray) -> None:
    """Writes a video, atomically, and deletes its stored latents."""
    write_video(
        video.path,
        frames,
        fps=provenance.fps,
        metadata=provenance.metadata(video),
        identity=provenance.identity(video),
    )
    logger.info("wrote %s", video.path)
    if provenance.resumable:
        delete_latents(video)
