"""The device loop: the one part of the server that uses jax.

    resolve ----> prepare: load weights, compile serve_sizes ----> run: take jobs until stopped

A job is denoised in a batch with others of the same program, its latents are stored, and it is
decoded; files are written in a thread while the next job is denoised. A failure belongs to its jobs
alone. With several processes the first one takes the jobs, and all of them agree before every job
and after every step on what is cancelled and whether to stop.
"""

import io
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.config.validate import VideoRequestLine
from maxdiffusion.diffusion.denoise import NotFiniteError, initial_noise
from maxdiffusion.diffusion.registry import SAMPLERS
from maxdiffusion.distributed.coordination import (
    all_gather_str,
    broadcast_from_first,
    is_multiprocess,
)
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.generate import check_same, start_up_plan
from maxdiffusion.generation.job import ResolvedJob, resolve_job
from maxdiffusion.generation.resume import (
    LatentCache,
    Provenance,
    Video,
    finished,
    store_latents,
    write_file,
)
from maxdiffusion.generation.settings import (
    LineTasks,
    guidance_scales,
    sampler,
    step_options,
    use_compilation_cache,
    video_shape,
)
from maxdiffusion.pipelines import pipeline_named
from maxdiffusion.pipelines.programs import as_bytes
from maxdiffusion.pipelines.request import Request, VideoShape, check_video_shape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.tasks.base import TextToVideo
from maxdiffusion.pipelines.text import BUCKETS, PromptTokenizer
from maxdiffusion.pipelines.wan import VideoPipeline
from maxdiffusion.pipelines.weights import load_wan_parameters
from maxdiffusion.runtime.files import WritingFailed, as_path, local_copy
from maxdiffusion.runtime.progress import PROGRESS
from maxdiffusion.runtime.video import VideoError, read_video
from maxdiffusion.serving.fields import Offer, Size
from maxdiffusion.serving.images import NAME as IMAGE
from maxdiffusion.serving.images import InputImages
from maxdiffusion.serving.preview import PreviewMap, animated, clean_estimate
from maxdiffusion.serving.queue import INPUTS, JobQueue, state_folder
from maxdiffusion.serving.reporting import Phase, Reporter, timed
from maxdiffusion.serving.store import Job

logger = logging.getLogger(__name__)
IDLE_SECONDS = 1.0
PREVIEW_FILE = "preview_map.json"
TRAIN_TIMESTEPS = 1000.0
SAMPLE_SIDE = 64
UNKNOWN_DEVICE_PIXELS = 16  # times the largest served size


class Stopped(Exception):
    """The server stops: the jobs that run go back to the queue."""


class AllCancelled(Exception):
    """No job of the batch is wanted any more."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job with everything that its video is made from."""

    job: Job
    config: Config
    provenance: Provenance
    video: Video

    @property
    def row(self) -> "Row":
        """The prompt, seed and image of the video."""
        image = None if self.video.line is None else self.video.line.image
        negative = self.config.negative_prompt
        return Row(prompt=self.video.prompt, negative=negative, seed=self.video.seed, image=image)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One video of a batch, as far as the videos of a batch may differ."""

    prompt: str = ""
    negative: str = ""
    seed: int = 0
    image: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An agreement of all processes: jobs that were cancelled, and whether to stop."""

    cancelled: frozenset[str]
    stop: bool


def parse_sizes(config: Config) -> tuple[Size, ...]:
    """Returns `serve_sizes`, or the one size of the config; raises all that cannot be read."""
    usual = Size(width=config.width, height=config.height, frames=config.num_frames)
    found = {text: Size.parse(text, config.num_frames) for text in config.serve_sizes}
    rule = "must be WIDTHxHEIGHTxFRAMES, such as 1280x720x81"
    Collector(
        [
            Problem(name="serve_sizes", value=text, rule=rule)
            for text, size in found.items()
            if size is None
        ]
    ).raise_if_any()
    return tuple(size for size in found.values() if size is not None) or (usual,)


class Worker:
    """A model on its devices, and the loop that makes videos with it."""

    def __init__(
        self, job: ResolvedJob, folder: ModelFolder, sizes: tuple[Size, ...], images: InputImages
    ):
        self._job, self._folder, self.sizes, self._images = job, folder, sizes, images
        self._compiled: set[Any] = set()
        self._stop = threading.Event()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="writing videos")
        self._pending: Future[None] | None = None
        self._pipeline: VideoPipeline | None = None
        self._previews = PreviewMap(job.builder.spec.vae.z_dim)

    @classmethod
    def resolve(cls, parsed: ParsedConfig) -> "Worker":
        """Returns the worker of a config; raises `ProblemsFound` with all problems."""
        problems = Collector(parsed.problems)
        sizes: tuple[Size, ...] = ()
        with problems:
            sizes = parse_sizes(parsed.config)
        use_compilation_cache(parsed.config)
        images = InputImages(state_folder(parsed.config) / INPUTS)
        config = with_sample_image(parsed.config, images)
        stated = replace(parsed, config=config, problems=tuple(problems.problems))
        job, folder = resolve_job(stated)
        spec = job.builder.spec
        for size in sizes:
            with problems:
                check_video_shape(shape_of(size), spec.vae, spec.transformer)
        problems.raise_if_any()
        return cls(job, folder, sizes, images)

    @property
    def is_first(self) -> bool:
        """Returns whether this process takes requests and writes files."""
        return jax.process_index() == 0

    def stop(self) -> None:
        """Asks the loop to end at the next step; may be called by a signal handler."""
        self._stop.set()

    def offer(self) -> Offer:
        """Returns what clients may ask for."""
        spec = self._job.builder.spec
        multiple = spec.vae.spatial_factor * spec.transformer.patch[1]
        return Offer.of(
            self._job.config,
            sizes=self.sizes,
            size_multiple=multiple,
            frame_step=spec.vae.temporal_factor,
            most_pixels=self._most_pixels(),
            schedulers=tuple(entry.name for entry in SAMPLERS),
            images=offered_images(spec),
            plan=self.describe(),
        )

    def describe(self) -> dict[str, Any]:
        """Returns the mesh and the attention plan, for the page."""
        mesh = self._job.builder.mesh
        plan = self._job.attention.self_attention
        return {
            "device": mesh.devices.flat[0].device_kind,
            "devices": mesh.size,
            "mesh": {str(axis): size for axis, size in mesh.shape.items()},
            "attention": plan.name,
            "runs": plan.runs,
            "scheme": plan.scheme.title(),
            "kernel": plan.backend.title,
            "tokens": plan.problem.q_len,
            "text": start_up_plan(self._job),
        }

    def _most_pixels(self) -> int:
        """Returns the pixels of the largest video that fits, by the memory model of the chip."""
        from maxdiffusion.generation import auto  # reads tables that only this needs

        largest = max(size.pixels for size in self.sizes)
        chip = auto.CHIP_NAMES.get(jax.devices()[0].device_kind.lower())
        if chip is None:
            return largest * UNKNOWN_DEVICE_PIXELS
        from maxdiffusion.costs.chips import CHIPS

        job = self._job
        room = round(CHIPS[chip].hbm_bytes * auto.USABLE)
        mesh = job.choices.mesh.shape
        need = auto.bytes_needed(
            job.config, job.builder.spec, mesh=mesh, shape=job.shape, room=room
        )
        weights = need.total(mesh.context if job.choices.shards_weights else 1) - need.step
        usual = job.config.width * job.config.height * job.config.num_frames
        return max(largest, int(usual * max(0, room - weights) / max(1, need.step)))

    # Start

    def prepare(self, phase: Phase, state: Path | None) -> None:
        """Loads the weights and compiles all served sizes; `state` has the fit of previews."""
        job, cache = self._job, self._job.config.pretrained_orbax_dir
        logger.info(start_up_plan(job))
        with timed("load", phase):
            loaded = load_wan_parameters(
                self._folder, job.builder, cache=as_path(cache) if cache else None
            )
            jax.block_until_ready(loaded.parameters.transformers)
            self._pipeline = pipeline_named(job.shape.task.pipeline)(
                builder=job.builder,
                parameters=loaded.parameters,
                tokenizer=PromptTokenizer.load(self._folder.root / "tokenizer"),
                attention=job.plans,
                folder=self._folder,
            )
        for size in self.sizes:
            with timed(f"compile {size}", phase):
                for count in sorted({self._batch(1), self._batch(2)}):
                    for image in self._sample_images():
                        request = self._sample_request(size, count, image)
                        self._compile(request, all_texts=True)
        with timed("previews", phase):
            self._fit_previews(state)

    def _sample_images(self) -> tuple[str | None, ...]:
        """Returns an image for every kind of request: with and without one."""
        offered = offered_images(self._job.builder.spec)
        sample = str(sample_image(self._images)) if offered != "none" else None
        return {"none": (None,), "optional": (None, sample), "required": (sample,)}[offered]

    def _sample_request(self, size: Size, count: int, image: str | None = None) -> Request:
        config = replace(
            self._job.config, width=size.width, height=size.height, num_frames=size.frames
        )
        return self._request(config, [Row(image=image)] * count)

    def _compile(self, request: Request, *, all_texts: bool = False) -> None:
        assert self._pipeline is not None
        length = self._job.config.max_sequence_length
        texts = [" ".join(["a"] * (bucket - 4)) for bucket in BUCKETS if bucket <= length]
        self._pipeline.compile(request, as_bytes, other_prompts=texts if all_texts else ())
        self._compiled.add(self._program(request))

    def _program(self, request: Request) -> Any:
        assert self._pipeline is not None
        steps = (request.step_cache, request.plan.programs)
        return self._pipeline.shape(request), type(request.sampler), steps

    def _fit_previews(self, state: Path | None) -> None:
        assert self._pipeline is not None
        if state is None or not self.is_first or is_multiprocess():
            return
        channels = self._previews.channels
        stored = PreviewMap.load(state / PREVIEW_FILE, channels)
        if stored is not None:
            self._previews = stored
            return
        image = self._sample_images()[0]
        request = self._sample_request(min(self.sizes), self._batch(1), image)
        noise = initial_noise([1], self._pipeline.shape(request).latent.dims)[0]
        frames = np.asarray(self._pipeline.decode(request, noise, as_bytes))
        self._previews.add(noise, frames)

    def _batch(self, jobs: int) -> int:
        """Returns the batch size of a number of jobs: 1, or the one of the config."""
        full = self._job.shape.videos
        copies, data = self._job.shape.guidance.copies, self._job.choices.mesh.shape.data
        return 1 if jobs == 1 and copies % data == 0 else full

    def _request(self, config: Config, rows: Sequence[Row]) -> Request:
        """Returns the request of the videos of a batch."""
        spec = self._job.builder.spec
        tasks = LineTasks(config=config, spec=spec)
        lines = [VideoRequestLine(prompt=row.prompt, image=row.image) for row in rows]
        task = tasks.task(lines[0]) if tasks.takes_inputs else TextToVideo()
        inputs = [tasks.inputs(line) for line in lines]
        return Request(
            prompts=tuple(row.prompt for row in rows),
            negative_prompts=tuple(row.negative for row in rows),
            video=video_shape(config),
            sampler=task.sampler(sampler(config, spec)),
            scales=guidance_scales(config),
            **step_options(config, spec),
            seeds=tuple(row.seed for row in rows),
            task=task,
            inputs=tuple(one for one in inputs if one is not None),
        )

    # Loop

    def run(self, queue: JobQueue | None, state: Path | None) -> None:
        """Makes videos until the server stops; the first process has the queue."""
        try:
            while not self._agree(queue, ()).stop:
                jobs = self._next_jobs(queue)
                PROGRESS.checkpoint("jobs" if jobs else "idle")
                if jobs:
                    self._make(Reporter(queue), jobs)
                    self._save_previews(state)
        finally:
            self._finish_writing()
            self._writing.shutdown(wait=True)

    def _next_jobs(self, queue: JobQueue | None) -> list[Job]:
        def take() -> list[dict[str, Any]]:
            assert queue is not None
            jobs = queue.take(self._job.shape.videos, wait_seconds=IDLE_SECONDS)
            return [asdict(job) for job in jobs]

        return [Job(**fields) for fields in broadcast_from_first("next jobs", take)]

    def _agree(self, queue: JobQueue | None, identifiers: Sequence[str]) -> Verdict:
        """Returns what all processes agree on; every process calls it at the same points."""
        stop = self._stop.is_set() or (queue is not None and queue.stopping.is_set())
        cancelled = sorted(queue.cancelled(identifiers)) if queue is not None else []
        texts = all_gather_str("serving", json.dumps([cancelled, stop]))
        said = [json.loads(text) for text in texts]
        everything = frozenset(name for names, _ in said for name in names)
        return Verdict(cancelled=everything, stop=any(stops for _, stops in said))

    def _make(self, reporter: Reporter, jobs: list[Job]) -> None:
        """Makes the videos of jobs of one program; a failure ends these jobs only."""
        try:
            works = [self._work(job) for job in jobs]
            works = [work for work in works if not self._is_done(reporter, work)]
            stored = {work.job.id: LatentCache(work.provenance, [work.video]) for work in works}
            fresh = [work for work in works if not stored[work.job.id]]
            for work in works:
                if stored[work.job.id]:
                    request = self._request_of([work])
                    self._decode(reporter, work, request, stored[work.job.id].read([work.video])[0])
            if fresh:
                self._denoise(reporter, fresh)
        except Stopped:
            reporter.requeue(jobs)
        except AllCancelled:
            pass
        except Exception as error:
            if is_multiprocess() and not isinstance(error, ProblemsFound | NotFiniteError):
                raise  # the other processes wait in a collective: the watchdog ends the job
            code, message = explain(error)
            for job in jobs:
                reporter.fail(job, code, message)

    def _work(self, job: Job) -> Work:
        fields = {name: value for name, value in job.fields.items() if name != IMAGE}
        digest = job.fields.get(IMAGE)
        image = None if digest is None else str(self._images.path(digest))
        config = replace(self._job.config, **fields)
        provenance = Provenance.of(self._job.choices.fields_of(config))
        folder = as_path(config.output_dir)
        return Work(
            job=job,
            config=config,
            provenance=replace(provenance, resumable=True),
            video=Video(
                prompt=config_prompt(config),
                seed=config.seed,
                path=folder / f"{job.id}.mp4",
                line=VideoRequestLine(prompt=config_prompt(config), image=image),
                changes={} if digest is None else {IMAGE: digest},
            ),
        )

    def _is_done(self, reporter: Reporter, work: Work) -> bool:
        """Completes a job whose video an earlier server wrote before it ended."""
        if not finished(work.provenance, (work.video,))[0]:
            return False
        if self.is_first:
            frames, _ = read_video(local_copy(work.video.path))
            reporter.complete(work.job, frames, {})
        return True

    def _request_of(self, works: Sequence[Work]) -> Request:
        """Returns the request of a batch; one that is too small repeats its last job."""
        full = [*works, *[works[-1]] * (self._batch(len(works)) - len(works))]
        return self._request(works[0].config, [work.row for work in full])

    def _denoise(self, reporter: Reporter, works: Sequence[Work]) -> None:
        assert self._pipeline is not None
        request, identifiers = self._request_of(works), [work.job.id for work in works]
        if self._program(request) not in self._compiled:
            reporter.stage(identifiers, "compiling")
            self._compile(request)
        reporter.stage(identifiers, "prompt")
        started = time.monotonic()
        experts = self._pipeline.condition(request)
        steps = Steps(worker=self, reporter=reporter, works=works, request=request)
        latents: Any = None
        for latents, step in self._pipeline.denoise(request, experts):
            steps.after(latents, step.index, step.seconds)
        final = np.array(latents)
        check_same(final, request)
        seconds = {
            "denoise_seconds": round(time.monotonic() - started, 4),
            "step_seconds": steps.seconds / max(1, len(request.sampler.timesteps) * len(works)),
        }
        alive = [
            (work, one) for work, one in zip(works, final, strict=False) if work in steps.alive
        ]
        for work, one in alive:
            if self.is_first:
                keep_latents(work, one)
        for work, one in alive:
            self._decode(reporter, work, request, one, seconds)

    def _decode(
        self,
        reporter: Reporter,
        work: Work,
        request: Request,
        latents: np.ndarray,
        timings: Mapping[str, Any] | None = None,
    ) -> None:
        """Decodes one video and starts to write it."""
        assert self._pipeline is not None
        reporter.stage([work.job.id], "decoding")
        started = time.monotonic()
        frames = np.asarray(self._pipeline.decode(request, latents, as_bytes))
        self._finish_writing()
        if not self.is_first:
            return
        reporter.stage([work.job.id], "writing")

        def write_files() -> None:
            try:
                write_file(work.provenance, work.video, frames)
                seconds = {**(timings or {}), "finish_seconds": time.monotonic() - started}
                reporter.complete(work.job, frames, seconds)
                self._previews.add(latents, frames)
            except Exception as error:
                reporter.fail(work.job, *explain(error))

        self._pending = self._writing.submit(write_files)

    def _finish_writing(self) -> None:
        """Waits for the files of the job before, so that at most one video waits in memory."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _save_previews(self, state: Path | None) -> None:
        if state is not None and self.is_first:
            try:
                self._previews.save(state / PREVIEW_FILE)
            except OSError as error:
                logger.warning("the fit of previews was not stored: %s", error.strerror)


class Steps:
    """Follows the steps of one batch: progress, previews, cancellation."""

    def __init__(
        self, *, worker: Worker, reporter: Reporter, works: Sequence[Work], request: Request
    ):
        self._worker, self._reporter, self._request = worker, reporter, request
        self.alive = [*works]
        self.seconds = 0.0
        self._rows = {work.job.id: row for row, work in enumerate(works)}
        self._before: tuple[int, np.ndarray] | None = None

    def after(self, latents: Any, index: int, seconds: float) -> None:
        """Reports a step; raises Stopped, or AllCancelled when no job is left."""
        self.seconds += seconds
        queue = self._reporter.queue
        verdict = self._worker._agree(queue, [work.job.id for work in self.alive])
        for work in [work for work in self.alive if work.job.id in verdict.cancelled]:
            self._reporter.cancel(work.job)
            self.alive.remove(work)
        if not self.alive:
            raise AllCancelled
        if verdict.stop:
            raise Stopped
        self._reporter.step([work.job.id for work in self.alive], index + 1, seconds)
        if queue is not None and queue.is_watched and not is_multiprocess():
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
            colours = self._worker._previews.colours(clean)
            queue.preview(work.job.id, index + 1, animated(colours, size))


def offered_images(spec: WanSpec) -> str:
    """Returns whether requests begin with an image: none, optional or required."""
    if spec.image_channels:
        return "required"
    return "optional" if spec.time_per_token else "none"


def sample_image(images: InputImages) -> Path:
    """Returns a gray image, for programs that are compiled before a request comes."""
    buffer = io.BytesIO()
    Image.new("RGB", (SAMPLE_SIDE, SAMPLE_SIDE), "gray").save(buffer, format="PNG")
    return images.path(images.keep(buffer.getvalue()))


def with_sample_image(config: Config, images: InputImages) -> Config:
    """Returns the config with an image, which the job of an image-to-video model must have."""
    if config.model_type != "I2V" or config.image_url:
        return config
    return replace(config, image_url=str(sample_image(images)))


def shape_of(size: Size) -> VideoShape:
    """Returns the shape of a size."""
    return VideoShape(height=size.height, width=size.width, num_frames=size.frames)


def config_prompt(config: Config) -> str:
    """Returns the one prompt of a request's config."""
    assert isinstance(config.prompt, str)
    return config.prompt


def keep_latents(work: Work, latents: np.ndarray) -> None:
    """Stores latents so that a restart only decodes; a full disk costs that chance only."""
    try:
        store_latents(work.provenance, [work.video], latents[None])
    except WritingFailed as error:
        logger.warning("%s: %s", work.job.id, error)


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
