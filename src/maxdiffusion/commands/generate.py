"""From a checked config to video files, with a plan before and a timing summary after."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

import jax
import numpy as np

from maxdiffusion import __version__
from maxdiffusion.commands.entry import chip_of
from maxdiffusion.commands.fast_heads import FastHeadReport, Watch
from maxdiffusion.commands.kept_latents import KeptLatents, forget_needless, latents_path
from maxdiffusion.commands.kept_prompts import kept_prompts
from maxdiffusion.commands.pipeline_settings import sampler, video_shape
from maxdiffusion.commands.preparation import Preparation, prepare
from maxdiffusion.commands.profiles import profile_notes, profile_plan
from maxdiffusion.commands.video_writer import VideoWriter, decoding
from maxdiffusion.commands.videos import Video, batches, finished, list_videos
from maxdiffusion.config.config import Config, without_meaning
from maxdiffusion.config.loading import Reading
from maxdiffusion.pipelines.denoise import Experts
from maxdiffusion.pipelines.loading import load_wan_parameters
from maxdiffusion.pipelines.programs import as_bytes
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.wan import WanPipeline
from maxdiffusion.runtime.agreement import agree_on_result
from maxdiffusion.runtime.atomic import remove_leftovers
from maxdiffusion.runtime.host_times import describe_hosts, gather_hosts
from maxdiffusion.runtime.libtpu_flags import describe_flags
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import RunFailed
from maxdiffusion.runtime.profiling import Profiler
from maxdiffusion.runtime.progress import bytes_bar, steps_bar
from maxdiffusion.runtime.stopping import STOPS, StopAsked
from maxdiffusion.runtime.timing import Stage, Timings


def generate(reading: Reading) -> None:
    """Makes the videos of a config; raises ProblemsFound before anything costly is done."""
    use_cache(reading.config)
    preparation = prepare(reading)
    plans = preparation.workshop.attention(preparation.shape)
    report = FastHeadReport(preparation.config, plans.self_attention)
    say("\n".join([start_up_plan(preparation), *report.notes()]))
    videos = videos_to_make(preparation)
    if not videos:
        return
    kept = KeptLatents(preparation.config, videos)
    groups = in_groups(videos, kept, preparation.shape.videos)
    timings = Timings(Profiler(profile_plan(preparation.config)))
    MARKS.reach("loading weights")
    pipeline = load(preparation, timings, [video.prompt for video in videos])
    MARKS.reach("compiling")
    with timings.stage(Stage.COMPILE):
        prompts = [video.prompt for video in videos]
        pipeline.compile(request(preparation, groups[0]), as_bytes, other_prompts=prompts)
        report.compile(pipeline, request(preparation, groups[0]))
    with STOPS.heeded(), VideoWriter(preparation.config) as writer:
        for number, group in enumerate(groups):
            MARKS.reach(f"the prompts of {group[0].path.name}")
            asked = request(preparation, group)
            if group[0] in kept:
                latents = kept.read(group)
            else:
                try:
                    latents = make(pipeline, asked, timings, report, writer.check)
                except StopAsked:
                    writer.finish()
                    raise stopped(groups[:number], videos, preparation.config) from None
                writer.keep(group, latents)
            write_group(pipeline, asked, group, latents, writer, timings)
            writer.settle()
        with decoding(timings, Stage.VAE_DECODE_HOST):
            writer.fetch()
    hosts = gather_hosts(timings)
    say("\n".join([*report.lines(), timings.summary(), describe_hosts(hosts)]))
    if preparation.config.timing_file and jax.process_index() == 0:
        details = run_details(preparation) | {"fast_heads": report.as_json()}
        details["hosts"] = [asdict(host) for host in hosts]
        timings.write(place(preparation.config.timing_file), details)


def in_groups(
    videos: tuple[Video, ...], kept: KeptLatents, size: int
) -> tuple[tuple[Video, ...], ...]:
    """The videos that are made together; those that only need decoding come first, and are said."""
    if kept:
        say(f"{len(kept)} of them denoised before, and now only decoded")
    denoised = tuple(video for video in videos if video in kept)
    others = tuple(video for video in videos if video not in kept)
    return (*batches(denoised, size), *batches(others, size))


def videos_to_make(preparation: Preparation) -> tuple[Video, ...]:
    """The videos of the job, without those that an earlier run of a prompts file has finished."""
    config = preparation.config
    videos = list_videos(config, preparation.job)
    if jax.process_index() == 0:
        remove_leftovers([path for video in videos for path in (video.path, latents_path(video))])
    done = finished(config, videos)
    if jax.process_index() == 0:
        forget_needless([video for video, there in zip(videos, done, strict=True) if there])
    if any(done):
        left = f"{len(videos) - sum(done)} to make" if not all(done) else "nothing is left to make"
        say(f"{sum(done)} of {len(videos)} videos are there already; {left}")
    return tuple(video for video, there in zip(videos, done, strict=True) if not there)


def stopped(
    done: Sequence[tuple[Video, ...]], videos: tuple[Video, ...], config: Config
) -> RunFailed:
    """What is said at the end of a run that was asked to stop."""
    made = sum(map(len, done))
    again = "makes the rest" if config.prompts_file else "starts again"
    return RunFailed(
        f"as asked, with {made} of {len(videos)} videos made. The same command {again}."
    )


def use_cache(config: Config) -> None:
    """Keeps compiled programs in `jax_cache_dir`, if the config names one."""
    if config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.jax_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def say(text: str) -> None:
    """Prints for people, once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


def start_up_plan(preparation: Preparation) -> str:
    """What will run, in words, before it does."""
    config, job, workshop = preparation.config, preparation.job, preparation.workshop
    device, shape = workshop.mesh.devices.flat[0], preparation.shape
    axes = " x ".join(f"{axis} {size}" for axis, size in workshop.mesh.shape.items())
    lines = [
        f"maxdiffusion {__version__} on {workshop.mesh.size} x {device.device_kind}",
        f"model: {config.model_name} from {config.pretrained_model_name_or_path}",
        f"mesh: {axes}",
        *preparation.notes,
        *profile_notes(config),
        *describe_flags(chip_of(config)),
        workshop.attention(shape).describe(),
        workshop.decoder_sharding(shape).describe(),
        workshop.settings.precision.describe(),
        f"videos: {job.videos} of {config.num_frames} frames of {config.width}x{config.height}, "
        f"{shape.videos} at a time, {config.num_inference_steps} steps",
    ]
    unused = without_meaning(config)
    return "\n".join([*lines, unused] if unused else lines)


def load(preparation: Preparation, timings: Timings, prompts: Sequence[str]) -> WanPipeline:
    """The pipeline with the weights that these prompts need, after a progress bar."""
    folder, workshop = preparation.folder, preparation.workshop
    cache = preparation.config.pretrained_orbax_dir
    tokenizer = PromptTokenizer.load(folder.root / "tokenizer")
    with timings.stage(Stage.LOAD) as clock:
        kept = kept_prompts(preparation, tokenizer, prompts, say)
        with bytes_bar("Loading") as progress:
            loaded = load_wan_parameters(
                folder,
                workshop,
                without=() if kept is None else kept.needless,
                cache=place(cache) if cache else None,
                progress=progress,
            )
        clock.ready(loaded.parameters.transformers)
    for message in loaded.messages:
        say(f"weights of {message}")
    return WanPipeline(
        workshop=workshop, parameters=loaded.parameters, tokenizer=tokenizer, kept_prompts=kept
    )


def request(preparation: Preparation, group: tuple[Video, ...]) -> Request:
    """The request of a group; a last group that is too small is filled up with its last video."""
    config, job = preparation.config, preparation.job
    full = [*group, *[group[-1]] * (preparation.shape.videos - len(group))]
    return Request(
        prompts=tuple(video.prompt for video in full),
        negative_prompts=(config.negative_prompt,) * len(full),
        video=video_shape(config),
        sampler=sampler(config, preparation.workshop.spec),
        scales=job.guidance,
        boundary_ratio=config.boundary_ratio if config.model_name == "wan2.2" else None,
        seeds=tuple(video.seed for video in full),
    )


def make(
    pipeline: WanPipeline,
    request: Request,
    timings: Timings,
    report: FastHeadReport,
    check: Callable[[], None],
) -> np.ndarray:
    """The latents of every video of a request, on the host; `check` is called at every step."""
    with timings.stage(Stage.INFERENCE):
        with timings.stage(Stage.CONDITIONING):
            experts = pipeline.condition(request)
        with timings.stage(Stage.DENOISE):
            watch = report.watch(pipeline, request, experts)
            latents = denoise(pipeline, request, experts, timings, watch, check)
            check_same(latents, request)
            return latents


def denoise(
    pipeline: WanPipeline,
    request: Request,
    experts: Experts,
    timings: Timings,
    watch: Watch | None,
    check: Callable[[], None],
) -> np.ndarray:
    """The finished latents of every video, on the host; `watch` sees what each step starts from."""
    if watch is not None:
        watch(0, pipeline.first_latents(request))
    with steps_bar("Denoising", len(request.sampler.timesteps)) as advance:
        for latents, step in timings.watch(STOPS.between(pipeline.denoise(request, experts))):
            advance()
            check()
            if watch is not None:
                watch(step.index + 1, latents)
            finished = latents
    return np.asarray(finished)


def check_same(latents: np.ndarray, request: Request) -> None:
    """Raises Diverged unless every process has the same latents."""
    seeds = ", ".join(map(str, request.seeds))
    agree_on_result(f"latents of seeds {seeds}", hashlib.sha256(latents.tobytes()).hexdigest())


def write_group(
    pipeline: WanPipeline,
    request: Request,
    group: tuple[Video, ...],
    latents: np.ndarray,
    writer: VideoWriter,
    timings: Timings,
) -> None:
    """Decodes the videos of a group, and hands each over to be written."""
    with steps_bar("Decoding", len(group), unit="video") as advance:
        # What only filled the group up is left out.
        for video, one in zip(group, latents, strict=False):
            MARKS.reach(f"decoding {video.path.name}")
            frames = decode(pipeline, request, one, timings)
            MARKS.reach(f"writing {video.path.name}")
            with decoding(timings, Stage.VAE_DECODE_HOST):
                writer.add(video, frames)
            advance()


def decode(
    pipeline: WanPipeline, request: Request, latents: np.ndarray, timings: Timings
) -> jax.Array:
    """The frames of one video as bytes, on the devices."""
    with decoding(timings, Stage.VAE_DECODE_DEVICE):
        return pipeline.decode(request, latents, as_bytes)


def run_details(preparation: Preparation) -> dict[str, object]:
    """What the timings are of."""
    config, workshop = preparation.config, preparation.workshop
    return {
        "software": f"maxdiffusion {__version__}",
        "device_kind": workshop.mesh.devices.flat[0].device_kind,
        "devices": workshop.mesh.size,
        "mesh": dict(workshop.mesh.shape),
        "attention": config.attention,
        "videos": preparation.job.videos,
        "videos_at_a_time": preparation.shape.videos,
        "config": dict(config.values),
    }
