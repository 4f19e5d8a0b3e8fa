"""The device loop: loads the model, compiles, and makes videos until the server stops.

    resolve ----> prepare: load weights, compile serve_sizes ----> run: take jobs until stopped

A job is denoised in a batch with others of the same program, its latents are stored, and it is
decoded; files are written in a thread while the next job is denoised. A failure belongs to its jobs
alone. With several processes the first one takes the jobs, and all of them agree before every job
and after every step on what is cancelled, on what is compiled and on whether to stop.
"""

import atexit
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.diffusion.denoise import NotFiniteError, initial_noise
from maxdiffusion.diffusion.registry import SAMPLERS
from maxdiffusion.distributed.coordination import (
    all_gather_str,
    broadcast_from_first,
    is_multiprocess,
)
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.generate import check_same, start_up_plan
from maxdiffusion.generation.job import ResolvedJob
from maxdiffusion.generation.resume import (
    LatentCache,
    Provenance,
    Video,
    finished,
    store_latents,
    write_file,
)
from maxdiffusion.generation.settings import LineTasks, use_compilation_cache
from maxdiffusion.pipelines import pipeline_named
from maxdiffusion.pipelines.programs import as_bytes
from maxdiffusion.pipelines.request import Request, check_video_shape
from maxdiffusion.pipelines.tasks.base import VisualInputs
from maxdiffusion.pipelines.text import BUCKETS, PromptTokenizer
from maxdiffusion.pipelines.wan import VideoPipeline, noting_programs
from maxdiffusion.pipelines.weights import load_wan_parameters
from maxdiffusion.runtime.files import WritingFailed, as_path, local_copy
from maxdiffusion.runtime.progress import PROGRESS
from maxdiffusion.runtime.video import read_video
from maxdiffusion.serving.device.preview import PreviewMap
from maxdiffusion.serving.device.programs import BackgroundPrograms
from maxdiffusion.serving.device.start import (
    Phase,
    ServedAdapters,
    check_servable,
    offered_inputs,
    parse_sizes,
    resolve_model,
    shape_of,
    shared_inputs,
    timed,
)
from maxdiffusion.serving.device.work import (
    AllCancelled,
    Reporter,
    Steps,
    Stopped,
    Verdict,
    Work,
    config_of,
    explain,
    factors_of,
    freeze,
    identity_of,
    line_of,
)
from maxdiffusion.serving.fields import check_presets, count_steps
from maxdiffusion.serving.offer import Offer, Size
from maxdiffusion.serving.queue import JobQueue, input_files
from maxdiffusion.serving.store import Job
from maxdiffusion.serving.uploads import InputFiles

logger = logging.getLogger(__name__)
IDLE_SECONDS = 1.0
PREVIEW_FILE = "preview_map.json"
UNKNOWN_DEVICE_PIXELS = 16  # times the largest served size
REMEMBERED_KINDS = 1024
SAMPLE = f"{'0' * 64}.png"  # stands for any image
NO_INPUTS = VisualInputs()


class Worker:
    """A model on its devices, and the loop that makes videos with it."""

    def __init__(
        self,
        job: ResolvedJob,
        folder: ModelFolder,
        *,
        config: Config,
        sizes: tuple[Size, ...],
        files: InputFiles,
    ):
        """`config` is that of the server; the job may have another one, to be resolved."""
        self._job, self._folder, self._config = job, folder, config
        self.sizes, self.files = sizes, files
        spec = job.builder.spec
        self._adapters = ServedAdapters.of(config, spec)
        self._inputs = shared_inputs(offered_inputs(spec), files, config.output_dir)
        self._programs = BackgroundPrograms(
            self._compile_kind, self._free_programs, explain, self._wake
        )
        self._kind_of = functools.lru_cache(REMEMBERED_KINDS)(self._compute_kind)
        self._queue: JobQueue | None = None
        self._stop = threading.Event()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="writing videos")
        self._pending: Future[None] | None = None
        self._pipeline: VideoPipeline | None = None
        self._previews = PreviewMap(spec.vae.z_dim)

    @classmethod
    def resolve(cls, parsed: ParsedConfig) -> "Worker":
        """Returns the worker of a config; raises `ProblemsFound` with all problems."""
        problems = Collector(parsed.problems)
        sizes: tuple[Size, ...] = ()
        with problems:
            sizes = parse_sizes(parsed.config)
        use_compilation_cache(parsed.config)
        files = input_files(parsed.config, shared=is_multiprocess())
        job, folder = resolve_model(replace(parsed, problems=tuple(problems.problems)), files)
        spec = job.builder.spec
        with problems:
            check_servable(spec)
        for size in sizes:
            with problems:
                check_video_shape(shape_of(size), spec.vae, spec.transformer)
        problems.raise_if_any()
        worker = cls(job, folder, config=parsed.config, sizes=sizes, files=files)
        worker._check_presets()
        return worker

    @property
    def is_first(self) -> bool:
        """Returns whether this process takes requests and writes files."""
        return jax.process_index() == 0

    def stop(self) -> None:
        """Asks the loop to end at the next step; may be called by a signal handler."""
        self._stop.set()

    def offer(self) -> Offer:
        """Returns what clients may ask for, without usual presets that this config cannot run."""
        offer = self._offer()
        runs = {name: one for name, one in offer.presets.items() if not self._problems_of(one)}
        return offer if self._config.serve_presets else replace(offer, presets=runs)

    def _problems_of(self, preset: Mapping[str, Any]) -> tuple[Problem, ...]:
        """Returns why requests with a preset cannot be made, if so."""
        fields = self._usual_fields(min(self.sizes))[0] | dict(preset)
        steps = count_steps(self._offer(), fields, stated=preset.get("num_inference_steps"))
        try:
            self._check(fields | {"num_inference_steps": steps})
        except ProblemsFound as found:
            return found.problems
        return ()

    def _check_presets(self) -> None:
        """Raises everything that is wrong with the presets of the config."""
        offer = self._offer()
        check_presets(offer)
        Collector(
            [
                replace(problem, name=f"serve_presets.{name}: {problem.name}")
                for name in self._config.serve_presets
                for problem in self._problems_of(offer.presets[name])
            ]
        ).raise_if_any()

    def _offer(self) -> Offer:
        spec = self._job.builder.spec
        multiple = spec.vae.spatial_factor * spec.transformer.patch[1]
        return Offer.of(
            self._config,
            sizes=self.sizes,
            size_multiple=multiple,
            frame_step=spec.vae.temporal_factor,
            most_pixels=self._most_pixels(),
            schedulers=tuple(entry.name for entry in SAMPLERS),
            inputs=self._inputs,
            adapters=self._adapters.names,
            plan=self.describe(),
            check=self._check,
        )

    def _check(self, fields: Mapping[str, Any]) -> None:
        """Raises if a job with these fields has no plan of its steps."""
        assert self._requests(fields)[0].plan

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
            self._adapters.load(self._pipeline, strict=job.config.lora_strict)
        for size in self.sizes:
            with timed(f"compile {size}", phase):
                for fields in self._usual_fields(size):
                    self._programs.compile_now(self._compute_kind(freeze(fields)), fields)
        with timed("previews", phase):
            self._fit_previews(state)

    def _usual_fields(self, size: Size) -> list[dict[str, Any]]:
        """Returns fields of jobs for which a size is compiled at the start.

        They are those with and without a first image. Other inputs are compiled when they come.
        """
        shape = {"width": size.width, "height": size.height, "num_frames": size.frames}
        offer = self._offer()
        usual, offered = {**offer.defaults, **shape}, offer.inputs
        required = {name: SAMPLE for name, needed in offered.items() if needed}
        kinds = [usual | required]
        if offered.get("input_reference") is False:
            kinds.append(usual | {"input_reference": SAMPLE})
        return kinds

    def _requests(self, fields: Mapping[str, Any]) -> list[Request]:
        """Returns requests of all batch sizes for jobs with these fields; no file is read."""
        tasks = LineTasks(config=self._config_of(fields), spec=self._job.builder.spec)
        line = line_of({**fields, "prompt": ""}, self.files)
        return [
            tasks.request(
                [line] * count,
                negative_prompts=[""] * count,
                seeds=[0] * count,
                inputs=[NO_INPUTS] * count,
            )
            for count in sorted({self._batch(1), self._batch(2)})
        ]

    def _compile_kind(self, fields: Mapping[str, Any], keys: set[Hashable]) -> None:
        """Compiles all programs of jobs with these fields, and adds their keys."""
        assert self._pipeline is not None
        length = self._job.config.max_sequence_length
        texts = [" ".join(["a"] * (bucket - 4)) for bucket in BUCKETS if bucket <= length]
        with noting_programs(keys):
            for request in self._requests(fields):
                self._pipeline.compile(request, as_bytes, other_prompts=texts)

    def _free_programs(self, keys: Iterable[Hashable]) -> None:
        assert self._pipeline is not None
        self._pipeline.drop_programs(keys)

    def _compute_kind(self, fields: tuple[tuple[str, Any], ...]) -> Hashable:
        """Returns the programs of jobs with these fields, as a value."""
        assert self._pipeline is not None
        return tuple(
            (
                self._pipeline.shape(request),
                type(request.sampler),
                request.step_cache and request.step_cache.program_key,
                tuple(request.plan.programs),
            )
            for request in self._requests(dict(fields))
        )

    def _config_of(self, fields: Mapping[str, Any]) -> Config:
        return config_of(self._job.config, fields)

    def _fit_previews(self, state: Path | None) -> None:
        """Fits the map of previews to the VAE; all processes decode, the first one keeps it."""
        assert self._pipeline is not None
        channels = self._previews.channels

        def load() -> bool:
            stored = None if state is None else PreviewMap.load(state / PREVIEW_FILE, channels)
            self._previews = stored or self._previews
            return stored is not None

        if broadcast_from_first("the fit of previews", load):
            return
        request = self._requests(self._usual_fields(min(self.sizes))[0])[0]
        noise = initial_noise([1], self._pipeline.shape(request).latent.dims)[0]
        frames = np.asarray(self._pipeline.decode(request, noise, as_bytes))
        self._previews.add(np.asarray(noise), frames)

    def _batch(self, jobs: int) -> int:
        """Returns the batch size of a number of jobs: 1, or the one of the config."""
        full = self._job.shape.videos
        copies, data = self._job.shape.guidance.copies, self._job.choices.mesh.shape.data
        return 1 if jobs == 1 and copies % data == 0 else full

    # Loop

    def run(self, queue: JobQueue | None, state: Path | None) -> None:
        """Makes videos until the server stops; the first process has the queue."""
        self._queue = queue
        try:
            while not self._agree(()).stop:
                jobs = self._next_jobs(queue)
                PROGRESS.checkpoint("jobs" if jobs else "idle")
                if jobs:
                    self._make(Reporter(queue), jobs)
                    self._save_previews(state)
        finally:
            self._finish_writing()
            self._writing.shutdown(wait=True)

    def leave(self) -> None:
        """Lets the process end while it compiles: nothing interrupts that, and no job needs it.

        Python would free what the compiler uses, and crash. Everything else is closed before: with
        several processes their common end, too.
        """
        if self._programs.is_busy:
            logger.info("stopped while programs were compiled in the background")
            atexit.register(end_now)

    def _wake(self) -> None:
        if self._queue is not None:
            self._queue.wake()

    def _next_jobs(self, queue: JobQueue | None) -> list[Job]:
        def take() -> list[dict[str, Any]]:
            assert queue is not None
            self._programs.choose()
            jobs = queue.take(
                self._job.shape.videos,
                wait_seconds=IDLE_SECONDS,
                held=functools.partial(self._is_held, queue),
            )
            if jobs:
                self._programs.run(self._kind(jobs[0]))
            return [asdict(job) for job in jobs if not self._is_refused(queue, job)]

        return [Job(**fields) for fields in broadcast_from_first("next jobs", take)]

    def _kind(self, job: Job) -> Hashable | None:
        """Returns the kind of a job; None for fields that the model refuses when it runs."""
        try:
            return self._kind_of(freeze(job.fields))
        except ProblemsFound:
            return None

    def _is_held(self, queue: JobQueue, job: Job) -> bool:
        """Returns whether a job must wait for its programs, and asks for them if so."""
        kind = self._kind(job)
        if kind is None or self._programs.is_ready(kind) or self._programs.failure(kind):
            self._programs.use(kind)
            queue.release(job.id)
            return False
        reason = f"Programs for {job.size} with these settings are being compiled."
        if not self._programs.order(kind, {**job.fields, "prompt": "", "negative_prompt": ""}):
            reason = f"Programs for {job.size} are compiled when those of other jobs are done."
        queue.hold(job.id, reason)
        return True

    def _is_refused(self, queue: JobQueue, job: Job) -> bool:
        """Fails a job whose programs could not be compiled."""
        failure = self._programs.failure(self._kind(job))
        if failure is not None:
            queue.fail(job, *failure)
        return failure is not None

    def _agree(self, identifiers: Sequence[str]) -> Verdict:
        """Returns what all processes agree on; every process calls it at the same points."""
        queue = self._queue
        stop = self._stop.is_set() or (queue is not None and queue.stopping.is_set())
        cancelled = sorted(queue.cancelled(identifiers)) if queue is not None else []
        for job in queue.arrivals() if queue is not None else ():
            assert queue is not None
            self._is_held(queue, job)  # begins to compile while others run
        mine = {"cancelled": cancelled, "stop": stop, "programs": self._programs.say()}
        said = [json.loads(text) for text in all_gather_str("serving", json.dumps(mine))]
        self._programs.hear([one["programs"] for one in said])
        everything = frozenset(name for one in said for name in one["cancelled"])
        return Verdict(cancelled=everything, stop=any(one["stop"] for one in said))

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
        config = self._config_of(job.fields)
        provenance = Provenance.of(self._job.choices.fields_of(config))
        line = line_of(job.fields, self.files)
        return Work(
            job=job,
            config=config,
            provenance=replace(provenance, resumable=True),
            video=Video(
                prompt=line.prompt,
                seed=config.seed,
                path=as_path(config.output_dir) / f"{job.id}.mp4",
                line=line,
                changes=identity_of(job.fields),
            ),
            factors=factors_of(job.fields),
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
        tasks = LineTasks(config=works[0].config, spec=self._job.builder.spec)
        return tasks.request(
            [work.line for work in full],
            negative_prompts=[work.config.negative_prompt for work in full],
            seeds=[work.video.seed for work in full],
        )

    def _denoise(self, reporter: Reporter, works: Sequence[Work]) -> None:
        assert self._pipeline is not None
        request, identifiers = self._request_of(works), [work.job.id for work in works]
        reporter.stage(identifiers, "prompt")
        started = time.monotonic()
        self._adapters.activate(self._pipeline, works[0].factors)
        experts = self._pipeline.condition(request)
        steps = Steps(
            agree=self._agree,
            previews=self._previews,
            reporter=reporter,
            works=works,
            request=request,
        )
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


def end_now() -> None:
    """Ends the process as it is, with success."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def keep_latents(work: Work, latents: np.ndarray) -> None:
    """Stores latents so that a restart only decodes; a full disk costs that chance only."""
    try:
        store_latents(work.provenance, [work.video], latents[None])
    except WritingFailed as error:
        logger.warning("%s: %s", work.job.id, error)
