"""Runs a generation: resolve -> load -> for each group of videos: denoise -> decode -> write.

The start-up plan is logged before, a timing summary after. Groups are videos that are made at once.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion import __version__
from maxdiffusion.attention import AttentionPlan
from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config, ignored_fields
from maxdiffusion.config.load import ParsedConfig, parse_config
from maxdiffusion.diffusion.denoise import Experts
from maxdiffusion.distributed.coordination import (
    PREEMPTION,
    Preempted,
    assert_same_result,
    gather_host_times,
)
from maxdiffusion.errors import RunFailed
from maxdiffusion.generation.job import ResolvedJob, SearchTiles, resolve_job
from maxdiffusion.generation.resume import (
    LatentCache,
    Provenance,
    Video,
    VideoWriter,
    Write,
    batches,
    delete_unneeded_latents,
    finished,
    latents_path,
    list_videos,
    write_file,
)
from maxdiffusion.generation.settings import (
    profile_notes,
    profile_plan,
    run_plan,
    use_compilation_cache,
)
from maxdiffusion.pipelines import pipeline_named
from maxdiffusion.pipelines.programs import FixedMEligibleHeads, ProgramShape, as_bytes, as_floats
from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.tasks.base import TextToVideo
from maxdiffusion.pipelines.text import PromptTokenizer, RowCache
from maxdiffusion.pipelines.wan import VideoPipeline
from maxdiffusion.pipelines.weights import WanParameters, load_wan_parameters
from maxdiffusion.runtime.files import as_path, remove_leftovers
from maxdiffusion.runtime.progress import PROGRESS, bytes_bar, steps_bar
from maxdiffusion.runtime.timing import Profiler, Stage, Timings, describe_hosts
from maxdiffusion.runtime.tpu_flags import describe_flags, target_chip

logger = logging.getLogger(__name__)


Group = tuple[Video, ...]
"""Videos that are made at once."""
CheckLatents = Callable[[np.ndarray, Request], None]
"""Checks the latents of a request, on every process."""
Pipeline = TypeVar("Pipeline", bound=VideoPipeline)


def generate(
    parsed: ParsedConfig,
    *,
    search_tiles: SearchTiles | None = None,
    check_latents: CheckLatents | None = None,
    write: Write = write_file,
) -> None:
    """Makes the videos of a config; raises `ProblemsFound` before anything costly is done.

    `search_tiles` does the work of `enable_tile_search`. `check_latents` gets the latents of every
    request, by default to compare them between processes; `write` writes the file of a video.
    """
    use_compilation_cache(parsed.config)
    job, folder = resolve_job(parsed, search_tiles=search_tiles)
    report = FixedMReport(job.config, job.attention.self_attention)
    logger.info("\n".join([start_up_plan(job), *report.notes()]))
    provenance = Provenance.of(job.choices.fields_of(job.config))
    videos = videos_to_make(job, provenance)
    if not videos:
        return
    stored = LatentCache(provenance, videos)
    groups = group_videos(job, videos, stored)
    timings = Timings(Profiler(profile_plan(job.config)))
    requests = requests_to_compile(job, groups)
    compiling = partial(compile_programs, requests=requests, videos=videos, report=report)
    pipeline = load(job, folder, videos, timings, compiling=compiling)
    with PREEMPTION.guard(), VideoWriter(provenance, write) as writer:
        run = Run(
            job=job,
            pipeline=pipeline,
            writer=writer,
            timings=timings,
            report=report,
            check_latents=check_latents or check_same,
        )
        for number, group in enumerate(groups):
            try:
                run.make(group, stored)
            except Preempted:
                writer.finish()
                raise stopped(groups[:number], videos, job.config) from None
        run.fetch()
    summarise(job, timings, report)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A loaded pipeline, and where its videos, times and counts go."""

    job: ResolvedJob
    pipeline: VideoPipeline
    writer: VideoWriter
    timings: Timings
    report: "FixedMReport"
    check_latents: CheckLatents

    def make(self, group: Group, stored: LatentCache) -> None:
        """Denoises a group, unless an earlier run has, then decodes it and queues its files."""
        PROGRESS.checkpoint(f"the prompts of {group[0].path.name}")
        request = request_of(self.job, group)
        if request.task.in_segments:
            self.make_in_segments(group, request)
            return
        if group[0] in stored:
            latents = stored.read(group)
        else:
            latents = self.denoise(request)
            self.writer.store(group, latents)
        self.decode(group, request, latents)
        self.writer.wait_for_latents()

    def make_in_segments(self, group: Group, request: Request) -> None:
        """Makes videos whose segments continue each other, and queues their files.

        A killed run makes them from the beginning: the latents of one segment are not enough.
        """
        from maxdiffusion.pipelines.tasks.animate import bytes_of, make_segments  # for Animate

        def decode(part: Request, latents: np.ndarray) -> np.ndarray:
            PROGRESS.checkpoint(f"decoding a segment of {group[0].path.name}")
            with self.decode_stage(Stage.VAE_DECODE_DEVICE):
                return np.asarray(self.pipeline.decode(part, latents, as_floats))

        frames, _ = make_segments(request, self.denoise, decode)
        for video, one in zip(group, frames, strict=False):
            PROGRESS.checkpoint(f"writing {video.path.name}")
            with self.decode_stage(Stage.VAE_DECODE_HOST):
                self.writer.add(video, bytes_of(one))
            self.timings.mark_first_video()

    def denoise(self, request: Request) -> np.ndarray:
        """Returns the latents of every video of a request, on the host, equal on all processes."""
        with self.timings.stage(Stage.INFERENCE):
            with self.timings.stage(Stage.CONDITIONING):
                experts = self.pipeline.condition(request)
            with self.timings.stage(Stage.DENOISE):
                latents = self.run_steps(request, experts)
                self.check_latents(latents, request)
                return latents

    def run_steps(self, request: Request, experts: Experts) -> np.ndarray:
        """Returns the latents after the last step; an error of the writer ends the loop early."""
        count = StepCount(
            report=self.report, pipeline=self.pipeline, request=request, experts=experts
        )
        if self.report.active:
            count.before_step(0, self.pipeline.first_latents(request))
        steps = self.pipeline.denoise(request, experts)
        steps = PREEMPTION.until_preempted(
            steps
        )  # raises Preempted after the step that SIGTERM found
        steps = self.timings.watch(steps)  # times and profiles every step
        with steps_bar("Denoising", len(request.sampler.timesteps)) as advance:
            for latents, step in steps:
                advance()
                self.writer.check()
                count.before_step(step.index + 1, latents)
        return np.asarray(latents)

    def decode(self, group: Group, request: Request, latents: np.ndarray) -> None:
        """Decodes the videos of a group and queues each for writing."""
        with steps_bar("Decoding", len(group), unit="video") as advance:
            # Rows that only filled the group up are left out.
            for video, one in zip(group, latents, strict=False):
                PROGRESS.checkpoint(f"decoding {video.path.name}")
                with self.decode_stage(Stage.VAE_DECODE_DEVICE):
                    frames = self.pipeline.decode(request, one, as_bytes)
                PROGRESS.checkpoint(f"writing {video.path.name}")
                with self.decode_stage(Stage.VAE_DECODE_HOST):
                    self.writer.add(video, frames)
                self.timings.mark_first_video()
                advance()

    def fetch(self) -> None:
        """Returns when the frames of all videos are on the host."""
        with self.decode_stage(Stage.VAE_DECODE_HOST):
            self.writer.fetch()

    def decode_stage(self, part: Stage) -> ExitStack:
        """Times a part of decoding; of the host's part, the time that the run waits for it."""
        stages = ExitStack()
        for stage in (Stage.INFERENCE, Stage.VAE_DECODE, part):
            stages.enter_context(self.timings.stage(stage))
        return stages


def videos_to_make(job: ResolvedJob, provenance: Provenance) -> Group:
    """Returns the videos of the job without those that an earlier run has finished."""
    videos = list_videos(job)
    if jax.process_index() == 0:
        remove_leftovers([path for video in videos for path in (video.path, latents_path(video))])
    done = finished(provenance, videos)
    if jax.process_index() == 0:
        delete_unneeded_latents([video for video, made in zip(videos, done, strict=True) if made])
    if any(done):
        left = f"{len(videos) - sum(done)} to make" if not all(done) else "nothing is left to make"
        logger.info("%d of %d videos are there already; %s", sum(done), len(videos), left)
    return tuple(video for video, made in zip(videos, done, strict=True) if not made)


def group_videos(job: ResolvedJob, videos: Group, stored: LatentCache) -> tuple[Group, ...]:
    """Returns the videos in groups of one shape; those that only need decoding come first."""
    if stored:
        logger.info("%d of them denoised before, and now only decoded", len(stored))
    parts: dict[tuple[bool, ProgramShape], list[Video]] = {}
    for only_decoded in (True, False):
        for video in videos:
            if (video in stored) == only_decoded:
                parts.setdefault((only_decoded, shape_of(job, video)), []).append(video)
    return tuple(
        group for part in parts.values() for group in batches(tuple(part), job.shape.videos)
    )


def shape_of(job: ResolvedJob, video: Video) -> ProgramShape:
    """Returns the sizes that the programs of a video are compiled for."""
    assert video.line is not None
    return job.tasks.shape(video.line, job.shape.videos)


def load(
    job: ResolvedJob,
    folder: ModelFolder,
    videos: Group,
    timings: Timings,
    *,
    compiling: Callable[[VideoPipeline], None] | None = None,
) -> VideoPipeline:
    """Returns the pipeline with the weights that these videos need, its programs compiled.

    `compiling` runs while the weights load, unless the devices are the cores of this host. The
    stage of compiling is the time by which it takes longer.
    """
    PROGRESS.checkpoint("loading weights")
    tokenizer = PromptTokenizer.load(folder.root / "tokenizer")
    prompts = find_prompts(job, folder, tokenizer, [video.prompt for video in videos])
    without = () if prompts is None else prompts.unneeded_components
    pipeline = pipeline_named(job.shape.task.pipeline)(
        builder=job.builder,
        parameters=WanParameters.described(job.builder, without),
        tokenizer=tokenizer,
        prompt_cache=prompts,
        attention=job.plans,
        folder=folder,
    )
    background = ThreadPoolExecutor(1, thread_name_prefix="compile")
    compiled: Future[None] | None = None
    if compiling is not None and job.builder.mesh.devices.flat[0].platform != "cpu":
        compiled = background.submit(compiling, pipeline)
    try:
        with timings.stage(Stage.LOAD) as clock:
            pipeline.place(load_weights(job, folder, without))
            clock.ready(pipeline.parameters.transformers)
        PROGRESS.checkpoint("compiling")
        with timings.stage(Stage.COMPILE):
            if compiled is not None:
                compiled.result()
            elif compiling is not None:
                compiling(pipeline)
    finally:
        background.shutdown(wait=False, cancel_futures=True)
    return pipeline


def load_weights(job: ResolvedJob, folder: ModelFolder, without: Sequence[str]) -> WanParameters:
    """Returns the weights of all components but those of `without`."""
    cache = job.config.pretrained_orbax_dir
    with bytes_bar("Loading") as progress:
        loaded = load_wan_parameters(
            folder,
            job.builder,
            without=without,
            cache=as_path(cache) if cache else None,
            progress=progress,
        )
    for message in loaded.messages:
        logger.info("weights of %s", message)
    return loaded.parameters


def pipeline_from_config(
    kind: type[Pipeline], source: object, overrides: Mapping[str, object]
) -> Pipeline:
    """Returns the loaded pipeline of a config file, mapping or ConfigDict, with overrides."""
    parsed = parse_config(source, overrides)
    use_compilation_cache(parsed.config)
    job, folder = resolve_job(parsed)
    cache = parsed.config.pretrained_orbax_dir
    loaded = load_wan_parameters(folder, job.builder, cache=as_path(cache) if cache else None)
    return kind(
        builder=job.builder,
        parameters=loaded.parameters,
        tokenizer=PromptTokenizer.load(folder.root / "tokenizer"),
        attention=job.plans,
        folder=folder,
    )


def find_prompts(
    job: ResolvedJob, folder: ModelFolder, tokenizer: PromptTokenizer, prompts: Sequence[str]
) -> RowCache | None:
    """Returns what `prompt_embeddings_cache_dir` has of these prompts; None without one."""
    config, shape = job.config, job.shape
    if not config.prompt_embeddings_cache_dir:
        return None
    from maxdiffusion.pipelines.prompt_cache import PromptCache  # for this field alone

    cache = PromptCache.of_encoder(
        as_path(config.prompt_embeddings_cache_dir),
        folder,
        job.builder.settings.precision,
        job.builder.spec.text_encoder.width,
    )
    texts = [*prompts, *([config.negative_prompt] if shape.guidance.copies == 2 else [])]
    found = cache.scan(
        [tokenizer.ids(text, shape.text_length) for text in texts], shape.text_length
    )
    logger.info(found.describe())
    return found


def compile_programs(
    pipeline: VideoPipeline, *, requests: Sequence[Request], videos: Group, report: "FixedMReport"
) -> None:
    """Compiles everything that the run executes; `requests` has one of each shape."""
    prompts = [video.prompt for video in videos]
    for request in requests:
        # The next segment continues frames that were not rounded.
        frames = as_floats if request.task.in_segments else as_bytes
        pipeline.compile(request, frames, other_prompts=prompts)
        if report.active:
            pipeline.compile_fixed_m_eligible_heads(request)


def requests_to_compile(job: ResolvedJob, groups: Sequence[Group]) -> list[Request]:
    """Returns the request of the first group of each shape."""
    first: dict[ProgramShape, Group] = {}
    for group in groups:
        first.setdefault(shape_of(job, group[0]), group)
    return [request_of(job, group) for group in first.values()]


def request_of(job: ResolvedJob, group: Group) -> Request:
    """Returns the request of a group; a group that is too small repeats its last video."""
    full = [*group, *[group[-1]] * (job.shape.videos - len(group))]
    lines = [video.line for video in full if video.line is not None]
    assert len(lines) == len(full)
    return job.tasks.request(
        lines,
        negative_prompts=[job.config.negative_prompt] * len(full),
        seeds=[video.seed for video in full],
        latents=latents_of(job, full),
    )


def latents_of(job: ResolvedJob, videos: Sequence[Video]) -> Float[np.ndarray, "B F Y X C"] | None:
    """Returns the latents that videos start from, of `latents_path`; None without one."""
    if not job.config.latents_path:
        return None
    from maxdiffusion.generation.latents import load_latents, rows_of  # for this field alone

    latents = load_latents(job.config, [job.shape], job.workload.videos)
    return rows_of(latents, [video.index for video in videos])


def check_same(latents: np.ndarray, request: Request) -> None:
    """Raises Diverged unless every process has the same latents."""
    seeds = ", ".join(map(str, request.seeds))
    assert_same_result(f"latents of seeds {seeds}", hashlib.sha256(latents.tobytes()).hexdigest())


def stopped(done: Sequence[Group], videos: Group, config: Config) -> RunFailed:
    """Returns the error that ends a run after SIGTERM."""
    made = sum(map(len, done))
    again = "makes the rest" if config.prompts_file else "starts again"
    return RunFailed(
        f"as asked, with {made} of {len(videos)} videos made. The same command {again}."
    )


class FixedMReport:
    """Counts the heads that fixed-m softmax serves on its fast path (`report_fast_heads`).

    Counts are taken before the first and the last step of every group.
    """

    def __init__(self, config: Config, plan: AttentionPlan):
        self._asked = config.report_fast_heads
        self._runs = plan.runs
        self._counts: list[FixedMEligibleHeads] = []
        self.active = self._asked and plan.fixed_m

    def notes(self) -> Sequence[str]:
        """Returns the lines of the start-up plan; none unless the config asks for the report."""
        if not self._asked:
            return ()
        if not self.active:
            return (f"report_fast_heads: {self._runs} has no fixed-m softmax, nothing to count",)
        return ("report_fast_heads: one more forward before the first and before the last step",)

    def add(self, count: FixedMEligibleHeads) -> None:
        """Adds the count of one step."""
        self._counts.append(count)

    def lines(self) -> Sequence[str]:
        """Returns one line per count."""
        return [count.describe() for count in self._counts]

    def as_json(self) -> list[dict[str, object]]:
        """Returns the counts for the timing file."""
        return [count.as_json() for count in self._counts]


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """Counts the fixed-m heads of one group, where the report is active."""

    report: FixedMReport
    pipeline: VideoPipeline
    request: Request
    experts: Experts

    def before_step(self, step: int, latents: Float[Array, "B F Y X C"]) -> None:
        """Counts in the step that starts from `latents`, if it is the first or the last."""
        if self.report.active and step in (0, len(self.request.sampler.timesteps) - 1):
            self.report.add(
                self.pipeline.fixed_m_eligible_heads(self.request, self.experts, latents, step)
            )


def start_up_plan(job: ResolvedJob) -> str:
    """Returns a description of the run, for the log before it starts."""
    config, builder, shape = job.config, job.builder, job.shape
    device = builder.mesh.devices.flat[0]
    axes = " x ".join(f"{axis} {size}" for axis, size in builder.mesh.shape.items())
    length = f"{job.tasks.video(job.workload.lines[0]).num_frames} frames"
    length = f"segments of {length}" if shape.task.in_segments else length
    lines = [
        f"maxdiffusion {__version__} on {builder.mesh.size} x {device.device_kind}",
        f"model: {config.model_name} from {config.pretrained_model_name_or_path}",
        f"mesh: {axes}",
        *job.notes,
        *profile_notes(config),
        *describe_flags(target_chip(config.topology)),
        job.attention.describe(),
        *([] if isinstance(shape.task, TextToVideo) else [f"task: {shape.task.title}"]),
        builder.decoder_sharding(shape).describe(),
        builder.settings.precision.describe(),
        f"videos: {job.workload.videos} of {length} of "
        f"{config.width}x{config.height}, {shape.videos} at a time, "
        f"{config.num_inference_steps} steps",
        run_plan(config, builder.spec, shape.task).describe(),
    ]
    unused = ignored_fields(config)
    return "\n".join([*lines, unused] if unused else lines)


def summarise(job: ResolvedJob, timings: Timings, report: FixedMReport) -> None:
    """Logs where the time went, and writes it to `timing_file` if the config names one."""
    hosts = gather_host_times(timings)
    lines = [*report.lines(), timings.summary(), timings.first_video(), describe_hosts(hosts)]
    logger.info("\n".join(filter(None, lines)))
    if job.config.timing_file and jax.process_index() == 0:
        details = run_details(job) | {"fast_heads": report.as_json()}
        details["hosts"] = [asdict(host) for host in hosts]
        timings.write(as_path(job.config.timing_file), details)


def run_details(job: ResolvedJob) -> dict[str, object]:
    """Returns the facts about a run that its timing file records."""
    return {
        "software": f"maxdiffusion {__version__}",
        **job.step_facts(),
        "videos": job.workload.videos,
        "videos_at_a_time": job.shape.videos,
        "config": job.choices.fields_of(job.config),
    }
