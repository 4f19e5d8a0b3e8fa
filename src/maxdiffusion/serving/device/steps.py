"""Follows the steps of a batch: progress, previews, cancellation, the end of the server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxdiffusion.pipelines.request import Request
from maxdiffusion.serving.device.preview import PreviewMap, animated, clean_estimate
from maxdiffusion.serving.device.reporting import Reporter
from maxdiffusion.serving.device.work import Work
from maxdiffusion.serving.queue import JobQueue

TRAIN_TIMESTEPS = 1000.0


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
