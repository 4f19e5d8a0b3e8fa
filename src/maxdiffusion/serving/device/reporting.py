"""Reports of the device loop: stages, steps, ends and failures of jobs, phases of the start."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from maxdiffusion.diffusion.denoise import NotFiniteError
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.files import WritingFailed
from maxdiffusion.runtime.progress import PROGRESS
from maxdiffusion.runtime.video import VideoError
from maxdiffusion.serving.queue import JobQueue
from maxdiffusion.serving.store import Job

logger = logging.getLogger(__name__)
Phase = Callable[[str, float], None]
"""Gets the name of a phase of the start and its seconds."""


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


class timed:  # noqa: N801
    """Measures a phase of the start and logs it."""

    def __init__(self, name: str, phase: Phase):
        self._name, self._phase = name, phase

    def __enter__(self) -> None:
        PROGRESS.checkpoint(self._name)
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            seconds = time.monotonic() - self._started
            logger.info("%s: %.2f s", self._name, seconds)
            self._phase(self._name, seconds)


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
