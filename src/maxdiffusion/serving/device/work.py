"""Jobs that run: everything that their videos are made from, their steps, and how they end.

fields of a job --> config fields        replace those of the server
                --> lora_NAME            factors on the strengths of adapters
                --> names of files       image, video, ... of the line
Steps           progress, previews, cancellation after every step
Reporter        tells the queue; `explain` has the code of a failure
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from maxdiffusion.config import Config
from maxdiffusion.config.config import FIELDS
from maxdiffusion.config.validate import VideoRequestLine
from maxdiffusion.diffusion.denoise import NotFiniteError
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.generation.resume import Provenance, Video
from maxdiffusion.pipelines.request import Request
from maxdiffusion.runtime.files import WritingFailed
from maxdiffusion.runtime.video import VideoError
from maxdiffusion.serving.device.preview import PreviewMap, animated, clean_estimate
from maxdiffusion.serving.offer import ADAPTER
from maxdiffusion.serving.queue import JobQueue
from maxdiffusion.serving.store import Job
from maxdiffusion.serving.uploads import UPLOADS, InputFiles, inputs_of

logger = logging.getLogger(__name__)
TRAIN_TIMESTEPS = 1000.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job with everything that its video is made from."""

    job: Job
    config: Config
    provenance: Provenance
    video: Video
    factors: Mapping[str, float]

    @property
    def line(self) -> VideoRequestLine:
        """The prompt and the inputs of the video."""
        assert self.video.line is not None
        return self.video.line


def config_of(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns the server's config with the fields of a job, and inputs of the job alone."""
    changed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name in FIELDS and name not in UPLOADS
    }
    return replace(config, **{"image_url": "", "last_image_path": "", **changed})


def line_of(fields: Mapping[str, Any], files: InputFiles) -> VideoRequestLine:
    """Returns the prompt of a job and the paths of its inputs."""
    paths: dict[str, Any] = {}
    for name, value in inputs_of(fields).items():
        several = not isinstance(value, str)
        found = tuple(str(files.path(one)) for one in (value if several else [value]))
        paths[UPLOADS[name].line] = found if several else found[0]
    return VideoRequestLine(prompt=fields["prompt"], **paths)


def factors_of(fields: Mapping[str, Any]) -> dict[str, float]:
    """Returns the factors of a job on the strengths of adapters, by adapter."""
    return {
        name.removeprefix(ADAPTER): float(value)
        for name, value in fields.items()
        if name.startswith(ADAPTER) and name not in FIELDS
    }


def identity_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a video depends on besides the usual config fields."""
    files = inputs_of(fields)
    used = ("image_fit", "strength", "conditioning_scale") if files else ()
    kept = {name: fields[name] for name in used if name in fields}
    strengths = {f"{ADAPTER}{name}": factor for name, factor in factors_of(fields).items()}
    return {**files, **kept, **strengths}


def freeze(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a job that its programs may depend on, as a value."""
    free = ("prompt", "negative_prompt", "seed", "fps")
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(fields.items())
        if name not in free
    )


@dataclass(frozen=True, kw_only=False)
class Reporter:
    """Tells the queue what happens to jobs; does nothing on processes without one."""

    queue: JobQueue | None

    def stage(self, identifiers: Sequence[str], stage: str) -> None:
        """Reports the stage of jobs."""
        if self.queue is not None:
            self.queue.stage(identifiers, stage)

    def step(self, identifiers: Sequence[str], step: int, seconds: float) -> None:
        """Reports a finished step."""
        if self.queue is not None:
            self.queue.step(identifiers, step, seconds)

    def complete(self, job: Job, frames: np.ndarray, timings: Mapping[str, Any]) -> None:
        """Writes the still images of a video that exists, and completes its job."""
        if self.queue is not None:
            self.queue.library.write_stills(job.id, frames)
            self.queue.complete(job, timings)

    def cancel(self, job: Job) -> None:
        """Ends a cancelled job."""
        if self.queue is not None:
            self.queue.cancel_running(job)

    def fail(self, job: Job, code: str, message: str) -> None:
        """Ends a job that failed, unless it ended before."""
        if self.queue is not None and self.queue.live(job.id) is not None:
            self.queue.fail(job, code, message)

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Gives jobs back that the server did not finish."""
        if self.queue is not None:
            self.queue.requeue([job for job in jobs if self.queue.live(job.id) is not None])


class Stopped(Exception):
    """The server stops: the jobs that run go back to the queue."""


class AllCancelled(Exception):
    """No job of the batch is wanted any more."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An agreement of all processes: jobs that were cancelled, and whether to stop."""

    cancelled: frozenset[str]
    stop: bool


Agree = Callable[[Sequence[str]], Verdict]
"""Returns the verdict on running jobs, after all processes have called it."""


class Steps:
    """The steps of one batch. Previews are drawn by the process that has the queue."""

    def __init__(
        self,
        *,
        agree: Agree,
        previews: PreviewMap,
        reporter: Reporter,
        works: Sequence[Work],
        request: Request,
    ):
        self._agree, self._previews = agree, previews
        self._reporter, self._request = reporter, request
        self.alive = [*works]
        self.seconds = 0.0
        self._rows = {work.job.id: row for row, work in enumerate(works)}
        self._before: tuple[int, np.ndarray] | None = None

    def after(self, latents: Any, index: int, seconds: float) -> None:
        """Reports a step; raises Stopped, or AllCancelled when no job is left."""
        self.seconds += seconds
        queue = self._reporter.queue
        verdict = self._agree([work.job.id for work in self.alive])
        for work in [work for work in self.alive if work.job.id in verdict.cancelled]:
            self._reporter.cancel(work.job)
            self.alive.remove(work)
        if not self.alive:
            raise AllCancelled
        if verdict.stop:
            raise Stopped
        self._reporter.step([work.job.id for work in self.alive], index + 1, seconds)
        if queue is not None and queue.is_watched:
            self._preview(queue, np.array(latents), index)

    def _preview(self, queue: JobQueue, latents: np.ndarray, index: int) -> None:
        """Draws the estimate of the finished video; a failure costs the preview only."""
        noise = [*self._request.sampler.timesteps, 0.0]
        earlier_step, self._before = self._before, (index, latents)
        if earlier_step is None or earlier_step[0] != index - 1:
            return
        before = earlier_step[1]
        size = (self._request.video.width, self._request.video.height)
        after, earlier = noise[index + 1] / TRAIN_TIMESTEPS, noise[index] / TRAIN_TIMESTEPS
        for work in self.alive:
            row = self._rows[work.job.id]
            clean = clean_estimate(latents[row], before[row], float(after), float(earlier))
            colours = self._previews.colours(clean)
            queue.preview(work.job.id, index + 1, animated(colours, size))


def explain(error: Exception) -> tuple[str, str]:
    """Returns the code and the message of a failure for clients; details go to the log."""
    if isinstance(error, ProblemsFound):
        return "invalid_value", str(error)
    if isinstance(error, NotFiniteError):
        return "not_finite", "The model computed values that are not finite."
    if is_disk_error(error):
        logger.error("the disk refused a file: %s", error)
        return "disk_full", "The server could not write the video: its disk is full."
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in text:
        logger.error("out of memory: %s", text.splitlines()[0])
        return "out_of_memory", "The devices have too little memory for this size."
    logger.error("a job failed", exc_info=error)
    return "internal_error", "The server failed to make this video. Its log has the reason."


def is_disk_error(error: BaseException) -> bool:
    """Returns whether a failure is a write that the disk refused."""
    return isinstance(error, OSError | WritingFailed) or (
        isinstance(error, VideoError) and "No space left" in str(error)
    )
