"""Reports of the device loop: stages, steps and ends of jobs, and the phases of the start."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxdiffusion.runtime.progress import PROGRESS
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
