"""The queue as the HTTP layer and the device loop share it: store, files, live progress, estimates.

    HTTP layer   submit, view, cancel, delete          any thread
    device loop  take, stage, step, finish, give up    one thread
    both         `listen`: a call after every change, for event streams

Live progress is in memory: a restart loses it, and the job begins again or continues from latents.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from maxdiffusion.config import Config
from maxdiffusion.runtime.files import as_path
from maxdiffusion.serving.errors import ApiError
from maxdiffusion.serving.library import Library
from maxdiffusion.serving.metrics import Metrics
from maxdiffusion.serving.store import (
    CANCELLED,
    COMPLETED,
    IN_PROGRESS,
    QUEUED,
    Job,
    JobStore,
    Limits,
    NewJob,
    OtherRequest,
    QueueFull,
    Waiting,
    batch_of,
    now,
    window_of,
)
from maxdiffusion.serving.uploads import ORPHAN_SECONDS, UPLOADS, InputFiles, names_of

logger = logging.getLogger(__name__)
INPUTS = "inputs"
KEYS_KEPT_SECONDS = 24 * 3600
WATCHED_SECONDS = 15.0
RENEW_SECONDS = 1.0
RETRY_SECONDS = 30
SWEEP_SECONDS = 60.0
SHARED_SECONDS = 1.0
"""Age of the order of a queue that other servers change too."""
NOT_SHARED = ("prompt", "negative_prompt", "seed")
"""Fields in which the jobs of one batch may differ, apart from the content of files."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits and retention of a server."""

    limits: Limits
    free_bytes: int
    keep_hours: float
    keep_bytes: int
    attempts: int

    @classmethod
    def of(cls, config: Config) -> "Policy":
        """Returns the policy of a config."""
        return cls(
            limits=Limits(queue=config.serve_max_queue, per_key=config.serve_max_jobs_per_key),
            free_bytes=config.serve_free_bytes,
            keep_hours=config.serve_keep_hours,
            keep_bytes=config.serve_keep_bytes,
            attempts=config.serve_attempts,
        )

    def expiry(self) -> int | None:
        """Returns when a job that ends now is deleted; None for never."""
        return now() + int(self.keep_hours * 3600) if self.keep_hours else None


@dataclass(kw_only=True)
class Running:
    """Live progress of one job."""

    size: str
    steps: int
    stage: str = "starting"
    step: int = 0
    began: float = field(default_factory=time.monotonic)
    preview: bytes | None = None
    preview_step: int = 0

    @property
    def percent(self) -> int:
        """Steps done, in percent; the last percent is decoding and writing."""
        return min(99, 99 * self.step // max(1, self.steps))


class StepTimes:
    """Seconds per step and after the last step, by size, averaged over recent jobs."""

    WEIGHT = 0.3  # of the newest value

    def __init__(self) -> None:
        self._step: dict[str, float] = {}
        self._finish: dict[str, float] = {}

    def add(self, size: str, *, step: float | None = None, finish: float | None = None) -> None:
        """Adds a measurement."""
        for table, value in ((self._step, step), (self._finish, finish)):
            if value is not None:
                table[size] = table.get(size, value) * (1 - self.WEIGHT) + value * self.WEIGHT

    def seconds(self, size: str, *, jobs: int, steps: int) -> float | None:
        """Returns the seconds of jobs with `steps` steps in all; None for an unknown size."""
        if size not in self._step:
            return None
        return self._step[size] * steps + self._finish.get(size, 0.0) * jobs


@dataclass(frozen=True, kw_only=True)
class Place:
    """Jobs that start before a queued job; and jobs and steps by size until its batch is done.

    `work` is empty where that is not known, because programs are compiled first.
    """

    before: int
    work: Mapping[str, tuple[int, int]]


def places(
    waiting: Sequence[Waiting],
    *,
    limit: int,
    kind: Callable[[Waiting], Hashable],
    held: Container[str],
) -> dict[str, Place]:
    """Returns the places of queued jobs by id, as the device loop will take them.

    Up to `limit` jobs of one kind and priority start together. Jobs that are held are passed; they
    start in their own turn, if their programs are there by then.
    """
    found = {
        job.id: Place(before=index, work={}) for index, job in enumerate(waiting) if job.id in held
    }
    rest = iter([job for job in waiting if job.id not in held])
    window, before, work = [*islice(rest, window_of(limit))], 0, dict[str, tuple[int, int]]()
    while window:
        batch = batch_of(window, limit, kind)
        for job in batch:
            jobs, steps = work.get(job.size, (0, 0))
            work = work | {job.size: (jobs + 1, steps + job.steps)}
        place, taken = Place(before=before, work=work), {job.id for job in batch}
        found |= dict.fromkeys(taken, place)
        before += len(batch)
        window = [job for job in window if job.id not in taken] + [*islice(rest, len(batch))]
    return found


class JobQueue:
    """Jobs, their files and their live progress."""

    def __init__(self, store: JobStore, library: Library, policy: Policy, files: InputFiles):
        self.store, self.library, self.policy = store, library, policy
        self.files = files
        self.metrics = Metrics(store.counts)
        self.times = StepTimes()
        self.ready = False
        self.stopping = threading.Event()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._running: dict[str, Running] = {}
        self._cancelled: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._last_sign = time.monotonic()
        self._last_renewal = 0.0
        self._last_watched = 0.0
        self._last_sweep = time.monotonic()
        self._reasons: dict[str, str] = {}
        self._arrived: SimpleQueue[Job] = SimpleQueue()
        self._limit = 1  # jobs of a batch
        self._kinds: dict[str, Hashable] = {}  # of queued jobs, where batches are made
        self._version = 0  # of the order of the queue
        self._places: tuple[int, float, dict[str, Place]] = (-1, 0.0, {})

    @classmethod
    def open(cls, config: Config, store: JobStore, files: InputFiles | None = None) -> "JobQueue":
        """Returns the queue of a config, with everything that an earlier server left."""
        files = files or input_files(config, shared=store.shared)
        queue = cls(store, Library(as_path(config.output_dir)), Policy.of(config), files)
        queue.recover()
        return queue

    # Start and housekeeping

    def recover(self) -> None:
        """Takes up the work of an earlier server."""
        self.take_back()
        completed = self.store.completed()
        if not self.store.shared:
            gone = [job.id for job in completed if not self.library.has(job.id)]
            if gone:
                logger.warning("%d completed videos have no file any more", len(gone))
                self.store.lose(gone)
            self._sweep(completed)
        for job in completed[-100:]:
            self._remember_times(job)
        self.tidy()

    def take_back(self) -> None:
        """Returns jobs of servers that are gone to the queue."""
        for job in self.store.recover(attempts=self.policy.attempts):
            logger.info("%s was running and is queued again", job.id)
            self._wake.put(None)
        self._version += 1

    def keep_claims(self) -> None:
        """Renews the claims on running jobs, where several servers share the queue."""
        identifiers = [*self._running]
        if not identifiers or not self.store.shared:
            return
        # Another server may have cancelled a job, or taken it after a long pause of this one.
        lost = set(identifiers) - self.store.renew(identifiers)
        self._cancelled |= (lost & {*self._running}) | self.store.to_cancel(identifiers)

    def _sweep(self, completed: Sequence[Job]) -> None:
        known = {job.id for job in completed}
        unfinished = {job.id for job in self.store.unfinished()}
        self.library.sweep(known | unfinished, unfinished)
        self.files.sweep(names_of(self.store.all_fields()))

    def _remember_times(self, job: Job) -> None:
        timings = job.timings or {}
        self.times.add(
            job.size, step=timings.get("step_seconds"), finish=timings.get("finish_seconds")
        )

    def tidy(self) -> None:
        """Deletes what is too old or too much."""
        for job in self.store.expired(now()):
            self.remove(job.id)
        if self.policy.keep_bytes:
            self._make_room()
        self.store.forget_keys(now() - KEYS_KEPT_SECONDS)
        if time.monotonic() - self._last_sweep > SWEEP_SECONDS:
            self._last_sweep = time.monotonic()
            self.sweep_inputs(older_than=ORPHAN_SECONDS)

    def sweep_inputs(self, *, older_than: float) -> None:
        """Removes files that no job needs: of requests that were refused, and of deleted jobs."""
        removed = self.files.sweep(names_of(self.store.all_fields()), older_than=older_than)
        if removed:
            logger.info("removed %d inputs that no job needs", removed)

    def _remove_inputs(self, job: Job) -> None:
        """Removes the files that only a deleted job needed."""
        own = names_of([job.fields])
        if own:
            for name in own - names_of(self.store.all_fields()):
                self.files.remove(name)

    def _make_room(self) -> None:
        completed = self.store.completed()
        total = sum(job.bytes for job in completed)
        for job in completed:
            if total <= self.policy.keep_bytes:
                return
            self.remove(job.id)
            total -= job.bytes

    def remove(self, identifier: str, owner: str | None = None) -> bool:
        """Deletes a job and its files; one that runs ends at its next step. Returns if it was."""
        job = self.store.delete(identifier, owner)
        if job is None:
            return False
        self._stop_running(identifier)
        self._reasons.pop(identifier, None)
        if job.status != IN_PROGRESS:
            self.library.remove(identifier)
            self._remove_inputs(job)
        self._reorder()
        return True

    # Requests

    def submit(self, new: NewJob, idempotency: tuple[str, str] | None = None) -> tuple[Job, bool]:
        """Returns the job of a request, and whether it is new; raises ApiError."""
        if self.library.free_bytes() < self.policy.free_bytes:
            raise disk_full()
        try:
            job, is_new = self.store.add(new, self.policy.limits, idempotency=idempotency)
        except QueueFull as error:
            whose = "of this key" if error.of_key else "in all"
            message = f"{error.limit} jobs {whose} wait or run already. Try again later."
            headers = {"Retry-After": str(RETRY_SECONDS)}
            code = "too_many_jobs" if error.of_key else "queue_full"
            raise ApiError(429, message, code=code, headers=headers) from None
        except OtherRequest:
            message = "This Idempotency-Key was used for another request."
            raise ApiError(422, message, code="idempotency_key_reused") from None
        self._arrived.put(job)
        self._wake.put(None)
        self._reorder()
        return job, is_new

    def cancel(self, identifier: str, owner: str) -> Job | None:
        """Cancels a job: at once if it waits, at its next step if it runs."""
        job = self.store.cancel(identifier, owner)
        self._stop_running(identifier)
        self._reasons.pop(identifier, None)
        if job is not None and not job.is_active and job.error:
            self.library.remove(identifier)
        self._reorder()
        return job

    def _stop_running(self, identifier: str) -> None:
        """Lets the device loop end a job; the row says the same, for a job that is being taken."""
        self._cancelled.add(identifier)
        if identifier not in self._running:
            self._cancelled.discard(identifier)

    def live(self, identifier: str) -> Running | None:
        """Returns the live progress of a job that runs here."""
        return self._running.get(identifier)

    def position(self, job: Job) -> tuple[int | None, float | None]:
        """Returns how many jobs are before a job, and the seconds until it is done, if known."""
        if job.status == IN_PROGRESS:
            return None, self._seconds_left(self._running.get(job.id))
        place = self._places_now().get(job.id) if job.status == QUEUED else None
        if place is None:  # it ended, or began since its row was read
            return None, None
        parts = [self._seconds_left(running) for running in [*self._running.values()]]
        parts += [
            self.times.seconds(size, jobs=jobs, steps=steps)
            for size, (jobs, steps) in place.work.items()
        ]
        known = [part for part in parts if part is not None]
        is_known = place.work and len(known) == len(parts)
        return place.before, sum(known) if is_known else None

    def _places_now(self) -> dict[str, Place]:
        """Returns the places of all queued jobs; computed once for each change of the queue."""
        version, at, found = self._places
        stale = self.store.shared and time.monotonic() - at > SHARED_SECONDS
        if version == self._version and not stale:
            return found
        version = self._version  # before the jobs are read
        waiting = self.store.waiting()
        found = places(
            waiting, limit=self._limit, kind=self._kinds_of(waiting), held={*self._reasons}
        )
        self._places = (version, time.monotonic(), found)
        return found

    def _kinds_of(self, waiting: Sequence[Waiting]) -> Callable[[Waiting], Hashable]:
        """Returns the function of a job to what the jobs of its batch share."""
        if self._limit == 1:
            return lambda job: job.id
        identifiers = [job.id for job in waiting]
        known = self._kinds
        new = self.store.fields_of([one for one in identifiers if one not in known])
        added = {one: shared_fields(fields) for one, fields in new.items()}
        self._kinds = {one: known[one] for one in identifiers if one in known} | added
        kinds = self._kinds
        return lambda job: kinds.get(job.id)

    def _seconds_left(self, running: Running | None) -> float | None:
        if running is None:
            return None
        left = running.steps - running.step
        return self.times.seconds(running.size, jobs=1, steps=left)

    # Listeners

    def listen(self, call: Callable[[], None]) -> Callable[[], None]:
        """Calls a function after every change, from any thread; returns how to stop that."""
        self._listeners.append(call)
        return lambda: self._listeners.remove(call)

    def watch(self) -> None:
        """Notes that somebody looks at previews."""
        self._last_watched = time.monotonic()

    @property
    def is_watched(self) -> bool:
        """Returns whether previews are worth their time."""
        return time.monotonic() - self._last_watched < WATCHED_SECONDS

    def _reorder(self) -> None:
        """Notes that the order of the queue has changed, and calls all listeners."""
        self._version += 1
        self.notify()

    def notify(self) -> None:
        """Calls all listeners."""
        for call in [*self._listeners]:
            call()

    # The device loop

    def take(
        self,
        limit: int,
        *,
        wait_seconds: float,
        held: Callable[[Job], bool] = lambda job: False,
    ) -> list[Job]:
        """Returns the next jobs that can be made together; waits a little if there are none.

        Jobs that are `held` stay in the queue, and others pass them.
        """
        self.sign()
        self._limit = limit
        if self.stopping.is_set():
            return []
        jobs = self.store.claim(limit, alike=alike, held=held)
        if not jobs:
            try:
                self._wake.get(timeout=wait_seconds)
            except Empty:
                return []
            jobs = self.store.claim(limit, alike=alike, held=held)
        for job in jobs:
            self._reasons.pop(job.id, None)
            self._running[job.id] = Running(size=job.size, steps=job.steps)
            self.metrics.waited.observe(max(0, now() - job.created_at))
        if jobs:
            self._cancelled |= self.store.to_cancel([job.id for job in jobs])
            self._reorder()
        return jobs

    def hold(self, identifier: str, reason: str) -> None:
        """Notes why a job waits although its turn has come."""
        if self._reasons.get(identifier) != reason:
            self._reasons[identifier] = reason
            self._reorder()

    def release(self, identifier: str) -> None:
        """Notes that a job waits for its turn only."""
        if self._reasons.pop(identifier, None) is not None:
            self._reorder()

    def reason(self, identifier: str) -> str | None:
        """Returns why a job waits, if it is not only for the jobs before it."""
        return self._reasons.get(identifier)

    def arrivals(self) -> list[Job]:
        """Returns the jobs that came since the last call."""
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def wake(self) -> None:
        """Lets the device loop look for jobs again."""
        self._wake.put(None)

    def stop(self) -> None:
        """Asks the device loop to end at its next step; may be called by a signal handler."""
        self.stopping.set()
        self._wake.put(None)

    def sign(self) -> None:
        """Notes that the device loop is alive."""
        self._last_sign = time.monotonic()

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last sign of the device loop."""
        return time.monotonic() - self._last_sign

    def stage(self, identifiers: Sequence[str], stage: str) -> None:
        """Notes what running jobs are at: compiling, prompt, denoising, decoding, writing."""
        self.sign()
        for identifier in identifiers:
            self._running[identifier].stage = stage
        self.notify()

    def step(self, identifiers: Sequence[str], step: int, seconds: float) -> None:
        """Notes that running jobs have done a step."""
        self.sign()
        self.metrics.step.observe(seconds)
        for identifier in identifiers:
            running = self._running[identifier]
            running.stage, running.step = "denoising", step
            self.times.add(running.size, step=seconds / len(identifiers))
        if time.monotonic() - self._last_renewal > RENEW_SECONDS:
            self._last_renewal = time.monotonic()
            self._renew(identifiers)
        self.notify()

    def _renew(self, identifiers: Sequence[str]) -> None:
        self.store.note_progress(identifiers, self._running[identifiers[0]].percent)
        self.keep_claims()

    def preview(self, identifier: str, step: int, image: bytes) -> None:
        """Notes the preview of a step."""
        running = self._running.get(identifier)
        if running is not None:
            running.preview, running.preview_step = image, step
            self.notify()

    def cancelled(self, identifiers: Sequence[str]) -> set[str]:
        """Returns which of the jobs were cancelled or deleted."""
        return self._cancelled & {*identifiers}

    def complete(self, job: Job, timings: Mapping[str, Any]) -> None:
        """Ends a job whose files exist."""
        size = self.library.secure(job.id)
        finish = timings.get("finish_seconds")
        self.times.add(job.size, finish=finish)
        kept = self.store.complete(
            job.id, size=size, timings=timings, expires_at=self.policy.expiry()
        )
        self._end(job, outcome=COMPLETED, kept=kept)

    def fail(self, job: Job, code: str, message: str) -> None:
        """Ends a job without a video."""
        kept = self.store.fail(job.id, code, message, expires_at=self.policy.expiry())
        if kept:  # else another server may have it
            self.library.remove(job.id)
        self._end(job, outcome=code, kept=kept)

    def cancel_running(self, job: Job) -> None:
        """Ends a job that was cancelled while it ran."""
        self.fail(job, CANCELLED, "The job was cancelled.")

    def _end(self, job: Job, *, outcome: str, kept: bool) -> None:
        running = self._running.pop(job.id, None)
        self._cancelled.discard(job.id)
        if running is not None:
            self.metrics.ran.observe(time.monotonic() - running.began)
        if not kept and self.store.get(job.id) is None:  # deleted while it ran
            self.library.remove(job.id)
            self._remove_inputs(job)
            outcome = "deleted"
        self.metrics.finished.labels(outcome=outcome).inc()
        logger.info("%s: %s", job.id, outcome)
        self.notify()

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Returns running jobs to the queue, because the server stops."""
        self.store.requeue([job.id for job in jobs])
        for job in jobs:
            self._running.pop(job.id, None)
            logger.info("%s: queued again", job.id)
        self._reorder()


def disk_full() -> ApiError:
    """Returns the error of a server without room for videos."""
    message = "The server has no room for another video. Delete some, or try again later."
    return ApiError(507, message, code="disk_full", headers={"x-should-retry": "false"})


def state_folder(config: Config) -> Path:
    """Returns the folder of the queue."""
    return Path(config.serve_dir).expanduser().absolute()


def input_files(config: Config, *, shared: bool) -> InputFiles:
    """Returns the folder of what requests bring: next to the videos where others need it too."""
    of_all = shared or bool(config.serve_database_url)
    folder = as_path(config.output_dir) if of_all else state_folder(config)
    return InputFiles(folder / INPUTS, most_video_pixels=config.serve_max_input_pixels)


def alike(job: Job) -> Hashable:
    """Returns what jobs of one batch share."""
    return shared_fields(job.fields)


def shared_fields(fields: Mapping[str, Any]) -> Hashable:
    """Returns all fields but prompts, seeds and the content of files."""
    return tuple(
        (name, _shared(name, value))
        for name, value in sorted(fields.items())
        if name not in NOT_SHARED
    )


def _shared(name: str, value: Any) -> Hashable:
    if name in UPLOADS:
        return len(value) if isinstance(value, list) else 1
    return tuple(value) if isinstance(value, list) else value
